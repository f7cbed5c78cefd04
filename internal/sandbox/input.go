package sandbox

import (
	"bytes"
	"context"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/journal"
)

// given is what a process's input was given later than at its start, as it is taken down. The box's mu guards it.
type given struct {
	k *journal.Keeper // nil: nothing
	// at is how much the process is known to have taken in all.
	at int64
	// lost is how much of that is not in k, and unsure how much more there may be since.
	lost, unsure int64
}

// Input writes to a process's standard input or terminal, and with closeAfter closes it. It returns
// how many bytes the process was given in all. offset is how many the caller knows to be taken, so
// that a repeated call writes nothing twice, or -1. It blocks while the process does not read.
// Kinds: FailedPrecondition (no standard input, it has ended, the offset is not reached).
func (m *Manager) Input(ctx context.Context, p Principal, ref, processID string, offset int64, data []byte, closeAfter bool) (int64, error) {
	if offset < -1 {
		return 0, invalid("offset is %d", offset).WithHint("use -1 for: wherever it stands")
	}
	pr, err := m.running(ctx, p, ref, processID)
	if err != nil {
		return 0, err
	}
	defer m.done(pr.box)
	gctx, stop := m.attended(ctx, pr.box.guest)
	defer stop()
	n, err := m.put(gctx, pr, guestwire.InputRequest{ID: pr.id, Offset: offset, Close: closeAfter}, data, true)
	return n, cause(gctx, err)
}

// feed writes all of a process's input and closes it.
func (m *Manager) feed(pr *proc, input []byte) {
	ctx, cancel := context.WithCancel(m.ctx)
	defer cancel()
	go func() { // a process that ends without reading must not hold this up
		select {
		case <-pr.ended:
			cancel()
		case <-ctx.Done():
		}
	}()
	// A process that closes its input, or ends, before it has read everything is no fault of anybody.
	_, _ = m.put(ctx, pr, guestwire.InputRequest{ID: pr.id, Offset: 0, Close: true}, input, pr.given() == nil) // else its start tells of it
}

// put writes data to a process's input and, with note, takes down what the process took of it. Who comes while another
// writes waits here, where the guest would have it wait: so it is taken down in the order in which the process got it.
func (m *Manager) put(ctx context.Context, pr *proc, r guestwire.InputRequest, data []byte, note bool) (int64, error) {
	select {
	case pr.writing <- struct{}{}:
		defer func() { <-pr.writing }()
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	}
	reply, err := pr.box.guest.Input(ctx, r, bytes.NewReader(data))
	start, upTo := r.Offset, reply.Offset
	if err != nil {
		upTo = m.takenBy(ctx, pr)
	} else if start < 0 {
		start = upTo - int64(len(data))
	}
	pr.took(start, data, upTo, note)
	return reply.Offset, err
}

// takenBy asks how much a process's input has taken, after a call that did not tell; -1: nobody knows.
func (m *Manager) takenBy(ctx context.Context, pr *proc) int64 {
	ctx, cancel := m.detached(ctx, pr.box.guest)
	defer cancel()
	reply, err := pr.box.guest.Input(ctx, guestwire.InputRequest{ID: pr.id, Offset: -1}, nil)
	if err != nil {
		return -1
	}
	return reply.Offset
}

// took notes that data was written to a process's input, where its first byte is the one at start, or with start -1 the
// next; and that the process has upTo bytes in all, -1: nobody knows. Without note only that is noted. Terminals are left
// out: what is typed there may be a password, and what is to be seen of it is in the output.
func (pr *proc) took(start int64, data []byte, upTo int64, note bool) {
	b := pr.box
	b.mu.Lock()
	defer b.mu.Unlock()
	g := &pr.stdin
	switch {
	case pr.info.TTY || pr.finishing:
		return
	case upTo < 0:
		g.unsure += int64(len(data))
		return
	case !note:
		g.at, g.unsure = max(g.at, upTo), 0
		return
	}
	if start < 0 {
		start = g.at
	}
	from, end := max(start, g.at), min(upTo, start+int64(len(data)))
	if end > from {
		if g.k == nil {
			g.k = b.keeperLocked(RecordContent)
		}
		g.lost += from - g.at
		_, _ = g.k.Write(data[from-start : end-start]) // never fails
		g.at = end
	}
	g.lost += max(upTo-g.at, 0)
	g.at, g.unsure = max(g.at, upTo), 0
}
