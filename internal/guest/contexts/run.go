package contexts

import (
	"time"

	"casemate.dev/internal/guestwire"
)

// run is one execution of code.
type run struct {
	c       *interpreter
	id      string
	env     map[string]string
	timeout time.Duration
	grace   time.Duration
	log     *log
	done    chan struct{} // closed once the end is known and nothing more is said

	// What follows is guarded by c.mu.
	code   string // until it is handed over
	info   guestwire.RunInfo
	raised bool
	cause  guestwire.RunEnd // set where it is interrupted or out of time
	timer  *time.Timer
	// unheard is set while an interrupt is under way that the driver answers; repeats counts how often it
	// was sent again.
	unheard bool
	repeats int
}

func newRun(c *interpreter, r guestwire.RunCode, code string) *run {
	n := &run{
		c: c, id: r.ID, env: r.Env, code: code, done: make(chan struct{}),
		timeout: time.Duration(r.TimeoutMS) * time.Millisecond, grace: defaultGrace,
		log:  c.set.pool.newLog(r.Buffer),
		info: guestwire.RunInfo{ID: r.ID, Context: c.id, Queued: time.Now().UnixNano()},
	}
	if r.GraceMS > 0 {
		n.grace = time.Duration(r.GraceMS) * time.Millisecond
	}
	return n
}

// ending says how a run ended whose driver said that it did; c.mu is held.
func (r *run) ending() guestwire.RunEnd {
	switch {
	case r.cause == guestwire.RunTimedOut:
		return r.cause // also where the code took no notice and came to its end
	case r.cause != guestwire.RunNone && r.raised:
		return r.cause
	case r.raised:
		return guestwire.RunFailed
	}
	return guestwire.RunCompleted
}

// ended makes the end known. It is called once, after endLocked.
func (r *run) ended() {
	r.log.finish()
	close(r.done)
}

func (r *run) snapshot() guestwire.RunInfo {
	r.c.mu.Lock()
	i := r.info
	r.c.mu.Unlock()
	i.Items, i.Dropped = r.log.sizes()
	return i
}
