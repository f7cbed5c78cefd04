package rootfs

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/id"
	"casemate.dev/internal/linux/mount"
	"casemate.dev/internal/testenv"
)

// limit bounds every wait in these tests.
const limit = 20 * time.Second

// mechanisms are those that this machine gives: tmpfs needs Linux 6.6, project quotas a kernel with a
// quota format and a file system made for them.
func mechanisms(t testing.TB) []string {
	all := []string{byBtrfs}
	testenv.Root(t)
	if _, err := openTmpfs(t.TempDir()); err == nil {
		all = append(all, byTmpfs)
	} else if !errs.Is(err, errs.Unsupported) {
		t.Fatal(err)
	}
	return all
}

// light is the mechanism that costs the least, for tests that don't depend on it.
func light(t testing.TB) string {
	all := mechanisms(t)
	return all[len(all)-1]
}

const testImage = 768 << 20

// open opens a store of its own for the test and closes it.
func open(t testing.TB, cfg Config) *Store {
	t.Helper()
	testenv.Root(t)
	if cfg.DataDir == "" {
		cfg.DataDir = t.TempDir()
	}
	if cfg.ImageBytes == 0 {
		cfg.ImageBytes = testImage
	}
	s, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_, _ = s.Sweep(context.Background(), nil)
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func plan(t testing.TB, s *Store, r Request) (string, Plan) {
	t.Helper()
	if r.ID == "" {
		r.ID = id.Sandbox()
	}
	if r.Template == "" {
		r.Template = "host"
	}
	if r.DiskBytes == 0 {
		r.DiskBytes = 64 << 20
	}
	p, err := s.Plan(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	return r.ID, p
}

// full reports whether an error says that a limit is reached: which of the two depends on the mechanism.
func full(err error) bool { return errors.Is(err, syscall.EDQUOT) || errors.Is(err, syscall.ENOSPC) }

// every runs a test with each mechanism.
func every(t *testing.T, f func(t *testing.T, s *Store)) {
	for _, m := range mechanisms(t) {
		t.Run(m, func(t *testing.T) {
			testenv.NoLeaks(t)
			f(t, open(t, Config{Mechanism: m}))
		})
	}
}

func write(t *testing.T, path string, size int) error {
	t.Helper()
	return os.WriteFile(path, make([]byte, size), 0o644)
}

func TestPlanLimitRelease(t *testing.T) {
	every(t, func(t *testing.T, s *Store) {
		box, p := plan(t, s, Request{DiskBytes: 32 << 20})
		other, q := plan(t, s, Request{DiskBytes: 32 << 20})
		if p.Disk.Mechanism != s.Mechanism() || p.Disk.Bytes != 32<<20 {
			t.Errorf("disk %+v", p.Disk)
		}
		for _, dir := range []string{p.Upper, p.Work} {
			st, err := os.Stat(dir)
			if err != nil {
				t.Fatal(err)
			}
			sys := st.Sys().(*syscall.Stat_t)
			if st.Mode() != os.ModeDir|0o755 || sys.Uid != 0 || sys.Gid != 0 {
				t.Errorf("%s: %v of %d:%d", filepath.Base(dir), st.Mode(), sys.Uid, sys.Gid)
			}
		}
		if err := write(t, p.Upper+"/big", 64<<20); !full(err) {
			t.Errorf("64 MB into 32: %v", err)
		}
		if err := write(t, q.Upper+"/f", 8<<20); err != nil { // the neighbour goes on
			t.Errorf("neighbour: %v", err)
		}
		if err := os.Remove(p.Upper + "/big"); err != nil {
			t.Errorf("remove at the limit: %v", err)
		}
		if _, err := s.Plan(t.Context(), Request{ID: box, Template: "host", DiskBytes: 1 << 20}); !errs.Is(err, errs.AlreadyExists) {
			t.Errorf("second plan: %v, want already_exists", err)
		}
		for range 2 {
			if err := s.Release(t.Context(), box); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := os.Stat(p.Upper); !notThere(err) {
			t.Errorf("after release: %v", err)
		}
		removed, err := s.Sweep(t.Context(), map[string]bool{other: true})
		if err != nil || len(removed) != 0 {
			t.Errorf("sweep took %v %v", removed, err)
		}
		removed, err = s.Sweep(t.Context(), nil)
		if err != nil || len(removed) != 1 || removed[0] != "layer "+other {
			t.Errorf("sweep took %v %v, want layer %s", removed, err, other)
		}
		if err := s.use(id.Sandbox(), use{base: "host-x"}); err != nil { // a create that was killed here
			t.Fatal(err)
		}
		if removed, err := s.Sweep(t.Context(), nil); err != nil || len(removed) != 0 {
			t.Errorf("sweep took %v %v", removed, err)
		}
		testenv.Eventually(t, limit, "trash is empty", func() bool {
			left, err := os.ReadDir(s.area("trash"))
			return err == nil && len(left) == 0
		})
		if left, err := os.ReadDir(s.useDir()); err != nil || len(left) != 0 {
			t.Errorf("uses left: %v %v", left, err)
		}
	})
}

func TestPlanErrors(t *testing.T) {
	s := open(t, Config{Mechanism: light(t)})
	for name, c := range map[string]struct {
		r    Request
		kind errs.Kind
	}{
		"id":        {Request{ID: "../x", Template: "host"}, errs.InvalidArgument},
		"template":  {Request{ID: id.Sandbox(), Template: "none"}, errs.NotFound},
		"profile":   {Request{ID: id.Sandbox(), Template: "host", Profile: "standard"}, errs.FailedPrecondition},
		"not built": {Request{ID: id.Sandbox(), Template: "base"}, errs.FailedPrecondition},
		"workspace": {Request{ID: id.Sandbox(), Template: "host", DiskBytes: 1 << 20, Workspaces: []WorkspaceRequest{{Source: "/none"}}}, errs.NotFound},
	} {
		if _, err := s.Plan(t.Context(), c.r); !errs.Is(err, c.kind) {
			t.Errorf("%s: %v, want %v", name, err, c.kind)
		}
	}
	for _, area := range []string{s.area("live"), s.useDir()} {
		if left, err := os.ReadDir(area); err != nil || len(left) != 0 {
			t.Errorf("left in %s: %v %v", area, left, err)
		}
	}
	if err := s.Release(t.Context(), "../../x"); !errs.Is(err, errs.InvalidArgument) {
		t.Errorf("release: %v", err)
	}
}

func TestSecondServerIsRefused(t *testing.T) {
	dir := t.TempDir()
	open(t, Config{DataDir: dir, Mechanism: light(t)})
	if s, err := Open(t.Context(), Config{DataDir: dir}); !errs.Is(err, errs.FailedPrecondition) {
		t.Errorf("second store on one directory: %v %v", s, err)
	}
	// Another directory is another store.
	open(t, Config{Mechanism: byBtrfs})
	open(t, Config{Mechanism: byBtrfs})
}

// A server is killed while a sandbox runs, whose own mounts hold the image. The next server finds the
// same device and file system, with the layer and its limit.
func TestRestartFindsTheSameImage(t *testing.T) {
	testenv.NoLeaks(t)
	dir := t.TempDir()
	s, err := Open(t.Context(), Config{DataDir: dir, Mechanism: byBtrfs, ImageBytes: testImage})
	if err != nil {
		t.Fatal(err)
	}
	box, p := plan(t, s, Request{DiskBytes: 32 << 20})
	gone, _ := plan(t, s, Request{})
	if err := write(t, p.Upper+"/before", 4<<20); err != nil {
		t.Fatal(err)
	}
	sandbox, err := mount.Clone(filepath.Dir(p.Upper), false)
	if err != nil {
		t.Fatal(err)
	}
	defer sandbox.Close()
	devices := func() int {
		n := 0
		backing, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
		for _, b := range backing {
			text, _ := os.ReadFile(b)
			if strings.HasPrefix(string(text), dir) {
				n++
			}
		}
		return n
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if n := devices(); n != 1 {
		t.Fatalf("%d devices while the sandbox goes on", n)
	}
	s = open(t, Config{DataDir: dir}) // keeps its mechanism
	if n := devices(); n != 1 {
		t.Fatalf("%d devices on one image", n)
	}
	// The same file system: what the sandbox writes is seen at once.
	f, err := os.OpenFile("/proc/self/fd/"+itoa(int(sandbox.Fd()))+"/upper/after", os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
	if _, err := os.Stat(p.Upper + "/after"); err != nil {
		t.Errorf("the restarted server sees another file system: %v", err)
	}
	if err := write(t, p.Upper+"/big", 64<<20); !full(err) {
		t.Errorf("limit after a restart: %v", err)
	}
	removed, err := s.Sweep(t.Context(), map[string]bool{box: true})
	if err != nil || len(removed) != 1 || removed[0] != "layer "+gone {
		t.Errorf("sweep took %v %v", removed, err)
	}
	changes, err := s.Changes(t.Context(), box, p, "")
	if err != nil || len(changes) != 3 {
		t.Errorf("changes %v %v", changes, err)
	}
}

func itoa(n int) string {
	if n < 10 {
		return string(rune('0' + n))
	}
	return itoa(n/10) + itoa(n%10)
}

// A second store on the same directory, mounted over a killed one's in one mount namespace.
func TestOpenCleansUpAfterAKilledServer(t *testing.T) {
	testenv.NoLeaks(t)
	dir := t.TempDir()
	s, err := Open(t.Context(), Config{DataDir: dir, Mechanism: byBtrfs, ImageBytes: testImage})
	if err != nil {
		t.Fatal(err)
	}
	box, p := plan(t, s, Request{})
	// What a kill leaves: the lock is given back by the kernel, everything else stays.
	s.stop()
	s.workers.Wait()
	d := s.disk.(*btrfsDisk)
	d.stop()
	d.worker.Wait()
	for range len(s.spares) {
		(<-s.spares).close()
	}
	_ = d.rootDir.Close()
	_ = s.lock.Close()
	again := open(t, Config{DataDir: dir})
	if _, err := os.Stat(p.Upper); err != nil {
		t.Errorf("layer of %s: %v", box, err)
	}
	testenv.Eventually(t, limit, "spares of the killed server are gone", func() bool {
		left, err := os.ReadDir(again.area("trash"))
		return err == nil && len(left) == 0
	})
	if n := strings.Count(mountInfo(t), dir); n != 1 {
		t.Errorf("mounted %d times", n)
	}
}

func mountInfo(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestWorkspacesShareTheLimit(t *testing.T) {
	every(t, func(t *testing.T, s *Store) {
		src := t.TempDir()
		if err := os.Chown(src, 4711, 4712); err != nil {
			t.Fatal(err)
		}
		_, p := plan(t, s, Request{DiskBytes: 32 << 20, Workspaces: []WorkspaceRequest{
			{Source: src, Target: "/workspace"}, {Source: "/usr", Target: "/b"},
		}})
		if len(p.Workspaces) != 2 {
			t.Fatalf("%+v", p.Workspaces)
		}
		w := p.Workspaces[0]
		if w.Source != src || w.Target != "/workspace" || w.OwnerUID != 4711 || w.OwnerGID != 4712 {
			t.Errorf("%+v", w)
		}
		if err := write(t, p.Upper+"/f", 20<<20); err != nil {
			t.Fatal(err)
		}
		if err := write(t, w.Upper+"/f", 20<<20); !full(err) {
			t.Errorf("20 MB in the root and 20 in a workspace fit into 32: %v", err)
		}
	})
}

func TestUsed(t *testing.T) {
	every(t, func(t *testing.T, s *Store) {
		box, p := plan(t, s, Request{})
		if err := write(t, p.Upper+"/f", 10<<20); err != nil {
			t.Fatal(err)
		}
		syscall.Sync()
		testenv.Eventually(t, limit, "10 MB used", func() bool {
			n, err := s.Used(box)
			return err == nil && n >= 10<<20 && n < 12<<20
		})
	})
}

func TestInodesAreLimitedOnTmpfs(t *testing.T) {
	if light(t) != byTmpfs {
		return // btrfs has no limit on inodes, and says so: DiskLimit.Inodes is 0
	}
	s := open(t, Config{Mechanism: light(t)})
	_, p := plan(t, s, Request{Inodes: 100})
	if p.Disk.Inodes != 100 {
		t.Errorf("%+v", p.Disk)
	}
	var err error
	for i := 0; i < 200 && err == nil; i++ {
		err = os.WriteFile(p.Upper+"/"+itoa(i), nil, 0o644)
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("200 files of 100: %v", err)
	}
}

// TestFilesInMemoryOfAnEarlierServer: what a server mounted in its own namespace goes out of sight with it, while a sandbox
// goes on. What lies at the place then is nobody's files, and is not kept as a sandbox's.
func TestFilesInMemoryOfAnEarlierServer(t *testing.T) {
	if light(t) != byTmpfs {
		return // other mechanisms keep files on disk
	}
	s := open(t, Config{Mechanism: byTmpfs})
	box, p := plan(t, s, Request{})
	if err := write(t, p.Upper+"/precious", 100); err != nil {
		t.Fatal(err)
	}
	calls := map[string]func() error{
		"commit": func() error {
			_, err := s.Commit(t.Context(), box, p, still, still)
			return err
		},
		"changes": func() error {
			_, err := s.Changes(t.Context(), box, p, "")
			return err
		},
		"used": func() error {
			_, err := s.Used(box)
			return err
		},
		"lend": func() error {
			back, err := s.Lend(box)
			if err == nil {
				err = back()
			}
			return err
		},
	}
	for name, call := range calls {
		if err := call(); err != nil {
			t.Errorf("%s while the files are in sight: %v", name, err)
		}
	}
	if err := unmount(s.disk.files(s.live(box))); err != nil {
		t.Fatal(err)
	}
	for name, call := range calls {
		if err := call(); !errs.Is(err, errs.FailedPrecondition) {
			t.Errorf("%s of files that are out of sight: %v", name, err)
		}
	}
}

func TestStoreKeepsItsMechanism(t *testing.T) {
	dir := t.TempDir()
	s, err := Open(t.Context(), Config{DataDir: dir, Mechanism: light(t)})
	if err != nil {
		t.Fatal(err)
	}
	_ = s.Close()
	if _, err := Open(t.Context(), Config{DataDir: dir, Mechanism: byProject}); !errs.Is(err, errs.FailedPrecondition) {
		t.Errorf("another mechanism: %v", err)
	}
	if _, err := Open(t.Context(), Config{DataDir: t.TempDir(), Mechanism: "magic"}); !errs.Is(err, errs.InvalidArgument) {
		t.Errorf("unknown mechanism: %v", err)
	}
	// A size that can't be had is refused. Who asked for one on the disk must not get files in memory instead, for good.
	for _, size := range []int64{1, minImage - 1<<20, 1 << 60} {
		if _, err := Open(t.Context(), Config{DataDir: t.TempDir(), ImageBytes: size}); !errs.Is(err, errs.InvalidArgument) {
			t.Errorf("an image of %d bytes: %v", size, err)
		}
	}
	if got := open(t, Config{DataDir: dir}).Mechanism(); got != light(t) {
		t.Errorf("reopened with %s", got)
	}
}

func TestProbingTakesTheBest(t *testing.T) {
	s := open(t, Config{})
	if m := s.Mechanism(); m != byProject && m != byBtrfs {
		t.Errorf("chose %s with mkfs.btrfs at hand", m)
	}
}

func BenchmarkPlan(b *testing.B) {
	for _, m := range mechanisms(b) {
		b.Run(m, func(b *testing.B) {
			s := open(b, Config{Mechanism: m})
			for b.Loop() {
				b.StopTimer()
				if m == byBtrfs {
					for len(s.spares) == 0 { // the common case: one is ready
						time.Sleep(time.Millisecond)
					}
				}
				b.StartTimer()
				box, _ := plan(b, s, Request{DiskBytes: 4 << 20})
				b.StopTimer()
				if err := s.Release(b.Context(), box); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
		})
	}
}
