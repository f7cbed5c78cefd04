package sandbox

import (
	"context"
	"maps"
	"time"

	"casemate.dev/internal/journal"
)

// Update changes a sandbox; nil fields stay as they are.
type Update struct {
	Labels *map[string]string
	// Lifetime counts from now on; ≤ 0: no end.
	Lifetime *time.Duration
	// Extend keeps an end that is later than what Lifetime would make it.
	Extend bool
	// Idle ≤ 0 stands for no idle limit.
	Idle *time.Duration
	// Limits' zero fields stay as they are.
	Limits *Limits
	// Network replaces the network rules and limits of a sandbox that has a network. Its Proxy is not read: Proxy, where it
	// is set, replaces that, too.
	Network *Network
	Proxy   *string
	// Extra replaces what the interface keeps with the sandbox.
	Extra *map[string]string
}

// Update changes labels, lifetime, idle limit or limits of a running or paused sandbox: all of it or
// nothing. It counts as activity. Kinds: InvalidArgument, FailedPrecondition (it is not alive),
// PermissionDenied (a child's limits), and what the backend says about limits.
func (m *Manager) Update(ctx context.Context, p Principal, ref string, u Update) (Sandbox, error) {
	if err := u.check(); err != nil {
		return Sandbox{}, err
	}
	b, stopped, err := m.resolve(ctx, p, ref)
	if err != nil {
		return Sandbox{}, err
	}
	if b == nil {
		return Sandbox{}, &TransitionError{ID: stopped.ID, From: stopped.State}
	}
	if u.Limits != nil {
		if err := b.acquire(ctx); err != nil {
			return Sandbox{}, err
		}
		defer b.release()
		limits, err := m.applyLimits(ctx, p, b, *u.Limits)
		if err != nil {
			return Sandbox{}, err
		}
		u.Limits = &limits
	}
	if u.Network != nil {
		if u.Limits == nil {
			if err := b.acquire(ctx); err != nil {
				return Sandbox{}, err
			}
			defer b.release()
		}
		u.Network = withProxy(u.Network, b.snapshot().Spec.Network, u.Proxy)
		if err := m.setNetwork(ctx, p, b, u.Network); err != nil {
			return Sandbox{}, err
		}
	}
	b.mu.Lock()
	if b.sb.State != Running && b.sb.State != Paused {
		defer b.mu.Unlock()
		return Sandbox{}, &TransitionError{ID: b.id, From: b.sb.State}
	}
	m.applyLocked(b, u)
	saved := m.saveLocked(b, event(journal.SandboxUpdated, p.ID, u.facts()))
	s := b.snapshotLocked()
	b.mu.Unlock()
	if _, err = saved.Wait(); err == nil && u.Labels != nil && s.Spec.Network != nil && m.cfg.Gateway != nil {
		err = m.relabeled(ctx, s)
	}
	return s, err
}

// withProxy returns a network with the proxy that it is to have: the one that there is, unless another is asked for.
func withProxy(n, now *Network, asked *string) *Network {
	out := *n
	out.Proxy = ""
	switch {
	case asked != nil:
		out.Proxy = *asked
	case now != nil:
		out.Proxy = now.Proxy
	}
	return &out
}

// relabeled tells the gateway of new labels, by which secrets are bound.
func (m *Manager) relabeled(ctx context.Context, s Sandbox) error {
	policy, err := m.policyOf(s.Spec.Record, s.Spec.Network)
	if err != nil {
		return err
	}
	return m.cfg.Gateway.Configure(ctx, s.ID, policy)
}

func (u Update) check() error {
	var c checker
	if u.Labels != nil {
		c.labels(*u.Labels)
	}
	if u.Lifetime != nil {
		c.duration("lifetime", *u.Lifetime)
	}
	if u.Idle != nil {
		c.duration("idle", *u.Idle)
	}
	if u.Limits != nil {
		c.limits(*u.Limits)
	}
	if u.Extra != nil {
		c.extra(*u.Extra)
	}
	return c.err
}

func (u Update) facts() updatedFacts {
	f := updatedFacts{Labels: u.Labels, Limits: u.Limits, Network: u.Network}
	if u.Lifetime != nil {
		f.Lifetime = durationOrNone(*u.Lifetime)
	}
	if u.Idle != nil {
		f.Idle = durationOrNone(*u.Idle)
	}
	return f
}

func durationOrNone(d time.Duration) string {
	if d <= 0 {
		return "none"
	}
	return d.String()
}

// applyLocked changes what needs no backend, and the timers that depend on it.
func (m *Manager) applyLocked(b *box, u Update) {
	s := &b.sb
	s.LastActive = wall(m.clock.Now())
	if u.Labels != nil {
		s.Spec.Labels = maps.Clone(*u.Labels)
	}
	if u.Lifetime != nil {
		s.live(s.LastActive, *u.Lifetime, u.Extend)
	}
	if u.Network != nil {
		s.Spec.Network = u.Network
	}
	if u.Extra != nil {
		s.Spec.Extra = maps.Clone(*u.Extra)
	}
	if u.Idle != nil {
		s.Spec.Idle = max(*u.Idle, 0)
	}
	if u.Limits != nil {
		s.Spec.Limits = *u.Limits
		if !s.asleep() {
			s.Applied = b.inst.Applied()
		}
	}
	m.armLocked(b)
}

// applyLimits changes the instance's limits and returns them whole. Preconditions: the caller holds
// the life token.
func (m *Manager) applyLimits(ctx context.Context, p Principal, b *box, asked Limits) (Limits, error) {
	now := b.snapshot()
	if now.State != Running && now.State != Paused {
		return Limits{}, &TransitionError{ID: b.id, From: now.State}
	}
	limits := fillLimits(asked, now.Spec.Limits)
	if parent := m.find(b.parent); parent != nil {
		if err := withinParent(limits, parent.snapshot().Spec.Limits); err != nil {
			return Limits{}, err
		}
	}
	if now.asleep() {
		return limits, nil // they hold from the resume on
	}
	return limits, b.inst.Update(ctx, limits)
}

// Pause freezes every process; memory is kept, unless it is paused without memory already. Calls that need a process fail until Resume; what the
// guest holds (output so far) can be read. Idempotent.
func (m *Manager) Pause(ctx context.Context, p Principal, ref string) (Sandbox, error) {
	return m.freeze(ctx, p, ref, Paused)
}

// Resume lets the processes of a paused sandbox go on. It counts as activity. Idempotent.
func (m *Manager) Resume(ctx context.Context, p Principal, ref string) (Sandbox, error) {
	return m.freeze(ctx, p, ref, Running)
}

func (m *Manager) freeze(ctx context.Context, p Principal, ref string, to State) (Sandbox, error) {
	b, stopped, err := m.resolve(ctx, p, ref)
	if err != nil {
		return Sandbox{}, err
	}
	if b == nil {
		return Sandbox{}, &TransitionError{ID: stopped.ID, From: stopped.State, To: to}
	}
	return m.freezeBox(ctx, p.ID, b, to, nil)
}

// freezeBox freezes or thaws b on behalf of actor; "" is the server itself. Where still is given, it
// is asked under b.mu, and nothing changes where it says no.
func (m *Manager) freezeBox(ctx context.Context, actor string, b *box, to State, still func() bool) (Sandbox, error) {
	if err := b.acquire(ctx); err != nil {
		return Sandbox{}, err
	}
	defer b.release()
	now := b.snapshot()
	if now.State == to {
		return now, nil
	}
	if !now.State.CanBecome(to) || now.State == Starting {
		return Sandbox{}, &TransitionError{ID: b.id, From: now.State, To: to}
	}
	if now.asleep() {
		return m.wake(ctx, actor, b)
	}
	// First the kernel, then the state: if the server is killed between, Recover makes the kernel
	// agree with the state again, and nobody was told anything yet.
	change, undo, t := b.inst.Freeze, b.inst.Thaw, journal.SandboxPaused
	if to == Running {
		change, undo, t = b.inst.Thaw, b.inst.Freeze, journal.SandboxResumed
		if err := b.unhold(ctx); err != nil {
			return Sandbox{}, err
		}
	}
	if to == Paused && now.Applied.Runtime != "" { // its guest can't be asked later
		if err := m.keepEnv(ctx, b); err != nil {
			return Sandbox{}, err
		}
	}
	if err := change(ctx); err != nil {
		return Sandbox{}, err
	}
	b.mu.Lock()
	if b.sb.State != now.State { // it ends meanwhile
		defer b.mu.Unlock()
		return Sandbox{}, &TransitionError{ID: b.id, From: b.sb.State, To: to}
	}
	if still != nil && !still() {
		b.mu.Unlock()
		return now, undo(context.WithoutCancel(ctx))
	}
	b.sb.LastActive = wall(m.clock.Now())
	b.sb.rest(b.sb.LastActive, to)
	saved := m.becomeLocked(b, to, event(t, actor, struct{}{}))
	m.armLocked(b)
	s := b.snapshotLocked()
	b.mu.Unlock()
	if _, err := saved.Wait(); err != nil {
		return Sandbox{}, m.unfreeze(ctx, b, now.State, to, undo, err)
	}
	return s, nil
}

// unfreeze goes back to the state before, since the new one could not be recorded.
func (m *Manager) unfreeze(ctx context.Context, b *box, from, to State, undo func(context.Context) error, err error) error {
	if uerr := undo(context.WithoutCancel(ctx)); uerr != nil {
		m.log.Error("cannot undo a change of state that was not recorded", "sandbox", b.id, "error", uerr)
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.sb.State == to {
		b.sb.rest(wall(m.clock.Now()), from)
		back := event(journal.SandboxUpdated, "", map[string]State{"state": from})
		m.becomeLocked(b, from, back)
		m.armLocked(b)
	}
	return err
}
