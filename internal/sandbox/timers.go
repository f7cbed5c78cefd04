package sandbox

import (
	"context"
	"time"

	"casemate.dev/internal/errs"
)

// A sandbox ends by itself in two ways.
//
// Its lifetime runs from its start, or from the last update of it, whether it is used, paused or not;
// with Spec.RestPaused it rests while the sandbox is paused. With Spec.PauseAtEnd its end only pauses
// the sandbox.
//
// Its idle limit runs from its last activity. Activity is a call that uses the sandbox: starting,
// running, feeding, signalling or waiting for a process, reading or following output, file calls,
// connections to ports, resume, and updates. Such a call counts from its begin to its end, so that
// a followed output, a watched directory or an open connection keeps the sandbox. A process that
// merely runs does not, nor does looking at a sandbox (get, list, usage, changes, events). While a
// sandbox is paused its idle limit rests.

// armLocked sets the timers anew. Preconditions: the state is Running or Paused.
func (m *Manager) armLocked(b *box) {
	b.stopTimersLocked()
	m.armLifetimeLocked(b, 0)
	if b.sb.Spec.Idle > 0 && b.sb.State == Running {
		b.idle = m.clock.AfterFunc(b.idleLeftLocked(m.clock.Now()), func() { m.idleFired(b) })
	}
}

// armLifetimeLocked sets the timer of the lifetime, which fires after least at the soonest. Preconditions: there is none yet.
func (m *Manager) armLifetimeLocked(b *box, least time.Duration) {
	if !b.sb.ExpiresAt.IsZero() {
		left := b.sb.ExpiresAt.Sub(wall(m.clock.Now()))
		b.lifetime = m.clock.AfterFunc(max(left, least), func() { m.lifetimeFired(b) })
	}
}

func (b *box) stopTimersLocked() {
	// A callback that has begun already finds out for itself that it is late.
	if b.lifetime != nil {
		b.lifetime.Stop()
		b.lifetime = nil
	}
	if b.idle != nil {
		b.idle.Stop()
		b.idle = nil
	}
}

// idleLeftLocked returns how long the sandbox may stay unused from now on.
func (b *box) idleLeftLocked(now time.Time) time.Duration {
	if b.inUse > 0 {
		return b.sb.Spec.Idle
	}
	return max(b.sb.LastActive.Add(b.sb.Spec.Idle).Sub(wall(now)), 0)
}

// lifetimeFired ends the sandbox, unless it was renewed. Renewal and expiry decide under the same
// lock, so that a sandbox whose renewal was acknowledged has a timer, and one without a timer ends.
func (m *Manager) lifetimeFired(b *box) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.sb.State != Running && b.sb.State != Paused || b.sb.ExpiresAt.IsZero() {
		return
	}
	if wall(m.clock.Now()).Before(b.sb.ExpiresAt) {
		m.armLocked(b)
		return
	}
	if b.sb.Spec.PauseAtEnd && b.sb.State == Running {
		m.background(func() { m.pauseAtEnd(b) })
		return
	}
	m.endOfLifetimeLocked(b)
}

func (m *Manager) endOfLifetimeLocked(b *box) {
	m.beginEndLocked(b, "", EndLifetime, "its lifetime of "+b.sb.Spec.Lifetime.String()+" ran out")
}

// pauseAtEnd pauses a sandbox whose lifetime ran out, unless it is renewed meanwhile. One that can't
// be paused ends: a lifetime is a promise.
func (m *Manager) pauseAtEnd(b *box) {
	ctx, cancel := context.WithTimeout(m.ctx, m.cfg.Defaults.Stop)
	defer cancel()
	expired := func() bool {
		return !b.sb.ExpiresAt.IsZero() && !wall(m.clock.Now()).Before(b.sb.ExpiresAt)
	}
	err := m.pauseBox(ctx, b, expired)
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.sb.State != Running || m.ctx.Err() != nil:
	case !expired():
		m.armLocked(b)
	default:
		m.log.Error("cannot pause a sandbox at the end of its lifetime, so it ends", "sandbox", b.id, "error", err)
		m.endOfLifetimeLocked(b)
	}
}

// pauseBox pauses b in the way that its spec says.
func (m *Manager) pauseBox(ctx context.Context, b *box, still func() bool) error {
	b.mu.Lock()
	filesOnly, onDisk := b.sb.Spec.PauseFilesOnly, b.sb.Spec.PauseOnDisk
	b.mu.Unlock()
	onDisk = onDisk && m.HasImages(ctx, b.snapshot().Spec.Isolation)
	switch {
	case filesOnly:
		if err := b.acquire(ctx); err != nil {
			return err
		}
		defer b.release()
		_, err := m.sleep(ctx, "", b, "", still)
		return err
	case onDisk:
		_, err := m.rememberBox(ctx, "", b, still)
		return err
	}
	_, err := m.freezeBox(ctx, "", b, Paused, still)
	return err
}

// rememberBox pauses b with its memory on disk, or where there is no room for that, in memory: nothing is lost for want of disk.
func (m *Manager) rememberBox(ctx context.Context, actor string, b *box, still func() bool) (Sandbox, error) {
	if err := b.acquire(ctx); err != nil {
		return Sandbox{}, err
	}
	s, err := m.hibernate(ctx, actor, b, still)
	b.release()
	if !errs.Is(err, errs.ResourceExhausted) {
		return s, err
	}
	m.log.Warn("the memory of a sandbox does not fit on its disk, so it is paused in memory", "sandbox", b.id, "error", err)
	return m.freezeBox(ctx, actor, b, Paused, still)
}

// live sets the lifetime anew, from now on; with extend it never brings the end nearer.
func (s *Sandbox) live(now time.Time, lifetime time.Duration, extend bool) {
	if s.State == Paused && s.Spec.rests() {
		s.Spec.Lifetime = lifetime // it begins with the resume
		return
	}
	var end time.Time
	if lifetime > 0 {
		end = now.Add(lifetime)
	}
	if extend && (s.ExpiresAt.IsZero() || !end.IsZero() && !end.After(s.ExpiresAt)) {
		return
	}
	s.Spec.Lifetime, s.ExpiresAt = lifetime, end
}

// rest ends or begins the lifetime of a sandbox that is paused or resumed now, where it rests meanwhile.
func (s *Sandbox) rest(now time.Time, to State) {
	if !s.Spec.rests() {
		return
	}
	s.ExpiresAt = time.Time{}
	if to == Running && s.Spec.Lifetime > 0 {
		s.ExpiresAt = now.Add(s.Spec.Lifetime)
	}
}

func (m *Manager) idleFired(b *box) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.sb.State != Running || b.sb.Spec.Idle <= 0 {
		return
	}
	if b.idleLeftLocked(m.clock.Now()) > 0 {
		m.armLocked(b)
		return
	}
	m.beginEndLocked(b, "", EndIdle, "nobody used it for "+b.sb.Spec.Idle.String())
}
