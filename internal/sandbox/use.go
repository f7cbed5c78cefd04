package sandbox

import (
	"context"

	"casemate.dev/internal/errs"
)

// use finds a sandbox that can be used now and counts the caller's call as activity until done.
func (m *Manager) use(ctx context.Context, p Principal, ref string) (*box, error) {
	return m.useIn(ctx, p, ref, false)
}

// useIn is use, also of a paused sandbox where pausedToo is set: for what only the guest does.
func (m *Manager) useIn(ctx context.Context, p Principal, ref string, pausedToo bool) (*box, error) {
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
	if err := m.enter(b, pausedToo); err != nil {
		return nil, err
	}
	return b, nil
}

func (m *Manager) enter(b *box, pausedToo bool) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.sb.State == Running || b.sb.State == Paused && pausedToo:
	case b.sb.State == Paused:
		return errs.New(errs.FailedPrecondition, "sandbox %s is paused", b.id).
			WithHint("resume it first: casemate resume %s", b.id)
	default:
		return &TransitionError{ID: b.id, From: b.sb.State}
	}
	b.inUse++
	b.sb.LastActive = wall(m.clock.Now())
	return nil
}

// done ends what use began. The idle timer is not touched: when it fires, it looks.
func (m *Manager) done(b *box) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.inUse--
	b.sb.LastActive = wall(m.clock.Now())
}
