package spawn

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Post is what the thread attends to, besides the starts that others ask for.
type Post struct {
	// FD is watched for reading. It stays the Post's.
	FD int
	// Ready is called on the thread whenever FD is readable or broken. It waits for nothing but by
	// Seat.Poll, since nothing else is started meanwhile. false ends the attending.
	Ready func(*Seat) bool
	// Relieved is called on the thread when another Post has taken this one's place, or after Close. It
	// must not block. It is not called after Ready has returned false.
	Relieved func()
}

// Attend makes the thread attend to p, in place of what it attends to now. After Close it calls p.Relieved.
func (s *Spawner) Attend(p Post) {
	if !s.give(job{post: &p}) {
		p.Relieved()
	}
}

// Seat is the thread itself, for what runs on it. It is valid within Post.Ready only.
type Seat struct {
	s    *Spawner
	post *Post // what is attended to
	runs *Post // whose Ready runs
	over bool  // the Spawner is closed
	poll []unix.PollFd
	jobs []job
}

// attend waits for the next thing to do, and does it. It reports false once the Spawner is closed.
func (t *Seat) attend() bool {
	post := t.post
	var fds [1]unix.PollFd
	n := 0
	if post != nil {
		fds[0], n = unix.PollFd{Fd: int32(post.FD), Events: unix.POLLIN}, 1
	}
	for fds[0].Revents == 0 && t.post == post && !t.over {
		t.wait(fds[:n], nil)
	}
	if t.over {
		t.replace(nil)
		return false
	}
	if t.post != post {
		return true
	}
	t.runs = post
	keep := post.Ready(t)
	t.runs = nil
	switch {
	case !keep && t.post == post:
		t.post = nil
	case keep && t.post != post:
		post.Relieved() // it was replaced meanwhile
	}
	return true
}

// replace attends to another Post, or to none.
func (t *Seat) replace(p *Post) {
	old := t.post
	t.post = p
	if old != nil && old != t.runs { // that one is relieved once its Ready has returned
		old.Relieved()
	}
}

// Start is Spawner.Start without a hand-over.
func (t *Seat) Start(a Attr) (int, error) {
	p, err := t.s.plan(a, -1)
	if err != nil {
		return 0, &Error{StepCheck, err}
	}
	t.s.guard.begin(p)
	pid, err := p.run()
	t.s.guard.end()
	runtime.KeepAlive(a.Scope.Files)
	return pid, err
}

// Poll is ppoll(2) that does meanwhile what others ask of the thread. It returns when one of fds has
// something to tell, in its Revents, or when timeout is over. Negative descriptors are left out.
func (t *Seat) Poll(fds []unix.PollFd, timeout time.Duration) {
	deadline := time.Now().Add(timeout)
	for {
		left := max(time.Until(deadline), 0)
		ts := unix.NsecToTimespec(int64(left))
		t.wait(fds, &ts)
		for i := range fds {
			if fds[i].Revents != 0 {
				return
			}
		}
		if left == 0 {
			return
		}
	}
}

// wait waits once, and serves what was asked for.
func (t *Seat) wait(fds []unix.PollFd, timeout *unix.Timespec) {
	t.poll = append(append(t.poll[:0], unix.PollFd{Fd: int32(t.s.wake), Events: unix.POLLIN}), fds...)
	_, err := unix.Ppoll(t.poll, timeout, nil)
	if err != nil {
		return // EINTR, or no memory for a moment
	}
	for i := range fds {
		fds[i].Revents = t.poll[i+1].Revents
	}
	if t.poll[0].Revents != 0 {
		t.serve()
	}
}

// serve does what others have asked for.
func (t *Seat) serve() {
	s := t.s
	var count [8]byte
	_, _ = unix.Read(s.wake, count[:])
	s.mu.Lock()
	jobs := s.queue
	s.queue, t.jobs = t.jobs, nil
	t.over = s.closed
	s.mu.Unlock()
	for _, j := range jobs {
		if j.post != nil {
			t.replace(j.post)
			continue
		}
		pid, err := j.plan.run()
		j.done <- result{pid, err}
	}
	clear(jobs)
	t.jobs = jobs[:0]
}

// guard looks after the starts of a Seat, as plan.wait does after others: there the thread itself waits for
// the child. It costs such a start two stores, and a goroutine while there are any.
type guard struct {
	plan atomic.Pointer[plan] // of the start under way

	// mu guards the fields below.
	mu      sync.Mutex
	running bool
	begun   bool // since the goroutine looked last
}

// guardRest is after how many looks without a start the goroutine ends.
const guardRest = 10

func (g *guard) begin(p *plan) {
	g.plan.Store(p)
	g.mu.Lock()
	defer g.mu.Unlock()
	g.begun = true
	if !g.running {
		g.running = true
		go g.run()
	}
}

func (g *guard) end() { g.plan.Store(nil) }

func (g *guard) run() {
	t := time.NewTicker(prodEvery)
	defer t.Stop()
	var seen *plan
	looks := 0
	for range t.C {
		p := g.plan.Load()
		if p != seen {
			seen, looks = p, 0
		}
		looks++
		if p != nil && looks > int(stuckAfter/prodEvery) {
			p.prod()
		}
		if p == nil && looks > guardRest && g.rest() {
			return
		}
	}
}

// rest reports whether the goroutine may end.
func (g *guard) rest() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.running = g.begun
	g.begun = false
	return !g.running
}
