// Package sched keeps the server's own scheduling class to itself.
//
// What belongs here: classes and their attributes (sched(7)). What does not: shares of processors, which are control
// groups' (package cgroup).
package sched

import (
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// Normally calls f on a thread that the kernel schedules like any other: one of a real-time or deadline class
// leaves it for so long. What a thread starts inherits its class: below a server that was given such a one,
// processes of sandboxes would go before the host's own, and control groups of version 1 take no such thread
// (EINVAL). It needs CAP_SYS_NICE where the thread has such a class.
func Normally(f func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	was, err := unix.SchedGetAttr(0, 0)
	if err != nil {
		return fmt.Errorf("read scheduling class: %w", err)
	}
	switch was.Policy {
	case unix.SCHED_NORMAL, unix.SCHED_BATCH, unix.SCHED_IDLE:
		return f()
	}
	if err := unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_NORMAL}, 0); err != nil {
		return fmt.Errorf("leave real-time class: %w", err)
	}
	defer func() { _ = unix.SchedSetAttr(0, was, 0) }() // else the server does without
	return f()
}
