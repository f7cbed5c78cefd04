package btrfs

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/linux/loop"
	"casemate.dev/internal/testenv"
)

// fresh mounts a new file system and returns its root.
func fresh(t *testing.T) *os.File {
	t.Helper()
	testenv.Root(t)
	testenv.NoLeaks(t)
	dir := t.TempDir()
	img, err := os.OpenFile(dir+"/img", os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer img.Close()
	if err := img.Truncate(512 << 20); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("/usr/sbin/mkfs.btrfs", "-q", dir+"/img").CombinedOutput(); err != nil {
		t.Fatalf("%s %v", out, err)
	}
	dev, err := loop.Attach(img)
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	if err := os.Mkdir(dir+"/m", 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(dev.Path, dir+"/m", "btrfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOATIME, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir+"/m", 0); err != nil {
			t.Error(err)
		}
	})
	root := openDir(t, dir+"/m")
	return root
}

func openDir(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func create(t *testing.T, dir *os.File, name string) *os.File {
	t.Helper()
	if err := CreateSubvolume(dir, name); err != nil {
		t.Fatal(err)
	}
	return openDir(t, dir.Name()+"/"+name)
}

func TestSubvolumes(t *testing.T) {
	root := fresh(t)
	if !Is(root) || !IsSubvolume(root) {
		t.Error("the root is a subvolume")
	}
	a := create(t, root, "a")
	if err := os.Mkdir(a.Name()+"/dir", 0o755); err != nil {
		t.Fatal(err)
	}
	if !IsSubvolume(a) || IsSubvolume(openDir(t, a.Name()+"/dir")) {
		t.Error("a is a subvolume, a/dir is none")
	}
	id, err := ID(openDir(t, a.Name()+"/dir"))
	if err != nil || id < firstFree {
		t.Errorf("id %d %v", id, err)
	}
	if err := CreateSubvolume(root, "a"); !errors.Is(err, unix.EEXIST) {
		t.Errorf("twice: %v", err)
	}
	for _, name := range []string{"", ".", "..", "x/y", "x\x00", strings.Repeat("x", 5000)} {
		if err := CreateSubvolume(root, name); !errs.Is(err, errs.InvalidArgument) {
			t.Errorf("name %.10q: %v", name, err)
		}
	}
	if err := DeleteSubvolume(root, "a"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(root.Name() + "/a"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after delete: %v", err)
	}
	if err := DeleteTree(root, root, "a"); !errors.Is(err, unix.ENOENT) {
		t.Errorf("delete what is not there: %v", err)
	}
}

func TestDeleteTreeCopesWithNestedSubvolumes(t *testing.T) {
	root := fresh(t)
	a := create(t, root, "a")
	if err := os.MkdirAll(a.Name()+"/x/y", 0o755); err != nil {
		t.Fatal(err)
	}
	b := create(t, openDir(t, a.Name()+"/x/y"), "b")
	create(t, b, "c")
	create(t, a, "d")
	keep := create(t, root, "keep")
	// Twin: the plain call refuses.
	if err := DeleteSubvolume(root, "a"); !errors.Is(err, unix.ENOTEMPTY) {
		t.Fatalf("twin: %v, want ENOTEMPTY", err)
	}
	if err := DeleteTree(root, root, "a"); err != nil {
		t.Fatal(err)
	}
	ids, err := Children(root, 5)
	id, _ := ID(keep)
	if err != nil || !slices.Equal(ids, []uint64{id}) {
		t.Errorf("left %v %v, want %d", ids, err, id)
	}
}

func TestSnapshotIsReadOnlyAndIndependent(t *testing.T) {
	root := fresh(t)
	a := create(t, root, "a")
	if err := os.WriteFile(a.Name()+"/f", []byte("before"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := Snapshot(a, root, "s"); err != nil { // what is not on disk yet is in it
		t.Fatal(err)
	}
	if err := os.WriteFile(a.Name()+"/f", []byte("after"), 0o644); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(root.Name() + "/s/f"); err != nil || string(b) != "before" {
		t.Errorf("snapshot holds %q %v", b, err)
	}
	if err := os.WriteFile(root.Name()+"/s/g", nil, 0o644); !errors.Is(err, unix.EROFS) {
		t.Errorf("write into a snapshot: %v", err)
	}
	if err := DeleteSubvolume(root, "s"); err != nil {
		t.Fatal(err)
	}
}

// What is written once SnapshotFixed says so is not in the snapshot, though that is not on the disk yet.
func TestSnapshotFixed(t *testing.T) {
	root := fresh(t)
	a := create(t, root, "a")
	for i := range 20 {
		name, text := fmt.Sprintf("s%d", i), fmt.Sprintf("before %d", i)
		if err := os.WriteFile(a.Name()+"/f", []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		calls := 0
		err := SnapshotFixed(root, a, root, name, func() {
			calls++
			if err := os.WriteFile(a.Name()+"/f", []byte("after"), 0o644); err != nil {
				t.Error(err)
			}
			if err := os.WriteFile(a.Name()+"/new", nil, 0o644); err != nil {
				t.Error(err)
			}
		})
		if err != nil || calls != 1 {
			t.Fatalf("%v, %d calls", err, calls)
		}
		if b, err := os.ReadFile(root.Name() + "/" + name + "/f"); err != nil || string(b) != text {
			t.Fatalf("snapshot %d holds %q %v, want %q", i, b, err, text)
		}
		if err := os.Remove(a.Name() + "/new"); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(root.Name() + "/" + name + "/new"); !errors.Is(err, os.ErrNotExist) {
			t.Fatalf("snapshot %d has what came later: %v", i, err)
		}
	}
	if err := SnapshotFixed(root, a, root, "s0", func() { t.Error("fixed though it fails") }); !errors.Is(err, unix.EEXIST) {
		t.Errorf("of a name that is there: %v", err)
	}
}

func TestQuota(t *testing.T) {
	root := fresh(t)
	for range 2 {
		if err := EnableQuota(root); err != nil {
			t.Fatal(err)
		}
	}
	a, b := create(t, root, "a"), create(t, root, "b")
	id, err := ID(a)
	if err != nil {
		t.Fatal(err)
	}
	if err := Limit(a, 20<<20); err != nil {
		t.Fatal(err)
	}
	if n, err := LimitOf(root, id); err != nil || n != 20<<20 {
		t.Errorf("limit %d %v", n, err)
	}
	big := make([]byte, 40<<20)
	if err := os.WriteFile(a.Name()+"/f", big, 0o644); !errors.Is(err, unix.EDQUOT) {
		t.Errorf("40 MB into 20: %v", err)
	}
	if err := os.WriteFile(b.Name()+"/f", big, 0o644); err != nil { // twin: without a limit
		t.Errorf("twin: %v", err)
	}
	if err := Sync(root); err != nil {
		t.Fatal(err)
	}
	used, err := Usage(root, id)
	if err != nil || used > 20<<20 || used < 10<<20 {
		t.Errorf("usage %d %v", used, err)
	}
	if err := LimitID(root, id, 0); err != nil {
		t.Fatal(err)
	}
	if n, err := LimitOf(root, id); err != nil || n != 0 {
		t.Errorf("limit after lifting %d %v", n, err)
	}
	if err := os.WriteFile(a.Name()+"/f", big, 0o644); err != nil {
		t.Errorf("after lifting: %v", err)
	}
	if _, err := Usage(root, 99999); !errs.Is(err, errs.NotFound) {
		t.Errorf("usage of nobody: %v", err)
	}
	groups, err := QuotaGroups(root)
	if err != nil || !slices.Contains(groups, id) {
		t.Errorf("groups %v %v", groups, err)
	}
}

// counted returns a fresh file system with quota groups, and a subvolume a of it.
func counted(t *testing.T) (root, a *os.File, id uint64) {
	t.Helper()
	root = fresh(t)
	if err := EnableQuota(root); err != nil {
		t.Fatal(err)
	}
	a = create(t, root, "a")
	id, err := ID(a)
	if err != nil {
		t.Fatal(err)
	}
	return root, a, id
}

func TestCountersShowWhatIsNotCommitted(t *testing.T) {
	root, a, id := counted(t)
	c, err := CountersOf(a)
	if err != nil {
		t.Fatal(err)
	}
	if err := Sync(root); err != nil {
		t.Fatal(err)
	}
	before := c.Activity()
	testenv.Eventually(t, time.Minute, "nothing shows while nothing is written", func() bool {
		last := before // the file system itself may still have something to do
		before = c.Activity()
		return before == last
	})
	if err := os.WriteFile(a.Name()+"/f", make([]byte, 8<<20), 0o644); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, time.Minute, "8 MB show as used or pending", func() bool { // between the two it may change sides
		used, err := Usage(root, id)
		if err != nil {
			t.Fatal(err)
		}
		return used+c.Pending(id) >= 8<<20
	})
	if c.Activity() == before {
		t.Error("a write does not show")
	}
	if n := (Counters{dir: "/none"}).Pending(id); n != 0 {
		t.Errorf("without sysfs: %d", n)
	}
}

func TestQuotaGroupsOfDeletedSubvolumesGo(t *testing.T) {
	root, a, id := counted(t)
	_ = a.Close() // while somebody has it open its space does not come back
	if is, err := Exists(root, id); err != nil || !is {
		t.Errorf("exists %v %v", is, err)
	}
	if err := DeleteSubvolume(root, "a"); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 20*time.Second, "space came back", func() bool {
		if err := StartCommit(root); err != nil {
			t.Fatal(err)
		}
		is, err := Exists(root, id)
		return err == nil && !is
	})
	testenv.Eventually(t, 20*time.Second, "it counts nothing any more", func() bool {
		if err := StartCommit(root); err != nil {
			t.Fatal(err)
		}
		err := DropQuotaGroup(root, id)
		if err != nil && !errs.Is(err, errs.Unavailable) {
			t.Fatal(err)
		}
		return err == nil
	})
	if err := DropQuotaGroup(root, id); err != nil {
		t.Errorf("once more: %v", err)
	}
}

// A group that counts is not dropped, and where the kernel has stopped counting, a new count brings limits back.
func TestLimitsOutliveWhatStopsTheCount(t *testing.T) {
	root, a, id := counted(t)
	c, err := CountersOf(root)
	if err != nil {
		t.Fatal(err)
	}
	if err := Limit(a, 20<<20); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(a.Name()+"/first", make([]byte, 8<<20), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := Sync(root); err != nil {
		t.Fatal(err)
	}
	if err := DropQuotaGroup(root, id); !errs.Is(err, errs.Unavailable) {
		t.Errorf("dropping a group that counts: %v", err)
	}
	if c.Astray() {
		t.Fatal("the count stopped at once")
	}
	stopCount(t, root, a)
	if !c.Astray() {
		t.Fatal("the twin did not stop the count")
	}
	if err := Recount(root); err != nil {
		t.Fatal(err)
	}
	if c.Astray() {
		t.Error("still no count")
	}
	if used, err := Usage(root, id); err != nil || used < 8<<20 {
		t.Errorf("usage %d %v", used, err)
	}
	if err := os.WriteFile(a.Name()+"/second", make([]byte, 16<<20), 0o644); !errors.Is(err, unix.EDQUOT) {
		t.Errorf("8 and 16 MB into 20: %v", err)
	}
}

// stopCount has the kernel give up counting: a group that shares what it holds gets a parent.
func stopCount(t *testing.T, root, a *os.File) {
	t.Helper()
	if err := Snapshot(a, root, "shares"); err != nil {
		t.Fatal(err)
	}
	if err := Sync(root); err != nil {
		t.Fatal(err)
	}
	id, err := ID(a)
	if err != nil {
		t.Fatal(err)
	}
	const parent = 1<<48 | 1
	if err := ioctlQgroupCreate(root, &qgroupCreate{create: 1, qgroup: parent}); err != nil {
		t.Fatal(err)
	}
	if err := assign(root, id, parent); err != nil {
		t.Fatal(err)
	}
}

// More items than one answer holds.
func TestSearchGoesOn(t *testing.T) {
	root := fresh(t)
	if err := EnableQuota(root); err != nil {
		t.Fatal(err)
	}
	const n = 150
	for i := range n {
		if err := CreateSubvolume(root, fmt.Sprintf("s%03d", i)); err != nil {
			t.Fatal(err)
		}
	}
	ids, err := Children(root, 5)
	if err != nil || len(ids) != n || !slices.IsSorted(ids) {
		t.Errorf("%d children %v, want %d", len(ids), err, n)
	}
	groups, err := QuotaGroups(root)
	if err != nil || len(groups) < n {
		t.Errorf("%d groups %v", len(groups), err)
	}
}

func TestOtherFileSystems(t *testing.T) {
	dir := openDir(t, "/proc")
	if Is(dir) || IsSubvolume(dir) {
		t.Error("proc is no btrfs")
	}
	f, err := os.Create(t.TempDir() + "/f")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := NoCopyOnWrite(f); err != nil {
		t.Errorf("where it means nothing: %v", err)
	}
	if err := CreateSubvolume(dir, "x"); !errors.Is(err, syscall.ENOTTY) {
		t.Errorf("subvolume in proc: %v", err)
	}
}

// Whatever is done to a subvolume after a snapshot, the snapshot does not show it any more; what is only read, it does.
func TestShows(t *testing.T) {
	root := fresh(t)
	if err := EnableQuota(root); err != nil {
		t.Fatal(err)
	}
	c, err := CountersOf(root)
	if err != nil {
		t.Fatal(err)
	}
	a := create(t, root, "a")
	at := func(name string) string { return a.Name() + "/" + name }
	if err := os.WriteFile(at("f"), make([]byte, 1<<20), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(at("small"), []byte("inline"), 0o644); err != nil {
		t.Fatal(err)
	}
	write := func(name string, offset int64) func() error {
		return func() error {
			f, err := os.OpenFile(at(name), os.O_WRONLY, 0)
			if err != nil {
				return err
			}
			_, err = f.WriteAt([]byte("x"), offset)
			return errors.Join(err, f.Close())
		}
	}
	mapped := func() error {
		f, err := os.OpenFile(at("f"), os.O_RDWR, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		m, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_WRITE|unix.PROT_READ, unix.MAP_SHARED)
		if err != nil {
			return err
		}
		m[7]++
		return unix.Munmap(m)
	}
	var held []byte // stays mapped, and is written to again in the rounds that follow
	changes := map[string]func() error{
		"write":       write("f", 4096),
		"write small": write("small", 1),
		"append":      write("f", 1<<20+5000),
		"mmap":        mapped,
		"mmap held":   func() error { held[9]++; return nil },
		"same bytes":  func() error { return os.WriteFile(at("same"), []byte("same"), 0o644) },
		"create":      func() error { return os.WriteFile(at("new"), nil, 0o644) },
		"remove":      func() error { return os.Remove(at("new")) },
		"mkdir":       func() error { return os.Mkdir(at("dir"), 0o755) },
		"rename":      func() error { return os.Rename(at("dir"), at("moved")) },
		"chmod":       func() error { return os.Chmod(at("f"), 0o600) },
		"chown":       func() error { return os.Lchown(at("f"), 7, 7) },
		"times":       func() error { return os.Chtimes(at("f"), time.Unix(1, 0), time.Unix(1, 0)) },
		"attribute":   func() error { return unix.Setxattr(at("f"), "user.x", []byte("y"), 0) },
		"link":        func() error { return os.Link(at("f"), at("link")) },
		"symlink":     func() error { return os.Symlink("f", at("sym")) },
		"truncate":    func() error { return os.Truncate(at("f"), 1<<19) },
	}
	f, err := os.OpenFile(at("f"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if held, err = unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_WRITE|unix.PROT_READ, unix.MAP_SHARED); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(held) }()
	round := 0
	snap := func() *os.File {
		round++
		name := fmt.Sprintf("s%d", round)
		if err := Snapshot(a, root, name); err != nil {
			t.Fatal(err)
		}
		return openDir(t, root.Name()+"/"+name)
	}
	shows := func(s *os.File) bool {
		is, err := Shows(c, s, a)
		if err != nil {
			t.Fatal(err)
		}
		return is
	}
	order := []string{
		"write", "write small", "append", "mmap", "mmap held", "same bytes", "same bytes", "create", "remove", "mkdir",
		"rename", "chmod", "chown", "times", "attribute", "link", "symlink", "mmap held", "truncate",
	}
	for _, what := range order {
		s := snap()
		if _, err := os.ReadFile(at("f")); err != nil {
			t.Fatal(err)
		}
		if !shows(s) {
			t.Errorf("before %s: a snapshot that was just made does not show what is there", what)
		}
		if err := changes[what](); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if shows(s) {
			t.Errorf("%s: shows it still", what)
		}
		if err := Sync(root); err != nil {
			t.Fatal(err)
		}
		if shows(s) {
			t.Errorf("%s: shows it once it is on the disk", what)
		}
	}
	// A write at once after a snapshot leaves the file's times as they were, if the clock has not gone on.
	for range 200 {
		if err := write("f", 0)(); err != nil {
			t.Fatal(err)
		}
		s := snap()
		if err := write("f", 1)(); err != nil {
			t.Fatal(err)
		}
		if shows(s) {
			t.Fatal("shows what was written at once after it")
		}
	}
	s := snap()
	b := create(t, root, "b")
	if is, err := Shows(c, s, b); err != nil || is {
		t.Errorf("of another subvolume: %v %v", is, err)
	}
	if err := Clone(a, root, "clone"); err != nil {
		t.Fatal(err)
	}
	if is, err := Shows(c, openDir(t, root.Name()+"/clone"), a); err != nil || is {
		t.Errorf("what can be written to: %v %v", is, err)
	}
	if _, err := Shows(Counters{dir: "/none"}, s, a); err == nil {
		t.Error("without counters it is not certain")
	}
}
