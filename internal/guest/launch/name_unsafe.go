package launch

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// nameProcess names the process for people who look at a host's process list: the kernel took the
// number of the descriptor that it was executed from. Only the main thread's name shows there, which
// this runs on unless the runtime has moved it already; so it matters little if it fails.
func nameProcess() {
	name := [16]byte{} // TASK_COMM_LEN, with the final NUL
	copy(name[:15], "casemate-guest")
	_ = unix.Prctl(unix.PR_SET_NAME, uintptr(unsafe.Pointer(&name[0])), 0, 0, 0)
}
