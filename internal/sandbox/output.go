package sandbox

import (
	"context"
	"errors"
	"io"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
)

// Output sends what a process printed, from an offset on, to sink, and returns the process as it is
// then. With Follow that is after its end, which is recorded by then. If ctx ends or sink fails, the
// process goes on. Kinds: NotFound, FailedPrecondition (the sandbox has stopped, and the output with
// it), InvalidArgument.
func (m *Manager) Output(ctx context.Context, p Principal, ref, processID string, o OutputOptions, sink OutputSink) (Process, error) {
	if o.Offset < 0 || o.Limit < 0 {
		return Process{}, invalid("offset and limit can't be negative")
	}
	b, err := m.useIn(ctx, p, ref, true)
	if err != nil {
		return Process{}, err
	}
	defer m.done(b)
	pr, err := m.held(ctx, b, processID)
	if err != nil {
		return Process{}, err
	}
	return m.output(ctx, pr, o, sink)
}

// held returns a process whose output the guest may still hold.
func (m *Manager) held(ctx context.Context, b *box, processID string) (*proc, error) {
	pr := b.proc(processID)
	if pr == nil {
		if _, err := m.process(ctx, b.id, processID); err != nil {
			return nil, err
		}
		return nil, errs.New(errs.NotFound, "the output of process %s is not kept any more", processID)
	}
	select {
	case <-pr.started:
		return pr, pr.failed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (m *Manager) output(ctx context.Context, pr *proc, o OutputOptions, sink OutputSink) (Process, error) {
	stream, err := pr.box.guest.Output(ctx, guestwire.OutputRequest{
		ID: pr.id, Offset: o.Offset, Follow: o.Follow, Hold: o.Hold, Limit: o.Limit,
	})
	if err != nil {
		return m.cutShort(ctx, pr, err)
	}
	defer stream.Close()
	var h *transcript
	if o.Offset == 0 && o.Follow && o.Limit == 0 {
		h = newTranscript(pr.box)
		sink = hearing{sink, h}
	}
	if err := pump(stream, sink); err != nil {
		return m.cutShort(ctx, pr, err)
	}
	return m.told(pr, stream.Info(), h), nil
}

// pump sends a stream's items to sink until the guest has said all.
func pump(stream *guestwire.OutputStream, sink OutputSink) error {
	for {
		item, err := stream.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if item.Gap > 0 {
			err = sink.Gap(Gap{From: item.Offset, To: item.End()})
		} else {
			err = sink.Output(item.Stream, item.Offset, item.Data)
		}
		if err != nil {
			return &sinkError{err}
		}
	}
}

// sinkError is a failure of the caller's side, not of the guest's.
type sinkError struct{ err error }

func (e *sinkError) Error() string { return e.err.Error() }
func (e *sinkError) Unwrap() error { return e.err }

// told returns a process as the guest has just described it; an end is recorded first, with all that was heard of it.
func (m *Manager) told(pr *proc, info guestwire.ProcessInfo, h *transcript) Process {
	if info.End != guestwire.EndNone {
		return m.finish(pr, info, h)
	}
	p := pr.snapshot()
	if p.End == EndNone {
		p.Bytes, p.Dropped = info.Bytes, info.Dropped
	}
	return p
}

// cutShort returns a process whose stream broke: see broken.
func (m *Manager) cutShort(ctx context.Context, pr *proc, err error) (Process, error) {
	err = m.broken(ctx, pr.box, pr.ended, err)
	return pr.snapshot(), err
}

// broken decides what it means that a stream of b's guest broke with err before the end of what it tells of. Where the
// sandbox ends, its guest goes away in the middle of things, and the end that is recorded says so: that is an answer, not an
// error, and nil is returned once ended is closed.
func (m *Manager) broken(ctx context.Context, b *box, ended <-chan struct{}, err error) error {
	var sink *sinkError
	if errors.As(err, &sink) {
		return sink.err
	}
	if ctx.Err() != nil || errs.KindOf(err) != errs.Unavailable {
		return cause(ctx, err)
	}
	if !m.goes(ctx, b) {
		select {
		case <-ended:
			return nil
		default:
			return err
		}
	}
	select {
	case <-ended:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-m.ctx.Done():
		return shuttingDown()
	}
}

// goes reports whether b, to whose guest a connection broke, is on its way out, so that all that ran in it ends. A guest's
// connections break a moment before the kernel tells that it has ended, so one that answers nothing more is waited for.
func (m *Manager) goes(ctx context.Context, b *box) bool {
	switch s := b.snapshot(); {
	case s.asleep():
		return s.FilesOnly // else what ran lies in the memory image
	case s.State != Running:
		return s.State == Stopping || s.State == Stopped
	}
	ctx, cancel := context.WithTimeout(ctx, m.cfg.Defaults.Connect)
	defer cancel()
	if _, err := b.guest.Status(ctx); err == nil {
		return false // it lives, and nothing but the connection has ended
	}
	select {
	case <-b.inst.Done():
		s := b.snapshot()
		return !s.asleep() || s.FilesOnly
	case <-ctx.Done():
	case <-m.ctx.Done():
	}
	return false
}
