package launch

import (
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
)

func openDir(t *testing.T, dir string) int {
	t.Helper()
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	return fd
}

// A target is found or made below the root, never through a link and never above it.
func TestTarget(t *testing.T) {
	unix.Umask(0o022)
	dir := t.TempDir()
	outside := t.TempDir()
	for _, d := range []string{"have/it", "file's"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for name, to := range map[string]string{
		"absolute": outside, "relative": "have", "upwards": "../../../../../../tmp", "dangling": "nothing", "magic": "/proc/self/root",
	} {
		if err := os.Symlink(to, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	root := openDir(t, dir)
	for _, tt := range []struct {
		name   string
		single bool
		ok     bool
	}{
		{"/have/it", false, true},
		{"/made", false, true},
		{"/made/deep/er", false, true},
		{"/have/it/file", true, true},
		{"/made/for/file", true, true},
		{"/file", true, true},
		{"/file", false, false},
		{"/file/below", false, false},
		{"/absolute", false, false},
		{"/absolute/x", false, false},
		{"/absolute/x", true, false},
		{"/relative", false, false},
		{"/relative/it", false, false},
		{"/upwards/x", false, false},
		{"/dangling", false, false},
		{"/dangling/x", false, false},
		{"/magic/etc", false, false},
		{"/", false, false},
		{"", false, false},
		{"have/it", false, false},
		{"/have/../made", false, false},
		{"/have//it", false, false},
		{"/..", false, false},
	} {
		fd, err := target(root, tt.name, tt.single, 0)
		if (err == nil) != tt.ok {
			t.Errorf("target(%q, single %v): %v", tt.name, tt.single, err)
		}
		if err != nil {
			continue
		}
		var got, want unix.Stat_t
		if err := unix.Fstat(fd, &got); err != nil {
			t.Fatal(err)
		}
		if err := unix.Lstat(filepath.Join(dir, tt.name), &want); err != nil || got.Ino != want.Ino {
			t.Errorf("target(%q) is inode %d, want %d, %v", tt.name, got.Ino, want.Ino, err)
		}
		_ = unix.Close(fd)
	}
	if entries, err := os.ReadDir(outside); err != nil || len(entries) > 0 {
		t.Errorf("something was made outside: %v, %v", entries, err)
	}
}

// Whatever could be a door stops the start.
func TestCheckFile(t *testing.T) {
	dir := t.TempDir()
	open := func(name string, flags int) int {
		fd, err := unix.Open(name, flags|unix.O_CLOEXEC, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Close(fd) })
		return fd
	}
	memfd, err := unix.MemfdCreate("m", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(memfd)
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(epoll)
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pipe[0])
	defer unix.Close(pipe[1])
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pair[0])
	defer unix.Close(pair[1])
	fakeMemfd := filepath.Join(dir, "memfd:x")
	for _, tt := range []struct {
		what string
		fd   int
		ok   bool
	}{
		{"null", open("/dev/null", unix.O_RDWR), true},
		{"memfd", memfd, true},
		{"poller", epoll, true},
		{"pipe", pipe[0], true},
		{"socket", pair[0], true},
		{"directory", open(dir, unix.O_RDONLY|unix.O_DIRECTORY), false},
		{"directory as a path", open(dir, unix.O_PATH|unix.O_DIRECTORY), false},
		{"file", open(filepath.Join(dir, "f"), unix.O_CREAT|unix.O_RDWR), false},
		{"file as a path", open(filepath.Join(dir, "f"), unix.O_PATH), false},
		{"file named like a memfd", open(fakeMemfd, unix.O_CREAT|unix.O_RDWR), false},
		{"proc file", open("/proc/self/status", unix.O_RDONLY), false},
		{"other device", open("/dev/zero", unix.O_RDONLY), false},
	} {
		if err := checkFile(tt.fd); (err == nil) != tt.ok {
			t.Errorf("%s: %v", tt.what, err)
		}
	}
	// This test program has directories and files open, and so could be no PID 1.
	if n, err := checkFiles(); err == nil {
		t.Errorf("%d files and no complaint", n)
	}
}

func conns(t *testing.T) (server net.Conn, guest *guestwire.Conn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ends := make([]net.Conn, 2)
	for i, fd := range fds {
		if ends[i], err = connOf(uintptr(fd)); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = ends[i].Close() })
	}
	return ends[0], guestwire.NewConn(ends[1])
}

// A guest that nobody launches ends quietly; one that is asked for something else says no.
func TestReceive(t *testing.T) {
	server, guest := conns(t)
	_ = server.Close()
	if err := new(setup).receive(guest); !errors.Is(err, ErrUnclaimed) {
		t.Errorf("the server went away: %v", err)
	}

	server, guest = conns(t)
	go func() { _ = new(setup).receive(guest) }()
	err := guestwire.CallOn(t.Context(), server, guestwire.MethodStatus, nil, nil, nil)
	if !errs.Is(err, errs.InvalidArgument) {
		t.Errorf("another method: %v", err)
	}

	server, guest = conns(t)
	passed, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	s := setup{micros: map[string]int64{}}
	done := make(chan error)
	go func() { done <- s.receive(guest) }()
	go func() {
		defer passed.Close()
		l := guestwire.Launch{Hostname: "h", Root: guestwire.Overlay{Lowers: []int{0}}}
		_ = guestwire.CallOn(t.Context(), server, guestwire.MethodLaunch, l, []*os.File{passed}, nil)
	}()
	if err := <-done; err != nil || s.launch.Hostname != "h" || len(s.files) != 1 {
		t.Errorf("a launch: %+v, %d files, %v", s.launch, len(s.files), err)
	}
	for _, i := range []int{-1, 1, 99} {
		if _, err := s.file(i); err == nil {
			t.Errorf("file %d", i)
		}
	}
	_, _ = s.keepOnly(nil)
}

// Filters are read whole and at a position, and none is too long or missing.
func TestReadFilters(t *testing.T) {
	file := func(n int) *os.File {
		f, err := os.CreateTemp(t.TempDir(), "")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
		if _, err := f.WriteString(strings.Repeat("x", n)); err != nil {
			t.Fatal(err)
		}
		return f
	}
	for _, tt := range []struct {
		sizes []int
		ok    bool
	}{
		{nil, true},
		{[]int{8}, true},
		{[]int{8, maxFilter}, true},
		{[]int{0}, false},
		{[]int{maxFilter + 8}, false},
		{[]int{8, 8, 8}, false},
	} {
		var s setup
		for i, n := range tt.sizes {
			s.files = append(s.files, file(n))
			s.launch.Filters = append(s.launch.Filters, i)
		}
		err := s.readFilters()
		if (err == nil) != tt.ok {
			t.Errorf("%v: %v", tt.sizes, err)
		}
		if tt.ok && len(tt.sizes) == 2 && (len(s.launch.Walls.Seccomp) != 8 || len(s.launch.Walls.SeccompExec) != maxFilter) {
			t.Errorf("%v: read %d and %d", tt.sizes, len(s.launch.Walls.Seccomp), len(s.launch.Walls.SeccompExec))
		}
	}
	s := setup{launch: guestwire.Launch{Filters: []int{3}}}
	if err := s.readFilters(); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("a filter that was not passed: %v", err)
	}
}

func TestWarmUpIsHarmless(*testing.T) { warmUp() }

// FuzzLaunch decodes launches: the server is believed, but a guest that crashes on what it sends could
// not say why.
func FuzzLaunch(f *testing.F) {
	f.Add([]byte(`{"root":{"lowers":[0],"upper":1,"upper_dir":"u","work_dir":"w"},"mounts":[{"target":"/usr","file":2}],"sys":3}`))
	f.Add([]byte(`{"mounts":[{"target":"/../x","overlay":{"lowers":[-1]}}],"filters":[9]}`))
	root, err := unix.Open(f.TempDir(), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(_ *testing.T, body []byte) {
		s := setup{}
		if guestwire.Unmarshal(body, &s.launch) != nil {
			return
		}
		_ = s.readFilters()
		_, _ = s.keepOnly(s.launch.Join)
		for _, m := range s.launch.Mounts {
			if len(m.Target) > 64 {
				continue
			}
			if fd, err := target(root, m.Target, m.Single, 0); err == nil {
				_ = unix.Close(fd)
			}
		}
	})
}
