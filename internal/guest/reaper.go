package guest

import (
	"sync"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
)

// reaper waits for every child of PID 1: processes, workers, and orphans that the kernel gives it.
// Nothing else in the guest may wait.
//
// A pid means something only until its zombie is reaped; then the kernel may give it to another
// process. So reaping and the table of pids change together under one lock, and a signal is sent
// under that lock to a child that is still in the table.
type reaper struct {
	orphaned func() // called after an orphan was reaped; must not block

	// mu guards the fields below.
	mu       sync.Mutex
	children map[int]*child
	starting int          // starts under way
	early    map[int]exit // unknown pids that ended while a start was under way
	started  *sync.Cond   // a child may exist
	born     uint64       // counts starts, so that none is missed between a look and a wait
}

// exit is how a child ended.
type exit struct {
	status unix.WaitStatus
	usage  unix.Rusage
	// alone says that afterwards PID 1 had no child at all. Then nothing runs in the sandbox, and what
	// has ended left nothing behind: known without looking.
	alone bool
}

// child is a process that was started and not yet reaped.
type child struct {
	r     *reaper
	pid   int
	ended func(exit) // called by the reaper; must not block; nil while somebody else waits (see take)
	gone  bool       // guarded by r.mu
	exit  exit       // once gone, where somebody else waits
}

func newReaper(orphaned func()) *reaper {
	r := &reaper{orphaned: orphaned, children: make(map[int]*child), early: make(map[int]exit)}
	r.started = sync.NewCond(&r.mu)
	return r
}

// start runs fork, which returns the pid of a new child, and calls ended when that child has ended:
// maybe before start returns.
func (r *reaper) start(fork func() (int, error), ended func(exit)) (*child, error) {
	c, err := r.fork(fork)
	if err != nil {
		return nil, err
	}
	r.adopt(c, ended)
	return c, nil
}

// fork runs fork, which returns the pid of a new child. The caller waits for the child by itself and asks
// for its end with take, or leaves it to the reaper with adopt. A reaper that has nothing to wait for is
// not woken.
func (r *reaper) fork(fork func() (int, error)) (*child, error) {
	r.mu.Lock()
	r.starting++
	r.mu.Unlock()

	pid, err := fork()

	r.mu.Lock()
	defer r.mu.Unlock()
	r.starting--
	c := &child{r: r, pid: pid}
	e, isEarly := r.early[pid]
	switch {
	case err != nil:
		// A child that failed before it executed is an unknown pid like any orphan.
		r.lookLocked()
	case isEarly:
		c.gone, c.exit = true, e
		delete(r.early, pid)
	default:
		r.children[pid] = c
	}
	if r.starting == 0 {
		clear(r.early)
	}
	if err != nil {
		return nil, err
	}
	return c, nil
}

// adopt has the reaper wait for a child, and call ended when it has ended: maybe before adopt returns.
func (r *reaper) adopt(c *child, ended func(exit)) {
	r.mu.Lock()
	c.ended = ended
	gone := c.gone
	r.lookLocked()
	r.mu.Unlock()
	if gone {
		ended(c.exit)
	}
}

// take reaps a child that has ended, unless the reaper has done so already. It reports false where the child
// lives.
func (r *reaper) take(c *child) (exit, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !c.gone {
		if pid, err := wait4(c.pid, &c.exit); pid != c.pid || err != nil {
			return exit{}, false
		}
		c.gone = true
		delete(r.children, c.pid)
	}
	// Is anything left that can end? Who ends while nobody waits is told of here.
	c.exit.alone = unix.Waitid(unix.P_ALL, 0, nil, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil) == unix.ECHILD
	if !c.exit.alone {
		r.lookLocked()
	}
	return c.exit, true
}

// lookLocked says that there may be a child to wait for.
func (r *reaper) lookLocked() {
	r.born++
	r.started.Broadcast()
}

func wait4(pid int, e *exit) (int, error) {
	return unix.Wait4(pid, &e.status, unix.WNOHANG, &e.usage)
}

// run reaps until the process ends. It blocks a thread in the kernel rather than wait for SIGCHLD,
// which would pass through three goroutines before it arrives here.
func (r *reaper) run() {
	for {
		r.mu.Lock()
		seen := r.born
		r.mu.Unlock()
		// WNOWAIT leaves the zombie, and with it the pid, until the table's lock is held.
		err := unix.Waitid(unix.P_ALL, 0, nil, unix.WEXITED|unix.WNOWAIT, nil)
		switch err {
		case nil:
			r.reap()
		case unix.ECHILD:
			// No child means no descendant, so nothing ends before something is started.
			r.mu.Lock()
			for r.born == seen {
				r.started.Wait()
			}
			r.mu.Unlock()
		}
	}
}

// reap takes every zombie there is.
func (r *reaper) reap() {
	var orphans, alone bool
	var ended []func(alone bool)
	for {
		var e exit
		r.mu.Lock()
		pid, err := wait4(-1, &e)
		if pid <= 0 || err != nil {
			r.mu.Unlock()
			if err == unix.EINTR {
				continue
			}
			alone = err == unix.ECHILD
			break
		}
		c := r.children[pid]
		if c != nil {
			c.gone = true
			delete(r.children, pid)
			if c.ended == nil {
				c.exit, c = e, nil // who waits for it finds that here
			}
		} else {
			orphans = true
			if r.starting > 0 {
				r.early[pid] = e
			}
		}
		r.mu.Unlock()
		if c != nil {
			ended = append(ended, func(alone bool) {
				e.alone = alone
				c.ended(e)
			})
		}
	}
	for _, tell := range ended {
		tell(alone)
	}
	if orphans && r.orphaned != nil {
		r.orphaned()
	}
}

// signal sends a signal to the child itself, unless it has ended.
func (c *child) signal(sig unix.Signal) error {
	c.r.mu.Lock()
	defer c.r.mu.Unlock()
	if c.gone {
		return errs.New(errs.FailedPrecondition, "the process has ended")
	}
	return unix.Kill(c.pid, sig)
}
