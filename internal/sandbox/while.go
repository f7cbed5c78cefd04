package sandbox

import "context"

// WhileRunning returns a context that ends when ctx does, or when the sandbox is paused, stops or is
// taken down: what streams to or from it then has nothing more to say. The caller calls stop when it
// is through. The error is as that of a call that uses the sandbox; it does not count as activity.
func (m *Manager) WhileRunning(ctx context.Context, p Principal, ref string) (_ context.Context, stop func(), err error) {
	b, stopped, err := m.resolve(ctx, p, ref)
	if err != nil {
		return nil, nil, err
	}
	if b == nil {
		return nil, nil, &TransitionError{ID: stopped.ID, From: stopped.State}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.sb.State != Running {
		return nil, nil, &TransitionError{ID: b.id, From: b.sb.State}
	}
	cctx, cancel := context.WithCancelCause(ctx)
	id := b.id
	unhook := context.AfterFunc(b.up, func() { cancel(&TransitionError{ID: id, From: Stopping}) })
	return cctx, func() { unhook(); cancel(nil) }, nil
}

// Alive returns the ids of the sandboxes that run or are paused, whoever owns them. It is for an
// interface that must find the one sandbox that a signature belongs to.
func (m *Manager) Alive() []string {
	boxes := m.boxes()
	ids := make([]string, 0, len(boxes))
	for _, b := range boxes {
		b.mu.Lock()
		state := b.sb.State
		b.mu.Unlock()
		if state == Running || state == Paused {
			ids = append(ids, b.id)
		}
	}
	return ids
}
