package notify

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

func receive(fd int, c *Call) error {
	return ioctl(fd, unix.SECCOMP_IOCTL_NOTIF_RECV, unsafe.Pointer(c))
}

func respond(fd int, a *answer) error {
	return ioctl(fd, unix.SECCOMP_IOCTL_NOTIF_SEND, unsafe.Pointer(a))
}

func valid(fd int, id uint64) error {
	return ioctl(fd, unix.SECCOMP_IOCTL_NOTIF_ID_VALID, unsafe.Pointer(&id))
}

// ioctl does not give up the thread's processor: each of the three returns at once.
func ioctl(fd int, request uintptr, arg unsafe.Pointer) error {
	_, _, errno := syscall.RawSyscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(arg))
	if errno != 0 {
		return errno
	}
	return nil
}
