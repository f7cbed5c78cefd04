package sandbox

import (
	"context"
	"encoding/json"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/journal"
)

// takeUpContexts learns of the contexts that a guest has kept while no server was there. They live in
// the guest alone; what the journal says to be open and is not any more gets its end recorded.
func (m *Manager) takeUpContexts(ctx context.Context, b *box) error {
	lctx, cancel := m.prompt(ctx, b.guest)
	defer cancel()
	infos, err := b.guest.Contexts(lctx)
	if errs.Is(err, errs.Unsupported) {
		return nil // a guest from before there were contexts
	}
	if err != nil || len(infos) == 0 {
		return cause(lctx, err)
	}
	open, err := m.openRuns(ctx, b.id)
	if err != nil {
		return err
	}
	for _, info := range infos {
		if !contextID(info.ID) {
			continue
		}
		c := m.takeUpContext(lctx, b, believedContext(info), open)
		if hidden(info) {
			m.forgetFresh(c)
		}
	}
	return nil
}

// forgetFresh ends what an earlier server has forked ahead; a run that goes on is waited for.
func (m *Manager) forgetFresh(c *codeContext) {
	c.box.mu.Lock()
	var run string
	if len(c.order) > 0 {
		run = c.order[0].id
	}
	c.box.mu.Unlock()
	m.dropForkAfter(c, run, keepFork)
}

// takeUpContext takes up one of them. ctx is that of all, so that a guest with many does not hold a start up for each.
func (m *Manager) takeUpContext(ctx context.Context, b *box, info guestwire.ContextInfo, open map[[2]string]bool) *codeContext {
	c := &codeContext{id: info.ID, box: b, fork: info.Fork, info: info, started: make(chan struct{}), runs: make(map[string]*codeRun)}
	close(c.started)
	if scope, err := b.inst.OpenScope(scopePrefix + c.id); err == nil {
		c.scope = scope
	}
	b.mu.Lock()
	if b.codes == nil {
		b.codes = make(map[string]*codeContext)
	}
	b.codes[c.id] = c
	b.mu.Unlock()
	runs, err := b.guest.ContextRuns(ctx, c.id)
	if err != nil {
		m.log.Warn("cannot learn of the runs of a context", "sandbox", b.id, "context", c.id, "error", cause(ctx, err))
	}
	for _, info := range runs {
		if !runID(info.ID) {
			continue
		}
		r, fresh, err := c.enterRun(Principal{ID: "server"}, info.ID)
		if err != nil || !fresh {
			continue // a guest that was taken over says strange things
		}
		b.mu.Lock()
		r.recorded = true
		b.mu.Unlock()
		close(r.handed)
		name := [2]string{c.id, info.ID}
		switch {
		case info.End == RunNone:
			r.told(info)
			m.watchRun(r)
		case open[name]:
			m.runEnded(r, info, nil)
		default: // its end is recorded
			r.once.Do(func() {
				b.mu.Lock()
				r.info = believedRun(info)
				b.mu.Unlock()
				close(r.ended)
			})
		}
	}
	switch {
	case hidden(info):
	case info.State != guestwire.ContextEnded:
		m.background(func() { m.watchContext(c, info.Starts) })
	default:
		m.contextEnded(c, info.Starts, info)
	}
	return c
}

// openRuns returns the runs, by context and id, whose start is recorded and whose end is not.
func (m *Manager) openRuns(ctx context.Context, sandboxID string) (map[[2]string]bool, error) {
	open := make(map[[2]string]bool)
	const page = 1000
	for after := uint64(0); ; {
		events, err := m.journal.Events(ctx, sandboxID, after, page)
		if err != nil {
			return nil, err
		}
		for _, e := range events {
			after = e.Seq
			if e.Type != journal.RunStarted && e.Type != journal.RunEnded {
				continue
			}
			var f runEndFacts
			if json.Unmarshal(e.Facts[journal.Server], &f) == nil {
				if name := [2]string{f.Context, f.Run}; e.Type == journal.RunStarted {
					open[name] = true
				} else {
					delete(open, name)
				}
			}
		}
		if len(events) < page {
			return open, nil
		}
	}
}
