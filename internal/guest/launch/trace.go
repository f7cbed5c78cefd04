package launch

import (
	"errors"
	"fmt"
	"os"
	"path"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/guestwire"
)

// trace is the socket by which a runtime's kernel tells of system calls. The runtime connects to it, and the connection
// leaves the cell before the runtime goes on: no process of the cell keeps the end that is read.
type trace struct {
	listener int
	out      listenerSink
	done     atomic.Bool // the connection is out
}

// openTrace makes the socket, where the launch asks for one, and begins to wait for the runtime; nil: it asks for none.
func (s *setup) openTrace() (*trace, error) {
	name := s.launch.Runtime.Trace
	if name == "" {
		return nil, nil
	}
	f, err := s.file(s.launch.Listener)
	if err != nil {
		return nil, err
	}
	s.files[s.launch.Listener] = nil
	t := &trace{out: listenerSink{f}}
	if t.listener, err = listenPackets(name); err != nil {
		t.out.close()
		return nil, err
	}
	go t.accept(name)
	return t, nil
}

func listenPackets(name string) (int, error) {
	if err := os.MkdirAll(path.Dir(name), 0o700); err != nil {
		return -1, err
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, os.NewSyscallError("socket", err)
	}
	err = os.NewSyscallError("bind", unix.Bind(fd, &unix.SockaddrUnix{Name: name}))
	if err == nil {
		err = os.NewSyscallError("listen", unix.Listen(fd, 1))
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// accept takes one connection and hands it out. Where that fails the runtime is not greeted, and so does not start.
func (t *trace) accept(name string) {
	defer t.out.close()
	fd, _, err := unix.Accept4(t.listener, unix.SOCK_CLOEXEC)
	_ = unix.Close(t.listener)
	_ = os.Remove(name)
	if err != nil {
		return
	}
	conn := os.NewFile(uintptr(fd), "trace")
	defer func() { _ = conn.Close() }()
	if err := t.greet(fd, conn); err != nil {
		fmt.Fprintln(os.Stderr, "trace:", err) // the guest's log
	}
}

func (t *trace) greet(fd int, conn *os.File) error {
	said := make([]byte, 64)
	n, err := unix.Read(fd, said)
	if err != nil {
		return os.NewSyscallError("read", err)
	}
	if string(said[:n]) != guestwire.TraceGreeting {
		return fmt.Errorf("the runtime greets with %q: it speaks another version", said[:n])
	}
	if err := t.out.send(conn); err != nil {
		return err
	}
	t.done.Store(true) // before the runtime can go on
	_, err = unix.Write(fd, []byte(guestwire.TraceGreeting))
	return os.NewSyscallError("write", err)
}

// sent reports an error where the runtime has started without the connection that it was to make.
func (t *trace) sent() error {
	if t != nil && !t.done.Load() {
		return errors.New("the runtime tells of no system calls")
	}
	return nil
}
