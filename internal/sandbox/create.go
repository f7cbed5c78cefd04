package sandbox

import (
	"context"
	"time"

	"casemate.dev/internal/cleanup"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/rootfs"
	"casemate.dev/internal/store"
	"casemate.dev/internal/trace"
)

// CreateOptions go with a create.
type CreateOptions struct {
	// ID is the sandbox's id, or "" for a new one.
	ID string
	// IdempotencyKey makes a repeated create give the same sandbox.
	IdempotencyKey string
}

// Create starts a sandbox and returns when its guest answers. On error nothing is left of it but
// its record. Kinds: InvalidArgument (the text names the field), NotFound (template, backend),
// PermissionDenied, AlreadyExists (id, name), ResourceExhausted (limits on sandboxes), Unsupported
// (a layer is missing), Conflict (idempotency key), DeadlineExceeded (start timeout).
func (m *Manager) Create(ctx context.Context, p Principal, s Spec, o CreateOptions) (Sandbox, error) {
	asked := []any{s, o.ID, p.Sandbox}
	spec, err := m.checkSpec(ctx, p, s, &o)
	if err != nil {
		return Sandbox{}, err
	}
	if o.IdempotencyKey == "" {
		b, err := m.create(ctx, p, spec, o.ID)
		if err != nil {
			return Sandbox{}, err
		}
		return b.snapshot(), nil
	}
	answer, err := m.once.do(ctx, m, request{
		principal: p.ID, scope: "sandbox", key: o.IdempotencyKey, body: asked,
		stale: m.neverRan,
		run: func(ctx context.Context, remember func(answer string) store.Write) (string, error) {
			b, err := m.create(ctx, p, spec, o.ID, remember(o.ID))
			if err != nil {
				return "", err
			}
			return b.id, nil
		},
	})
	if err != nil {
		return Sandbox{}, err
	}
	return m.get(ctx, answer)
}

// neverRan reports whether a remembered create came to nothing, so that the key may be used again.
func (m *Manager) neverRan(ctx context.Context, sandboxID string) (bool, error) {
	if m.find(sandboxID) != nil {
		return false, nil
	}
	row, ok, err := m.db.GetSandbox(ctx, sandboxID)
	if err != nil || !ok {
		return !ok, err
	}
	s, _, err := ofRow(row)
	return s.StartedAt.IsZero(), err
}

// create starts a sandbox whose spec is checked. with is written together with its first record.
func (m *Manager) create(ctx context.Context, p Principal, s Spec, sandboxID string, with ...store.Write) (*box, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, m.cfg.Defaults.Start, errs.New(errs.DeadlineExceeded,
		"the sandbox did not start within %s (start timeout)", m.cfg.Defaults.Start))
	defer cancel()
	// One that is alive is found when the place is taken; ids of stopped ones belong to their record.
	if _, known, err := m.db.GetSandbox(ctx, sandboxID); err != nil || known {
		if err == nil {
			err = errs.New(errs.AlreadyExists, "sandbox %s exists, or has been", sandboxID).WithHint("leave the id out")
		}
		return nil, err
	}
	b, err := m.reserve(p, s, sandboxID, cancel)
	if err != nil {
		return nil, err
	}
	defer m.wg.Done()
	began := m.clock.Now()
	b.mu.Lock()
	created := m.saveLocked(b, event(journal.SandboxCreated, p.ID, factsOfSpec(b.sb)), with...)
	b.mu.Unlock()

	undo := cleanup.New()
	err = m.start(ctx, b, created, undo)
	inst := b.inst.now() // as soon as it runs, somebody may pause it without memory
	var running journal.Pending
	if err == nil {
		running, err = m.started(b, p, began)
	}
	if err != nil {
		err = cause(ctx, err)
		undo.Run()
		return nil, m.startFailed(b, p, err)
	}
	undo.Release()
	restored := b.restored
	if restored {
		if err := m.inherit(ctx, b); err != nil {
			m.log.Warn("cannot take up the processes that a sandbox began with", "sandbox", b.id, "error", err)
		}
	}
	close(b.ready)
	m.background(func() { m.follow(b, inst) })
	if _, err := running.Wait(); err != nil {
		// It runs, but after a restart nobody would know: so it must not.
		m.beginEnd(b, "", EndStartFailed, "its start could not be recorded")
		<-b.ended
		return nil, err
	}
	if restored { // its interpreters and its service came along
		return b, nil
	}
	m.warm(p, b)
	if err := m.serve(ctx, p, b); err != nil {
		text, _ := errs.PublicText(err)
		m.beginEnd(b, "", EndStartFailed, text)
		<-b.ended
		return nil, cause(ctx, err)
	}
	return b, nil
}

// reserve takes the id, the name and a place among the limits.
func (m *Manager) reserve(p Principal, s Spec, sandboxID string, cancel context.CancelFunc) (*box, error) {
	owner, parent := p.ID, (*box)(nil)
	if p.Sandbox != "" {
		if parent = m.find(p.Sandbox); parent == nil {
			return nil, errs.New(errs.FailedPrecondition, "sandbox %s has ended and can have no children", p.Sandbox)
		}
		owner = parent.owner // so that a person sees what their sandboxes made, and it counts as theirs
	}
	b := newBox(Sandbox{
		ID: sandboxID, State: Starting, Spec: s, Owner: owner, Parent: p.Sandbox,
		CreatedAt: wall(m.clock.Now()), Head: s.Commit,
	})
	b.cancelStart = cancel
	if parent != nil {
		parent.mu.Lock()
		defer parent.mu.Unlock()
		if parent.sb.State != Running {
			return nil, &TransitionError{ID: parent.id, From: parent.sb.State}
		}
	}
	if err := m.enlist(b); err != nil {
		return nil, err
	}
	if parent != nil {
		// In the same critical section as the check: a parent that ends takes along what is listed.
		parent.children[b.id] = b
	}
	return b, nil
}

func (m *Manager) enlist(b *box) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.closed:
		return shuttingDown()
	case m.cfg.MaxSandboxes > 0 && len(m.live) >= m.cfg.MaxSandboxes:
		return errs.New(errs.ResourceExhausted, "the server has its %d sandboxes already", m.cfg.MaxSandboxes).
			WithHint("delete one that is not needed, or raise --max-sandboxes")
	case m.cfg.MaxPerPrincipal > 0 && m.owned[b.owner] >= m.cfg.MaxPerPrincipal:
		return errs.New(errs.ResourceExhausted, "you have your %d sandboxes already", m.cfg.MaxPerPrincipal).
			WithHint("delete one that is not needed, or raise --max-per-key")
	case m.live[b.id] != nil:
		return errs.New(errs.AlreadyExists, "sandbox %s exists", b.id)
	}
	for _, other := range m.live {
		// owner and Name never change, so that no lock of the other is needed.
		if other.owner == b.owner && other.name == b.name {
			return errs.New(errs.AlreadyExists, "you have a sandbox named %s: %s", b.name, other.id).
				WithHint("choose another name, or delete that one")
		}
	}
	m.live[b.id] = b
	m.owned[b.owner]++
	m.wg.Add(1) // for create, which Close waits for
	return nil
}

// start builds the instance: plan, start, claim. What it built is on undo.
func (m *Manager) start(ctx context.Context, b *box, created journal.Pending, undo *cleanup.Stack) error {
	s, times := b.sb.Spec, make(map[string]time.Duration, 5) // nobody else changes Spec while it starts
	step := m.stopwatch(ctx, times)
	undo.Add(func() {
		if err := m.cfg.Roots.Release(context.WithoutCancel(ctx), b.id); err != nil {
			m.log.Warn("cannot remove the files of a sandbox that did not start", "sandbox", b.id, "error", err)
		}
	})
	plan, err := m.cfg.Roots.Plan(ctx, planRequest(b.id, s))
	if err != nil {
		return err
	}
	step("plan")
	// The record stands before anything runs, so that a server that is killed now finds what to look
	// for; that it is written while the plan is made costs the create nothing.
	if _, err := created.Wait(); err != nil {
		return err
	}
	step("record")
	backend := m.cfg.Backends[s.Isolation]
	spec := isolation.Spec{ID: b.id, Profile: s.Profile, Root: plan, Limits: s.Limits, AllowMissing: s.AllowMissing}
	observedCalls(s, &spec)
	networkOf(s.Network, &spec)
	env := m.granted(ctx, b, s, &spec)
	image, err := m.restorable(plan)
	if err != nil {
		return err
	}
	b.restored = image != ""
	inst, err := m.startOrRestore(ctx, backend, spec, image)
	if err != nil {
		return err
	}
	undo.Add(func() { m.destroyQuietly(ctx, inst) })
	step("start")
	if s.Network != nil {
		undo.Add(func() { m.detach(ctx, b) })
		if err := m.attach(ctx, b, inst, s.Network); err != nil {
			return err
		}
		step("network")
	}
	place := seatOf(inst)
	client := guestwire.NewClient(place.Dial)
	if err := m.claim(ctx, client, b, env, plan, image != ""); err != nil {
		return err
	}
	step("claim")
	changes, err := m.startTracking(ctx, b, s.FileChanges, created.Event.Seq)
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.backend, b.inst, b.guest, b.changes = backend, place, client, changes
	b.body.Plan, b.body.Record = plan, inst.Record()
	b.sb.Applied, b.sb.Timings = inst.Applied(), times
	b.sb.Spec.User, b.sb.Spec.Dir = or(s.User, plan.User), or(s.Dir, plan.Dir)
	return nil
}

func (m *Manager) stopwatch(ctx context.Context, times map[string]time.Duration) func(step string) {
	last := m.clock.Now()
	return func(step string) {
		now := m.clock.Now()
		times[step] = now.Sub(last)
		trace.Step(ctx, "sandbox."+step, last, now)
		last = now
	}
}

func planRequest(sandboxID string, s Spec) rootfs.Request {
	r := rootfs.Request{
		ID: sandboxID, Template: s.Template, Layer: s.layer, Profile: string(s.Profile),
		DiskBytes: s.Limits.DiskBytes, Inodes: s.Limits.Inodes,
	}
	for _, w := range s.Workspaces {
		r.Workspaces = append(r.Workspaces, rootfs.WorkspaceRequest{Source: w.Source, Target: w.Target})
	}
	return r
}

func (m *Manager) startOrRestore(ctx context.Context, b isolation.Backend, s isolation.Spec, image string) (isolation.Instance, error) {
	if image == "" {
		return b.Start(ctx, s)
	}
	return b.Restore(ctx, s, image)
}

// claim gives the instance its identity, in one step. A pooled instance gets it in the same way; one that was restored
// from another sandbox's memory image gives up that one's.
func (m *Manager) claim(ctx context.Context, g guest, b *box, env map[string]string, plan rootfs.Plan, restored bool) error {
	ctx, cancel := m.prompt(ctx, g)
	defer cancel()
	s := b.snapshot().Spec
	claim := guestwire.Claim{
		Sandbox: b.id, Hostname: s.Name, Env: env,
		User: or(s.User, plan.User), Dir: or(s.Dir, plan.Dir),
	}
	if restored {
		return cause(ctx, g.Restored(ctx, guestwire.Restored{Claim: &claim}))
	}
	return cause(ctx, g.Claim(ctx, claim))
}

// started makes a started instance a running sandbox, unless it is to end already.
func (m *Manager) started(b *box, p Principal, began time.Time) (journal.Pending, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.stop != nil {
		return journal.Pending{}, context.Canceled
	}
	now := m.clock.Now()
	s := &b.sb
	s.StartedAt, s.LastActive = wall(now), wall(now)
	b.gauge = newGauge(now)
	if s.Spec.Lifetime > 0 {
		s.ExpiresAt = s.StartedAt.Add(s.Spec.Lifetime)
	}
	s.Timings["total"] = now.Sub(began)
	if took := m.counted.Starts[s.Spec.Isolation]; took != nil {
		took.Observe(now.Sub(began))
	}
	s.Spec.Env = nil
	up := event(journal.SandboxStarted, "", s.Applied)
	up.Sandbox = b.id
	m.journal.Enqueue(up)
	//casemate:fact server sandbox.claimed name text its host name
	//casemate:fact server sandbox.claimed user text
	//casemate:fact server sandbox.claimed dir text
	//casemate:fact server sandbox.claimed total_us number how long its start took
	//casemate:fact server sandbox.claimed placeholders list the variables that hold placeholders of secrets
	facts := map[string]any{"name": b.name, "user": s.Spec.User, "dir": s.Spec.Dir, "total_us": s.Timings["total"].Microseconds()}
	if len(b.placeholders) > 0 {
		facts["placeholders"] = b.placeholders
	}
	running := m.becomeLocked(b, Running, event(journal.SandboxClaimed, p.ID, facts))
	m.armLocked(b)
	return running, nil
}

// wall is a time without its monotonic reading: what is stored, and compared with what was.
func wall(t time.Time) time.Time { return t.UTC().Round(0) }

// startFailed records that a sandbox did not come to be and returns what the caller is told.
func (m *Manager) startFailed(b *box, p Principal, err error) error {
	b.mu.Lock()
	why := ending{reason: EndStartFailed}
	if b.stop != nil {
		why = *b.stop
		err = errs.New(errs.FailedPrecondition, "sandbox %s was ended while it started: %s", b.id, why.reason)
	}
	text, _ := errs.PublicText(err)
	b.sb.EndReason, b.sb.EndDetail = why.reason, or(why.detail, text)
	b.sb.EndedAt = wall(m.clock.Now())
	b.sb.Spec.Env = nil
	ended := m.becomeLocked(b, Stopped, event(journal.SandboxEnded, p.ID, endFacts{Reason: why.reason, Detail: b.sb.EndDetail}))
	b.mu.Unlock()
	if _, werr := ended.Wait(); werr != nil {
		m.log.Error("cannot record that a sandbox did not start", "sandbox", b.id, "error", werr)
	}
	m.forget(b)
	close(b.ready)
	close(b.ended)
	return err
}

func (m *Manager) destroyQuietly(ctx context.Context, inst isolation.Instance) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), m.cfg.Defaults.Stop)
	defer cancel()
	if err := inst.Destroy(ctx); err != nil {
		// What is left is found by the next server's Sweep.
		m.log.Error("cannot remove a sandbox that did not start", "sandbox", inst.ID(), "error", err)
	}
}
