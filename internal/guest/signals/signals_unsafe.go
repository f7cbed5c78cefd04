package signals

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// sigaction is the kernel's struct sigaction, the same on amd64 and arm64 up to the restorer that
// only amd64 reads, and only where there is a handler.
type sigaction struct {
	handler  uintptr
	flags    uint64
	restorer uintptr
	mask     uint64
}

// defaultAction gives a signal its default action. There is no such call in package signal: Reset
// leaves the runtime's own handler in place.
func defaultAction(sig unix.Signal) error {
	var sa sigaction
	_, _, errno := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(sig), uintptr(unsafe.Pointer(&sa)), 0,
		unsafe.Sizeof(sa.mask), 0, 0)
	if errno != 0 {
		return os.NewSyscallError("rt_sigaction", errno)
	}
	return nil
}
