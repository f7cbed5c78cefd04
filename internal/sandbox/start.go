package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/id"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/store"
)

// proc is one process of a box that is alive, or one of the last that ended.
type proc struct {
	id    string
	box   *box
	actor string
	// asked is when its start was asked for: before it could do anything. Zero for one that an earlier
	// server started.
	asked time.Time

	// started is closed once the start is answered; failed then says whether it was refused.
	started chan struct{}
	answer  sync.Once
	failed  error
	// ended is closed once its end is recorded.
	ended chan struct{}
	// writing has a place for the one who writes to its input.
	writing chan struct{}

	// What follows is guarded by box.mu.
	info      Process
	scope     isolation.Scope // nil until it has started, and once closed
	finishing bool            // somebody records the end
	watched   bool            // a watcher waits for the end
	input     []byte          // what it is given right at its start
	stdin     given           // what it was given later
	left      bool            // it has ended, and some of its tree live on
}

// answered says that the start is answered. Idempotent.
func (pr *proc) answered() { pr.answer.Do(func() { close(pr.started) }) }

func (pr *proc) snapshot() Process {
	pr.box.mu.Lock()
	defer pr.box.mu.Unlock()
	return pr.info
}

// keepEnded is how many ended processes of a sandbox are kept in memory; older ones are read from
// the store. The guest keeps the output of about as many.
const keepEnded = 256

// StartProcess starts a process and returns once the guest has it; its end is recorded whether
// anybody waits or not. Starting an id that exists attaches to that process. Kinds: InvalidArgument,
// NotFound (sandbox, program, directory, user), PermissionDenied, FailedPrecondition (the sandbox is
// paused or stopped), ResourceExhausted, Conflict (idempotency key), Unavailable (the guest was lost;
// whether the process started is found out and recorded).
func (m *Manager) StartProcess(ctx context.Context, p Principal, ref string, s ProcessSpec, key string) (Process, error) {
	b, err := m.useFor(ctx, p, ref, &s, key)
	if err != nil {
		return Process{}, err
	}
	defer m.done(b)
	if key == "" {
		return m.startProcess(ctx, p, b, s)
	}
	processID, err := m.startOnce(ctx, p, b, s, nil, key, func(ctx context.Context, s ProcessSpec, w ...store.Write) error {
		_, err := m.startProcess(ctx, p, b, s, w...)
		return err
	})
	if err != nil {
		return Process{}, err
	}
	return m.process(ctx, b.id, processID)
}

// useFor checks a process spec and the sandbox that it is for.
func (m *Manager) useFor(ctx context.Context, p Principal, ref string, s *ProcessSpec, key string) (*box, error) {
	var c checker
	if err := c.process(s); err != nil {
		return nil, err
	}
	if err := checkKey(key); err != nil {
		return nil, err
	}
	return m.use(ctx, p, ref)
}

// startOnce runs start once for its key and returns the process's id.
func (m *Manager) startOnce(ctx context.Context, p Principal, b *box, s ProcessSpec, input []byte, key string,
	start func(context.Context, ProcessSpec, ...store.Write) error,
) (string, error) {
	asked := []any{s, input}
	s.ID = or(s.ID, id.New(id.Process))
	return m.once.do(ctx, m, request{
		principal: p.ID, scope: "process:" + b.id, key: key, body: asked,
		stale: func(ctx context.Context, answer string) (bool, error) {
			_, err := m.process(ctx, b.id, answer)
			if errs.Is(err, errs.NotFound) {
				return true, nil
			}
			return false, err
		},
		run: func(ctx context.Context, remember func(string) store.Write) (string, error) {
			return s.ID, start(ctx, s, remember(s.ID))
		},
	})
}

func (m *Manager) startProcess(ctx context.Context, p Principal, b *box, s ProcessSpec, with ...store.Write) (Process, error) {
	pr, scope, err := m.admit(ctx, p, b, &s)
	if err != nil {
		return Process{}, err
	}
	if scope == nil {
		return pr.attached(ctx)
	}
	// The start does not depend on the caller's staying: a start of which nobody knows whether it
	// happened is worse than one that was not needed.
	sctx, cancel := m.detached(ctx, b.guest)
	defer cancel()
	info, err := b.guest.Start(sctx, m.startRequest(pr, s, scope), scope.Files())
	if err != nil {
		return Process{}, m.notStarted(pr, s, scope, cause(sctx, err))
	}
	out, err := m.began(pr, s, scope, info, with...)
	if err == nil {
		m.watch(pr)
	}
	return out, err
}

// admit makes the entry of a process and its scope, which is the caller's until began or notStarted takes it:
// the sandbox may end meanwhile. It returns no scope where it finds an entry of that id.
func (m *Manager) admit(ctx context.Context, p Principal, b *box, s *ProcessSpec) (*proc, isolation.Scope, error) {
	chosen := s.ID != ""
	s.ID = or(s.ID, id.New(id.Process))
	if chosen {
		// One that is kept only in the store has ended, and its output is gone: it can't be attached to.
		if known, err := m.process(ctx, b.id, s.ID); err == nil && b.proc(s.ID) == nil {
			return nil, nil, errs.New(errs.AlreadyExists, "process %s has been: it ended at %s", s.ID,
				known.EndedAt.Format(time.RFC3339)).WithHint("choose another id")
		}
	}
	pr := &proc{
		id: s.ID, box: b, actor: p.ID,
		started: make(chan struct{}), ended: make(chan struct{}), writing: make(chan struct{}, 1), asked: wall(m.clock.Now()),
		info: Process{ID: s.ID, Tag: s.Tag, SandboxID: b.id, Argv: slices.Clone(s.Argv), TTY: s.TTY},
	}
	b.mu.Lock()
	if other := b.procs[s.ID]; other != nil {
		b.mu.Unlock()
		return other, nil, nil
	}
	if b.sb.State != Running {
		defer b.mu.Unlock()
		return nil, nil, &TransitionError{ID: b.id, From: b.sb.State}
	}
	b.procs[s.ID] = pr
	b.mu.Unlock()
	scope, err := b.inst.NewScope(ctx, s.ID)
	if err != nil {
		return nil, nil, m.refuse(pr, *s, errs.Wrap(err, errs.KindOf(err), "cannot make the process's control group"))
	}
	b.changes.begin(pr.id)
	b.mu.Lock()
	over := pr.failed != nil
	b.mu.Unlock()
	if over { // the sandbox ended, or was paused without memory, before it was there to be taken out
		b.changes.leave(pr.id)
	}
	return pr, scope, nil
}

func (b *box) proc(processID string) *proc {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.procs[processID]
}

// attached returns the process that another start has begun.
func (pr *proc) attached(ctx context.Context) (Process, error) {
	select {
	case <-pr.started:
	case <-ctx.Done():
		return Process{}, ctx.Err()
	}
	if pr.failed != nil {
		return Process{}, pr.failed
	}
	out := pr.snapshot()
	out.Attached = true
	return out, nil
}

func (m *Manager) startRequest(pr *proc, s ProcessSpec, scope isolation.Scope) guestwire.StartProcess {
	r := guestwire.StartProcess{
		ID: pr.id, Argv: s.Argv, Env: s.Env, Dir: s.Dir, User: s.User,
		TTY: s.TTY, Rows: s.Rows, Cols: s.Cols,
		TimeoutMS: s.Timeout.Milliseconds(), GraceMS: s.Grace.Milliseconds(),
		Buffer: s.Buffer, Hold: s.Hold, Scope: scope.Layout(),
	}
	if s.Stdin {
		r.Stdin = guestwire.StdinPipe
	}
	return r
}

// startFacts are the guest's facts of process.started and process.failed, and the server's.
//
//casemate:facts server process.started process.failed = -pid
//casemate:facts guest process.started = pid,dir,user
type startFacts struct {
	PID       int      `json:"pid,omitempty"`
	Dir       string   `json:"dir,omitempty"`
	User      string   `json:"user,omitempty"`
	Cut       bool     `json:"cut,omitempty"` // argv is longer than what is recorded
	Env       []string `json:"env,omitempty"` // names
	TTY       bool     `json:"tty,omitempty"`
	TimeoutMS int64    `json:"timeout_ms,omitempty"`
	Error     string   `json:"error,omitempty"`
}

// maxRecorded bounds the arguments that an event carries.
const maxRecorded = 16 << 10

// asked is the event of a process that was asked for, and of why it did not start, where it did not.
func asked(t journal.Type, pr *proc, s ProcessSpec, problem string) journal.Event {
	argv, short := recordable(s.Argv)
	//casemate:fact server process.started,process.failed argv body
	//casemate:fact server process.started stdin body what it was given right away
	e := pr.box.withArgv(event(t, pr.actor, startFacts{
		Cut: short, Dir: s.Dir, User: s.User, Env: slices.Sorted(maps.Keys(s.Env)), TTY: s.TTY, TimeoutMS: s.Timeout.Milliseconds(), Error: problem,
	}), journal.Server, argv)
	if input := pr.given(); len(input) > 0 {
		e = pr.box.keeping(RecordContent, e, journal.Server, "stdin", input)
	}
	e.Sandbox, e.Process = pr.box.id, pr.id
	return e
}

// withArgv adds recordable arguments to an event, as what o told of them: they may hold secrets, so they lie beside it.
func (b *box) withArgv(e journal.Event, o journal.Observer, argv []string) journal.Event {
	text, err := json.Marshal(argv)
	if err != nil { // which strings give no cause for
		return e
	}
	return b.keeping(RecordContent, e, o, "argv", text)
}

// recordable cuts arguments to what an event, and a row of the store, may hold of them.
func recordable(argv []string) (out []string, short bool) {
	size := 0
	for i, a := range argv {
		if size += len(a) + 1; size > maxRecorded {
			keep := len(a) - (size - maxRecorded)
			return append(slices.Clone(argv[:i]), a[:max(keep, 0)]), true
		}
	}
	return argv, false
}

// startedAt is when a process started, as the guest says, which may answer for a short one when that has ended: not before it was
// asked for, and not after now.
func startedAt(info guestwire.ProcessInfo, asked, now time.Time) time.Time {
	at := time.Unix(0, info.Started).UTC()
	switch {
	case at.After(now):
		return now
	case at.Before(asked):
		return asked
	}
	return at
}

// began takes note of a process that the guest has started, and records it without waiting. Only
// what comes with it is waited for: an idempotency key must be found by whoever asks next. Where the
// sandbox ended meanwhile, and that the process did not start is recorded, it returns that as an error.
func (m *Manager) began(pr *proc, s ProcessSpec, scope isolation.Scope, info guestwire.ProcessInfo, with ...store.Write) (Process, error) {
	b := pr.box
	e := asked(journal.ProcessStarted, pr, s, "").
		With(journal.Guest, startFacts{PID: info.PID, Dir: cut(info.Dir), User: cut(info.User)})
	b.mu.Lock()
	if pr.failed != nil {
		defer b.mu.Unlock()
		_ = scope.Close() // what is left of it goes with the sandbox
		return Process{}, pr.failed
	}
	pr.scope = scope
	pr.info.PID, pr.info.Dir, pr.info.User = info.PID, cut(info.Dir), cut(info.User)
	pr.info.StartedAt = startedAt(info, pr.asked, wall(m.clock.Now()))
	out := pr.info
	b.mu.Unlock()
	waits := len(with) > 0
	with = append(with, store.AddProcess(lateRow(out)))
	if !waits {
		m.journal.Post(e, with...)
	} else if _, err := m.journal.Record(m.ctx, e, with...); err != nil {
		m.log.Error("cannot record the start of a process", "sandbox", b.id, "process", pr.id, "error", err)
	}
	pr.answered() // only now: its end must not be recorded before its start
	return out, nil
}

// notStarted takes back a start that the guest refused, and returns what the caller is told. Where
// the guest was lost meanwhile, it is found out in the background whether the process started.
func (m *Manager) notStarted(pr *proc, s ProcessSpec, scope isolation.Scope, err error) error {
	if !refusal(err) && m.background(func() { m.settle(pr, s, scope) }) {
		return err
	}
	_ = scope.Close() // what is left of it goes with the sandbox
	return m.refuse(pr, s, err)
}

// refuse records that a process did not start, unless it did, and returns why: where that is recorded already,
// what was recorded.
func (m *Manager) refuse(pr *proc, s ProcessSpec, err error) error {
	b := pr.box
	b.mu.Lock()
	if pr.failed != nil || !pr.info.StartedAt.IsZero() {
		defer b.mu.Unlock()
		if pr.failed != nil {
			return pr.failed
		}
		return err
	}
	pr.finishing, pr.failed = true, err
	delete(b.procs, pr.id)
	b.mu.Unlock()
	problem, _ := errs.PublicText(err)
	m.journal.Post(asked(journal.ProcessFailed, pr, s, problem))
	b.changes.leave(pr.id)
	pr.answered()
	close(pr.ended)
	return err
}

// settle asks the guest what became of a start whose answer was lost.
func (m *Manager) settle(pr *proc, s ProcessSpec, scope isolation.Scope) {
	ctx, cancel := m.prompt(m.ctx, pr.box.guest)
	info, err := pr.box.guest.Get(ctx, pr.id)
	cancel()
	err = cause(ctx, err)
	if err == nil {
		if _, err := m.began(pr, s, scope, info); err == nil {
			m.watch(pr)
		}
		return
	}
	if errs.Is(err, errs.NotFound) {
		err = errs.New(errs.NotFound, "the process was not started")
	} else {
		// Neither yes nor no: end what may be in the scope, so that no process runs unknown.
		kctx, cancel := context.WithTimeout(context.WithoutCancel(m.ctx), m.cfg.Defaults.Stop)
		err = errors.Join(err, scope.Kill(kctx))
		cancel()
		err = errs.Wrap(err, errs.FailedPrecondition, "the guest was lost while the process started")
	}
	_ = m.notStarted(pr, s, scope, err)
}

func (pr *proc) closeScope() {
	if scope := pr.takeScope(); scope != nil {
		_ = scope.Close() // what is left of it goes with the sandbox
	}
}

func (pr *proc) takeScope() isolation.Scope {
	pr.box.mu.Lock()
	defer pr.box.mu.Unlock()
	scope := pr.scope
	pr.scope = nil
	return scope
}

// cut bounds text that the guest sent.
func cut(s string) string {
	if len(s) > maxPath {
		return s[:maxPath]
	}
	return s
}

func processRow(p Process) (store.Process, error) {
	text, err := processText(p)
	if err != nil {
		return store.Process{}, fmt.Errorf("encode process %s: %w", p.ID, err)
	}
	row := lateRow(p)
	row.Body, row.Late = text, nil
	return row, nil
}

// lateRow is processRow for a process that runs: where its end comes soon, nobody reads what it was before.
func lateRow(p Process) store.Process {
	return store.Process{
		Sandbox: p.SandboxID, ID: p.ID, Started: nanos(p.StartedAt), Ended: nanos(p.EndedAt),
		Late: func() []byte {
			text, err := processText(p)
			if err != nil { // which a process that has only begun gives no cause for
				text, _ = processText(Process{ID: p.ID, SandboxID: p.SandboxID})
			}
			return text
		},
	}
}

func processText(p Process) ([]byte, error) {
	p.Argv, _ = recordable(p.Argv)
	p.Attached = false
	return json.Marshal(p)
}

func ofProcessRow(r store.Process) (Process, error) {
	var p Process
	if err := json.Unmarshal(r.Body, &p); err != nil {
		return Process{}, fmt.Errorf("decode process %s: %w", r.ID, err)
	}
	return p, nil
}
