// Package seccomp installs a system call filter on the calling thread, and names what a filter may
// answer.
//
// What belongs here: the loader, which the guest links, so nothing that assembles. Programs are made
// by the server in seccomp/filter; which calls a profile allows is in isolation/walls.
package seccomp

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// Verdict is what the kernel does with a system call: a SECCOMP_RET_* value.
type Verdict uint32

// Verdicts without a parameter.
const (
	Allow Verdict = unix.SECCOMP_RET_ALLOW
	// Kill ends the whole process with SIGSYS.
	Kill Verdict = unix.SECCOMP_RET_KILL_PROCESS
	// Notify hands the call over to the filter's listener, which answers it; where there is none, it is ENOSYS.
	Notify Verdict = unix.SECCOMP_RET_USER_NOTIF
)

// Errno returns the verdict that fails the call with e.
func Errno(e unix.Errno) Verdict {
	return unix.SECCOMP_RET_ERRNO | Verdict(e)&unix.SECCOMP_RET_DATA
}

// String returns "allow", "kill", "notify" or the error's name.
func (v Verdict) String() string {
	switch {
	case v == Allow:
		return "allow"
	case v == Kill:
		return "kill"
	case v == Notify:
		return "notify"
	case v&unix.SECCOMP_RET_ACTION_FULL == unix.SECCOMP_RET_ERRNO:
		return unix.ErrnoName(unix.Errno(v & unix.SECCOMP_RET_DATA))
	}
	return fmt.Sprintf("%#x", uint32(v))
}

// instruction is the size of struct sock_filter, maxInstructions the kernel's BPF_MAXINSNS.
const (
	instruction     = 8
	maxInstructions = 4096
)

// ErrProgram says that bytes are no program.
var ErrProgram = errors.New("no seccomp program")

// Install puts a program (struct sock_filter after struct sock_filter, in the machine's byte order)
// on the calling thread, for good: it and all that it forks. Other threads of the process are not
// touched (no TSYNC), so lock the goroutine to its thread first.
//
// The thread needs no_new_privs or CAP_SYS_ADMIN in its user namespace.
func Install(program []byte) error {
	n, err := length(program)
	if err != nil {
		return err
	}
	if errno := RawInstall(&program[0], n); errno != 0 {
		return os.NewSyscallError("seccomp", errno)
	}
	return nil
}

// Listen is Install with a listener, by which another process answers the calls that the program hands over (package
// notify). Whoever has it may let refused calls through, so it should leave this process at once. EBUSY: the thread has
// a filter with a listener already, and there can be no second one.
func Listen(program []byte) (*os.File, error) {
	n, err := length(program)
	if err != nil {
		return nil, err
	}
	fd, errno := listen(&program[0], n)
	if errno != 0 {
		return nil, os.NewSyscallError("seccomp", errno)
	}
	return os.NewFile(uintptr(fd), "seccomp listener"), nil
}

func length(program []byte) (uint16, error) {
	n := len(program) / instruction
	if n == 0 || n > maxInstructions || len(program)%instruction != 0 {
		return 0, fmt.Errorf("%d bytes: %w", len(program), ErrProgram)
	}
	return uint16(n), nil
}

// InstallProcess is Install for every thread of the process at once, those that are made later included.
// Every thread needs no_new_privs, and none may have a filter that the calling one has not.
func InstallProcess(program []byte) error {
	n, err := length(program)
	if err != nil {
		return err
	}
	thread, errno := installAll(&program[0], n)
	if errno != 0 {
		return os.NewSyscallError("seccomp", errno)
	}
	if thread != 0 { // seccomp(2), SECCOMP_FILTER_FLAG_TSYNC: the thread that could not be brought along
		return fmt.Errorf("thread %d has a filter of its own", thread)
	}
	return nil
}

// ConfineProcess takes every thread of the process the right to gain any (NoNewPrivs), and installs the program for them all.
func ConfineProcess(program []byte) error {
	// no_new_privs is the calling thread's, and it is by that thread's that the kernel lets the filter in.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := NoNewPrivs(); err != nil {
		return err
	}
	return InstallProcess(program)
}

// NoNewPrivs keeps the calling thread, and all that it forks, from gaining rights by what it executes
// (prctl(2)). InstallProcess passes it on to the process's other threads.
func NoNewPrivs() error {
	return os.NewSyscallError("prctl PR_SET_NO_NEW_PRIVS", unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
}
