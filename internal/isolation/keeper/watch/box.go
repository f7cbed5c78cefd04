package watch

import (
	"errors"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/keeper"
	"casemate.dev/internal/linux/seccomp/filter"
	"casemate.dev/internal/linux/seccomp/notify"
)

// box is a sandbox whose calls are answered.
type box struct {
	key      int32 // by which the epoll knows it; never used twice
	id       string
	calls    isolation.Calls
	arch     string
	decide   *filter.Machine
	listener *os.File
	guest    *os.File // a pidfd
	freezer  *os.File // nil where no attempt pauses
	freeze   []byte
	fd       int32  // the listener's
	trace    *trace // what a runtime's kernel tells, where the listener is its connection; nil: it is a filter's

	// held says that an attempt froze it, and nobody has released it since. The process's mu guards it.
	held bool

	// mu guards the fields below, and is held while a call is answered. It is taken before the process's.
	mu       sync.Mutex
	gone     bool   // it was dropped
	attempts bucket // how fast attempts are answered
	others   bucket // how fast other calls are answered
	details  bucket // how fast executions and connections are looked at
	opens    bucket // how fast opened files are
	distinct bucket // how fast attempts that differ from those before are told of one by one
	muted    bool   // nothing is received until the buckets have something again
	notes    notes
	due      time.Time // when it is tended next; zero: when something comes
	timer    *time.Timer
}

// The bounds of what one sandbox gets. What comes faster waits in the kernel, where it costs nobody anything: a loop of
// refused mounts made 40,000 a second, and kept half a processor busy answering.
const (
	attemptRate, attemptBurst = 100, 100
	otherRate, otherBurst     = 4000, 2000
	detailRate, detailBurst   = 100, 400
	// Attempts may be recorded of every sandbox, so what one program can write into the journal is little.
	distinctRate, distinctBurst = 5, 200
)

// bucket holds what may be done, and fills at a rate.
type bucket struct {
	rate, most, has float64
	at              time.Time
}

func newBucket(rate, burst float64) bucket { return bucket{rate: rate, most: burst, has: burst} }

// left fills the bucket up to now and returns how much is in it.
func (b *bucket) left(now time.Time) float64 {
	if !b.at.IsZero() {
		b.has = min(b.most, b.has+now.Sub(b.at).Seconds()*b.rate)
	}
	b.at = now
	return b.has
}

// take takes one out, if there is one.
func (b *bucket) take(now time.Time) bool {
	if b.left(now) < 1 {
		return false
	}
	b.has--
	return true
}

// attach begins to answer a sandbox's calls. Unless it fails, the files are the process's from here on.
func (k *process) attach(a keeper.Attach, files []*os.File) error {
	b, err := newBox(a, files)
	if err != nil {
		return err
	}
	k.forgetEnded(b.id)
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.byID[b.id] != nil {
		return errs.New(errs.AlreadyExists, "sandbox %s is watched already", b.id)
	}
	k.lastKey++
	b.key = k.lastKey
	k.boxes[b.key], k.byID[b.id] = b, b
	delete(k.killed, b.id)
	if err := k.control(unix.EPOLL_CTL_ADD, b); err != nil {
		delete(k.boxes, b.key)
		delete(k.byID, b.id)
		return err
	}
	return nil
}

// forgetEnded drops the sandbox of that id whose first process has ended: the kernel may not have said yet that nothing of
// it is left when the next of that id begins.
func (k *process) forgetEnded(id string) {
	k.mu.Lock()
	b := k.byID[id]
	k.mu.Unlock()
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.gone && ended(b.guest, 0) {
		k.drop(b, time.Now())
	}
}

// ended reports whether the process of a pidfd has ended, or does so in time.
func ended(pidfd *os.File, within time.Duration) bool {
	list := []unix.PollFd{{Fd: int32(pidfd.Fd()), Events: unix.POLLIN}}
	for until := time.Now().Add(within); ; {
		n, err := unix.Poll(list, int(max(0, time.Until(until)).Milliseconds()))
		if err == nil || !errors.Is(err, unix.EINTR) {
			return n > 0
		}
	}
}

func newBox(a keeper.Attach, files []*os.File) (*box, error) {
	want := 2
	if a.Calls.OnAttempt == isolation.ReactPause && a.Freeze != "" {
		want = 3
	}
	if a.Sandbox == "" || len(files) != want {
		return nil, errs.New(errs.InvalidArgument, "%d files came with sandbox %q, not %d", len(files), a.Sandbox, want)
	}
	machine, err := filter.NewMachine(a.Decide)
	if err != nil {
		return nil, errs.Wrap(err, errs.InvalidArgument, "the filter can't be read: %v", err)
	}
	b := &box{
		id: a.Sandbox, calls: a.Calls, arch: a.Arch, decide: machine, listener: files[0], guest: files[1], freeze: []byte(a.Freeze),
		attempts: newBucket(attemptRate, attemptBurst), others: newBucket(otherRate, otherBurst), details: newBucket(detailRate, detailBurst), opens: newBucket(detailRate, detailBurst),
		distinct: newBucket(distinctRate, distinctBurst),
	}
	if want == 3 {
		b.freezer = files[2]
	}
	b.fd = int32(b.listener.Fd())
	if a.Trace {
		b.trace, err = newTrace(a, int(b.fd))
		return b, err
	}
	if !notify.IsListener(int(b.fd)) {
		return nil, errs.New(errs.InvalidArgument, "the first file is no listener")
	}
	return b, nil
}

func (b *box) close() {
	_ = b.listener.Close()
	_ = b.guest.Close()
	if b.freezer != nil {
		_ = b.freezer.Close()
	}
}

// control makes the epoll tell of a box's next event, once.
func (k *process) control(op int, b *box) error {
	return os.NewSyscallError("epoll_ctl", unix.EpollCtl(k.epoll, op, int(b.fd), &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLONESHOT, Fd: b.key}))
}
