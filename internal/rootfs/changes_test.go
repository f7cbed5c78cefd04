package rootfs

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/linux/fd"
	"casemate.dev/internal/testenv"
)

// must fails the test for the first error.
func must(t *testing.T, all ...error) {
	t.Helper()
	for _, err := range all {
		if err != nil {
			t.Fatal(err)
		}
	}
}

func ops(changes []Change) []string {
	var out []string
	for _, c := range changes {
		out = append(out, fmt.Sprintf("%s %s %s %d %o", c.Op, c.Path, c.Type, c.Size, c.Mode))
	}
	return out
}

func mkdirs(t *testing.T, paths ...string) {
	t.Helper()
	for _, p := range paths {
		must(t, os.MkdirAll(p, 0o755))
	}
}

func text(t *testing.T, path, s string) {
	t.Helper()
	must(t, os.WriteFile(path, []byte(s), 0o644))
}

// lower makes a layer to start from.
func lower(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	must(t, os.Chmod(dir, 0o755))
	mkdirs(t, dir+"/d/sub", dir+"/gone/deep", dir+"/replaced/old", dir+"/todir", dir+"/same")
	text(t, dir+"/same/file", "same")
	text(t, dir+"/edit", "before")
	text(t, dir+"/samesize", "aaaa")
	text(t, dir+"/chmod", "x")
	text(t, dir+"/chown", "x")
	text(t, dir+"/touched", "x")
	text(t, dir+"/removed", "x")
	text(t, dir+"/gone/deep/f", "x")
	text(t, dir+"/replaced/keep", "keep")
	text(t, dir+"/replaced/lost", "lost")
	text(t, dir+"/tofile", "x")
	text(t, dir+"/d/sub/f", "x")
	must(t, os.Symlink("a", dir+"/link"), os.Symlink("s", dir+"/samelink"))
	return dir
}

// What a sandbox can do to its files, done through a real overlay.
func TestChanges(t *testing.T) {
	every(t, func(t *testing.T, s *Store) {
		box, p := plan(t, s, Request{})
		p.Lowers = []string{lower(t)}
		root := overlay(t, p)
		in := func(name string) string { return root + "/" + name }
		now := time.Now()
		mkdirs(t, in("new/sub"))
		text(t, in("new/sub/f"), "12345")
		text(t, in("edit"), "after!")
		must(t, os.Chtimes(in("samesize"), now, now))
		text(t, in("samesize"), "bbbb")
		must(t,
			os.Chtimes(in("samesize"), time.Unix(1, 0), time.Unix(1, 0)),
			os.Chmod(in("chmod"), 0o600), os.Chown(in("chown"), 1000, 1000),
			os.Chtimes(in("touched"), now, now), os.Chtimes(in("same/file"), now, now),
			os.Remove(in("removed")), os.RemoveAll(in("gone")),
			// An opaque directory: removed and made again, one file as it was.
			os.RemoveAll(in("replaced")), os.Mkdir(in("replaced"), 0o755))
		text(t, in("replaced/keep"), "keep")
		text(t, in("replaced/fresh"), "fresh")
		must(t,
			os.RemoveAll(in("todir")), os.WriteFile(in("todir"), []byte("now a file"), 0o644),
			os.Remove(in("tofile")), os.Mkdir(in("tofile"), 0o755))
		text(t, in("tofile/f"), "x")
		must(t,
			os.Remove(in("link")), os.Symlink("b", in("link")),
			os.Remove(in("samelink")), os.Symlink("s", in("samelink")),
			os.Symlink("/etc/shadow", in("shadow")), os.Chmod(in("d"), 0o700), syscall.Mkfifo(in("fifo"), 0o600),
			os.Chmod(in("d/sub/f"), 0o644|os.ModeSetuid))
		// Made and removed again: nothing.
		text(t, in("brief"), "x")
		must(t, os.Remove(in("brief")))
		got, err := s.Changes(t.Context(), box, p, "")
		must(t, err)
		want := []string{
			"modified /chmod file 1 600",
			"modified /chown file 1 644",
			"modified /d dir 0 700",
			"modified /d/sub/f file 1 4644",
			"modified /edit file 6 644",
			"added /fifo other 0 600",
			"removed /gone dir 0 755",
			"modified /link symlink 1 777",
			"added /new dir 0 755",
			"added /new/sub dir 0 755",
			"added /new/sub/f file 5 644",
			"removed /removed file 1 644",
			"added /replaced/fresh file 5 644",
			"removed /replaced/lost file 4 644",
			"removed /replaced/old dir 0 755",
			"modified /samesize file 4 644",
			"added /shadow symlink 11 777",
			"modified /todir file 10 644",
			"modified /tofile dir 0 755",
			"added /tofile/f file 1 644",
		}
		if d := cmp.Diff(want, ops(got)); d != "" {
			t.Error(d)
		}
		if left, err := os.ReadDir(s.area("snapshots")); err != nil || len(left) != 0 {
			t.Errorf("snapshots left: %v %v", left, err)
		}
	})
}

func TestChangesOfAWorkspace(t *testing.T) {
	s := open(t, Config{Mechanism: byBtrfs})
	src := lower(t)
	must(t, os.Chown(src+"/edit", 4711, 4711))
	box, p := plan(t, s, Request{Workspaces: []WorkspaceRequest{{Source: src, Target: "/workspace"}}})
	w := p.Workspaces[0]
	root := overlay(t, Plan{Lowers: []string{src}, Upper: w.Upper, Work: w.Work})
	text(t, root+"/new", "x")
	must(t, os.Chown(root+"/edit", 1000, 1000)) // what an id map does to the owner is no change
	text(t, p.Upper+"/elsewhere", "x")
	got, err := s.Changes(t.Context(), box, p, "/workspace")
	must(t, err)
	if d := cmp.Diff([]string{"added new file 1 644"}, ops(trimmed(got))); d != "" {
		t.Error(d)
	}
	if b, err := os.ReadFile(src + "/edit"); err != nil || string(b) != "before" {
		t.Errorf("the source changed: %q %v", b, err)
	}
	if _, err := s.Changes(t.Context(), box, p, "/other"); !errs.Is(err, errs.NotFound) {
		t.Errorf("no such workspace: %v", err)
	}
}

func trimmed(all []Change) []Change {
	for i := range all {
		all[i].Path = strings.TrimPrefix(all[i].Path, "/")
	}
	return all
}

// Directories that were made to mount something on are no change; what is put beside that is one.
func TestMountPointsAreNoChange(t *testing.T) {
	s := open(t, Config{Mechanism: byBtrfs})
	box, p := plan(t, s, Request{Workspaces: []WorkspaceRequest{{Source: t.TempDir(), Target: "/a/b/workspace"}}})
	mkdirs(t, p.Upper+"/a/b/workspace", p.Upper+"/a/other")
	got, err := s.Changes(t.Context(), box, p, "")
	must(t, err)
	if d := cmp.Diff([]string{"added /a/other dir 0 755"}, ops(got)); d != "" {
		t.Error(d)
	}
}

func TestChangesErrors(t *testing.T) {
	s := open(t, Config{Mechanism: byBtrfs})
	box, p := plan(t, s, Request{})
	other, q := plan(t, s, Request{})
	if _, err := s.Changes(t.Context(), "../x", p, ""); !errs.Is(err, errs.InvalidArgument) {
		t.Errorf("id: %v", err)
	}
	// A plan of another sandbox shows nothing of that one.
	if _, err := s.Changes(t.Context(), box, q, ""); !errs.Is(err, errs.InvalidArgument) {
		t.Errorf("another sandbox's plan: %v", err)
	}
	must(t, s.Release(t.Context(), other))
	if _, err := s.Changes(t.Context(), other, q, ""); !errs.Is(err, errs.NotFound) {
		t.Errorf("released: %v", err)
	}
}

// VULNERABILITY: what stands above each file was found out anew for each, in steps as the cube of the tree's depth: a chain
// of 2,000 directories, which takes 10 KB of disk, took five minutes of a processor.
// ATTACK: everything in a tree that could stop, fool or kill who reads it.
// VERIFIES: it is read, and told of as far as a path can name it.
func TestChangesOfAHostileTree(t *testing.T) {
	every(t, func(t *testing.T, s *Store) {
		box, p := plan(t, s, Request{DiskBytes: 128 << 20})
		p.Lowers = []string{lower(t)}
		deepenBy(t, p.Upper, "x", 5000)
		long := strings.Repeat("n", 255)
		must(t,
			syscall.Mkfifo(p.Upper+"/edit", 0o644), // where the lower has a regular file
			os.Symlink("/", p.Upper+"/d"),          // where the lower has a directory
			os.Symlink("/proc/self/fd/0/../..", p.Upper+"/magic"),
			os.WriteFile(p.Upper+"/"+long, nil, 0o644),
			os.WriteFile(p.Upper+"/\x1b[31mred\n", nil, 0o644),
			os.WriteFile(p.Upper+"/.wh.removed", nil, 0o644))
		t.Chdir(p.Upper)
		l, err := net.Listen("unix", "sock")
		must(t, err)
		defer l.Close()
		t.Chdir("/")
		start := time.Now()
		ctx, stop := context.WithTimeout(t.Context(), time.Minute)
		defer stop()
		got, err := s.Changes(ctx, box, p, "")
		must(t, err)
		t.Logf("%d changes in %v", len(got), time.Since(start))
		find := func(path string) string {
			for _, c := range got {
				if c.Path == path {
					return c.Op + " " + c.Type
				}
			}
			return ""
		}
		for path, want := range map[string]string{
			"/edit": "modified other", "/d": "modified symlink", "/magic": "added symlink", "/" + long: "added file",
			"/\x1b[31mred\n": "added file", "/.wh.removed": "added file", "/sock": "added other", "/removed": "",
			strings.Repeat("/x", 2047): "added dir", strings.Repeat("/x", 2048): "", "/d/etc": "",
		} {
			if got := find(path); got != want {
				t.Errorf("%.40q: %q, want %q", path, got, want)
			}
		}
		must(t, s.Release(t.Context(), box))
		testenv.Eventually(t, limit, "it is deleted", func() bool {
			left, err := os.ReadDir(s.area("trash"))
			return err == nil && len(left) == 0
		})
	})
}

// VULNERABILITY: the server holds every path of an answer, and the paths of a chain of directories add
// up to the square of its length.
// ATTACK: 3,000 directories with names of 250 bytes, one in the other: 1.1 GB of paths.
// VERIFIES: the answer holds what can be named, and the server little memory.
func TestChangesOfADeepTreeAreFew(t *testing.T) {
	every(t, func(t *testing.T, s *Store) {
		box, p := plan(t, s, Request{DiskBytes: 128 << 20})
		p.Lowers = []string{lower(t)}
		deepenBy(t, p.Upper, strings.Repeat("d", 250), 3000)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		got, err := s.Changes(t.Context(), box, p, "")
		runtime.ReadMemStats(&after)
		must(t, err)
		if len(got) != 16 { // 16 × 251 < 4,096
			t.Errorf("%d changes", len(got))
		}
		if used := after.TotalAlloc - before.TotalAlloc; used > 32<<20 {
			t.Errorf("%d MB for a listing of a few names", used>>20)
		}
		must(t, s.Release(t.Context(), box))
	})
}

// The answer is bounded, and says so rather than leave out something.
func TestTooManyChanges(t *testing.T) {
	c := comparison{prefix: "/", listed: maxChanges + 1}
	if err := c.entry("x"); !errs.Is(err, errs.ResourceExhausted) {
		t.Errorf("by number: %v", err)
	}
	c = comparison{prefix: "/", paths: maxChangePaths + 1}
	if err := c.entry("x"); !errs.Is(err, errs.ResourceExhausted) {
		t.Errorf("by their paths: %v", err)
	}
	c = comparison{names: 1000, held: 900}
	few, many := map[string]bool{"a": true}, map[string]bool{strings.Repeat("n", 100): true}
	release, err := c.hold(few)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.hold(many); !errs.Is(err, errs.ResourceExhausted) {
		t.Errorf("by the names at hand: %v", err)
	}
	if release(); c.held != 900 {
		t.Errorf("%d are held", c.held)
	}
	dir := t.TempDir()
	for i := range 100 {
		text(t, fmt.Sprintf("%s/%d", dir, i), "")
	}
	root, err := fd.OpenRoot(dir)
	must(t, err)
	defer root.Close()
	for most, fits := range map[int]bool{100 * (nameCost + 2): true, 100 * nameCost: false} {
		if err := (view{root}).names("", []bool{true}, map[string]bool{}, most); (err == nil) != fits {
			t.Errorf("100 names in %d bytes: %v", most, err)
		}
	}
}

// deepen makes a chain of directories, too long for any path.
func deepen(t *testing.T, dir string, depth int) {
	t.Helper()
	deepenBy(t, dir, "deep", depth)
}

func deepenBy(t *testing.T, dir, name string, depth int) {
	t.Helper()
	at, err := fd.OpenRoot(dir)
	must(t, err)
	for range depth {
		must(t, syscall.Mkdirat(int(at.Fd()), name, 0o755))
		next, err := fd.OpenDir(at, name)
		must(t, err)
		_ = at.Close()
		at = next
	}
	_ = at.Close()
}

// Several lowers: what a middle one removes or hides is not there to be changed.
func TestViewShowsLayersAsOverlayDoes(t *testing.T) {
	testenv.Root(t)
	top, bottom := t.TempDir(), t.TempDir()
	mkdirs(t, bottom+"/d/x", bottom+"/opaque/x", bottom+"/file/x", bottom+"/plain/x")
	mkdirs(t, top+"/opaque", top+"/plain")
	text(t, top+"/file", "")
	must(t, syscall.Mknod(top+"/d", syscall.S_IFCHR, 0), syscall.Setxattr(top+"/opaque", "trusted.overlay.opaque", []byte("y"), 0))
	var v view
	for _, dir := range []string{top, bottom} {
		f, err := fd.OpenRoot(dir)
		must(t, err)
		defer f.Close()
		v = append(v, f)
	}
	for path, want := range map[string]bool{
		"d": false, "d/x": false, "opaque": true, "opaque/x": false, "file": true, "file/x": false, "plain/x": true, "none": false,
	} {
		if f, err := v.find(path); err != nil || (f != nil) != want {
			t.Errorf("%s: %v %v, want %v", path, f, err, want)
		}
	}
}

func TestStripImported(t *testing.T) {
	testenv.Root(t)
	dir := t.TempDir()
	mkdirs(t, dir+"/d")
	text(t, dir+"/d/f", "x")
	must(t,
		syscall.Setxattr(dir+"/d", "trusted.overlay.opaque", []byte("y"), 0),
		syscall.Setxattr(dir+"/d", "trusted.mine", []byte("1"), 0),
		syscall.Setxattr(dir+"/d/f", "trusted.overlay.redirect", []byte("/etc/shadow"), 0),
		os.Symlink("/etc/shadow", dir+"/link"))
	must(t, stripImported(dir))
	var buf [64]byte
	if _, err := syscall.Getxattr(dir+"/d", "trusted.overlay.opaque", buf[:]); !errors.Is(err, syscall.ENODATA) {
		t.Errorf("opaque: %v", err)
	}
	if _, err := syscall.Getxattr(dir+"/d/f", "trusted.overlay.redirect", buf[:]); !errors.Is(err, syscall.ENODATA) {
		t.Errorf("redirect: %v", err)
	}
	if n, err := syscall.Getxattr(dir+"/d", "trusted.mine", buf[:]); err != nil || n != 1 {
		t.Errorf("an attribute of its own is kept: %v", err)
	}
	for name, want := range map[string]bool{"user.overlay.opaque": true, "trusted.overlay.origin": true, "user.overlays": false, "user.x": false} {
		if overlayXattr(name) != want {
			t.Errorf("%s is obeyed: %v", name, !want)
		}
	}
	for name, make := range map[string]func(string) error{
		".wh.secret": func(p string) error { return os.WriteFile(p, nil, 0o644) },
		"device":     func(p string) error { return syscall.Mknod(p, syscall.S_IFBLK|0o666, 8<<8) },
		"whiteout":   func(p string) error { return syscall.Mknod(p, syscall.S_IFCHR, 0) },
	} {
		path := filepath.Join(dir, "d", name)
		must(t, make(path))
		if err := stripImported(dir); !errs.Is(err, errs.InvalidArgument) {
			t.Errorf("%s: %v, want invalid_argument", name, err)
		}
		must(t, os.Remove(path))
	}
}
