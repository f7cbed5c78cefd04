package sandbox

import (
	"context"

	"casemate.dev/internal/cleanup"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/journal"
)

// PauseFiles pauses a sandbox without its memory: its files and settings stay, its processes end, and what
// held them (guest, control groups, memory, ids) is given back. Resume starts it anew on the files, with the
// same id, name, environment and limits; to programs that is a boot. One that is paused already loses the
// memory that was kept. Idempotent. Unsupported: the files lie in memory only.
func (m *Manager) PauseFiles(ctx context.Context, p Principal, ref string) (Sandbox, error) {
	b, err := m.toPause(ctx, p, ref)
	if err != nil {
		return Sandbox{}, err
	}
	defer b.release()
	return m.sleep(ctx, p.ID, b, "", nil)
}

// toPause finds a sandbox that is to be paused and takes its life token, which the caller releases.
func (m *Manager) toPause(ctx context.Context, p Principal, ref string) (*box, error) {
	b, stopped, err := m.resolve(ctx, p, ref)
	if err != nil {
		return nil, err
	}
	if b == nil {
		return nil, &TransitionError{ID: stopped.ID, From: stopped.State, To: Paused}
	}
	return b, b.acquire(ctx)
}

// pausedFacts are the server's facts of sandbox.paused and sandbox.resumed.
//
//casemate:facts server sandbox.paused sandbox.resumed
type pausedFacts struct {
	Memory   *bool  `json:"memory,omitempty"` // false: it was not kept
	OnDisk   bool   `json:"on_disk,omitempty"`
	Bytes    int64  `json:"bytes,omitempty"` // of the memory image
	Checkout string `json:"checkout,omitempty"`
}

func withoutMemory() pausedFacts { return pausedFacts{Memory: new(bool)} }

// sleep pauses b without memory on behalf of actor. checkout, where given, is recorded as what is to come
// next. Where still is given, it is asked under b.mu, and nothing changes where it says no.
// Preconditions: the caller holds the life token.
func (m *Manager) sleep(ctx context.Context, actor string, b *box, checkout string, still func() bool) (Sandbox, error) {
	now := b.snapshot()
	if now.FilesOnly && checkout == "" {
		return now, nil
	}
	if now.State != Running && now.State != Paused {
		return Sandbox{}, &TransitionError{ID: b.id, From: now.State, To: Paused}
	}
	if !m.cfg.Roots.Durable() {
		return Sandbox{}, errs.New(errs.Unsupported, "this server keeps files of sandboxes in memory only, so that they end with their processes").
			WithHint("install btrfs-progs and use a new data directory; or pause with memory")
	}
	undo, err := m.still(ctx, b, now)
	if err != nil {
		return Sandbox{}, err
	}
	defer undo.Run()
	b.mu.Lock()
	if b.sb.State != now.State { // it ends meanwhile
		defer b.mu.Unlock()
		return Sandbox{}, &TransitionError{ID: b.id, From: b.sb.State, To: Paused}
	}
	if still != nil && !still() {
		defer b.mu.Unlock()
		return b.snapshotLocked(), nil
	}
	// First the state, then the deed: from here on the next server finds that no instance is to be.
	b.leaving, b.sb.FilesOnly, b.sb.OnDisk, b.body.Checkout = true, true, false, checkout
	b.sb.LastActive = wall(m.clock.Now())
	facts := withoutMemory()
	facts.Checkout = checkout
	e := event(journal.SandboxPaused, actor, facts)
	saved := m.saveLockedAs(b, Paused, e)
	b.mu.Unlock()
	if _, err := saved.Wait(); err != nil {
		m.wakeUnrecorded(b, now)
		return Sandbox{}, err
	}
	undo.Release()
	m.detach(m.ctx, b)
	if !m.destroy(b) {
		return Sandbox{}, shuttingDown()
	}
	m.endProcesses(b)
	m.endContexts(b)
	b.changes.look()
	b.inst.put(nil)
	m.dropImage(b)
	m.rest(b)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.leaving = false
	return b.snapshotLocked(), nil
}

// rest gives back what the files of a sandbox that sleeps don't need.
func (m *Manager) rest(b *box) {
	if err := m.cfg.Roots.Rest(b.id); err != nil {
		m.log.Warn("cannot take back the room of a sandbox that sleeps", "sandbox", b.id, "error", err)
	}
}

// saveLockedAs saves b in a state, which may be the one that it has.
func (m *Manager) saveLockedAs(b *box, to State, e journal.Event) journal.Pending {
	if b.sb.State == to {
		return m.saveLocked(b, e)
	}
	b.sb.rest(b.sb.LastActive, to)
	saved := m.becomeLocked(b, to, e)
	m.armLocked(b)
	return saved
}

// still brings a sandbox's files to rest: what is in memory is written, the environment is kept with them,
// and nothing changes them until the returned stack is run.
func (m *Manager) still(ctx context.Context, b *box, now Sandbox) (*cleanup.Stack, error) {
	undo := cleanup.New()
	if now.asleep() {
		return undo, nil
	}
	if err := m.keepEnv(ctx, b); err != nil {
		return nil, err
	}
	// Most is written while it still runs, so that it is held only for the rest.
	if err := m.cfg.Roots.Flush(b.id, false); err != nil {
		return nil, err
	}
	if now.State == Running {
		if err := b.inst.Freeze(ctx); err != nil {
			return nil, err
		}
		undo.Add(func() { m.thaw(b) })
	}
	if err := m.cfg.Roots.Flush(b.id, true); err != nil {
		undo.Run()
		return nil, err
	}
	return undo, nil
}

func (m *Manager) thaw(b *box) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(m.ctx), m.cfg.Defaults.Stop)
	defer cancel()
	if err := b.inst.Thaw(ctx); err != nil {
		m.log.Error("cannot let a sandbox go on", "sandbox", b.id, "error", err)
	}
}

// wakeUnrecorded takes back a pause without memory that could not be recorded.
func (m *Manager) wakeUnrecorded(b *box, was Sandbox) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.leaving, b.sb.FilesOnly, b.sb.OnDisk, b.body.Checkout = false, was.FilesOnly, was.OnDisk, ""
	if was.State == Running && b.sb.State == Paused {
		b.sb.rest(wall(m.clock.Now()), Running)
		m.becomeLocked(b, Running, event(journal.SandboxUpdated, "", map[string]State{"state": Running}))
		m.armLocked(b)
	}
}

// keepEnv keeps a sandbox's environment with its files. That of one whose guest stands still was kept before that: it
// never changes.
func (m *Manager) keepEnv(ctx context.Context, b *box) error {
	if now := b.snapshot(); now.State == Paused && now.Applied.Runtime != "" {
		return nil
	}
	ctx, cancel := m.prompt(ctx, b.guest)
	defer cancel()
	env, err := b.guest.Env(ctx)
	if err != nil {
		return cause(ctx, err)
	}
	var c checker
	if c.env(env); c.err != nil { // a guest that was taken over says strange things
		return errs.Wrap(c.err, errs.FailedPrecondition, "sandbox %s's guest tells an environment that can't be", b.id)
	}
	m.withoutGranted(ctx, b, env)
	return m.cfg.Roots.PutEnv(b.id, env)
}

// wake starts a sandbox that is paused without memory, or restores one whose memory is on disk. Preconditions: the
// caller holds the life token.
func (m *Manager) wake(ctx context.Context, actor string, b *box) (Sandbox, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, m.cfg.Defaults.Start, errs.New(errs.DeadlineExceeded,
		"the sandbox did not start within %s (start timeout)", m.cfg.Defaults.Start))
	defer cancel()
	was := b.snapshot()
	facts := withoutMemory()
	if was.OnDisk {
		facts = fromDisk()
	}
	inst, err := m.startAgain(ctx, b, was.OnDisk)
	if err != nil {
		return Sandbox{}, cause(ctx, err)
	}
	undo := cleanup.New(func() { m.destroyQuietly(ctx, inst) }, func() { m.detach(ctx, b) })
	defer undo.Run()
	b.mu.Lock()
	if b.sb.State != Paused { // it ends meanwhile
		defer b.mu.Unlock()
		return Sandbox{}, &TransitionError{ID: b.id, From: b.sb.State, To: Running}
	}
	b.inst.put(inst)
	b.oomSeen, b.gauge = 0, newGauge(m.clock.Now())
	b.body.Record, b.sb.Applied, b.sb.FilesOnly, b.sb.OnDisk = inst.Record(), inst.Applied(), false, false
	b.sb.LastActive = wall(m.clock.Now())
	saved := m.saveLockedAs(b, Running, event(journal.SandboxResumed, actor, facts))
	s := b.snapshotLocked()
	b.mu.Unlock()
	if _, err := saved.Wait(); err != nil {
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.sb.State == Running {
			b.sb.FilesOnly, b.sb.OnDisk = was.FilesOnly, was.OnDisk
			b.inst.put(nil)
			m.saveLockedAs(b, Paused, event(journal.SandboxUpdated, "", map[string]State{"state": Paused}))
		}
		return Sandbox{}, err
	}
	undo.Release()
	m.background(func() { m.follow(b, inst) })
	if was.OnDisk {
		m.dropImage(b)
		if err := m.rejoin(ctx, b); err != nil { // it runs all the same
			m.log.Error("cannot take up the processes of a resumed sandbox", "sandbox", b.id, "error", err)
		}
		return s, nil
	}
	if err := m.serve(ctx, Principal{ID: b.owner}, b); err != nil {
		// It runs, with what it was paused with; its owner may look why, and start the service again.
		m.log.Warn("a resumed sandbox's service is not ready", "sandbox", b.id, "error", err)
	}
	return s, nil
}

// startAgain makes a new instance on a sandbox's files, with the processes of its memory image if image is set.
func (m *Manager) startAgain(ctx context.Context, b *box, image bool) (isolation.Instance, error) {
	b.mu.Lock()
	spec, plan := b.sb.Spec, b.body.Plan
	b.mu.Unlock()
	env, err := m.cfg.Roots.Env(b.id)
	if err != nil {
		return nil, err
	}
	if err := m.cfg.Roots.Rouse(b.id); err != nil {
		return nil, err
	}
	slept := cleanup.New(func() { m.rest(b) })
	defer slept.Run()
	back, err := m.cfg.Roots.Lend(b.id) // a full disk must not keep it from starting
	if err != nil {
		return nil, err
	}
	shape := isolation.Spec{ID: b.id, Profile: spec.Profile, Root: plan, Limits: spec.Limits, AllowMissing: spec.AllowMissing}
	observedCalls(spec, &shape)
	networkOf(spec.Network, &shape)
	spec.Env = env
	env = m.granted(ctx, b, spec, &shape)
	start := b.backend.Start
	if image {
		start = func(ctx context.Context, s isolation.Spec) (isolation.Instance, error) {
			return m.restoreImage(ctx, b, s)
		}
	}
	inst, err := start(ctx, shape)
	if berr := back(); berr != nil {
		m.log.Warn("cannot take back what was lent to a sandbox's disk", "sandbox", b.id, "error", berr)
	}
	if err != nil {
		return nil, err
	}
	undo := cleanup.New(func() { m.destroyQuietly(ctx, inst) }, func() { m.detach(ctx, b) })
	defer undo.Run()
	if err := m.attach(ctx, b, inst, spec.Network); err != nil {
		return nil, err
	}
	guest := guestwire.NewClient(inst.Dial)
	if image {
		err = m.tellRestored(ctx, guest, guestwire.Restored{})
	} else {
		err = m.claim(ctx, guest, b, env, plan, false)
	}
	if err != nil {
		return nil, err
	}
	undo.Release()
	slept.Release()
	return inst, nil
}

// recoverAsleep takes up a sandbox that an earlier server paused without memory, or with its memory on disk.
func (m *Manager) recoverAsleep(ctx context.Context, b *box, r *recovery) error {
	// It may have been killed before it took the instance down, or between its start and the record.
	if inst, err := m.adopt(ctx, b); err == nil {
		m.destroyQuietly(ctx, inst)
	}
	b.inst = seatOf(nil)
	b.guest = guestwire.NewClient(b.inst.Dial)
	b.backend = m.cfg.Backends[b.sb.Spec.Isolation]
	if b.backend == nil {
		return m.lost(ctx, b, r, ending{EndLost, "this server has no isolation " + b.sb.Spec.Isolation})
	}
	m.resumeTracking(ctx, b)
	if !b.sb.OnDisk { // else they go on with the resume
		if err := m.closeProcesses(ctx, b.id, EndSandboxStopped); err != nil {
			return err
		}
		m.dropImage(b)
	}
	b.changes.look()
	if b.body.Checkout != "" {
		if err := m.replaceFiles(ctx, b, "", b.body.Checkout); err != nil {
			m.log.Error("cannot finish a checkout", "sandbox", b.id, "error", err)
			return m.lost(ctx, b, r, ending{EndLost, "its checkout could not be finished when the server started"})
		}
	}
	m.rest(b)
	m.take(b)
	close(b.ready)
	b.mu.Lock()
	b.sb.LastActive = wall(m.clock.Now())
	//casemate:fact server sandbox.adopted memory yes_or_no whether it has more than its files
	adopted := m.saveLocked(b, event(journal.SandboxAdopted, "", map[string]any{"state": b.sb.State, "memory": b.sb.OnDisk}))
	m.armLocked(b)
	b.mu.Unlock()
	if _, err := adopted.Wait(); err != nil {
		m.log.Error("cannot record that a sandbox was adopted", "sandbox", b.id, "error", err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.report.Adopted = append(r.report.Adopted, b.id)
	return nil
}
