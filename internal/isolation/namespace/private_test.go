package namespace

import (
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// inPrivateMounts runs f on a thread with a mount namespace of its own, with an empty tmpfs; both go
// with the thread.
func inPrivateMounts(t *testing.T, f func(dir string) error) {
	t.Helper()
	dir := t.TempDir()
	done := make(chan error, 1)
	go offMainThread(func() {
		done <- func() error {
			if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
				return os.NewSyscallError("unshare", err)
			}
			if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
				return err
			}
			if err := unix.Mount("private", dir, "tmpfs", 0, "mode=755"); err != nil {
				return err
			}
			return f(dir)
		}()
		runtime.KeepAlive(dir)
	})
	if err := <-done; err != nil {
		t.Errorf("twin: %v", err)
	}
}

// offMainThread runs f locked to a thread that ends with it. Never the main one: that can't end, and
// /proc/self shows its namespaces as the whole process's.
func offMainThread(f func()) {
	runtime.LockOSThread()
	if unix.Gettid() != unix.Getpid() {
		f()
		return
	}
	// While the main thread is held here, another goroutine gets another one.
	held := make(chan struct{})
	go func() {
		runtime.LockOSThread()
		close(held)
		f()
	}()
	<-held
	runtime.UnlockOSThread()
}
