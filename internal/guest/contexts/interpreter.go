package contexts

import (
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
)

// maxStray bounds what is kept of what was printed between two runs.
const maxStray = 64 << 10

// interpreter is one context.
type interpreter struct {
	set    *Set
	id     string
	req    guestwire.CreateContext
	place  Place         // set before ready is closed
	ready  chan struct{} // closed when it has come up, or failed to
	failed error         // set before ready is closed
	// life is held, by a token in it, by what ends or replaces the driver.
	life chan struct{}
	// forks is set for a zygote, and zygote for a fork.
	forks  *forks
	zygote *interpreter

	// mu guards the fields below.
	mu      sync.Mutex
	info    guestwire.ContextInfo
	driver  *running // nil while there is none
	current *run     // what the driver executes
	queue   []*run
	runs    map[string]*run
	order   []*run        // oldest first
	stray   []item        // printed while nothing ran
	strayed int           // bytes of it
	changed chan struct{} // closed at the next change of the driver
	deleted bool
}

func newInterpreter(s *Set, r guestwire.CreateContext, zygote *interpreter) *interpreter {
	c := &interpreter{
		set: s, id: r.ID, req: r, zygote: zygote, ready: make(chan struct{}), life: make(chan struct{}, 1),
		runs: make(map[string]*run), changed: make(chan struct{}),
		info: guestwire.ContextInfo{
			ID: r.ID, Language: r.Language, Zygote: r.Zygote, Fork: zygote != nil, State: guestwire.ContextStarting, Created: time.Now().UnixNano(),
		},
	}
	if r.Zygote {
		c.forks = newForks(c)
	}
	return c
}

func (c *interpreter) snapshot() guestwire.ContextInfo {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := c.info
	i.Queued = len(c.queue)
	if i.State == guestwire.ContextIdle && c.current != nil {
		i.State, i.Run = guestwire.ContextBusy, c.current.id
	}
	return i
}

// launch starts a driver and waits until it is ready. The caller holds life, or is create.
func (c *interpreter) launch() error {
	d := c.starting()
	started, err := c.set.cfg.Launcher.Launch(&c.req, c.place, d.ended)
	c.began(d, started, err)
	if err != nil {
		return err
	}
	return c.comeUp(d)
}

// starting makes the entry of a driver that is to be started.
func (c *interpreter) starting() *running {
	d := newRunning(c)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.info.State = guestwire.ContextStarting
	c.info.End, c.info.Code, c.info.Signal = "", 0, 0
	c.driver = d
	return d
}

// began follows a driver that was started, unless err says that it was not.
func (c *interpreter) began(d *running, started *Driver, err error) {
	c.mu.Lock()
	if err != nil {
		c.driver = nil
		c.info.State, c.info.End = guestwire.ContextEnded, guestwire.EndFailed
		c.mu.Unlock()
		return
	}
	c.info.PID, c.info.Dir, c.info.User = started.PID, started.Dir, started.User
	c.info.Started = time.Now().UnixNano()
	c.info.Starts++
	c.mu.Unlock()
	d.begin(started)
}

// comeUp waits until a driver is ready.
func (c *interpreter) comeUp(d *running) error {
	limit := defaultStart
	if c.req.StartMS > 0 {
		limit = time.Duration(c.req.StartMS) * time.Millisecond
	}
	late := time.NewTimer(limit)
	defer late.Stop()
	select {
	case <-d.up:
		if c.forks != nil {
			return c.forks.prepare(d, late.C)
		}
		return c.entered(d)
	case <-d.over:
		return errs.New(errs.FailedPrecondition, "the %s interpreter ended while it started: %s", c.req.Language, c.lastWords(d)).
			WithHint("is %s installed in the sandbox?", c.req.Language)
	case <-late.C:
		d.kill("")
		<-d.over
		return errs.New(errs.DeadlineExceeded, "the %s interpreter was not ready within %s", c.req.Language, limit)
	}
}

// entered ends a fork that says that it is ready but is not in its place: its descendants would be
// nobody's.
func (c *interpreter) entered(d *running) error {
	if c.zygote == nil {
		return nil
	}
	err := c.set.cfg.Launcher.Entered(d.d.PID, c.place)
	if err == nil {
		return nil
	}
	d.kill("")
	<-d.over
	return errs.Wrap(err, errs.Internal, "the fork is not in its place: %v", err)
}

// lastWords tells how a driver ended and what it printed.
func (c *interpreter) lastWords(d *running) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	text := describe(d.exit)
	var said []byte
	for _, it := range c.stray {
		said = append(said, it.data...)
	}
	const most = 600
	if len(said) > most {
		said = said[len(said)-most:]
	}
	if len(said) > 0 {
		text += ": " + guestwire.Escape(string(said))
	}
	return text
}

// becameReady is called when a driver is ready.
func (c *interpreter) becameReady(d *running, m message) {
	c.mu.Lock()
	if c.driver != d || d.isUp {
		c.mu.Unlock()
		return
	}
	d.isUp, d.hears = true, m.Answers
	c.info.State, c.info.Version = guestwire.ContextIdle, m.Version
	close(d.up)
	c.mu.Unlock()
	c.next(d)
}

// submit queues a run, or finds the one that has its id.
func (c *interpreter) submit(r guestwire.RunCode, code string) (*run, bool, error) {
	c.mu.Lock()
	if known := c.runs[r.ID]; known != nil {
		c.mu.Unlock()
		return known, true, nil
	}
	if err := c.refusalLocked(); err != nil {
		c.mu.Unlock()
		return nil, false, err
	}
	n := newRun(c, r, code)
	c.runs[n.id] = n
	c.order = append(c.order, n)
	c.queue = append(c.queue, n)
	c.info.Runs++
	c.forgetLocked()
	d := c.driver
	c.mu.Unlock()
	if d != nil {
		c.next(d)
	}
	return n, false, nil
}

func (c *interpreter) refusalLocked() error {
	switch {
	case c.deleted:
		return errs.New(errs.NotFound, "no such context: %s", quote(c.id))
	case c.info.State == guestwire.ContextEnded:
		return errs.New(errs.FailedPrecondition, "the interpreter of context %s has ended (%s)", quote(c.id),
			describe(Exit{End: c.info.End, Code: c.info.Code, Signal: c.info.Signal})).WithHint("restart the context")
	case c.forks != nil:
		return errs.New(errs.FailedPrecondition, "context %s is there to be forked, and runs nothing itself", quote(c.id))
	case c.zygote != nil && c.info.Runs > 0:
		return errs.New(errs.FailedPrecondition, "context %s has had its one run", quote(c.id))
	case len(c.queue) >= guestwire.MaxQueued:
		return errs.New(errs.ResourceExhausted, "%d runs wait in context %s already", len(c.queue), quote(c.id)).
			WithHint("use another context, or wait")
	}
	return nil
}

// forgetLocked drops the oldest ended runs beyond guestwire.KeepRuns.
func (c *interpreter) forgetLocked() {
	for i := 0; len(c.order) > guestwire.KeepRuns+guestwire.MaxQueued && i < len(c.order); {
		r := c.order[i]
		if r.info.End == guestwire.RunNone {
			i++
			continue
		}
		delete(c.runs, r.id)
		c.order = append(c.order[:i], c.order[i+1:]...)
		r.log.drop()
	}
}

// next hands the next run over, where the driver is ready and has none.
func (c *interpreter) next(d *running) {
	c.mu.Lock()
	if c.driver != d || !d.isUp || c.current != nil || len(c.queue) == 0 {
		c.mu.Unlock()
		return
	}
	r := c.queue[0]
	c.queue[0] = nil
	c.queue = c.queue[1:]
	c.current = r
	r.info.Began = time.Now().UnixNano()
	stray := c.stray
	c.stray, c.strayed = nil, 0
	if r.timeout > 0 {
		r.timer = time.AfterFunc(r.timeout, func() { c.expire(d, r) })
	}
	code := r.code
	r.code = ""
	c.mu.Unlock()
	for _, it := range stray {
		r.log.append(it.kind, it.data)
	}
	d.give(r, code)
}

// executing returns the run that executes, nil for none.
func (c *interpreter) executing(d *running) *run {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.driver != d {
		return nil
	}
	return c.current
}

// said takes what a driver printed.
func (c *interpreter) said(d *running, kind guestwire.ItemKind, data []byte) {
	if len(data) == 0 {
		return
	}
	if r := c.executing(d); r != nil && r.log.append(kind, data) {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if n := min(len(data), maxStray-c.strayed); n > 0 && c.driver == d {
		c.stray = append(c.stray, item{kind: kind, data: append([]byte(nil), data[:n]...)})
		c.strayed += n
	}
}

// told takes a message of a driver. line is kept.
func (c *interpreter) told(d *running, m message, line []byte) {
	switch m.Ev {
	case evReady:
		c.becameReady(d, m)
		return
	case evZygote, evForked, evReaped:
		if c.forks != nil {
			c.forks.answered(m)
		}
		return
	}
	r := c.executing(d)
	if r == nil || m.ID != r.id {
		return // of a run that is over, or none of ours
	}
	if kind := itemOf(m.Ev); kind != 0 {
		if m.Ev == evError {
			c.mu.Lock()
			r.raised, r.info.Name, r.info.Value = true, m.Name, m.Value
			c.mu.Unlock()
		}
		r.log.append(kind, line)
		return
	}
	if m.Ev == evInterrupted {
		c.mu.Lock()
		r.unheard = false
		c.mu.Unlock()
	}
	if m.Ev == evEnd {
		c.mu.Lock()
		r.info.Count = m.Count
		c.endLocked(r, r.ending())
		c.mu.Unlock()
		r.ended()
		c.next(d)
	}
}

// endLocked notes the end of a run; ended makes it known.
func (c *interpreter) endLocked(r *run, end guestwire.RunEnd) {
	if r.info.End != guestwire.RunNone {
		return
	}
	r.info.End, r.info.Ended = end, time.Now().UnixNano()
	if r.timer != nil {
		r.timer.Stop()
	}
	if c.current == r {
		c.current = nil
	}
}

// expire is called when the time of a run is over: it is interrupted, and its driver killed where that
// does not help.
func (c *interpreter) expire(d *running, r *run) {
	c.mu.Lock()
	if c.current != r || c.driver != d {
		c.mu.Unlock()
		return
	}
	if r.cause == guestwire.RunTimedOut {
		c.mu.Unlock()
		d.kill(guestwire.RunTimedOut)
		return
	}
	r.cause = guestwire.RunTimedOut
	r.timer = time.AfterFunc(r.grace, func() { c.expire(d, r) })
	_ = d.interrupt(r)
	c.mu.Unlock()
}

// interrupt interrupts the run that executes, or takes one that waits out of the queue.
func (c *interpreter) interrupt(id string) (string, error) {
	c.mu.Lock()
	if r := c.current; r != nil && (id == "" || r.id == id) {
		defer c.mu.Unlock()
		if r.cause == guestwire.RunNone {
			r.cause = guestwire.RunInterrupted
		}
		if c.driver == nil {
			return r.id, nil
		}
		return r.id, c.driver.interrupt(r)
	}
	for i, r := range c.queue {
		if r.id == id {
			c.queue = append(c.queue[:i], c.queue[i+1:]...)
			c.endLocked(r, guestwire.RunInterrupted)
			c.mu.Unlock()
			r.ended()
			return r.id, nil
		}
	}
	defer c.mu.Unlock()
	if id != "" && c.runs[id] == nil {
		return "", errs.New(errs.NotFound, "no such run: %s", quote(id))
	}
	return "", nil
}

// driverEnded is called once everything of a driver is gone.
func (c *interpreter) driverEnded(d *running) {
	c.mu.Lock()
	if c.driver != d {
		c.mu.Unlock()
		return
	}
	c.driver = nil
	e := d.exit
	c.info.State, c.info.PID = guestwire.ContextEnded, 0
	c.info.End, c.info.Code, c.info.Signal = e.End, e.Code, e.Signal
	var over []*run
	if r := c.current; r != nil {
		end := guestwire.RunLost
		switch {
		case d.cause != guestwire.RunNone:
			end = d.cause
		case r.cause == guestwire.RunTimedOut:
			end = r.cause
		}
		r.info.Driver, r.info.Code, r.info.Signal = e.End, e.Code, e.Signal
		over = append(over, r)
		c.endLocked(r, end)
	}
	end := guestwire.RunLost
	if d.cause == guestwire.RunCanceled {
		end = d.cause
	}
	for _, r := range c.queue {
		r.info.Driver, r.info.Code, r.info.Signal = e.End, e.Code, e.Signal
		c.endLocked(r, end)
		over = append(over, r)
	}
	c.queue = nil
	c.changedLocked()
	c.mu.Unlock()
	for _, r := range over {
		r.ended()
	}
}

func (c *interpreter) changedLocked() {
	close(c.changed)
	c.changed = make(chan struct{})
}

// restart ends the driver, if there is one, and starts another.
func (c *interpreter) restart() (guestwire.ContextInfo, error) {
	c.life <- struct{}{}
	defer func() { <-c.life }()
	c.mu.Lock()
	gone := c.deleted
	d := c.driver
	c.mu.Unlock()
	if gone {
		return guestwire.ContextInfo{}, errs.New(errs.NotFound, "no such context: %s", quote(c.id))
	}
	if c.zygote != nil {
		return guestwire.ContextInfo{}, errs.New(errs.FailedPrecondition, "context %s is for one run, and has no other interpreter", quote(c.id))
	}
	if d != nil {
		d.kill(guestwire.RunCanceled)
		<-d.over
	}
	c.mu.Lock()
	c.stray, c.strayed = nil, 0
	c.mu.Unlock()
	if err := c.launch(); err != nil {
		return guestwire.ContextInfo{}, err
	}
	return c.snapshot(), nil
}

// delete ends the context for good.
func (c *interpreter) delete() {
	c.life <- struct{}{}
	defer func() { <-c.life }()
	c.mu.Lock()
	c.deleted = true
	d := c.driver
	leaving := c.spentLocked()
	c.mu.Unlock()
	if d != nil && leaving {
		d.await(leaveLimit)
	}
	if d != nil {
		d.kill(guestwire.RunCanceled)
		<-d.over
	}
	c.place.Close()
	c.mu.Lock()
	c.changedLocked()
	runs := c.order
	c.mu.Unlock()
	for _, r := range runs {
		r.log.drop()
	}
}

// spent reports whether a fork has had its run.
func (c *interpreter) spent() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.spentLocked()
}

func (c *interpreter) spentLocked() bool {
	return c.zygote != nil && c.info.Runs > 0 && c.current == nil && len(c.queue) == 0
}

// wait returns a channel that is closed when the driver number starts is not the running one any more.
func (c *interpreter) wait(starts int64) (<-chan struct{}, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	over := c.deleted || c.info.Starts != starts || c.info.State == guestwire.ContextEnded
	return c.changed, over
}

// find returns a run.
func (c *interpreter) find(id string) (*run, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if r := c.runs[id]; r != nil {
		return r, nil
	}
	return nil, errs.New(errs.NotFound, "no such run: %s", quote(id))
}

// allRuns returns the runs that are remembered, oldest first.
func (c *interpreter) allRuns() []*run {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]*run(nil), c.order...)
}

// interruptSignal is what stops a cell.
const interruptSignal = unix.SIGINT
