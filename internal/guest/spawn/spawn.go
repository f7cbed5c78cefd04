// Package spawn starts every process of a sandbox, and is where the walls stand: one operating
// system thread of the guest takes the control groups, the bounding set, no_new_privs, the Landlock
// domain and the seccomp filter upon itself, and forks each process from there. PID 1's other threads
// stay outside, above everything that runs inside.
//
// What belongs here: putting walls on a thread, and forking from it. What does not: deciding the
// walls (isolation/walls), waiting for children (package guest has the one reaper), output,
// terminals, timeouts.
//
// # One thread
//
// A Landlock domain is made by landlock_restrict_self, and two calls make two domains, whose
// processes could neither signal nor trace each other. All of the payload shares one domain, so one
// thread forks everything. With vfork it is busy for about 60 µs per process.
//
// It waits for two things at once: what other goroutines ask it to start (Start, StartWorker), and one
// descriptor that it attends to itself (Attend). Who is attended to starts processes without handing
// over to another thread and back, which costs more than the rest of a start; see Seat.
//
// # Control groups of single processes
//
// The child places itself between fork and exec: it writes "0" to the scope's "tasks" file (v1,
// measured at 3 to 8 µs: the kernel takes no lock of the thread group for it), or is born in the
// scope's "dir" (v2, CLONE_INTO_CGROUP). The thread itself never enters a scope, so that freezing or
// killing a scope never touches the guest, and its files never list PID 1.
//
// Between fork and exec the child shares PID 1's memory. The kernel's out-of-memory killer leaves such
// children alone (oom_badness, in_vfork), but not where a control group is killed as a whole: so
// memory.oom.group must stay off for the payload's groups, or PID 1 would go with the child.
package spawn

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/cleanup"
	"casemate.dev/internal/guestwire"
)

// ErrClosed says that the Spawner was closed.
var ErrClosed = errors.New("the spawner is closed")

// Spawner forks processes inside the walls. Its methods are safe for concurrent use.
type Spawner struct {
	walls   guestwire.Walls
	applied guestwire.WallsApplied
	limits  []limit
	exe     int      // the guest's own program, as a path descriptor
	null    *os.File // /dev/null
	wake    int      // an event descriptor that ends the thread's waiting
	seat    Seat     // the thread's own
	guard   guard

	// mu guards the fields below, and that wake is open while closed is not set.
	mu     sync.Mutex
	queue  []job
	closed bool
}

// job is a plan on its way to the thread, or a Post to attend to.
type job struct {
	plan *plan
	done chan<- result
	post *Post
}

type result struct {
	pid int
	err error
}

// New makes the thread and puts the walls on it. It fails if any of them can't be put in place; then
// nothing was started and the thread is gone. The calling process must be uid 0 of its user namespace,
// hold SETPCAP, SYS_ADMIN, SETUID, SETGID and w.Capabilities in it, and see a proc file system at
// /proc and a /dev/null. It must be shielded (signals.Shield), since children run no handler of it but
// those that Shield leaves in place.
//
// join are write-only "tasks" files of the payload's control groups (v1: memory, cpu, pids; not the
// freezer, so that a paused sandbox does not stop a thread of PID 1). On v2 there are none: there a
// process is in the payload's group by its scope. New does not keep join; the caller closes them.
func New(w guestwire.Walls, join []*os.File) (*Spawner, error) {
	return Prepare().Raise(w, join, nil)
}

// Thread is a thread that waits for its walls. Making one takes a third of the time of New, and nothing
// that only New's caller knows.
type Thread struct{ serve chan func() }

// Prepare makes the thread. Discard ends it where there will be no Raise.
func Prepare() *Thread {
	t := &Thread{serve: make(chan func())}
	offMainThread(func() {
		if serve, ok := <-t.serve; ok {
			serve()
		}
	})
	return t
}

// Discard ends a thread that got no walls.
func (t *Thread) Discard() { close(t.serve) }

// Raise is New on a prepared thread, which serves once; on error it is gone. Where w.Listen is set, send is given the
// filter's listener, on the thread, and sends it out of the process; Raise closes it.
func (t *Thread) Raise(w guestwire.Walls, join []*os.File, send func(*os.File) error) (*Spawner, error) {
	s := &Spawner{walls: w, exe: -1, wake: -1}
	s.seat.s = s
	undo := cleanup.New(func() { s.release() })
	defer undo.Run()
	if err := s.open(); err != nil {
		t.Discard()
		return nil, err
	}
	ready := make(chan error)
	t.serve <- func() {
		var err error
		if s.applied, err = raise(w, join, send); err != nil {
			ready <- err
			return // still locked, so the thread ends with its goroutine, and the walls with it
		}
		ready <- nil
		s.run()
	}
	if err := <-ready; err != nil {
		return nil, err
	}
	undo.Release()
	return s, nil
}

// open opens what starting processes takes.
func (s *Spawner) open() error {
	var err error
	// A path descriptor: the file is not readable inside, only executable, and nothing else is needed.
	if s.exe, err = unix.Open("/proc/self/exe", unix.O_PATH|unix.O_CLOEXEC, 0); err != nil {
		return fmt.Errorf("open own executable: %w", err)
	}
	if s.null, err = os.OpenFile(os.DevNull, os.O_RDWR, 0); err != nil {
		return err
	}
	if s.wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return os.NewSyscallError("eventfd", err)
	}
	s.limits, err = limitsOf(s.walls.Rlimits)
	return err
}

// offMainThread runs f in a goroutine that is locked to a thread of its own, never to the main one:
// that is what /proc/1 shows and checks access against, and it must stay outside the walls.
func offMainThread(f func()) {
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() != unix.Getpid() {
			f()
			return
		}
		// While this goroutine holds the main thread, another one must get a different thread.
		held := make(chan struct{})
		go func() {
			runtime.LockOSThread()
			close(held)
			f()
		}()
		<-held
		runtime.UnlockOSThread()
	}()
}

// run forks what comes and attends to what it is told to, until Close.
func (s *Spawner) run() {
	for s.seat.attend() {
	}
	s.release()
}

// give hands the thread a job. It reports false after Close.
func (s *Spawner) give(j job) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.queue = append(s.queue, j)
	s.wakeLocked()
	return true
}

func (s *Spawner) wakeLocked() {
	_, _ = unix.Write(s.wake, []byte{1, 0, 0, 0, 0, 0, 0, 0}) // fails only where a wake is due anyway
}

// release closes the Spawner's descriptors.
func (s *Spawner) release() {
	if s.exe >= 0 {
		_ = unix.Close(s.exe)
	}
	if s.null != nil {
		_ = s.null.Close()
	}
	if s.wake >= 0 {
		_ = unix.Close(s.wake)
	}
}

// Applied returns what was put in place.
func (s *Spawner) Applied() guestwire.WallsApplied { return s.applied }

// Start starts a process and returns its pid once it executes the program, or an *Error, or
// ErrClosed. Nothing of the guest is shared with it: descriptors are Attr.Files, signals are at their
// defaults and none is blocked, the umask is 022.
//
// Reaping is the caller's, also of a child that failed before it executed: that one shows up in
// wait4(-1) as an unknown pid. A child may have ended before Start returns, so the reaper must keep
// the status of unknown pids while a Start is under way.
//
// Start blocks while the child does, e.g. because something froze it before it executed; killing the
// scope ends that. A child that was stopped is told to go on. It does not stop the Go scheduler or the garbage collector meanwhile.
func (s *Spawner) Start(a Attr) (pid int, err error) {
	return s.start(a, -1)
}

// StartWorker starts the guest's own executable in the same walls, as the user given: it can do
// nothing that the user's processes couldn't. Where the file is not readable inside (a sealed
// descriptor of mode 0111), no process inside can trace the worker or open its memory.
func (s *Spawner) StartWorker(w Worker) (pid int, err error) {
	null := s.null.Fd()
	pid, err = s.start(Attr{
		Argv: append([]string{"casemate-guest"}, w.Args...), Env: w.Env,
		Files: []uintptr{null, null, null, w.Socket.Fd()},
		UID:   w.UID, GID: w.GID, Groups: w.Groups, Setsid: true, Ctty: -1, Scope: w.Scope,
	}, s.exe)
	runtime.KeepAlive(w.Socket)
	return pid, err
}

func (s *Spawner) start(a Attr, exe int) (int, error) {
	p, err := s.plan(a, exe)
	if err != nil {
		return 0, &Error{StepCheck, err}
	}
	done := make(chan result, 1)
	if !s.give(job{plan: p, done: done}) {
		return 0, ErrClosed
	}
	r := p.wait(done)
	runtime.KeepAlive(a.Scope.Files)
	return r.pid, r.err
}

const (
	// stuckAfter is how long a start may take until its child counts as stopped, and prodEvery how often it
	// is then told to go on.
	stuckAfter = 200 * time.Millisecond
	prodEvery  = 50 * time.Millisecond
)

// wait waits for the thread. Once the child has become its user, that user's processes can stop it before
// it executes ("kill -STOP -1" in a loop), and the thread, which waits for it, starts nothing more: so a
// child that takes long is told to go on. A frozen one is not, since SIGCONT does not thaw.
func (p *plan) wait(done <-chan result) result {
	prod := time.NewTimer(stuckAfter)
	defer prod.Stop()
	for {
		select {
		case r := <-done:
			return r
		case <-prod.C:
			p.prod()
			prod.Reset(prodEvery)
		}
	}
}

// prod tells the child to go on. Until the fork has returned the child is not reaped unless it has died this
// moment, so the pid is its own.
func (p *plan) prod() {
	if pid := atomic.LoadInt32(&p.child); pid > 1 {
		_ = unix.Kill(int(pid), unix.SIGCONT)
	}
}

// Close ends the thread once it has finished what it is at. Processes go on. Idempotent.
func (s *Spawner) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.closed = true
		s.wakeLocked()
	}
	return nil
}
