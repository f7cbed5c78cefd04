package spawn

import (
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// seated returns a Spawner whose thread has no walls, and starts nothing.
func seated(t *testing.T) *Spawner {
	t.Helper()
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	s := &Spawner{wake: wake, exe: -1}
	s.seat.s = s
	gone := make(chan struct{})
	go func() {
		runtime.LockOSThread()
		s.run()
		close(gone)
	}()
	t.Cleanup(func() {
		_ = s.Close()
		<-gone
	})
	return s
}

func pipe(t *testing.T) (r, w *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close(); _ = w.Close() })
	return r, w
}

// watched is a Post whose calls are told to a channel.
func watched(fd uintptr, ready func(*Seat) bool) (p Post, relieved chan struct{}) {
	relieved = make(chan struct{})
	return Post{FD: int(fd), Ready: ready, Relieved: func() { close(relieved) }}, relieved
}

// TestPosts sees to it that each Post is attended to, or relieved exactly once (a second close panics).
func TestPosts(t *testing.T) {
	s := seated(t)
	r, w := pipe(t)
	inside, leave := make(chan struct{}), make(chan struct{})
	first, firstRelieved := watched(r.Fd(), func(*Seat) bool {
		var b [1]byte
		_, _ = r.Read(b[:])
		inside <- struct{}{}
		<-leave
		return true
	})
	s.Attend(first)
	for range 2 { // it stays attended to
		if _, err := w.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		<-inside
		leave <- struct{}{}
	}
	// Two others come while it is busy; the thread finds both at once.
	if _, err := w.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	<-inside
	r2, _ := pipe(t)
	second, secondRelieved := watched(r2.Fd(), nil)
	r3, w3 := pipe(t)
	third, thirdRelieved := watched(r3.Fd(), func(*Seat) bool { inside <- struct{}{}; return false })
	s.Attend(second)
	s.Attend(third)
	leave <- struct{}{}
	<-firstRelieved
	<-secondRelieved
	if _, err := w3.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	<-inside // and then it is let go of
	fourth, fourthRelieved := watched(r2.Fd(), nil)
	s.Attend(fourth)
	_ = s.Close()
	<-fourthRelieved
	fifth, fifthRelieved := watched(r2.Fd(), nil)
	s.Attend(fifth)
	<-fifthRelieved
	select {
	case <-thirdRelieved:
		t.Error("one that had let go was relieved")
	default:
	}
}

// TestPostsReplacedWhileBusy replaces a Post twice from within its own Ready, where the thread serves others.
func TestPostsReplacedWhileBusy(t *testing.T) {
	s := seated(t)
	r, w := pipe(t)
	r2, _ := pipe(t)
	second, secondRelieved := watched(r2.Fd(), nil)
	third, thirdRelieved := watched(r2.Fd(), nil)
	first, firstRelieved := watched(r.Fd(), func(seat *Seat) bool {
		s.Attend(second)
		seat.Poll(nil, 0)
		s.Attend(third)
		seat.Poll(nil, 0)
		<-secondRelieved
		return true
	})
	s.Attend(first)
	if _, err := w.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	<-firstRelieved
	_ = s.Close()
	<-thirdRelieved
}
