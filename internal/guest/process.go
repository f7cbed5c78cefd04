package guest

import (
	"errors"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guest/output"
	"casemate.dev/internal/guest/pty"
	"casemate.dev/internal/guestwire"
)

const (
	// quietGrace is how long output must be silent after the first process has ended to count as
	// complete although somebody still has it open.
	quietGrace = 200 * time.Millisecond
	// lateGrace is when it counts as complete at the latest.
	lateGrace = time.Second
	// lookAgain is how soon output that waits to be read is looked for again.
	lookAgain = 10 * time.Millisecond
	// defaultGrace lies between SIGTERM and SIGKILL.
	defaultGrace = 2 * time.Second
)

// process is one command, from its start until it is forgotten.
type process struct {
	id    string
	ready chan struct{} // closed when it runs or could not be started
	done  chan struct{} // closed when it has ended and its output is complete
	table *table
	noted bool // guarded by table.mu: it is over

	// What follows is set before ready is closed and does not change.
	info  guestwire.ProcessInfo // the part that stays
	err   error                 // why it could not be started
	grace time.Duration
	out   *output.Buffer
	child *child
	input *input   // nil without standard input
	term  *os.File // the master of its terminal, or nil

	// mu guards the fields below.
	mu       sync.Mutex
	tree     tree
	open     int     // streams that have not reached their end
	busy     int     // chunks on their way into the buffer, which may wait for a holder
	sources  []drain // what pumps read
	last     time.Time
	ended    time.Time
	exit     exit
	cause    guestwire.End // set when we end it: EndTimedOut or EndCanceled
	killing  bool          // the tree's end is under way
	leftover int
	complete bool
	timeout  *time.Timer
}

// snapshot returns the state as the wire tells it.
func (p *process) snapshot() guestwire.ProcessInfo {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := p.info
	i.Bytes, i.Dropped = p.out.Sizes()
	if p.ended.IsZero() {
		return i
	}
	i.Ended = p.ended.UnixNano()
	i.Complete = p.complete
	i.Leftover = p.leftover
	st := p.exit.status
	if st.Signaled() {
		i.Signal = int(st.Signal())
	}
	switch {
	case p.cause != guestwire.EndNone:
		i.End = p.cause
	case st.Exited():
		i.End, i.Code = guestwire.EndExited, st.ExitStatus()
	case st.Signaled():
		i.End = guestwire.EndSignaled
	default:
		i.End = guestwire.EndLost
	}
	u := p.exit.usage
	i.UserMS, i.SystemMS = u.Utime.Nano()/1e6, u.Stime.Nano()/1e6
	i.MaxRSS = u.Maxrss << 10
	return i
}

// family returns the process and all that descends from it.
func (p *process) family() tree {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.tree
}

// hasEnded is called by the reaper: it must not block.
func (p *process) hasEnded(e exit) {
	p.mu.Lock()
	p.ended, p.exit = time.Now(), e
	p.oweLocked()
	if p.timeout != nil {
		p.timeout.Stop()
	}
	kill := p.cause != guestwire.EndNone && !p.killing
	if kill {
		p.killing = true
	}
	p.mu.Unlock()
	if p.input != nil {
		p.input.end()
	}
	if kill {
		// It ended by our SIGTERM: what is left of its tree goes at once.
		go p.killTree()
		return
	}
	p.settle()
}

// killTree ends everything that belongs to the process. The caller has set killing.
func (p *process) killTree() {
	_ = p.family().kill()
	p.mu.Lock()
	p.killing = false
	p.mu.Unlock()
	p.settle()
}

// settle completes the output when its time has come, and else looks again later.
func (p *process) settle() {
	p.mu.Lock()
	wait, due := p.settleLocked()
	if due {
		p.complete = true // nobody else gets here
		p.sources = nil
	}
	p.mu.Unlock()
	if due {
		p.finish()
	} else if wait > 0 {
		time.AfterFunc(wait, p.settle)
	}
}

// settleLocked returns whether the output is complete, and else when to look again; 0 means that
// something else will call settle.
func (p *process) settleLocked() (wait time.Duration, due bool) {
	switch {
	case p.complete || p.ended.IsZero() || p.killing:
		return 0, false
	case p.open == 0:
		return 0, true
	case p.busy > 0:
		return quietGrace, false // a holder is still taking what is there
	}
	since := p.last
	if since.Before(p.ended) {
		since = p.ended
	}
	now := time.Now()
	quiet := quietGrace - now.Sub(since)
	late := lateGrace - now.Sub(p.ended)
	// Silent is only what has nothing to tell. One that goes on printing, as a daemon may, is cut off when
	// it is late, but not before all is there that came before the end.
	if quiet <= 0 && (late > 0 || since == p.ended) && p.unreadLocked(false) || late <= 0 && p.unreadLocked(true) {
		return lookAgain, false
	}
	wait = min(quiet, late)
	return wait, wait <= 0
}

// finish makes the end known.
func (p *process) finish() {
	p.mu.Lock()
	alone := p.exit.alone
	p.mu.Unlock()
	if alone {
		p.empty()
	} else {
		p.recount()
	}
	p.out.Finish()
	close(p.done)
	p.table.note(p)
}

// recount notes how many processes of the tree live on, and lets go of the tree when none does.
func (p *process) recount() int {
	pids, err := p.family().pids()
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		// Who takes a tree for empty gives its scope to another process. What can't be told is taken to live.
		if !errors.Is(err, os.ErrClosed) {
			p.leftover = max(p.leftover, 1)
		}
		return p.leftover
	}
	p.leftover = len(pids)
	if p.leftover == 0 {
		p.emptyLocked()
	}
	return p.leftover
}

// empty lets go of the tree, in which nothing lives any more.
func (p *process) empty() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.emptyLocked()
}

func (p *process) emptyLocked() {
	p.leftover = 0
	p.tree.close()
	p.tree = emptyTree{}
}

// emptyTree is what is left of a tree when all of it has ended.
type emptyTree struct{}

func (emptyTree) pids() ([]int, error) { return nil, nil }
func (emptyTree) kill() error          { return nil }
func (emptyTree) close()               {}

// expire is called when the time limit is over.
func (p *process) expire() {
	p.mu.Lock()
	if !p.ended.IsZero() || p.cause != guestwire.EndNone {
		p.mu.Unlock()
		return
	}
	p.cause = guestwire.EndTimedOut
	p.timeout = time.AfterFunc(p.grace, p.expireHard)
	t := p.tree
	p.mu.Unlock()
	_ = signalTree(t, unix.SIGTERM)
}

// expireHard is called when the grace is over and the process still runs.
func (p *process) expireHard() {
	p.mu.Lock()
	kill := p.ended.IsZero() && !p.killing
	if kill {
		p.killing = true
	}
	p.mu.Unlock()
	if kill {
		p.killTree()
	}
}

// signal sends a signal to the process, or to its whole tree.
func (p *process) signal(sig unix.Signal, whole bool) error {
	if !whole {
		return p.child.signal(sig)
	}
	p.mu.Lock()
	t, cancel := p.tree, sig == unix.SIGKILL && !p.killing
	if cancel {
		if p.ended.IsZero() && p.cause == guestwire.EndNone {
			p.cause = guestwire.EndCanceled
		}
		p.killing = !p.complete
	}
	p.mu.Unlock()
	if sig != unix.SIGKILL {
		return signalTree(t, sig)
	}
	if cancel {
		p.killTree()
		p.recountEnded()
	}
	return nil
}

// recountEnded brings the leftover count up to date where the end is known already.
func (p *process) recountEnded() {
	select {
	case <-p.done:
		p.recount()
		p.table.note(p)
	default:
	}
}

func (p *process) resize(rows, cols uint16) error {
	if p.term == nil {
		return errs.New(errs.FailedPrecondition, "process %s has no terminal", p.id)
	}
	return pty.Resize(p.term, rows, cols)
}

// forget lets go of everything. The process must be complete.
func (p *process) forget() {
	p.family().close()
	p.out.Drop()
}
