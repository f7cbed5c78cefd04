package sandbox

import (
	"context"
	"slices"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
)

func noProcess(sandboxID, processID string) error {
	return errs.New(errs.NotFound, "no process %s in sandbox %s", quote(processID), sandboxID)
}

// process returns a process by the ids of both, from memory or the store.
func (m *Manager) process(ctx context.Context, sandboxID, processID string) (Process, error) {
	if b := m.find(sandboxID); b != nil {
		if pr := b.proc(processID); pr != nil {
			return pr.snapshot(), nil
		}
	}
	// What was acknowledged may still be on its way into the database.
	if err := m.db.Flush(); err != nil {
		m.log.Warn("cannot write queued changes", "error", err)
	}
	row, ok, err := m.db.GetProcess(ctx, sandboxID, processID)
	if err != nil {
		return Process{}, err
	}
	if !ok {
		return Process{}, noProcess(sandboxID, processID)
	}
	return ofProcessRow(row)
}

// GetProcess returns a process, also after its sandbox has ended.
func (m *Manager) GetProcess(ctx context.Context, p Principal, ref, processID string) (Process, error) {
	b, stopped, err := m.resolve(ctx, p, ref)
	if err != nil {
		return Process{}, err
	}
	if b == nil {
		return m.process(ctx, stopped.ID, processID)
	}
	return m.process(ctx, b.id, processID)
}

// maxListed bounds how many processes ListProcesses returns: the newest.
const maxListed = 1000

// ListProcesses returns the processes of a sandbox, also of a stopped one, the oldest first.
func (m *Manager) ListProcesses(ctx context.Context, p Principal, ref string) ([]Process, error) {
	b, stopped, err := m.resolve(ctx, p, ref)
	if err != nil {
		return nil, err
	}
	sandboxID, held := stopped.ID, map[string]Process{}
	if b != nil {
		sandboxID = b.id
		b.mu.Lock()
		for id, pr := range b.procs {
			if !pr.info.StartedAt.IsZero() {
				held[id] = pr.info
			}
		}
		b.mu.Unlock()
	}
	if err := m.db.Flush(); err != nil {
		m.log.Warn("cannot write queued changes", "error", err)
	}
	rows, err := m.db.ListProcesses(ctx, sandboxID, maxListed)
	if err != nil {
		return nil, err
	}
	all := make([]Process, 0, len(rows)+len(held))
	for _, r := range rows {
		one, ok := held[r.ID]
		delete(held, r.ID)
		if !ok {
			if one, err = ofProcessRow(r); err != nil {
				return nil, err
			}
		}
		all = append(all, one)
	}
	for _, one := range held {
		all = append(all, one)
	}
	slices.SortStableFunc(all, func(a, b Process) int { return a.StartedAt.Compare(b.StartedAt) })
	return all, nil
}

// WaitProcess returns a process once it has ended, or as it is when ctx ends; the latter is no error.
func (m *Manager) WaitProcess(ctx context.Context, p Principal, ref, processID string) (Process, error) {
	b, stopped, err := m.resolve(ctx, p, ref)
	if err != nil {
		return Process{}, err
	}
	if b == nil {
		return m.process(ctx, stopped.ID, processID)
	}
	_ = b.settled(ctx) // else it is told as it is now
	pr := b.proc(processID)
	if pr == nil {
		return m.process(ctx, b.id, processID)
	}
	if m.enter(b, true) == nil { // it ends soon where the sandbox can't be used any more
		defer m.done(b)
	}
	select {
	case <-pr.ended:
		if pr.failed != nil {
			return Process{}, pr.failed
		}
	case <-ctx.Done():
	case <-m.ctx.Done():
	}
	return pr.snapshot(), nil
}

// running finds a process to do something to.
func (m *Manager) running(ctx context.Context, p Principal, ref, processID string) (*proc, error) {
	b, err := m.use(ctx, p, ref)
	if err != nil {
		return nil, err
	}
	pr, err := m.held(ctx, b, processID)
	if err != nil {
		m.done(b)
		return nil, err
	}
	return pr, nil
}

// maxSignal is SIGRTMAX of Linux.
const maxSignal = 64

// Signal sends a signal to a process, or with tree to everything that descends from it. Signal 9
// with tree ends it as canceled.
func (m *Manager) Signal(ctx context.Context, p Principal, ref, processID string, sig int, tree bool) error {
	if sig < 1 || sig > maxSignal {
		return invalid("signal %d does not exist", sig).WithHint("use 1 to %d, as in 15 for TERM", maxSignal)
	}
	pr, err := m.running(ctx, p, ref, processID)
	if err != nil {
		return err
	}
	defer m.done(pr.box)
	ctx, cancel := m.prompt(ctx, pr.box.guest)
	defer cancel()
	return cause(ctx, pr.box.guest.Signal(ctx, guestwire.SignalRequest{ID: pr.id, Signal: sig, Tree: tree}))
}

// Resize sets the size of a process's terminal.
func (m *Manager) Resize(ctx context.Context, p Principal, ref, processID string, rows, cols uint16) error {
	pr, err := m.running(ctx, p, ref, processID)
	if err != nil {
		return err
	}
	defer m.done(pr.box)
	ctx, cancel := m.prompt(ctx, pr.box.guest)
	defer cancel()
	return cause(ctx, pr.box.guest.Resize(ctx, guestwire.ResizeRequest{ID: pr.id, Rows: rows, Cols: cols}))
}
