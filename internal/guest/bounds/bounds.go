// Package bounds holds a sandbox to its limits where the kernel below has none to hold it to: gVisor's counts
// processes and memory of control groups, but ends nobody for want of memory.
//
// What belongs here: the one control group of all processes of the sandbox, those of each in it, and who dies when there is too
// much memory. What does not: limits that the host's kernel holds (linux/cgroup); they stand around these, and end
// the whole sandbox.
package bounds

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/cleanup"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
)

// Group is the control group of all processes of a sandbox, and has one of its own for each in it. A nil Group holds nothing.
type Group struct {
	dir, pids, memory *os.File
	limit, kills      atomic.Int64
	changed           chan struct{}

	// mu guards the fields below.
	mu     sync.Mutex
	next   int
	leave  []string // groups in which something may live still
	closed bool
}

// New makes the group with its limits. dir is a directory in which nothing lies; nothing will be left in it. The
// caller must be root of the kernel, which must have control groups of version 2.
func New(dir string, b guestwire.Bounds) (*Group, error) {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	defer func() { _ = os.Remove(dir) }()
	const kind = "cgroup2"
	// With nsdelegate a namespace of groups is a wall: nothing is moved across its root, and none of that group's limits
	// changes from within (cgroup-v2.rst, "Interaction with Other Namespaces").
	if err := unix.Mount(kind, dir, kind, unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "nsdelegate"); err != nil {
		return nil, fmt.Errorf("mount control groups: %w", err)
	}
	// Files that are open keep working when the mount has gone, and no process can open any more of them.
	defer func() { _ = unix.Unmount(dir, unix.MNT_DETACH) }()
	g := &Group{changed: make(chan struct{}, 1)}
	undo := cleanup.New(func() { _ = g.Close() })
	defer undo.Run()
	if err := g.open(dir); err != nil {
		return nil, err
	}
	if err := g.Set(b); err != nil {
		return nil, err
	}
	undo.Release()
	return g, nil
}

func (g *Group) open(dir string) error {
	payload := filepath.Join(dir, "payload")
	if err := os.Mkdir(payload, 0o755); err != nil {
		return err
	}
	// No group below a scope: a scope's list of processes holds no deeper one's.
	if err := os.WriteFile(filepath.Join(payload, "cgroup.max.depth"), []byte("1"), 0); err != nil {
		return err
	}
	for _, f := range []struct {
		name string
		to   **os.File
		flag int
	}{{"", &g.dir, os.O_RDONLY}, {"pids.max", &g.pids, os.O_WRONLY}, {"memory.current", &g.memory, os.O_RDONLY}} {
		var err error
		if *f.to, err = os.OpenFile(filepath.Join(payload, f.name), f.flag, 0); err != nil {
			return err
		}
	}
	return nil
}

// Close closes the group's files.
func (g *Group) Close() error {
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()
	var all []error
	for _, f := range []*os.File{g.dir, g.pids, g.memory} {
		if f != nil {
			all = append(all, f.Close())
		}
	}
	return errors.Join(all...)
}

// Scope is the control group of one process and of all that descends from it. Root of the kernel may mount groups in a user
// namespace of its own; that it leaves none is the spawner's work (guestwire.Walls.OwnGroup).
type Scope struct {
	// Kill ends all that is in it when "1" is written, and Dir is the group, to be born in.
	Kill, Dir *os.File
	g         *Group
	name      string
}

// NewScope makes a scope. Whoever asked closes its files, and calls Leave then.
func (g *Group) NewScope() (*Scope, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil, os.ErrClosed
	}
	g.sweepLocked()
	g.next++
	s := &Scope{g: g, name: strconv.Itoa(g.next)}
	dir := int(g.dir.Fd())
	if err := unix.Mkdirat(dir, s.name, 0o755); err != nil {
		return nil, &os.PathError{Op: "mkdirat", Path: s.name, Err: err}
	}
	undo := cleanup.New(func() { _ = unix.Unlinkat(dir, s.name, unix.AT_REMOVEDIR) })
	defer undo.Run()
	var err error
	if s.Dir, err = openAt(dir, s.name, unix.O_RDONLY|unix.O_DIRECTORY); err != nil {
		return nil, err
	}
	if s.Kill, err = openAt(int(s.Dir.Fd()), "cgroup.kill", unix.O_WRONLY); err != nil {
		return nil, errors.Join(err, s.Dir.Close())
	}
	undo.Release()
	return s, nil
}

func openAt(dir int, name string, flags int) (*os.File, error) {
	fd, err := unix.Openat(dir, name, flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "openat", Path: name, Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}

// Leave removes the scope once nothing lives in it any more.
func (s *Scope) Leave() {
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	s.g.leave = append(s.g.leave, s.name)
	s.g.sweepLocked()
}

// sweepLocked removes the groups that were left and are empty.
func (g *Group) sweepLocked() {
	if g.closed {
		return
	}
	g.leave = slices.DeleteFunc(g.leave, func(name string) bool {
		err := unix.Unlinkat(int(g.dir.Fd()), name, unix.AT_REMOVEDIR)
		return err == nil || errors.Is(err, unix.ENOENT)
	})
}

// Set changes the limits.
func (g *Group) Set(b guestwire.Bounds) error {
	if b.MemoryBytes <= 0 || b.Pids <= 0 {
		return errs.New(errs.InvalidArgument, "limits of %d bytes and %d processes can't be held", b.MemoryBytes, b.Pids)
	}
	if _, err := g.pids.WriteAt([]byte(strconv.Itoa(b.Pids)), 0); err != nil {
		return fmt.Errorf("limit processes: %w", err)
	}
	g.limit.Store(b.MemoryBytes)
	select {
	case g.changed <- struct{}{}:
	default:
	}
	return nil
}

// Kills counts the processes that were ended for want of memory.
func (g *Group) Kills() int64 {
	if g == nil {
		return 0
	}
	return g.kills.Load()
}

const (
	// fastest is how many bytes a second a sandbox takes at most, for what it may have: by that Watch knows how
	// long it need not look.
	fastest = 2 << 30
	// soonest and latest bound how often Watch looks.
	soonest = 5 * time.Millisecond
	latest  = time.Second
)

// Watch ends the process with the most memory whenever all together have too much, until the program ends.
func (g *Group) Watch() {
	for {
		used, err := readNumber(g.memory)
		limit := g.limit.Load()
		if err == nil && used > limit {
			g.kill()
		}
		left := time.Duration(float64(max(0, limit-used)) / fastest * float64(time.Second))
		t := time.NewTimer(min(max(left, soonest), latest))
		select {
		case <-t.C:
		case <-g.changed:
			t.Stop()
		}
	}
}

// kill ends the process with the most memory.
func (g *Group) kill() {
	names, err := readNames("/proc")
	if err != nil {
		return
	}
	worst, most := 0, int64(0)
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil || pid == os.Getpid() {
			continue
		}
		if rss := resident(pid); rss > most {
			worst, most = pid, rss
		}
	}
	if worst != 0 && unix.Kill(worst, unix.SIGKILL) == nil {
		g.kills.Add(1)
		// Its memory is given back as it dies, which takes until it is scheduled.
		<-time.After(10 * time.Millisecond)
	}
}

func readNames(dir string) ([]string, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	return f.Readdirnames(-1)
}

// resident is a process's memory in pages; 0 where it has ended.
func resident(pid int) int64 {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/statm")
	if err != nil {
		return 0
	}
	fields := bytes.Fields(b)
	if len(fields) < 2 {
		return 0
	}
	n, err := strconv.ParseInt(string(fields[1]), 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// maxFile bounds what is read of a control file.
const maxFile = 1 << 20

func readAll(f *os.File) ([]byte, error) {
	return io.ReadAll(io.NewSectionReader(f, 0, maxFile))
}

func readNumber(f *os.File) (int64, error) {
	b, err := readAll(f)
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(string(bytes.TrimSpace(b)), 10, 64)
}
