package userns

import (
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// OwnedBy calls make on a thread of the given user, to whom a user namespace that make makes belongs: processes of that
// user, outside of it, then have every capability in it and none more elsewhere. The thread keeps its capabilities
// meanwhile. 0 is the calling process's own user, which must be root of the host.
//
// The kernel makes the whole process not dumpable with the change (credentials(7)), and it stays so.
func OwnedBy(uid uint32, make func() error) error {
	if uid == 0 {
		return make()
	}
	runtime.LockOSThread()
	// Without this bit, capabilities would go with uid 0 (capabilities(7)). No other thread is touched: these are raw
	// system calls, which change the calling thread alone.
	was, err := unix.PrctlRetInt(unix.PR_GET_SECUREBITS, 0, 0, 0, 0)
	if err == nil {
		err = unix.Prctl(unix.PR_SET_SECUREBITS, uintptr(was)|noSetuidFixup, 0, 0, 0)
	}
	if err != nil {
		runtime.UnlockOSThread()
		return os.NewSyscallError("prctl securebits", err)
	}
	// All three ids: a process whose effective user is not its real one counts as set-user-ID, and loses its ambient
	// capabilities at the exec.
	if err := setThread(uid); err != nil {
		_ = unix.Prctl(unix.PR_SET_SECUREBITS, uintptr(was), 0, 0, 0)
		runtime.UnlockOSThread()
		return err
	}
	err = make()
	if back := setThread(0); back != nil {
		// No step of the kernel's can fail here while the capability is held; a server that goes on as two users at
		// once would be worse than none.
		panic(back)
	}
	if back := unix.Prctl(unix.PR_SET_SECUREBITS, uintptr(was), 0, 0, 0); back != nil {
		return os.NewSyscallError("prctl securebits", back)
	}
	runtime.UnlockOSThread()
	return err
}

// noSetuidFixup is SECBIT_NO_SETUID_FIXUP.
const noSetuidFixup = 1 << 2

func setThread(uid uint32) error {
	_, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid))
	if errno != 0 {
		return os.NewSyscallError("setresuid", errno)
	}
	return nil
}
