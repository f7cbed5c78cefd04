package signals

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// queue sends a signal with SI_QUEUE, as sigqueue(3).
func queue(pid int, sig unix.Signal) {
	info := struct {
		signo, errno, code int32
		_                  int32
		pid                int32
		uid                uint32
		rest               [104]byte
	}{signo: int32(sig), code: -1, pid: int32(os.Getpid())}
	_, _, _ = unix.RawSyscall(unix.SYS_RT_SIGQUEUEINFO, uintptr(pid), uintptr(sig), uintptr(unsafe.Pointer(&info)))
}
