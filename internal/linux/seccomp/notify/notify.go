// Package notify answers the system calls that a filter hands over to its listener (seccomp_unotify(2)).
//
// What belongs here: the listener's four operations. What does not: installing a filter with a listener (package
// seccomp), and deciding about calls.
//
// A call that is let go on is only looked at, never decided on: what lies behind its pointers can be changed by another
// thread between the look and the kernel's own reading. Calls that are to be refused must be refused whatever lies
// there.
package notify

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// Call is a system call that waits for its answer: struct seccomp_notif.
type Call struct {
	ID    uint64 // of this notification
	PID   uint32 // the thread, as the pid namespace of whoever receives it knows it; 0: it is in none below
	Flags uint32
	// What the filter saw (struct seccomp_data).
	Number uint32
	Arch   uint32 // AUDIT_ARCH_*
	IP     uint64
	Args   [6]uint64
}

// answer is struct seccomp_notif_resp.
type answer struct {
	id    uint64
	value int64
	errno int32
	flags uint32
}

// ErrGone says that a call needs no answer any more: its thread was killed, or a signal came before it was received.
var ErrGone = errors.New("the call does not wait any more")

// Receive takes the next call. It may block where none waits: poll the listener first.
func Receive(fd int) (Call, error) {
	var c Call
	err := receive(fd, &c)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EINTR) {
		return c, ErrGone
	}
	return c, os.NewSyscallError("seccomp receive", err)
}

// Refuse answers a call with an error, or with ErrGone.
func Refuse(fd int, id uint64, errno unix.Errno) error {
	return send(fd, answer{id: id, errno: -int32(errno)})
}

// Continue lets a call go on as if there were no listener, or returns ErrGone.
func Continue(fd int, id uint64) error {
	return send(fd, answer{id: id, flags: unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE})
}

func send(fd int, a answer) error {
	err := respond(fd, &a)
	if errors.Is(err, unix.ENOENT) {
		return ErrGone
	}
	return os.NewSyscallError("seccomp answer", err)
}

// Waits reports whether a call still waits. As long as it does, its thread is alive, and what was read of it by its pid
// was its.
func Waits(fd int, id uint64) bool { return valid(fd, id) == nil }

// IsListener reports whether a descriptor is a filter's listener: nothing else knows a call that is none.
func IsListener(fd int) bool { return errors.Is(valid(fd, 0), unix.ENOENT) }
