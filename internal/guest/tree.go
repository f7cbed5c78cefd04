package guest

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/guest/spawn"
)

// tree is a process and everything that descends from it, as one thing to signal, count and kill.
type tree interface {
	// pids lists the processes that live.
	pids() ([]int, error)
	// kill ends all of them, also those that fork meanwhile, and returns when none is left or
	// killLimit is over.
	kill() error
	close()
}

// killLimit bounds how long a tree may take to die. A process in uninterruptible sleep dies when it
// wakes; the scope's owner on the host kills it again then.
const killLimit = 5 * time.Second

// tree returns the scope and the tree of a process that is to be started: of the files that came with the call, which it takes
// over, or where there are none and the guest has control groups of its own, of one of these.
func (g *Guest) tree(layout []string, files []*os.File) (spawn.Scope, tree, error) {
	scope := spawn.Scope{Layout: layout, Files: files}
	if len(files) > 0 || g.cfg.Bounds == nil {
		t, err := newTree(scope)
		return scope, t, err
	}
	own, err := g.cfg.Bounds.NewScope()
	if err != nil {
		return scope, nil, err
	}
	scope = spawn.Scope{Layout: []string{"kill", "dir"}, Files: []*os.File{own.Kill, own.Dir}}
	return scope, &scopeV2{kept: kept{files: scope.Files}, killFile: own.Kill, dir: own.Dir, leave: own.Leave}, nil
}

// newTree returns the tree of a scope, whose files it takes over. Without a scope it is found by
// parentage.
func newTree(s spawn.Scope) (tree, error) {
	if len(s.Files) == 0 {
		return &descent{}, nil
	}
	if len(s.Files) != len(s.Layout) {
		return nil, fmt.Errorf("scope of %d roles with %d files", len(s.Layout), len(s.Files))
	}
	role := make(map[string]*os.File, len(s.Files))
	for i, f := range s.Files {
		role[s.Layout[i]] = f
	}
	switch {
	case role["kill"] != nil && role["dir"] != nil:
		return &scopeV2{kept: kept{files: s.Files}, killFile: role["kill"], dir: role["dir"]}, nil
	case role["procs"] != nil && role["freezer"] != nil:
		return &scopeV1{kept: kept{files: s.Files}, procs: role["procs"], freezer: role["freezer"]}, nil
	}
	return nil, fmt.Errorf("scope of unknown layout %q", s.Layout)
}

// kept are a scope's files. A descriptor's number is used only while they are open: afterwards it may
// be another file's.
type kept struct {
	// mu guards the fields below, and is held for reading while a number is in use.
	mu    sync.RWMutex
	files []*os.File
}

func (k *kept) close() {
	k.mu.Lock()
	defer k.mu.Unlock()
	closeFiles(k.files)
	k.files = nil
}

// with calls f with the descriptor of one of the files.
func (k *kept) with(file *os.File, f func(fd int) (*os.File, error)) (*os.File, error) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	if k.files == nil {
		return nil, os.ErrClosed
	}
	return f(int(file.Fd()))
}

// scopeV1 is a freezer control group of version 1.
type scopeV1 struct {
	kept
	procs, freezer *os.File
}

// pids opens the list anew through /proc: on the passed descriptor itself the kernel repeats, for up
// to a second, what it said first (kernel/cgroup/cgroup-v1.c, CGROUP_PIDLIST_DESTROY_DELAY). The
// link is the guest's own descriptor of a single file, so it leads nowhere else.
func (s *scopeV1) pids() ([]int, error) {
	f, err := s.with(s.procs, func(fd int) (*os.File, error) {
		return os.Open("/proc/self/fd/" + strconv.Itoa(fd))
	})
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return readPids(f)
}

// kill stops the group, so that nothing forks away from the list, signals all, and lets them go on
// to their death: a frozen process does not die. A fork at the wrong moment can leave the group
// half frozen, so the whole is repeated until the list is empty.
func (s *scopeV1) kill() error {
	return killUntilEmpty(func() ([]int, error) {
		_, _ = s.freezer.WriteAt([]byte("FROZEN"), 0)
		pids, err := s.pids()
		for _, pid := range pids {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		_, _ = s.freezer.WriteAt([]byte("THAWED"), 0)
		return pids, err
	})
}

// scopeV2 is a control group of version 2.
type scopeV2 struct {
	kept
	killFile, dir *os.File
	leave         func() // what is to be done when the files are closed; may be nil
}

func (s *scopeV2) close() {
	s.kept.close()
	if s.leave != nil {
		s.leave()
	}
}

func (s *scopeV2) pids() ([]int, error) {
	f, err := s.with(s.dir, func(dir int) (*os.File, error) {
		fd, err := unix.Openat(dir, "cgroup.procs", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, os.NewSyscallError("openat cgroup.procs", err)
		}
		return os.NewFile(uintptr(fd), "cgroup.procs"), nil
	})
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return readPids(f)
}

// kill is one write (Linux 5.14), which takes forks into account, and then only waiting.
func (s *scopeV2) kill() error {
	if _, err := s.killFile.WriteAt([]byte("1"), 0); err != nil {
		return err
	}
	return killUntilEmpty(s.pids)
}

func closeFiles(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

// killUntilEmpty calls round, which returns those that lived, until there are none.
func killUntilEmpty(round func() ([]int, error)) error {
	deadline := time.Now().Add(killLimit)
	for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		pids, err := round()
		if err != nil || len(pids) == 0 {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%d processes don't die", len(pids))
		}
		<-time.After(wait)
	}
}

// maxPidList bounds the list read at once: the pids limit of a sandbox is far below it.
const maxPidList = 1 << 20

// readPids parses one pid per line. Pid 0 stands for a process of an outer pid namespace, which
// can't be signalled from here, and would mean the guest's own group to kill(2).
func readPids(r io.Reader) ([]int, error) {
	b, err := io.ReadAll(io.LimitReader(r, maxPidList))
	if errors.Is(err, unix.ENODEV) {
		return nil, nil // the group was removed: nobody is in it
	}
	if err != nil {
		return nil, err
	}
	var pids []int
	for line := range bytes.SplitSeq(b, []byte("\n")) {
		if pid, err := strconv.Atoi(string(line)); err == nil && pid > 1 {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// signalTree sends a signal to every process of a tree. SIGTERM is followed by SIGCONT, since a
// stopped process takes no other.
func signalTree(t tree, sig unix.Signal) error {
	pids, err := t.pids()
	for _, pid := range pids {
		_ = unix.Kill(pid, sig)
		if sig == unix.SIGTERM {
			_ = unix.Kill(pid, unix.SIGCONT)
		}
	}
	return err
}
