package netns

import (
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// New makes a network namespace with nothing but loopback, which lives as long as its descriptor.
func New() (*os.File, error) {
	type result struct {
		f   *os.File
		err error
	}
	done := make(chan result, 1)
	go func() {
		// The thread ends with the goroutine. The main thread can't end, so another one does it.
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			go func() {
				f, err := New()
				done <- result{f, err}
			}()
			runtime.UnlockOSThread()
			return
		}
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- result{nil, os.NewSyscallError("unshare", err)}
			return
		}
		err := LoopbackUp()
		f, oerr := os.Open(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()))
		if err == nil {
			err = oerr
		}
		done <- result{f, err}
	}()
	r := <-done
	return r.f, r.err
}
