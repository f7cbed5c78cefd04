package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"casemate.dev/internal/codecontext/drivers"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/id"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/store"
)

// codeRun is one run that this server has to do with.
type codeRun struct {
	id    string
	c     *codeContext
	actor string
	// handed is closed once the guest has answered for it, and that it was handed over is recorded, where it was.
	handed chan struct{}
	ended  chan struct{} // closed once its end is recorded
	once   sync.Once

	// What follows is guarded by box.mu.
	info     guestwire.RunInfo
	recorded bool // its start is
	watched  bool
}

// RunCode runs code, sends what it says to sink and returns the run once it has ended and its end is
// recorded. If ctx ends or sink fails before that, the run goes on, and CodeItems follows it from any
// item. Running an id that exists in the context follows that run from its beginning. Kinds:
// InvalidArgument, NotFound (sandbox, context, language not installed), FailedPrecondition (the
// context's interpreter has ended: restart it), ResourceExhausted (runs that wait, contexts), Conflict
// (idempotency key), Unavailable (the guest was lost).
func (m *Manager) RunCode(ctx context.Context, p Principal, ref string, s CodeSpec, key string, sink CodeSink) (CodeRun, error) {
	if err := checkCode(&s); err != nil {
		return CodeRun{}, err
	}
	if err := checkKey(key); err != nil {
		return CodeRun{}, err
	}
	if s.Fresh && key != "" {
		return CodeRun{}, invalid("a fresh run takes no idempotency key").WithHint("it sees nothing of others and changes no context: run it again")
	}
	b, err := m.use(ctx, p, ref)
	if err != nil {
		return CodeRun{}, err
	}
	defer m.done(b)
	if s.Fresh {
		return m.runFresh(ctx, p, b, s, sink)
	}
	c, err := m.contextFor(ctx, p, b, s)
	if err != nil {
		return CodeRun{}, err
	}
	if key != "" {
		return m.runCodeOnce(ctx, p, c, s, key, sink)
	}
	s.ID = or(s.ID, id.New(id.Run))
	return m.runCode(ctx, p, c, s, sink)
}

// runFresh runs code in a fork of its own.
func (m *Manager) runFresh(ctx context.Context, p Principal, b *box, s CodeSpec, sink CodeSink) (CodeRun, error) {
	c, err := m.freshContext(ctx, p, b, s)
	if err != nil {
		return CodeRun{}, err
	}
	s.ID = or(s.ID, id.New(id.Run))
	run, err := m.runCode(ctx, p, c, s, sink)
	if err != nil {
		m.dropForkAfter(c, s.ID, keepFork)
	} else {
		m.spend(c)
	}
	return run, err
}

func checkCode(s *CodeSpec) error {
	var c checker
	c.that(s.ID == "" || runID(s.ID), "use letters, digits, - and _, at most 64", "run id %s is malformed", quote(s.ID))
	c.that(s.Context == "" || contextID(s.Context), "use letters, digits, - and _, at most 48", "context id %s is malformed", quote(s.Context))
	c.that(len(s.Code) <= guestwire.MaxCode, "write data to a file instead", "code has %d bytes, limit %d", len(s.Code), guestwire.MaxCode)
	c.that(utf8.ValidString(s.Code), "", "code is not UTF-8")
	c.env(s.Env)
	c.that(s.Timeout >= 0 && s.Timeout <= maxExecution, "use 0 for no limit", "timeout is %s", s.Timeout)
	c.that(s.Timeout == 0 || s.Timeout >= time.Millisecond, "use 1ms or more", "timeout is %s", s.Timeout)
	c.that(s.Grace >= 0 && s.Grace <= time.Hour, "", "grace is %s", s.Grace)
	c.that(s.Buffer >= 0, "", "buffer is %d", s.Buffer)
	c.that(!s.Fresh || s.Context == "", "leave context out", "a fresh run has no context")
	c.that(s.Fresh || len(s.Imports) == 0, "set fresh", "imports are for fresh runs")
	c.that(len(s.Imports) <= maxImports, "", "%d imports, limit %d", len(s.Imports), maxImports)
	for _, name := range s.Imports {
		c.that(moduleName(name), "use a module's name, as numpy.linalg", "imports: %s is no module's name", quote(name))
	}
	return c.err
}

// contextFor returns the context that a run is for. The language's own one is created where it is not
// there yet.
func (m *Manager) contextFor(ctx context.Context, p Principal, b *box, s CodeSpec) (*codeContext, error) {
	if s.Context == "" {
		d, err := drivers.Find(or(s.Language, defaultLanguage))
		if err != nil {
			return nil, err
		}
		c, _, err := m.createContext(ctx, p, b, CodeContextSpec{ID: d.Language, Language: d.Language}, d)
		return c, err
	}
	c, err := m.context(ctx, b, s.Context)
	if err != nil || s.Language == "" {
		return c, err
	}
	d, err := drivers.Find(s.Language)
	if err != nil {
		return nil, err
	}
	if has := c.snapshot().Language; has != d.Language {
		return nil, invalid("context %s speaks %s, not %s", s.Context, has, d.Language).WithHint("leave one of the two out")
	}
	return c, nil
}

// defaultLanguage is what code is in where nobody says.
const defaultLanguage = "python"

// enterRun makes the entry of a run, or finds the one of that id.
func (c *codeContext) enterRun(p Principal, runID string) (r *codeRun, fresh bool, err error) {
	c.box.mu.Lock()
	defer c.box.mu.Unlock()
	if r := c.runs[runID]; r != nil {
		return r, false, nil
	}
	if c.left {
		return nil, false, c.lostLocked()
	}
	r = &codeRun{
		id: runID, c: c, actor: p.actor(c.box.id), handed: make(chan struct{}), ended: make(chan struct{}),
		info: guestwire.RunInfo{ID: runID, Context: c.id},
	}
	c.runs[runID] = r
	c.order = append(c.order, r)
	for i := 0; len(c.order) > guestwire.KeepRuns+guestwire.MaxQueued && i < len(c.order); {
		if old := c.order[i]; old.info.End != RunNone {
			delete(c.runs, old.id)
			c.order = slices.Delete(c.order, i, i+1)
			continue
		}
		i++
	}
	return r, true, nil
}

func (c *codeContext) leaveRun(r *codeRun) {
	c.box.mu.Lock()
	defer c.box.mu.Unlock()
	if c.runs[r.id] == r {
		delete(c.runs, r.id)
		if i := slices.Index(c.order, r); i >= 0 {
			c.order = slices.Delete(c.order, i, i+1)
		}
	}
}

// runCode is the short way: hand-over, items and end on one connection to the guest.
func (m *Manager) runCode(ctx context.Context, p Principal, c *codeContext, s CodeSpec, sink CodeSink, with ...store.Write) (CodeRun, error) {
	r, fresh, err := c.enterRun(p, s.ID)
	if err != nil {
		return CodeRun{}, err
	}
	if fresh {
		c.box.changes.begin(r.id)
	}
	rctx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	v := m.vigil(rctx, ctx, c.box.guest, m.cfg.Defaults.Start, cancel)
	info, stream, err := c.box.guest.RunCode(rctx, guestwire.RunCode{
		ID: s.ID, Context: c.id, Env: s.Env, TimeoutMS: s.Timeout.Milliseconds(), GraceMS: s.Grace.Milliseconds(), Buffer: s.Buffer,
		Items: guestwire.ItemsRequest{Context: c.id, Run: s.ID, Follow: sink != nil, Hold: s.Hold},
	}, s.Code)
	v.end()
	if err != nil {
		err = cause(rctx, err)
		if fresh && refusal(err) {
			c.leaveRun(r)
			c.box.changes.leave(r.id)
			close(r.handed)
		} else if fresh { // neither yes nor no
			m.recordRun(r, s, nil)
			m.watchRun(r)
		}
		return CodeRun{}, err
	}
	defer stream.Close()
	switch {
	case fresh && info.Attached: // it was there before, and its end is recorded
		close(r.handed)
		c.box.changes.leave(r.id)
	case fresh:
		m.recordRun(r, s, with)
	}
	out := r.told(info)
	if sink == nil {
		m.watchRun(r)
		return out, nil
	}
	defer context.AfterFunc(ctx, func() { cancel(nil) })()
	watcher := time.AfterFunc(watchAfter, func() { m.watchRun(r) })
	h := newTranscript(c.box)
	err = sink.Started(out)
	if err != nil {
		err = &sinkError{err}
	} else {
		err = pumpItems(stream, sink, h)
	}
	if err == nil && stream.Info().End != RunNone {
		watcher.Stop()
		return m.runEnded(r, stream.Info(), h), nil
	}
	m.watchRun(r)
	if err == nil {
		return r.snapshot(), errs.New(errs.Internal, "the guest ended the items of a run that goes on")
	}
	return m.runCutShort(ctx, r, err)
}

// runCodeOnce runs code once for its key, and follows it.
func (m *Manager) runCodeOnce(ctx context.Context, p Principal, c *codeContext, s CodeSpec, key string, sink CodeSink) (CodeRun, error) {
	asked := []any{s, c.id}
	s.ID = or(s.ID, id.New(id.Run))
	answer, err := m.once.do(ctx, m, request{
		principal: p.ID, scope: "code:" + c.box.id + ":" + c.id, key: key, body: asked,
		stale: func(context.Context, string) (bool, error) { return false, nil },
		run: func(ctx context.Context, remember func(string) store.Write) (string, error) {
			_, err := m.runCode(ctx, p, c, s, nil, remember(s.ID))
			return s.ID, err
		},
	})
	if err != nil {
		return CodeRun{}, err
	}
	r, err := c.run(answer)
	if err != nil {
		return CodeRun{}, err
	}
	if err := sink.Started(r.snapshot()); err != nil {
		return r.snapshot(), err
	}
	return m.codeItems(ctx, r, CodeItemsOptions{Follow: true, Hold: s.Hold}, sink)
}

// run returns a run that is kept.
func (c *codeContext) run(runID string) (*codeRun, error) {
	c.box.mu.Lock()
	defer c.box.mu.Unlock()
	if r := c.runs[runID]; r != nil {
		return r, nil
	}
	return nil, errs.New(errs.NotFound, "no run %s in context %s, or it is not kept any more", quote(runID), c.id)
}

func (r *codeRun) snapshot() CodeRun {
	r.c.box.mu.Lock()
	defer r.c.box.mu.Unlock()
	return r.snapshotLocked()
}

func (r *codeRun) snapshotLocked() CodeRun {
	i := r.info
	return CodeRun{
		ID: r.id, ContextID: r.c.id, SandboxID: r.c.box.id, Attached: i.Attached,
		QueuedAt: timeOf(i.Queued), BeganAt: timeOf(i.Began), EndedAt: timeOf(i.Ended),
		End: i.End, Count: i.Count, Items: i.Items, Dropped: i.Dropped, ErrorName: i.Name, ErrorValue: i.Value,
		Driver: i.Driver, Code: i.Code, Signal: i.Signal,
	}
}

// told takes what the guest says of a run that has not ended, and returns the run.
func (r *codeRun) told(i guestwire.RunInfo) CodeRun {
	i = believedRun(i)
	r.c.box.mu.Lock()
	defer r.c.box.mu.Unlock()
	if r.info.End == RunNone && i.End == RunNone {
		attached := i.Attached
		i.Attached = false
		i.ID, i.Context = r.id, r.c.id
		r.info = i
		out := r.snapshotLocked()
		out.Attached = attached
		return out
	}
	return r.snapshotLocked()
}

// believedRun bounds what a guest says of a run.
func believedRun(i guestwire.RunInfo) guestwire.RunInfo {
	i.Name, i.Value = cut(i.Name), cut(i.Value)
	switch i.End {
	case RunNone, RunCompleted, RunFailed, RunInterrupted, RunTimedOut, RunCanceled, RunDriverEnded, RunStopped, RunUnknown:
	default:
		i.End = RunUnknown
	}
	if i.Driver != "" {
		i.Driver = believedExit(i.Driver, i.Signal)
	}
	i.Items, i.Dropped, i.Count = max(i.Items, 0), max(i.Dropped, 0), max(i.Count, 0)
	return i
}

// pumpItems sends a stream's items to sink, and to h unless it is nil, until the guest has said all.
func pumpItems(stream *guestwire.ItemStream, sink CodeSink, h *transcript) error {
	for {
		item, err := stream.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if h != nil {
			h.item(item)
		}
		if item.Kind == 0 {
			err = sink.Gap(Gap{From: item.Number, To: item.Next()})
		} else {
			err = sink.Item(itemOf(item))
		}
		if err != nil {
			return &sinkError{err}
		}
	}
}

// itemOf reads an item. A line that is not what it should be becomes an error item: the code can write
// what it likes.
func itemOf(i guestwire.RunItem) CodeItem {
	out := CodeItem{Kind: i.Kind, Number: i.Number}
	switch i.Kind {
	case ItemStdout, ItemStderr:
		out.Text = i.Data
		return out
	case ItemResult:
		if r, ok := readLine[CodeResult](i.Data); ok && len(r.Data) > 0 && len(r.Data) <= maxTypes {
			out.Result = r
			return out
		}
	case ItemError:
		if e, ok := readLine[CodeError](i.Data); ok {
			out.Error = e
			return out
		}
	}
	out.Kind = ItemError
	out.Error = &CodeError{Name: "MalformedResult", Value: "the interpreter sent a result that is malformed"}
	return out
}

const (
	// maxTypes bounds the MIME types of one result.
	maxTypes = 64
	// maxNested bounds how deep the JSON of a result may nest.
	maxNested = 256
)

// readLine decodes a driver's line.
func readLine[T any](line []byte) (*T, bool) {
	if !utf8.Valid(line) || guestwire.Depth(line) > maxNested {
		return nil, false
	}
	v := new(T)
	return v, json.Unmarshal(line, v) == nil
}

// watchRun waits for a run's end in the background. A second call has no effect.
func (m *Manager) watchRun(r *codeRun) {
	b := r.c.box
	b.mu.Lock()
	skip := r.watched || r.info.End != RunNone
	r.watched = true
	b.mu.Unlock()
	if !skip {
		m.background(func() { m.awaitRun(r) })
	}
}

func (m *Manager) awaitRun(r *codeRun) {
	b := r.c.box
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		info, err := b.guest.WaitRun(m.ctx, guestwire.RunRef{Context: r.c.id, Run: r.id})
		switch {
		case err == nil && info.End != RunNone:
			m.runEnded(r, info, nil)
			return
		case errs.Is(err, errs.NotFound):
			m.runEnded(r, guestwire.RunInfo{End: RunUnknown}, nil)
			return
		}
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-r.ended:
			t.Stop()
			return
		case <-m.ctx.Done():
			t.Stop()
			return
		}
	}
}

// runEnded records the end of a run and returns the run with it. It happens once; others who call it
// wait for that. h is what it said; nil: that is asked for.
func (m *Manager) runEnded(r *codeRun, info guestwire.RunInfo, h *transcript) CodeRun {
	<-r.handed
	r.once.Do(func() {
		info = believedRun(info)
		info.ID, info.Context, info.Attached = r.id, r.c.id, false
		if info.End == RunNone {
			info.End = RunUnknown
		}
		if info.Driver == EndSignaled && info.Signal == 9 {
			info.Driver = m.driverEnd(r.c, info.Driver)
		}
		b := r.c.box
		b.mu.Lock()
		recorded := r.recorded
		b.mu.Unlock()
		if recorded {
			m.recordRunEnd(r, info, h)
			b.changes.runEnded(r)
		} else {
			b.changes.leave(r.id)
		}
		b.mu.Lock()
		r.info = info
		b.mu.Unlock()
		close(r.ended)
	})
	<-r.ended
	return r.snapshot()
}

// driverEnd finds out whether an interpreter that was killed ran out of memory. What the context's end
// recorded holds, since the kernel's count is read once.
func (m *Manager) driverEnd(c *codeContext, said End) End {
	ctx, cancel := m.detached(m.ctx, c.box.guest)
	defer cancel()
	if err := m.refreshContexts(ctx, c.box); err != nil {
		return said
	}
	c.box.mu.Lock()
	info := c.info
	c.box.mu.Unlock()
	if end := m.contextEnded(c, info.Starts, info); end == EndOOMKilled {
		return end
	}
	return said
}

// endRuns records the end of every open run of a context that is gone.
func (m *Manager) endRuns(c *codeContext, end RunEnd) {
	c.box.mu.Lock()
	open := slices.Clone(c.order)
	c.box.mu.Unlock()
	for _, r := range open {
		m.runEnded(r, guestwire.RunInfo{End: end}, nil)
	}
}

// endContexts records the end of every context whose sandbox is gone.
func (m *Manager) endContexts(b *box) {
	b.mu.Lock()
	all := slices.Collect(maps.Values(b.codes))
	b.mu.Unlock()
	for _, c := range all {
		scope := c.takeOut(true) // first, so that no run begins any more
		m.endRuns(c, RunStopped)
		if scope != nil {
			_ = scope.Close() // what is left of it goes with the sandbox
		}
	}
}

// runCutShort returns a run whose stream broke: see broken.
func (m *Manager) runCutShort(ctx context.Context, r *codeRun, err error) (CodeRun, error) {
	err = m.broken(ctx, r.c.box, r.ended, err)
	return r.snapshot(), err
}

// CodeItems sends what a run said, from an item on, to sink, and returns the run as it is then. With
// Follow that is after its end, which is recorded by then.
func (m *Manager) CodeItems(ctx context.Context, p Principal, ref, contextID, runID string, o CodeItemsOptions, sink CodeSink) (CodeRun, error) {
	if o.Offset < 0 {
		return CodeRun{}, invalid("offset can't be negative")
	}
	b, err := m.useIn(ctx, p, ref, true)
	if err != nil {
		return CodeRun{}, err
	}
	defer m.done(b)
	r, err := m.findRun(ctx, b, contextID, runID)
	if err != nil {
		return CodeRun{}, err
	}
	return m.codeItems(ctx, r, o, sink)
}

func (m *Manager) findRun(ctx context.Context, b *box, contextID, runID string) (*codeRun, error) {
	c, err := m.context(ctx, b, contextID)
	if err != nil {
		return nil, err
	}
	return c.run(runID)
}

func (m *Manager) codeItems(ctx context.Context, r *codeRun, o CodeItemsOptions, sink CodeSink) (CodeRun, error) {
	stream, err := r.c.box.guest.Items(ctx, guestwire.ItemsRequest{
		Context: r.c.id, Run: r.id, Offset: o.Offset, Follow: o.Follow, Hold: o.Hold,
	})
	if err != nil {
		return m.runCutShort(ctx, r, err)
	}
	defer stream.Close()
	var h *transcript
	if o.Offset == 0 {
		h = newTranscript(r.c.box)
	}
	if err := pumpItems(stream, sink, h); err != nil {
		return m.runCutShort(ctx, r, err)
	}
	if info := stream.Info(); info.End != RunNone {
		return m.runEnded(r, info, h), nil
	}
	return r.told(stream.Info()), nil
}

// GetRun returns one run of a context.
func (m *Manager) GetRun(ctx context.Context, p Principal, ref, contextID, runID string) (CodeRun, error) {
	return m.CodeItems(ctx, p, ref, contextID, runID, CodeItemsOptions{Offset: 1<<62 - 1}, deafSink{})
}

// deafSink hears nothing.
type deafSink struct{}

// Started implements CodeSink.
func (deafSink) Started(CodeRun) error { return nil }

// Item implements CodeSink.
func (deafSink) Item(CodeItem) error { return nil }

// Gap implements CodeSink.
func (deafSink) Gap(Gap) error { return nil }

// ListRuns returns the runs of a context that are kept, the oldest first.
func (m *Manager) ListRuns(ctx context.Context, p Principal, ref, contextID string) ([]CodeRun, error) {
	b, err := m.useIn(ctx, p, ref, true)
	if err != nil {
		return nil, err
	}
	defer m.done(b)
	c, err := m.context(ctx, b, contextID)
	if err != nil {
		return nil, err
	}
	gctx, cancel := m.prompt(ctx, b.guest)
	defer cancel()
	infos, err := b.guest.ContextRuns(gctx, c.id)
	if err != nil {
		return nil, cause(gctx, err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, i := range infos {
		if r := c.runs[i.ID]; r != nil && r.info.End == RunNone && i.End == RunNone {
			r.info = believedRun(i)
		}
	}
	all := make([]CodeRun, 0, len(c.order))
	for _, r := range c.order {
		all = append(all, r.snapshotLocked())
	}
	return all, nil
}

// InterruptContext interrupts what a context executes, or with runID that run, also where it waits. It
// returns the run that it hit, "" for none. The run's end says what came of it.
func (m *Manager) InterruptContext(ctx context.Context, p Principal, ref, contextID, runID string) (string, error) {
	b, err := m.use(ctx, p, ref)
	if err != nil {
		return "", err
	}
	defer m.done(b)
	c, err := m.context(ctx, b, contextID)
	if err != nil {
		return "", err
	}
	ctx, cancel := m.prompt(ctx, b.guest)
	defer cancel()
	hit, err := b.guest.Interrupt(ctx, guestwire.RunRef{Context: c.id, Run: runID})
	if err == nil && hit.Run != "" && !processID(hit.Run) {
		hit.Run = ""
	}
	return hit.Run, cause(ctx, err)
}

// names returns the names of variables in order.
func names(env map[string]string) []string { return slices.Sorted(maps.Keys(env)) }

// recordRun records that a run was handed to the guest.
func (m *Manager) recordRun(r *codeRun, s CodeSpec, with []store.Write) {
	//casemate:fact server run.started code body
	e := r.c.box.keeping(RecordContent, event(journal.RunStarted, r.actor, runFacts{
		Context: r.c.id, Run: r.id, Language: r.c.snapshot().Language,
		Env: names(s.Env), TimeoutMS: s.Timeout.Milliseconds(), Fresh: s.Fresh,
	}), journal.Server, "code", []byte(s.Code))
	e.Sandbox = r.c.box.id
	defer close(r.handed) // only now: its end must not be recorded before its start
	r.c.box.mu.Lock()
	r.recorded = true
	r.c.box.mu.Unlock()
	if len(with) == 0 {
		m.journal.Post(e)
	} else if _, err := m.journal.Record(m.ctx, e, with...); err != nil {
		m.log.Error("cannot record a run", "sandbox", e.Sandbox, "run", r.id, "error", err)
	}
}

// recordRunEnd records how a run ended, and what it said. No answer tells of an end before it is recorded.
func (m *Manager) recordRunEnd(r *codeRun, i guestwire.RunInfo, h *transcript) {
	facts := runEndFacts{Context: r.c.id, Run: r.id}
	gone := i.End == RunStopped || i.End == RunUnknown
	if h == nil && i.Items > 0 && !gone {
		h = m.saidByRun(r)
	}
	facts.Unread = h == nil && i.Items > 0
	if i.End == RunStopped || i.End == RunUnknown || i.Driver == EndOOMKilled {
		facts.End, facts.Driver = i.End, i.Driver
	}
	e := event(journal.RunEnded, r.actor, facts)
	if !gone {
		said := runSaidFacts{
			End: i.End, Count: i.Count, Items: i.Items, Dropped: i.Dropped, Error: strings.TrimSpace(i.Name),
			DurationMS: max(i.Ended-i.Began, 0) / int64(time.Millisecond), Driver: i.Driver, Code: i.Code, Signal: i.Signal,
		}
		if h != nil {
			said.Missed = h.missed
		}
		e = e.With(journal.Guest, said)
	}
	if h != nil && !gone {
		e = h.onto(e)
	}
	e.Sandbox = r.c.box.id
	if _, err := m.journal.Record(m.ctx, e); err != nil {
		m.log.Error("cannot record the end of a run", "sandbox", e.Sandbox, "run", r.id, "error", err)
	}
}
