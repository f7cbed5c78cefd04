package fd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func openRoot(t *testing.T, dir string) *os.File {
	t.Helper()
	root, err := OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = root.Close() })
	return root
}

// hostile makes a tree with everything that could harm who reads it.
func hostile(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, step := range []error{
		os.Mkdir(dir+"/d", 0o755),
		os.WriteFile(dir+"/d/file", []byte("text"), 0o644),
		os.Symlink("/etc/shadow", dir+"/d/shadow"),
		os.Symlink("/", dir+"/up"),
		os.Symlink("..", dir+"/d/parent"),
		os.Symlink("/proc/self/fd/0/../../..", dir+"/magic"),
		unix.Mkfifo(dir+"/d/fifo", 0o644),
		unix.Mknod(dir+"/null", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))),
		unix.Mknod(dir+"/whiteout", unix.S_IFCHR, 0),
	} {
		if step != nil {
			t.Fatal(step)
		}
	}
	old, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(dir) // a socket's path may have 107 bytes
	l, err := net.Listen("unix", "sock")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	t.Chdir(old)
	return dir
}

func TestOpenFileOpensOnlyRegularFilesBelow(t *testing.T) {
	dir := hostile(t)
	root := openRoot(t, dir)
	for path, want := range map[string]error{
		"d/file": nil, "./d/file": nil,
		"d/shadow": unix.EINVAL, "d/fifo": unix.EINVAL, "null": unix.EINVAL, "sock": unix.EINVAL, "d": unix.EINVAL,
		"up/etc/passwd": unix.ELOOP, "d/parent/d/file": unix.ELOOP, "magic/x": unix.ELOOP,
		"../x": unix.EXDEV, "/etc/passwd": unix.EXDEV, "d/../../x": unix.EXDEV, "none": unix.ENOENT,
	} {
		f, err := OpenFile(root, path)
		if f != nil {
			_ = f.Close()
		}
		if !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", path, err, want)
		}
	}
	// Twins: the plain calls go where the links lead.
	if _, err := os.Stat(dir + "/up/etc/passwd"); err != nil {
		t.Errorf("twin: %v", err)
	}
	if _, err := os.Stat(dir + "/d/parent/d/file"); err != nil {
		t.Errorf("twin: %v", err)
	}
}

func TestMountsAreNotCrossed(t *testing.T) {
	root := openRoot(t, "/")
	if _, err := Lstat(root, "proc/self"); !errors.Is(err, unix.EXDEV) || !Missing(err) {
		t.Errorf("over a mount: %v", err)
	}
	if _, err := Lstat(root, "usr/bin"); err != nil {
		t.Error(err)
	}
}

func TestLstat(t *testing.T) {
	dir := hostile(t)
	root := openRoot(t, dir)
	is := func(path string, f func(Info) bool) {
		t.Helper()
		i, err := Lstat(root, path)
		if err != nil || !f(i) {
			t.Errorf("%s: %+v %v", path, i, err)
		}
	}
	is("d", Info.IsDir)
	is("d/file", Info.IsRegular)
	is("d/shadow", Info.IsSymlink)
	is("whiteout", Info.IsWhiteout)
	is("null", func(i Info) bool { return i.IsDevice() && !i.IsWhiteout() })
	if _, err := Lstat(root, "up/etc"); !Missing(err) {
		t.Errorf("through a link: %v", err)
	}
	d, err := OpenDir(root, "d")
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if s, err := Readlink(d, "shadow"); err != nil || s != "/etc/shadow" {
		t.Errorf("readlink %q %v", s, err)
	}
	long := strings.Repeat("x/", 1000)
	if err := os.Symlink(long, dir+"/d/long"); err != nil {
		t.Fatal(err)
	}
	if s, err := Readlink(d, "long"); err != nil || s != long {
		t.Errorf("readlink of %d bytes: %d %v", len(long), len(s), err)
	}
	names, err := Names(d)
	slices.Sort(names)
	if err != nil || !slices.Equal(names, []string{"fifo", "file", "long", "parent", "shadow"}) {
		t.Errorf("names %v %v", names, err)
	}
}

func TestWalkVisitsEverythingOnce(t *testing.T) {
	root := openRoot(t, hostile(t))
	var paths []string
	err := Walk(t.Context(), root, func(e Entry) error {
		paths = append(paths, e.Path)
		if i, err := lstatAt(int(e.Dir.Fd()), e.Name); err != nil || !i.SameFile(e.Info) {
			t.Errorf("%s is not in its Dir: %v", e.Path, err)
		}
		if e.Depth != 1+strings.Count(e.Path, "/") {
			t.Errorf("%s has depth %d", e.Path, e.Depth)
		}
		return nil
	})
	want := []string{"d", "d/fifo", "d/file", "d/parent", "d/shadow", "magic", "null", "sock", "up", "whiteout"}
	if err != nil || !slices.Equal(paths, want) {
		t.Errorf("%v %v, want %v", paths, err, want)
	}
}

func TestWalkSkipStopAndCancel(t *testing.T) {
	root := openRoot(t, hostile(t))
	n := 0
	if err := Walk(t.Context(), root, func(Entry) error { n++; return ErrSkipDir }); err != nil || n != 6 {
		t.Errorf("skip: %d entries, %v", n, err)
	}
	stop := errors.New("stop")
	if err := Walk(t.Context(), root, func(Entry) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("stop: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Walk(ctx, root, func(Entry) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("cancel: %v", err)
	}
}

func TestRemoveAll(t *testing.T) {
	const depth = 5000
	dir := deep(t, depth)
	path := dir
	for range 60 {
		path += "/deep"
		if err := os.WriteFile(path+"/f", nil, 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Mkdir(path+"/side", 0o755); err != nil {
			t.Fatal(err)
		}
	}
	outside := t.TempDir()
	if err := os.WriteFile(outside+"/keep", nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(outside, dir+"/deep/link"); err != nil {
		t.Fatal(err)
	}
	for i := range 2*batch + 10 { // more than one batch
		if err := os.WriteFile(fmt.Sprintf("%s/deep/many%d", dir, i), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	root := openRoot(t, dir)
	for range 2 {
		if err := RemoveAll(root, "deep"); err != nil {
			t.Fatal(err)
		}
	}
	if names, err := Names(root); err != nil || len(names) != 0 {
		t.Errorf("left %v %v", names, err)
	}
	if _, err := os.Stat(outside + "/keep"); err != nil {
		t.Errorf("followed a link: %v", err)
	}
	for name, make := range map[string]func(string) error{
		"file": func(p string) error { return os.WriteFile(p, nil, 0) },
		"link": func(p string) error { return os.Symlink("/", p) },
		"dir":  func(p string) error { return os.Mkdir(p, 0o755) },
	} {
		if err := make(dir + "/" + name); err != nil {
			t.Fatal(err)
		}
		if err := RemoveAll(root, name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// deep makes a chain of directories, far longer than a path may be.
func deep(t *testing.T, depth int) string {
	t.Helper()
	dir := t.TempDir()
	t.Cleanup(func() { // os.RemoveAll takes a descriptor per level
		if err := RemoveAll(openRoot(t, dir), "deep"); err != nil {
			t.Error(err)
		}
	})
	at := openRoot(t, dir)
	for range depth {
		if err := unix.Mkdirat(int(at.Fd()), "deep", 0o755); err != nil {
			t.Fatal(err)
		}
		next, err := OpenDir(at, "deep")
		if err != nil {
			t.Fatal(err)
		}
		_ = at.Close()
		at = next
	}
	_ = at.Close()
	return dir
}

func TestWalkDeepTreeWithFewDescriptors(t *testing.T) {
	const depth = 5000
	dir := deep(t, depth)
	// A sibling on each of the first levels, visited on the way back up.
	path := dir
	for range 100 {
		path += "/deep"
		if err := os.WriteFile(path+"/zz", nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	root := openRoot(t, dir)
	dirs, files, most := 0, 0, 0
	err := Walk(t.Context(), root, func(e Entry) error {
		if e.Info.IsDir() {
			dirs++
		} else {
			files++
		}
		if dirs%500 == 0 {
			fds, _ := os.ReadDir("/proc/self/fd")
			most = max(most, len(fds))
		}
		return nil
	})
	if err != nil || dirs != depth || files != 100 {
		t.Errorf("%d directories, %d files, %v", dirs, files, err)
	}
	if most > keepOpen+40 {
		t.Errorf("%d descriptors were open", most)
	}
	// A path of 25,000 bytes resolves in chunks.
	if i, err := Lstat(root, strings.Repeat("deep/", depth-1)+"deep"); err != nil || !i.IsDir() {
		t.Errorf("lstat at the bottom: %v", err)
	}
	// Twin: the kernel takes no such path at once.
	if _, err := os.Lstat(filepath.Join(dir, strings.Repeat("deep/", depth))); !errors.Is(err, unix.ENAMETOOLONG) {
		t.Errorf("twin: %v", err)
	}
}

// ATTACK: while the walk is deep inside, a directory on its way is moved to where ".." leads elsewhere.
func TestWalkNoticesAMovedDirectory(t *testing.T) {
	dir := deep(t, keepOpen+20)
	elsewhere := t.TempDir()
	root := openRoot(t, dir)
	n := 0
	err := Walk(t.Context(), root, func(Entry) error {
		if n++; n == keepOpen+20 {
			return os.Rename(dir+"/deep/deep", elsewhere+"/moved")
		}
		return nil
	})
	if err == nil || !strings.Contains(err.Error(), "moved away") {
		t.Errorf("walk went on after a move: %v", err)
	}
}

func TestEntriesThatVanishAreLeftOut(t *testing.T) {
	dir := t.TempDir()
	for i := range 10 {
		if err := os.Mkdir(fmt.Sprintf("%s/%d", dir, i), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	root := openRoot(t, dir)
	seen := 0
	err := Walk(t.Context(), root, func(e Entry) error {
		seen++
		// This one becomes a symlink before the walk goes down into it, the rest vanishes.
		for i := range 10 {
			_ = os.Remove(fmt.Sprintf("%s/%d", dir, i))
		}
		return os.Symlink("/", dir+"/"+e.Name)
	})
	if err != nil || seen != 1 {
		t.Errorf("%d entries, %v", seen, err)
	}
}

func TestXattrs(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(dir+"/f", nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setxattr(dir+"/f", "trusted.overlay.opaque", []byte("y"), 0); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("f", dir+"/link"); err != nil {
		t.Fatal(err)
	}
	root := openRoot(t, dir)
	if v, ok, err := Xattr(root, "f", "trusted.overlay.opaque"); err != nil || !ok || v != "y" {
		t.Errorf("%q %v %v", v, ok, err)
	}
	if _, ok, err := Xattr(root, "link", "trusted.overlay.opaque"); ok || err != nil && !errors.Is(err, fs.ErrPermission) {
		t.Errorf("followed a symlink: %v %v", ok, err)
	}
	names, err := Xattrs(root, "f")
	if err != nil || !slices.Contains(names, "trusted.overlay.opaque") {
		t.Errorf("%v %v", names, err)
	}
	if err := RemoveXattr(root, "f", "trusted.overlay.opaque"); err != nil {
		t.Fatal(err)
	}
	if _, ok, _ := Xattr(root, "f", "trusted.overlay.opaque"); ok {
		t.Error("still there")
	}
}

func FuzzOpenFile(f *testing.F) {
	for _, s := range []string{"d/file", "../../etc/passwd", "/etc/passwd", "up/etc/passwd", "d/./file", "\x00", "d//file", strings.Repeat("d/", 4000)} {
		f.Add(s)
	}
	dir := f.TempDir()
	if err := os.MkdirAll(dir+"/root/d", 0o755); err != nil {
		f.Fatal(err)
	}
	if err := os.WriteFile(dir+"/root/d/file", []byte("in"), 0o644); err != nil {
		f.Fatal(err)
	}
	if err := os.WriteFile(dir+"/out", []byte("out"), 0o644); err != nil {
		f.Fatal(err)
	}
	if err := os.Symlink("/", dir+"/root/up"); err != nil {
		f.Fatal(err)
	}
	root, err := OpenRoot(dir + "/root")
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, path string) {
		file, err := OpenFile(root, path)
		if err != nil {
			return
		}
		defer file.Close()
		var b [8]byte
		if n, _ := file.Read(b[:]); string(b[:n]) != "in" {
			t.Errorf("%q led to %q", path, b[:n])
		}
	})
}
