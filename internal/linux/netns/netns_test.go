package netns

import (
	"net"
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// A new namespace has no way to itself until loopback is up.
func TestLoopbackUp(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test needs root")
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// The main thread can't end, so another one does it.
			inner := make(chan struct{})
			go func() {
				defer close(inner)
				runtime.LockOSThread()
				inNamespace(t)
			}()
			<-inner
			runtime.UnlockOSThread()
			return
		}
		inNamespace(t)
	}()
	<-done
}

// inNamespace spoils its thread, which ends with its goroutine.
func inNamespace(t *testing.T) {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Error(err)
		return
	}
	if err := connectToSelf(); err == nil {
		t.Error("twin: a new namespace reaches itself")
	}
	if err := LoopbackUp(); err != nil {
		t.Error(err)
		return
	}
	if err := LoopbackUp(); err != nil {
		t.Errorf("twice: %v", err)
	}
	if err := connectToSelf(); err != nil {
		t.Errorf("connect over loopback: %v", err)
	}
}

func connectToSelf() error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	to := unix.SockaddrInet4{Port: 9}
	copy(to.Addr[:], net.IPv4(127, 0, 0, 1).To4())
	return unix.Connect(s, &to)
}
