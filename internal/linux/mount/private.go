package mount

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// privateVariable carries the inode of the namespace that EnterPrivate made to the program that it
// starts in its own place.
const privateVariable = "CASEMATE_MOUNT_NS"

// EnterPrivate moves the whole process into a mount namespace of its own, by starting the program
// again in its own place; there it returns nil. What it mounts afterwards is seen by nobody else and
// goes with its last process, also after a kill. What the host mounts later still shows inside.
//
// It is called once, first thing in main: a namespace can be left only by a process's single thread,
// and a Go program has several (setns(2), unshare(2)).
func EnterPrivate() error {
	own, err := os.Readlink("/proc/thread-self/ns/mnt")
	if err != nil {
		return fmt.Errorf("read own mount namespace: %w", err)
	}
	if os.Getenv(privateVariable) == own {
		// Children must not take the mark for theirs.
		return os.Unsetenv(privateVariable)
	}
	runtime.LockOSThread() // until exec replaces the process; on error the thread is spent
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	// Slave, not private: the owner's later mounts shall show in workspaces, ours never outside.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("stop mounts from spreading: %w", err)
	}
	// And shared with the copies of this namespace that guests wait in, so that what is unmounted
	// here is unmounted there, and no waiting guest keeps a file system busy.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		return fmt.Errorf("let unmounts spread to children: %w", err)
	}
	inside, err := os.Readlink("/proc/thread-self/ns/mnt")
	if err != nil {
		return fmt.Errorf("read private mount namespace: %w", err)
	}
	env := slices.DeleteFunc(os.Environ(), func(s string) bool {
		return strings.HasPrefix(s, privateVariable+"=")
	})
	// exec ends all other threads and keeps this one's namespaces (execve(2)).
	err = unix.Exec("/proc/self/exe", os.Args, append(env, privateVariable+"="+inside))
	return &os.PathError{Op: "exec", Path: "/proc/self/exe", Err: err}
}
