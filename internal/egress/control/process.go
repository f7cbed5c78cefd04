package control

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/cleanup"
	"casemate.dev/internal/linux/pidfd"
)

// Verb is the program's first argument that makes it a gateway.
const Verb = "gateway"

// ListenFD is the descriptor on which a gateway finds its listening socket.
const ListenFD = 3

// The files in the run directory.
const (
	socketFile = "gateway.sock"
	recordFile = "gateway.json"
	logFile    = "gateway.log"
)

// record identifies a running gateway after the server was restarted.
type record struct {
	Boot  string `json:"boot"`
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // in clock ticks after boot
	UID   uint32 `json:"uid"`
}

// process is a gateway process that runs, or ran.
type process struct {
	handle *pidfd.Handle
	uid    uint32
}

// NameserversOf returns the name servers among the arguments of a gateway.
func NameserversOf(args []string) []string { return args }

// start makes the gateway process, as a user of its own, with nothing open but its socket and its log.
func (g *Gateway) start() (*process, error) {
	uid, release, err := g.cfg.UID()
	if err != nil {
		return nil, err
	}
	undo := cleanup.New(release)
	defer undo.Run()
	l, err := listen(g.path(socketFile))
	if err != nil {
		return nil, err
	}
	defer func() { _ = l.Close() }()
	log, err := os.OpenFile(g.path(logFile), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() { _ = log.Close() }()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = null.Close() }()
	fd := -1
	argv := append(append([]string{"casemate"}, Verb), g.cfg.Nameservers...)
	pid, err := syscall.ForkExec(g.cfg.Program, argv, &syscall.ProcAttr{ //nolint:forbidigo // the gateway is no process of a sandbox
		Dir: "/", Env: environment(),
		Files: []uintptr{null.Fd(), log.Fd(), log.Fd(), l.Fd()},
		Sys: &syscall.SysProcAttr{
			Credential: &syscall.Credential{Uid: uid, Gid: uid}, Setsid: true, PidFD: &fd,
		},
	})
	if err != nil {
		return nil, fmt.Errorf("start gateway: %w", err)
	}
	h, err := pidfd.FromFD(fd, pid)
	if err != nil {
		_ = syscall.Kill(pid, syscall.SIGKILL) // not reaped yet, so the pid is still its
		return nil, err
	}
	p := &process{handle: h, uid: uid}
	if err := g.writeRecord(p); err != nil {
		_ = h.Signal(syscall.SIGKILL)
		return nil, errors.Join(err, h.Close())
	}
	undo.Release()
	g.release = release
	return p, nil
}

// environment is the gateway's; nothing of the server's comes along, except a mark of tests.
func environment() []string {
	env := []string{"GOTRACEBACK=single"}
	if tag, ok := os.LookupEnv("CASEMATE_TEST_TAG"); ok {
		env = append(env, "CASEMATE_TEST_TAG="+tag)
	}
	return env
}

// listen makes the listening socket, in the place of one that an earlier gateway left.
func listen(path string) (*os.File, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	f := os.NewFile(uintptr(fd), "gateway listener")
	// Before bind, which gives the socket's file this mode: whoever may connect commands the gateway.
	err = os.NewSyscallError("fchmod", unix.Fchmod(fd, 0o600))
	if err == nil {
		err = os.NewSyscallError("bind", unix.Bind(fd, &unix.SockaddrUnix{Name: path}))
	}
	if err == nil {
		err = os.NewSyscallError("listen", unix.Listen(fd, 16))
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

func (g *Gateway) writeRecord(p *process) error {
	boot, err := pidfd.BootID()
	if err != nil {
		return err
	}
	start, err := pidfd.StartTime(p.handle.PID())
	if err != nil {
		return err
	}
	b, err := json.Marshal(record{boot, p.handle.PID(), start, p.uid})
	if err != nil {
		return err
	}
	return os.WriteFile(g.path(recordFile), b, 0o600)
}

// adopt finds the gateway that an earlier server left; nil where there is none. It is known by boot id,
// start time and user, never by its pid alone.
func (g *Gateway) adopt() (*process, error) {
	b, err := os.ReadFile(g.path(recordFile))
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
	g.cfg.KeepUID(r.UID)
	return &process{handle: h, uid: r.UID}, nil
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

func (g *Gateway) path(name string) string { return filepath.Join(g.cfg.RunDir, name) }

func (g *Gateway) dial() (*net.UnixConn, error) {
	return net.DialUnix("unix", nil, &net.UnixAddr{Name: g.path(socketFile), Net: "unix"})
}
