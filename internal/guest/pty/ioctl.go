package pty

import "golang.org/x/sys/unix"

// ioctlPeer opens the other end of a pseudo-terminal. The flags are the ioctl's argument itself, for
// which x/sys/unix has no wrapper.
func ioctlPeer(master int, flags uintptr) (int, error) {
	fd, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(master), unix.TIOCGPTPEER, flags)
	if errno != 0 {
		return -1, errno
	}
	return int(fd), nil
}
