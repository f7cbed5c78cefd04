package netns

import (
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// In runs f on a thread that has entered the network namespace ns. The thread ends afterwards, whatever f
// does: one that went back would be no different, if only that were sure.
func In(ns *os.File, f func() error) error {
	done := make(chan error, 1)
	go func() {
		// Never unlocked, which ends the thread with its goroutine.
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// The main thread can't end, and /proc/self shows its namespaces as the process's.
			go func() { done <- In(ns, f) }()
			runtime.UnlockOSThread()
			return
		}
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("enter network namespace: %w", os.NewSyscallError("setns", err))
			return
		}
		done <- f()
	}()
	return <-done
}

// Of opens the network namespace of a process. The caller sees to it that the pid is still the one meant.
func Of(pid int) (*os.File, error) { return os.Open(fmt.Sprintf("/proc/%d/ns/net", pid)) }
