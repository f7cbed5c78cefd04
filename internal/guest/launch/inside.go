package launch

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guest/bounds"
	"casemate.dev/internal/guest/signals"
	"casemate.dev/internal/guest/spawn"
	"casemate.dev/internal/guestwire"
)

// Inside is Run for PID 1 of a runtime's kernel: the root is built, and the launch comes on a socket that the
// runtime passed as guestwire.RuntimeControlFD, as do the server's connections afterwards.
func Inside() (*Sandbox, error) {
	unix.Umask(0o022)
	if err := signals.Shield(); err != nil {
		return nil, fmt.Errorf("shield signals: %w", err)
	}
	// Root inside holds all that the thread of the spawner does, and could trace that one: the memory is one for all.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("forbid tracing: %w", err)
	}
	conn, err := connOf(guestwire.RuntimeControlFD)
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	if err := nullInput(); err != nil {
		return nil, err
	}
	s := setup{began: time.Now(), micros: map[string]int64{}, thread: spawn.Prepare()}
	control := guestwire.NewConn(conn)
	if err := s.receive(control); err != nil {
		return nil, err
	}
	spawner, err := s.settleInside()
	if err != nil {
		return nil, errors.Join(err, control.Fail(err))
	}
	if err := control.Reply(s.reply); err != nil {
		return nil, errors.Join(fmt.Errorf("answer the launch: %w", err), spawner.Close())
	}
	u, ok := conn.(*net.UnixConn)
	if !ok {
		return nil, fmt.Errorf("the control socket is a %T", conn)
	}
	if s.bounds != nil {
		go s.bounds.Watch()
	}
	return &Sandbox{Listener: &passed{conn: u}, Spawner: spawner, Bounds: s.bounds, Inside: true, Launch: s.launch}, nil
}

// nullInput fills the place of standard input, so that nothing else is opened there.
func nullInput() error {
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: "/dev/null", Err: err}
	}
	if null == 0 {
		return nil
	}
	defer unix.Close(null)
	return os.NewSyscallError("dup3", unix.Dup3(null, 0, unix.O_CLOEXEC))
}

// groupDir is where the guest mounts the control groups of its kernel for the moment that it takes to open them.
const groupDir = "/dev/.casemate/groups"

func (s *setup) settleInside() (*spawn.Spawner, error) {
	if err := unix.Sethostname([]byte(s.launch.Hostname)); err != nil {
		return nil, fmt.Errorf("set host name: %w", err)
	}
	if err := remountInside(s.launch.Suid); err != nil {
		return nil, err
	}
	if err := setLimits(s.launch.Rlimits); err != nil {
		return nil, err
	}
	if b := s.launch.Bounds; b != nil {
		var err error
		if s.bounds, err = bounds.New(groupDir, *b); err != nil {
			return nil, fmt.Errorf("hold the limits: %w", err)
		}
	}
	spawner, err := s.thread.Raise(s.launch.Walls, nil, nil)
	if err != nil {
		return nil, fmt.Errorf("walls: %w", err)
	}
	s.lap("walls")
	s.reply.Walls, s.reply.Micros = spawner.Applied(), s.micros
	return spawner, nil
}

// remountInside gives what can be written the flags that it has in a sandbox without a runtime. The runtime mounts the root
// without any, and knows no nodev.
func remountInside(suid bool) error {
	const inert = unix.MS_NOSUID | unix.MS_NODEV
	flags := map[string]uintptr{"/": inert, "/tmp": inert, "/dev/shm": inert}
	if suid {
		flags["/"] = unix.MS_NODEV
	}
	for at, f := range flags {
		if err := unix.Mount("", at, "", unix.MS_REMOUNT|unix.MS_BIND|f, ""); err != nil {
			return fmt.Errorf("remount %s: %w", at, err)
		}
	}
	return nil
}

// passed is a listener whose connections come as descriptors on a socket.
type passed struct{ conn *net.UnixConn }

// Accept implements net.Listener.
func (p *passed) Accept() (net.Conn, error) {
	var b [1]byte
	oob := make([]byte, syscall.CmsgSpace(4))
	n, oobn, _, _, err := p.conn.ReadMsgUnix(b[:], oob)
	if err == nil && n == 0 {
		err = io.EOF
	}
	if err != nil {
		return nil, errors.Join(net.ErrClosed, err) // nobody can reach this guest any more
	}
	msgs, err := syscall.ParseSocketControlMessage(oob[:oobn])
	if err != nil || len(msgs) != 1 {
		return nil, errs.New(errs.Internal, "a connection came without its descriptor")
	}
	fds, err := syscall.ParseUnixRights(&msgs[0])
	if err != nil || len(fds) != 1 {
		return nil, errs.New(errs.Internal, "a connection came without its descriptor")
	}
	f := os.NewFile(uintptr(fds[0]), "connection")
	defer func() { _ = f.Close() }()
	return net.FileConn(f)
}

// Close implements net.Listener.
func (p *passed) Close() error { return p.conn.Close() }

// Addr implements net.Listener.
func (p *passed) Addr() net.Addr { return p.conn.LocalAddr() }
