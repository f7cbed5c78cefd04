package caps

import (
	"os"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// LimitProcess sets the permitted and effective sets of every thread of the process to keep, and
// empties their inheritable sets. Threads made later inherit that.
//
// Precondition: every thread has all of keep. The program ends if one can and another can't, since
// a process of threads with unequal rights is nothing to go on with (syscall.AllThreadsSyscall).
func LimitProcess(keep Set) error {
	hdr := &unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3} // pid 0: the thread that calls
	data := &[2]unix.CapUserData{}
	for i := range data {
		data[i].Permitted = uint32(keep >> (32 * i))
		data[i].Effective = data[i].Permitted
	}
	_, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(hdr)), uintptr(unsafe.Pointer(data)), 0)
	runtime.KeepAlive(hdr)
	runtime.KeepAlive(data)
	if errno != 0 {
		return os.NewSyscallError("capset", errno)
	}
	return nil
}
