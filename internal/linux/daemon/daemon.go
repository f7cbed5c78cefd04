// Package daemon starts helper processes of the server that outlive it, and finds them again.
//
// What belongs here: a process with a user of its own, a listening socket that it inherits, who may use that, and the record
// by which the next server knows the process. What does not: what is spoken over the socket, and what the helper does.
package daemon

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/linux/pidfd"
)

// listenFD is the descriptor on which a helper finds its listening socket.
const listenFD = 3

// Spec names a helper.
type Spec struct {
	// Dir holds NAME.sock, NAME.json (the record) and NAME.log.
	Dir, Name string
	// Program is executed with Args after its name.
	Program string
	Args    []string
	// UID is the user, and the group, that nothing else on the host runs as.
	UID uint32
	// Namespaces are CLONE_NEW* flags of those that it gets of its own.
	Namespaces uintptr
}

// Process is a helper that runs, or ran.
type Process struct {
	Handle *pidfd.Handle
	UID    uint32
	// Start is when it was started, in clock ticks after boot: with the pid, it names the process for as long as the
	// machine runs.
	Start uint64
}

// Socket returns the path of the helper's socket.
func (s Spec) Socket() string { return s.path(".sock") }

// Log returns the path of what the helper writes.
func (s Spec) Log() string { return s.path(".log") }

func (s Spec) path(suffix string) string { return filepath.Join(s.Dir, s.Name+suffix) }

// Dial connects to the helper's socket.
func (s Spec) Dial() (*net.UnixConn, error) {
	return net.DialUnix("unix", nil, &net.UnixAddr{Name: s.Socket(), Net: "unix"})
}

// Forget removes the socket and the record of a helper that has ended.
func (s Spec) Forget() {
	_ = os.Remove(s.path(".json"))
	_ = os.Remove(s.Socket())
}

// record identifies a running helper after the server was restarted.
type record struct {
	Boot  string `json:"boot"`
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // in clock ticks after boot
	UID   uint32 `json:"uid"`
}

// Start makes the process, with nothing open but its socket and its log.
func (s Spec) Start() (*Process, error) {
	l, err := s.listen()
	if err != nil {
		return nil, err
	}
	defer func() { _ = l.Close() }()
	log, err := os.OpenFile(s.Log(), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() { _ = log.Close() }()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = null.Close() }()
	// What Go opens is closed by each exec; what the server was started with need not be.
	if err := unix.CloseRange(listenFD, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return nil, os.NewSyscallError("close_range", err)
	}
	fd := -1
	argv := append([]string{"casemate"}, s.Args...)
	pid, err := syscall.ForkExec(s.Program, argv, &syscall.ProcAttr{ //nolint:forbidigo // a helper of the server is no process of a sandbox
		Dir: "/", Env: environment(),
		Files: []uintptr{null.Fd(), log.Fd(), log.Fd(), l.Fd()},
		Sys: &syscall.SysProcAttr{
			Credential: &syscall.Credential{Uid: s.UID, Gid: s.UID}, Setsid: true, PidFD: &fd, Cloneflags: s.Namespaces,
		},
	})
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", s.Name, err)
	}
	h, err := pidfd.FromFD(fd, pid)
	if err != nil {
		_ = syscall.Kill(pid, syscall.SIGKILL) // not reaped yet, so the pid is still its
		return nil, err
	}
	// The kernel counts what runs in a user namespace with its owner's processes, and a helper may be the owner of many:
	// its threads must not fail for what they run. Where root may not raise limits, the server's own holds.
	const unlimited = ^uint64(0)
	_ = unix.Prlimit(pid, unix.RLIMIT_NPROC, &unix.Rlimit{Cur: unlimited, Max: unlimited}, nil)
	p := &Process{Handle: h, UID: s.UID}
	if err := s.write(p); err != nil {
		_ = h.Signal(syscall.SIGKILL)
		return nil, errors.Join(err, h.Close())
	}
	return p, nil
}

// environment is a helper's; nothing of the server's comes along, except a mark of tests.
func environment() []string {
	env := []string{"GOTRACEBACK=single"}
	if tag, ok := os.LookupEnv("CASEMATE_TEST_TAG"); ok {
		env = append(env, "CASEMATE_TEST_TAG="+tag)
	}
	return env
}

// listen makes the listening socket, in the place of one that an earlier helper left.
func (s Spec) listen() (*os.File, error) {
	path := s.Socket()
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	f := os.NewFile(uintptr(fd), s.Name+" listener")
	// Before bind, which gives the socket's file this mode: whoever may connect commands the helper.
	err = os.NewSyscallError("fchmod", unix.Fchmod(fd, 0o600))
	if err == nil {
		err = os.NewSyscallError("bind", unix.Bind(fd, &unix.SockaddrUnix{Name: path}))
	}
	if err == nil {
		err = os.NewSyscallError("listen", unix.Listen(fd, 128))
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

func (s Spec) write(p *Process) error {
	boot, err := pidfd.BootID()
	if err != nil {
		return err
	}
	if p.Start, err = pidfd.StartTime(p.Handle.PID()); err != nil {
		return err
	}
	b, err := json.Marshal(record{boot, p.Handle.PID(), p.Start, p.UID})
	if err != nil {
		return err
	}
	return os.WriteFile(s.path(".json"), b, 0o600)
}

// Find returns the helper that an earlier server left; nil where there is none. It is known by boot id,
// start time and user, never by its pid alone. UID is not looked at.
func (s Spec) Find() (*Process, error) {
	b, err := os.ReadFile(s.path(".json"))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	var r record
	if err != nil || json.Unmarshal(b, &r) != nil {
		return nil, err // an unreadable record names no process
	}
	boot, err := pidfd.BootID()
	if err != nil || boot != r.Boot || r.PID <= 1 {
		return nil, err
	}
	h, err := pidfd.Open(r.PID)
	if err != nil {
		return nil, nil //nolint:nilerr // no process has its pid
	}
	start, serr := pidfd.StartTime(r.PID)
	uid, uerr := userOf(r.PID)
	// Looked at through the pid while the handle says that it has not ended: so it was this process.
	if serr != nil || uerr != nil || start != r.Start || uid != r.UID || !h.Alive() {
		return nil, h.Close()
	}
	return &Process{Handle: h, UID: r.UID, Start: r.Start}, nil
}

// userOf reads the real user of a process.
func userOf(pid int) (uint32, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(b), "\nUid:\t")
	first, _, _ := strings.Cut(rest, "\t")
	n, err := strconv.ParseUint(first, 10, 32)
	return uint32(n), err
}
