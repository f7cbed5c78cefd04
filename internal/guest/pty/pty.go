// Package pty makes pseudo-terminals from the sandbox's own devpts.
//
// What belongs here: opening, sizing, and handing over a terminal. What does not: who reads it.
//
// The usual way, opening /dev/ptmx and then the name that TIOCGPTN gives, trusts two paths that the
// sandbox's code may have replaced (CVE-2025-52565). Here the multiplexer must lie on a devpts, and
// the other end comes from the kernel by TIOCGPTPEER (ioctl_tty(2), Linux 4.13) without a path.
package pty

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guest/resolve"
)

// multiplexer is the instance's own: /dev/ptmx could be a link to another.
const multiplexer = "/dev/pts/ptmx"

// Open makes a terminal of the given size that belongs to uid. Both ends belong to the caller; the
// terminal's end must be closed once a process has it, so that reading from master ends with EIO
// when the last process is gone.
func Open(uid uint32, rows, cols uint16) (master, terminal *os.File, err error) {
	fd, err := resolve.Open(unix.AT_FDCWD, multiplexer, unix.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, nil, errs.Wrap(err, errs.ResourceExhausted, "no terminal to be had: %v", err)
	}
	if err := onDevpts(fd); err != nil {
		_ = unix.Close(fd)
		return nil, nil, err
	}
	// Nonblocking, so that Go's poller serves it and a reader takes no thread.
	master = os.NewFile(uintptr(fd), "terminal")
	terminal, err = peer(fd)
	if err == nil {
		err = prepare(fd, terminal, uid, rows, cols)
	}
	if err != nil {
		_ = master.Close()
		if terminal != nil {
			_ = terminal.Close()
		}
		return nil, nil, err
	}
	return master, terminal, nil
}

func onDevpts(fd int) error {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return os.NewSyscallError("fstatfs", err)
	}
	if fs.Type != unix.DEVPTS_SUPER_MAGIC {
		return errs.New(errs.FailedPrecondition, "%s of the sandbox is not a devpts", multiplexer)
	}
	return nil
}

// peer returns the terminal's end. It is blocking, since processes expect that.
func peer(master int) (*os.File, error) {
	if err := unix.IoctlSetPointerInt(master, unix.TIOCSPTLCK, 0); err != nil {
		return nil, os.NewSyscallError("ioctl TIOCSPTLCK", err)
	}
	fd, err := ioctlPeer(master, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("ioctl TIOCGPTPEER", err)
	}
	return os.NewFile(uintptr(fd), "terminal"), nil
}

func prepare(master int, terminal *os.File, uid uint32, rows, cols uint16) error {
	if err := setSize(master, rows, cols); err != nil {
		return err
	}
	fd := int(terminal.Fd())
	// The mode first, while the terminal is still the guest's own: that takes no capability.
	if err := unix.Fchmod(fd, 0o620); err != nil {
		return os.NewSyscallError("chmod terminal", err)
	}
	// The group stays what devpts' mount option gid= made it (tty).
	if err := unix.Fchown(fd, int(uid), -1); err != nil {
		return os.NewSyscallError("chown terminal", err)
	}
	return nil
}

// Resize sets the size, of which the kernel tells the foreground processes by SIGWINCH.
func Resize(master *os.File, rows, cols uint16) error {
	raw, err := master.SyscallConn()
	if err != nil {
		return fmt.Errorf("resize terminal: %w", err)
	}
	var inner error
	if err := raw.Control(func(fd uintptr) { inner = setSize(int(fd), rows, cols) }); err != nil {
		return fmt.Errorf("resize terminal: %w", err)
	}
	return inner
}

// Size of a terminal that names none: what terminals have had since the VT100.
const (
	defaultRows = 24
	defaultCols = 80
)

func setSize(fd int, rows, cols uint16) error {
	if rows == 0 {
		rows = defaultRows
	}
	if cols == 0 {
		cols = defaultCols
	}
	ws := unix.Winsize{Row: rows, Col: cols}
	return os.NewSyscallError("ioctl TIOCSWINSZ", unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &ws))
}
