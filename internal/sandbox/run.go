package sandbox

import (
	"context"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/store"
)

// watchAfter is how long Run itself is trusted to learn of the end. A reader that stands still would
// keep the end from being recorded; most processes end long before they need a watcher.
const watchAfter = time.Second

// Run starts a process, sends its output to sink and returns it once it has ended and its end is
// recorded. If ctx ends or sink fails before that, the process goes on, and Output follows it from
// any offset. Starting an id that exists follows that process from its beginning.
func (m *Manager) Run(ctx context.Context, p Principal, ref string, s ProcessSpec, o RunOptions, sink RunSink) (Process, error) {
	if o.Input != nil {
		s.Stdin = true
	}
	b, err := m.useFor(ctx, p, ref, &s, o.IdempotencyKey)
	if err != nil {
		return Process{}, err
	}
	defer m.done(b)
	if o.IdempotencyKey != "" {
		return m.runWithKey(ctx, p, b, s, o, sink)
	}
	pr, scope, err := m.admit(ctx, p, b, &s)
	if err != nil {
		return Process{}, err
	}
	if scope == nil {
		return m.followOther(ctx, pr, o, sink)
	}
	return m.run(ctx, pr, s, scope, o, sink)
}

// run is the short way: start, output and end on one connection to the guest.
func (m *Manager) run(ctx context.Context, pr *proc, s ProcessSpec, scope isolation.Scope, o RunOptions, sink RunSink) (Process, error) {
	// As in startProcess, the start must not be cut off by a caller who leaves.
	rctx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	v := m.vigil(rctx, ctx, pr.box.guest, m.cfg.Defaults.Start, cancel)
	pr.give(o.Input)
	info, stream, err := pr.box.guest.Run(rctx, guestwire.RunProcess{
		Start:  m.startRequest(pr, s, scope),
		Output: guestwire.OutputRequest{ID: pr.id, Follow: true, Hold: o.Hold},
	}, scope.Files())
	v.end()
	if err != nil {
		return Process{}, m.notStarted(pr, s, scope, cause(rctx, err))
	}
	defer stream.Close()
	defer context.AfterFunc(ctx, func() { cancel(nil) })()
	watcher := time.AfterFunc(watchAfter, func() { m.watch(pr) })
	started, err := m.began(pr, s, scope, info)
	if err != nil {
		watcher.Stop()
		return Process{}, err
	}
	if o.Input != nil {
		m.background(func() { m.feed(pr, o.Input) })
	}
	h := newTranscript(pr.box)
	err = sink.Started(started)
	if err != nil {
		err = &sinkError{err}
	} else {
		err = pump(stream, hearing{sink, h})
	}
	if err == nil && stream.Info().End != guestwire.EndNone {
		watcher.Stop()
		return m.finish(pr, stream.Info(), h), nil
	}
	m.watch(pr)
	if err == nil {
		return pr.snapshot(), errs.New(errs.Internal, "the guest ended the output of a running process")
	}
	return m.cutShort(ctx, pr, err)
}

// followOther follows a process that another call started.
func (m *Manager) followOther(ctx context.Context, pr *proc, o RunOptions, sink RunSink) (Process, error) {
	started, err := pr.attached(ctx)
	if err != nil {
		return Process{}, err
	}
	if err := sink.Started(started); err != nil {
		return started, err
	}
	return m.output(ctx, pr, OutputOptions{Follow: true, Hold: o.Hold}, sink)
}

// runWithKey starts the process once for its key, and follows it. A repeated call sees the output
// from its beginning, as far as the guest still holds it.
func (m *Manager) runWithKey(ctx context.Context, p Principal, b *box, s ProcessSpec, o RunOptions, sink RunSink) (Process, error) {
	processID, err := m.startOnce(ctx, p, b, s, o.Input, o.IdempotencyKey, func(ctx context.Context, s ProcessSpec, w ...store.Write) error {
		started, err := m.startProcess(ctx, p, b, s, w...)
		if err == nil && o.Input != nil && !started.Attached {
			if pr := b.proc(started.ID); pr != nil {
				m.background(func() { m.feed(pr, o.Input) })
			}
		}
		return err
	})
	if err != nil {
		return Process{}, err
	}
	pr, err := m.held(ctx, b, processID)
	if err != nil {
		return Process{}, err
	}
	return m.followOther(ctx, pr, o, sink)
}

// Execute starts a process, waits for its end and returns its output, of which the middle is left
// out where it is longer than the spec's Buffer. A process that names no timeout gets
// Defaults.Execution, and its Error says so if that ends it. Other than that it is Run.
func (m *Manager) Execute(ctx context.Context, p Principal, ref string, s ProcessSpec, o RunOptions) (Result, error) {
	unlimited := s.Timeout == 0
	if unlimited {
		s.Timeout = m.cfg.Defaults.Execution
	}
	if s.Buffer < 0 || s.Buffer > maxCollect {
		return Result{}, invalid("buffer is %d", s.Buffer).WithHint("use at most %d", maxCollect)
	}
	c := newCollector(or(s.Buffer, defaultCollect))
	end, err := m.Run(ctx, p, ref, s, o, c)
	if err != nil {
		return Result{}, err
	}
	if unlimited && end.End == EndTimedOut && end.Error == "" {
		end.Error = "no timeout was given, and the server's execution timeout of " +
			m.cfg.Defaults.Execution.String() + " ended it; set timeout"
	}
	r := c.result()
	r.Process = end
	return r, nil
}
