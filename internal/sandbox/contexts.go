package sandbox

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"casemate.dev/internal/codecontext/drivers"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/id"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/journal"
)

// codeContext is one context of a box.
type codeContext struct {
	id    string
	box   *box
	actor string
	pool  *freshPool // of a fork that this server has made
	fork  bool

	// started is closed once the guest has answered; failed then says whether it was refused.
	started chan struct{}
	failed  error

	// What follows is guarded by box.mu.
	scope isolation.Scope // nil once closed
	info  guestwire.ContextInfo
	runs  map[string]*codeRun
	order []*codeRun // oldest first
	// over is the number of the last interpreter whose end is recorded, end how that was, and known is closed
	// once end tells it.
	over  int64
	end   guestwire.ContextInfo
	known chan struct{}
	gone  bool // deleted
	left  bool // taken out of the box: nothing begins in it
	fell  bool // with its sandbox, which may run again, with another context of that id
}

// scopePrefix begins the names of contexts' control groups, which stand beside those of processes.
const scopePrefix = "ctx--"

// maxContextID leaves room for the prefix in the name of a control group.
const maxContextID = 48

// contextID reports whether s can name a context.
func contextID(s string) bool { return len(s) <= maxContextID && processID(s) }

// runID reports whether s can name a run.
func runID(s string) bool { return processID(s) }

// CreateContext starts an interpreter and returns when it is ready. Creating an id that exists attaches
// to that context. Kinds: InvalidArgument (language, user), NotFound (the language is not installed,
// directory, user), ResourceExhausted (contexts, memory), FailedPrecondition (it did not come up),
// DeadlineExceeded (the start timeout).
func (m *Manager) CreateContext(ctx context.Context, p Principal, ref string, s CodeContextSpec) (CodeContext, error) {
	d, err := checkContext(&s)
	if err != nil {
		return CodeContext{}, err
	}
	b, err := m.use(ctx, p, ref)
	if err != nil {
		return CodeContext{}, err
	}
	defer m.done(b)
	c, attached, err := m.createContext(ctx, p, b, s, d)
	if err != nil {
		return CodeContext{}, err
	}
	out := c.snapshot()
	out.Attached = attached
	return out, nil
}

func checkContext(s *CodeContextSpec) (drivers.Driver, error) {
	d, err := drivers.Find(or(s.Language, defaultLanguage))
	if err != nil {
		return d, err
	}
	s.Language = d.Language
	var c checker
	c.that(s.ID == "" || contextID(s.ID), "use letters, digits, - and _, at most 48", "context id %s is malformed", quote(s.ID))
	c.env(s.Env)
	c.user(s.User)
	c.that(len(s.Dir) < maxPath && !strings.Contains(s.Dir, "\x00"), "", "dir is longer than %d bytes or holds a NUL byte", maxPath-1)
	c.that(s.StartTimeout >= 0 && s.StartTimeout <= time.Hour, "use at most 1h", "start timeout is %s", s.StartTimeout)
	return d, c.err
}

// createContext makes the context, or finds the one that has its id.
func (m *Manager) createContext(ctx context.Context, p Principal, b *box, s CodeContextSpec, d drivers.Driver) (_ *codeContext, attached bool, err error) {
	s.ID = or(s.ID, id.New(id.Context))
	c := &codeContext{id: s.ID, box: b, actor: p.actor(b.id), started: make(chan struct{}), runs: make(map[string]*codeRun)}
	b.mu.Lock()
	if other := b.codes[s.ID]; other != nil {
		b.mu.Unlock()
		return other, true, other.await(ctx)
	}
	if b.lastingLocked() >= guestwire.MaxContexts {
		b.mu.Unlock()
		return nil, false, errs.New(errs.ResourceExhausted, "the sandbox has its %d contexts already", guestwire.MaxContexts).
			WithHint("delete one that is not needed")
	}
	if b.codes == nil {
		b.codes = make(map[string]*codeContext)
	}
	b.codes[s.ID] = c
	b.mu.Unlock()
	// As a process's start, it does not depend on the caller's staying.
	err = m.startContext(context.WithoutCancel(ctx), c, s, d)
	if err != nil {
		c.failed = err
		c.drop()
	}
	close(c.started)
	return c, false, err
}

// lastingLocked returns how many contexts there are beside forks.
func (b *box) lastingLocked() int {
	n := 0
	for _, c := range b.codes {
		if !c.fork {
			n++
		}
	}
	return n
}

// warm starts the contexts that a new sandbox is to have, and waits for none. One that does not come up is
// no fault of the sandbox: its first use tries again, and tells why.
func (m *Manager) warm(p Principal, b *box) {
	b.mu.Lock()
	specs, languages := b.warm, b.body.Plan.Contexts
	b.mu.Unlock()
	if specs == nil {
		for _, language := range languages {
			specs = append(specs, CodeContextSpec{ID: language, Language: language})
		}
	}
	for _, s := range specs {
		m.background(func() {
			d, err := checkContext(&s)
			if err == nil {
				_, _, err = m.createContext(m.ctx, p, b, s, d)
			}
			if err != nil && b.running() {
				m.log.Warn("cannot start a context ahead of its use", "sandbox", b.id, "context", s.ID, "error", err)
			}
		})
	}
}

// await waits until another call has started the context.
func (c *codeContext) await(ctx context.Context) error {
	select {
	case <-c.started:
		return c.failed
	case <-ctx.Done():
		return ctx.Err()
	}
}

const (
	// startDefault is how long an interpreter may take to come up, and startSlack what a guest may take
	// beyond that.
	startDefault = 30 * time.Second
	startSlack   = 5 * time.Second
)

func (m *Manager) startContext(ctx context.Context, c *codeContext, s CodeContextSpec, d drivers.Driver) error {
	b := c.box
	scope, err := b.inst.NewScope(ctx, scopePrefix+c.id)
	if err != nil {
		return errs.Wrap(err, errs.KindOf(err), "cannot make the context's control group")
	}
	b.mu.Lock()
	c.scope = scope
	b.mu.Unlock()
	limit := or(s.StartTimeout, startDefault)
	ctx, cancel := context.WithTimeoutCause(ctx, limit+startSlack, errs.New(errs.DeadlineExceeded,
		"the guest did not answer within %s", limit+startSlack))
	defer cancel()
	info, err := b.guest.CreateContext(ctx, guestwire.CreateContext{
		ID: c.id, Language: d.Language, Argv: d.Argv, Env: s.Env, Dir: s.Dir, User: s.User,
		Driver: string(d.Source), CodeFile: d.CodeFile, StartMS: limit.Milliseconds(), Scope: scope.Layout(),
		Zygote: s.zygote, Imports: s.imports,
	}, scope.Files())
	if err != nil {
		err = cause(ctx, err)
		if !refusal(err) {
			// Neither yes nor no: what may have come up goes, so that nothing runs unknown.
			kctx, kcancel := context.WithTimeout(context.WithoutCancel(m.ctx), m.cfg.Defaults.Stop)
			_ = scope.Kill(kctx)
			kcancel()
		}
		if len(d.Argv) > 0 && errs.Is(err, errs.NotFound) && strings.Contains(err.Error(), d.Argv[0]) {
			err = errs.Wrap(err, errs.NotFound, "the sandbox has no %s, which contexts in %s need", or(d.Needs, d.Argv[0]), d.Language).
				WithHint("use a template that has it, or install it")
		}
		return err
	}
	info = believedContext(info)
	b.mu.Lock()
	defer b.mu.Unlock()
	if c.left { // the sandbox ended meanwhile
		return c.lostLocked()
	}
	c.info = info
	m.recordContext(c, journal.ContextCreated, c.actor, contextFacts{
		Context: c.id, Language: d.Language, Dir: s.Dir, User: s.User, Env: names(s.Env), Imports: s.imports,
	}, info)
	m.background(func() { m.watchContext(c, info.Starts) })
	return nil
}

// believedContext bounds what a guest says of a context.
func believedContext(i guestwire.ContextInfo) guestwire.ContextInfo {
	i.Version, i.Dir, i.User, i.Language = cut(i.Version), cut(i.Dir), cut(i.User), cut(i.Language)
	switch i.State {
	case guestwire.ContextStarting, guestwire.ContextIdle, guestwire.ContextBusy:
		i.End, i.Code, i.Signal = "", 0, 0
	default:
		i.State = guestwire.ContextEnded
		i.End = believedExit(i.End, i.Signal)
	}
	if !runID(i.Run) {
		i.Run = ""
	}
	return i
}

// believedExit returns the end of a driver that a guest may tell of.
func believedExit(e End, signal int) End {
	switch e {
	case EndExited, EndFailed:
		return e
	case EndSignaled:
		if signal > 0 && signal <= maxSignal {
			return e
		}
	}
	return EndProcessLost
}

// context returns a context that has come up.
func (m *Manager) context(ctx context.Context, b *box, contextID string) (*codeContext, error) {
	b.mu.Lock()
	c := b.codes[contextID]
	b.mu.Unlock()
	if c == nil || c.await(ctx) != nil {
		return nil, errs.New(errs.NotFound, "no context %s in sandbox %s", quote(contextID), b.id).
			WithHint("list the sandbox's contexts")
	}
	return c, nil
}

// snapshot returns the context as it was last told.
func (c *codeContext) snapshot() CodeContext {
	c.box.mu.Lock()
	defer c.box.mu.Unlock()
	return c.snapshotLocked()
}

func (c *codeContext) snapshotLocked() CodeContext {
	i := c.info
	if i.State == guestwire.ContextEnded && c.over == i.Starts {
		i.End = c.end.End // with what the kernel knows of it
	}
	return CodeContext{
		ID: c.id, SandboxID: c.box.id, Language: i.Language, Version: i.Version, Dir: i.Dir, User: i.User, PID: i.PID,
		State: i.State, CreatedAt: timeOf(i.Created), StartedAt: timeOf(i.Started), Starts: i.Starts, Runs: i.Runs,
		Queued: i.Queued, Run: i.Run, End: i.End, Code: i.Code, Signal: i.Signal,
	}
}

// ListContexts returns the contexts of a sandbox, the oldest first.
func (m *Manager) ListContexts(ctx context.Context, p Principal, ref string) ([]CodeContext, error) {
	b, stopped, err := m.resolve(ctx, p, ref)
	if err != nil {
		return nil, err
	}
	if b == nil {
		return nil, &TransitionError{ID: stopped.ID, From: stopped.State}
	}
	if err := b.settled(ctx); err != nil {
		return nil, err
	}
	if err := m.refreshContexts(ctx, b); err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	all := make([]CodeContext, 0, len(b.codes))
	for _, c := range b.codes {
		if c.info.ID != "" && !hidden(c.info) {
			all = append(all, c.snapshotLocked())
		}
	}
	slices.SortFunc(all, func(a, b CodeContext) int {
		return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), strings.Compare(a.ID, b.ID))
	})
	return all, nil
}

// refreshContexts asks the guest how the contexts are.
func (m *Manager) refreshContexts(ctx context.Context, b *box) error {
	b.mu.Lock()
	ask := b.guest != nil && len(b.codes) > 0 && (b.sb.State == Running || b.sb.State == Paused)
	b.mu.Unlock()
	if !ask {
		return nil
	}
	ctx, cancel := m.prompt(ctx, b.guest)
	defer cancel()
	infos, err := b.guest.Contexts(ctx)
	if err != nil {
		return cause(ctx, err)
	}
	for c, info := range b.told(infos) {
		m.contextEnded(c, info.Starts, info)
	}
	return nil
}

// told takes what the guest says of the contexts, and returns those whose interpreter has ended: whoever looks may learn
// of that before who waits for it does, and what follows must not come before its record.
func (b *box) told(infos []guestwire.ContextInfo) map[*codeContext]guestwire.ContextInfo {
	ended := map[*codeContext]guestwire.ContextInfo{}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, info := range infos {
		c := b.codes[info.ID]
		if c == nil || c.info.ID == "" || info.Starts < c.info.Starts {
			continue
		}
		info = believedContext(info)
		if info.State == guestwire.ContextEnded && info.Starts == c.info.Starts { // else its start is not recorded yet
			ended[c] = info
		}
		c.info = info
	}
	return ended
}

// GetContext returns one context.
func (m *Manager) GetContext(ctx context.Context, p Principal, ref, contextID string) (CodeContext, error) {
	all, err := m.ListContexts(ctx, p, ref)
	if err != nil {
		return CodeContext{}, err
	}
	for _, c := range all {
		if c.ID == contextID {
			return c, nil
		}
	}
	return CodeContext{}, errs.New(errs.NotFound, "no context %s in sandbox %s", quote(contextID), quote(ref)).
		WithHint("list the sandbox's contexts")
}

// RestartContext gives a context a new interpreter, whatever it is doing, and returns when that is
// ready. What ran or waited is canceled.
func (m *Manager) RestartContext(ctx context.Context, p Principal, ref, contextID string) (CodeContext, error) {
	b, err := m.use(ctx, p, ref)
	if err != nil {
		return CodeContext{}, err
	}
	defer m.done(b)
	c, err := m.context(ctx, b, contextID)
	if err != nil {
		return CodeContext{}, err
	}
	if err := m.refreshContexts(ctx, b); err != nil { // an end that nobody has heard of yet is recorded first
		return CodeContext{}, err
	}
	rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), startDefault+2*startSlack)
	defer cancel()
	info, err := b.guest.RestartContext(rctx, c.id)
	if err != nil {
		return CodeContext{}, cause(rctx, err)
	}
	info = believedContext(info)
	b.mu.Lock()
	defer b.mu.Unlock()
	if c.left {
		return CodeContext{}, c.lostLocked()
	}
	c.info = info
	m.recordContext(c, journal.ContextRestarted, p.actor(b.id), contextFacts{Context: c.id, Language: info.Language}, info)
	m.background(func() { m.watchContext(c, info.Starts) })
	return c.snapshotLocked(), nil
}

// lostLocked is why nothing can begin in a context that was taken out of its box.
func (c *codeContext) lostLocked() error {
	if s := c.box.sb.State; s != Running {
		return &TransitionError{ID: c.box.id, From: s}
	}
	if c.fell {
		return errs.New(errs.Unavailable, "sandbox %s was stopped meanwhile", c.box.id).WithHint("try again")
	}
	return errs.New(errs.NotFound, "no context %s in sandbox %s any more", quote(c.id), c.box.id)
}

// DeleteContext ends a context and everything that descends from its interpreter.
func (m *Manager) DeleteContext(ctx context.Context, p Principal, ref, contextID string) error {
	b, err := m.use(ctx, p, ref)
	if err != nil {
		return err
	}
	defer m.done(b)
	c, err := m.context(ctx, b, contextID)
	if err != nil {
		return err
	}
	b.mu.Lock()
	c.gone = true // its end is a deletion, whoever tells of it first
	b.mu.Unlock()
	dctx, cancel := m.detached(ctx, b.guest)
	defer cancel()
	err = b.guest.DeleteContext(dctx, c.id)
	if err != nil && !errs.Is(err, errs.NotFound) {
		return cause(dctx, err)
	}
	m.endRuns(c, guestwire.RunCanceled)
	c.drop()
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.sb.State == Stopped {
		return nil // which is recorded, and nothing comes after it
	}
	m.recordContext(c, journal.ContextEnded, p.actor(b.id), contextFacts{Context: c.id, Reason: "deleted"}, guestwire.ContextInfo{})
	return nil
}

// drop takes a context out of its box.
func (c *codeContext) drop() {
	if scope := c.takeOut(false); scope != nil {
		_ = scope.Close() // what is left of it goes with the sandbox
	}
}

// watchContext waits for the end of one interpreter and records it.
func (m *Manager) watchContext(c *codeContext, starts int64) {
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		info, err := c.box.guest.WaitContext(m.ctx, guestwire.WaitContext{ID: c.id, Starts: starts})
		if err == nil {
			m.contextEnded(c, starts, believedContext(info))
			return
		}
		if errs.Is(err, errs.NotFound) {
			return // deleted
		}
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-c.box.ended:
			t.Stop()
			return
		case <-m.ctx.Done():
			t.Stop()
			return
		}
	}
}

// contextEnded records, once, that an interpreter has ended by itself, and returns how. info may tell
// of a later interpreter of the context: then this one was replaced, and its restart is recorded.
func (m *Manager) contextEnded(c *codeContext, starts int64, info guestwire.ContextInfo) End {
	b := c.box
	b.mu.Lock()
	if c.over >= starts || c.gone || info.Starts != starts || info.State != guestwire.ContextEnded {
		known := c.known
		b.mu.Unlock()
		if known != nil { // somebody may still be asking the kernel
			<-known
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		return c.end.End
	}
	known := make(chan struct{})
	c.over, c.known = starts, known
	b.mu.Unlock()
	kills, read := int64(0), false
	if info.End == EndSignaled && info.Signal == 9 {
		if kills, read = m.readOOM(b); kills > 0 {
			info.End = EndOOMKilled
		}
	}
	b.mu.Lock()
	c.end = info
	close(known)
	if c.info.Starts == starts {
		c.info = info
	}
	fork := c.info.Fork
	b.mu.Unlock()
	if fork {
		return info.End // its run's end tells
	}
	e := event(journal.ContextEnded, "", contextFacts{Context: c.id, Language: info.Language, Reason: "interpreter_ended", End: info.End}).
		With(journal.Guest, contextEndFacts{End: info.End, Code: info.Code, Signal: info.Signal})
	if read {
		e = e.With(journal.Kernel, kernelEndFacts{OOMKills: kills})
	}
	e.Sandbox = b.id
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.sb.State != Stopped { // else the end is recorded, and nothing comes after it
		m.journal.Post(e)
	}
	return info.End
}
