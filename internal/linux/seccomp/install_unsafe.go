package seccomp

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// fprog is struct sock_fprog.
type fprog struct {
	len    uint16
	filter *byte
}

// RawInstall is the seccomp system call and nothing else: it neither allocates nor grows the stack,
// so that a child may call it between fork and exec. Preconditions: program points at n valid
// instructions.
//
//go:nosplit
//go:norace
func RawInstall(program *byte, n uint16) syscall.Errno {
	prog := fprog{len: n, filter: program}
	_, _, errno := syscall.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0,
		uintptr(unsafe.Pointer(&prog)))
	return errno
}

// listen is RawInstall with a listener for the calls that the program hands over. What a listener has received can be
// interrupted by deadly signals only: with any signal, a call would be handed over again and again.
func listen(program *byte, n uint16) (int, syscall.Errno) {
	prog := fprog{len: n, filter: program}
	const flags = unix.SECCOMP_FILTER_FLAG_NEW_LISTENER | unix.SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV
	fd, _, errno := syscall.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, uintptr(unsafe.Pointer(&prog)))
	return int(fd), errno
}

// installAll is RawInstall for all threads. It returns the id of a thread that stood in the way, or 0.
func installAll(program *byte, n uint16) (int, syscall.Errno) {
	prog := fprog{len: n, filter: program}
	thread, _, errno := syscall.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC,
		uintptr(unsafe.Pointer(&prog)))
	return int(thread), errno
}
