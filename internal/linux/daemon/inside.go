package daemon

import (
	"errors"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
)

// Enter is the helper's own first step, or where it executes itself again, that one's: it refuses to be root, keeps its
// memory from files and from other processes of its user, and returns its listening socket.
func Enter() (*net.UnixListener, error) {
	if os.Geteuid() == 0 {
		return nil, errors.New("a helper of the server does not run as root; the server starts it")
	}
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return nil, os.NewSyscallError("setrlimit core", err)
	}
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return nil, os.NewSyscallError("prctl PR_SET_DUMPABLE", err)
	}
	f := os.NewFile(listenFD, "listener")
	l, err := net.FileListener(f)
	_ = f.Close()
	if err != nil {
		return nil, fmt.Errorf("listening socket: %w", err)
	}
	u, ok := l.(*net.UnixListener)
	if !ok {
		return nil, fmt.Errorf("listening socket: it is a %T", l)
	}
	return u, nil
}

// CheckPeer lets in root alone: the socket's mode does so already, and this does not depend on it. Kind: PermissionDenied.
func CheckPeer(c *net.UnixConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	cerr := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err = errors.Join(err, cerr); err != nil {
		return err
	}
	if cred.Uid != 0 {
		return errs.New(errs.PermissionDenied, "user %d may not command a helper of the server", cred.Uid)
	}
	return nil
}
