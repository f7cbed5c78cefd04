package sandbox

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/id"
	"casemate.dev/internal/journal"
)

// MaxForks is how many sandboxes one Fork makes at most.
const MaxForks = 100

// ForkOptions go with a fork.
type ForkOptions struct {
	Count int // 1 to MaxForks; 0: 1
	// Name is the forks' name, with -1, -2, … where they are several; "": their ids.
	Name string
	// Lifetime is the forks', as in a Spec; 0: the parent's.
	Lifetime time.Duration
	// Live makes the forks go on with the processes that the sandbox has.
	Live bool
	// Shape changes the spec of one fork before it is made; nil: none does.
	Shape func(sandboxID string, s *Spec)
}

// Forked is one of the sandboxes that Fork makes, or why it could not be made.
type Forked struct {
	Sandbox Sandbox
	Err     error
}

// forkers is how many forks are made side by side; each mostly waits for its guest.
const forkers = 32

// Fork makes new sandboxes with the files, the settings, the environment and the labels that a sandbox has
// now. Each has its own identity; what they share is never written to. No process comes along, unless they are live:
// then each goes on with all processes where they were, without their connections to and from outside, and with the
// environment that they had. The commit
// that they start from is returned, and an entry for each of them: with an error where it could not be
// made. The error is for what failed before any was begun.
func (m *Manager) Fork(ctx context.Context, p Principal, ref string, o ForkOptions) (Commit, []Forked, error) {
	if o.Count < 0 || o.Count > MaxForks {
		return Commit{}, nil, invalid("count is %d", o.Count).WithHint("use 1 to %d", MaxForks)
	}
	o.Count = or(o.Count, 1)
	b, stopped, err := m.resolve(ctx, p, ref)
	if err != nil {
		return Commit{}, nil, err
	}
	if b == nil {
		return Commit{}, nil, &TransitionError{ID: stopped.ID, From: stopped.State}
	}
	c, err := m.forkPoint(ctx, p, b, o.Live)
	if err != nil {
		return Commit{}, nil, err
	}
	specs := make([]Spec, o.Count)
	all := make([]Forked, o.Count)
	ids := make([]string, o.Count)
	for i := range specs {
		ids[i] = id.Sandbox()
		specs[i] = forkSpec(c, o, i)
		if o.Shape != nil {
			o.Shape(ids[i], &specs[i])
		}
	}
	var g errgroup.Group
	g.SetLimit(forkers)
	for i := range all {
		g.Go(func() error {
			all[i].Sandbox, all[i].Err = m.Create(ctx, p, specs[i], CreateOptions{ID: ids[i]})
			return nil
		})
	}
	_ = g.Wait()
	m.recordForks(b, p, c, all)
	return c, all, nil
}

// forkPoint commits what b's forks begin with.
func (m *Manager) forkPoint(ctx context.Context, p Principal, b *box, live bool) (Commit, error) {
	if err := b.acquire(ctx); err != nil {
		return Commit{}, err
	}
	defer b.release()
	return m.commit(ctx, p.ID, b, CommitOptions{Message: "fork of " + b.name, Memory: live}, true)
}

func forkSpec(c Commit, o ForkOptions, i int) Spec {
	s := c.Spec
	s.Template, s.Commit, s.from = c.ID, "", &c
	s.Labels, s.Extra = maps.Clone(s.Labels), maps.Clone(s.Extra)
	s.AllowMissing, s.Workspaces = slices.Clone(s.AllowMissing), slices.Clone(s.Workspaces)
	if s.Network != nil {
		network := *s.Network
		network.Rules = slices.Clone(network.Rules)
		s.Network = &network
	}
	s.Lifetime = or(o.Lifetime, s.Lifetime)
	if s.Lifetime == 0 {
		s.Lifetime = -1
	}
	s.Name = o.Name
	if o.Name != "" && o.Count > 1 {
		s.Name = fmt.Sprintf("%s-%d", o.Name, i+1)
	}
	return s
}

// forkedFacts are the server's facts of sandbox.forked.
//
//casemate:facts server sandbox.forked
type forkedFacts struct {
	Commit    string   `json:"commit"`
	Sandboxes []string `json:"sandboxes"`
	Failed    int      `json:"failed,omitempty"`
}

func (m *Manager) recordForks(b *box, p Principal, c Commit, all []Forked) {
	facts := forkedFacts{Commit: c.ID, Sandboxes: []string{}}
	for _, f := range all {
		if f.Err != nil {
			facts.Failed++
			continue
		}
		facts.Sandboxes = append(facts.Sandboxes, f.Sandbox.ID)
	}
	e := event(journal.SandboxForked, p.ID, facts)
	e.Sandbox = b.id
	m.journal.Post(e)
}

// CheckoutOptions go with a checkout.
type CheckoutOptions struct {
	// Discard drops what the sandbox has now; else it is committed first.
	Discard bool
}

// Checkout takes a sandbox back, or forward, to the files of a commit. Its processes end; it starts anew on
// the files, with the same id, name, environment and limits, unless it was paused: then it is paused without
// memory and starts with Resume. What it has now is committed first, so that nothing is lost, unless that
// is to be discarded. Killed on the way, the server leaves the files before it or after it, and goes on.
//
// It returns the sandbox and the commit of what it had before, whose ID is "" where that was discarded.
// Kinds: NotFound, FailedPrecondition (the state; another template or other workspaces), ResourceExhausted.
func (m *Manager) Checkout(ctx context.Context, p Principal, ref, commit string, o CheckoutOptions) (Sandbox, Commit, error) {
	b, stopped, err := m.resolve(ctx, p, ref)
	if err != nil {
		return Sandbox{}, Commit{}, err
	}
	if b == nil {
		return Sandbox{}, Commit{}, &TransitionError{ID: stopped.ID, From: stopped.State}
	}
	to, err := m.GetCommit(ctx, p, commit)
	if err != nil {
		return Sandbox{}, Commit{}, err
	}
	if err := b.acquire(ctx); err != nil {
		return Sandbox{}, Commit{}, err
	}
	defer b.release()
	was := b.snapshot()
	if err := fits(was.Spec, to); err != nil {
		return Sandbox{}, Commit{}, err
	}
	var saved Commit
	if !o.Discard {
		if saved, err = m.commit(ctx, p.ID, b, CommitOptions{Message: "before checkout of " + to.ID}, true); err != nil {
			return Sandbox{}, Commit{}, err
		}
	}
	s, err := m.checkOut(ctx, p.ID, b, to.ID)
	return s, saved, err
}

// checkOut gives a sandbox the files of a commit, and starts it anew unless it was paused. Preconditions: the
// caller holds the life token, and the commit fits.
func (m *Manager) checkOut(ctx context.Context, actor string, b *box, commit string) (Sandbox, error) {
	was := b.snapshot()
	if err := m.bind(ctx, b, commit); err != nil {
		return Sandbox{}, err
	}
	defer b.bindTo("")
	if _, err := m.sleep(ctx, actor, b, commit, nil); err != nil {
		return Sandbox{}, err
	}
	if err := m.replaceFiles(ctx, b, actor, commit); err != nil {
		return Sandbox{}, err
	}
	if was.State == Paused {
		return b.snapshot(), nil
	}
	return m.wake(ctx, actor, b)
}

// fits refuses a commit whose files a sandbox of that spec could not have had.
func fits(s Spec, c Commit) error {
	var what string
	switch {
	case c.Spec.Template != s.Template:
		what = "is of template " + c.Spec.Template + ", not " + s.Template
	case c.Spec.Isolation != s.Isolation:
		what = "is of isolation " + c.Spec.Isolation + ", not " + s.Isolation
	case !slices.Equal(c.Spec.Workspaces, s.Workspaces):
		what = "has other workspaces"
	case !slices.Contains(c.Profiles, string(s.Profile)):
		what = "does not allow profile " + string(s.Profile)
	default:
		return nil
	}
	return errs.New(errs.FailedPrecondition, "commit %s %s", c.ID, what).
		WithHint("start a sandbox from it instead: casemate create --template %s", c.ID)
}

// replaceFiles puts a commit's files in the place of those of a sandbox that is paused without memory, and
// records that it is done. It may be run again where it was cut short. actor "" is a server that starts.
func (m *Manager) replaceFiles(ctx context.Context, b *box, actor, commit string) error {
	ctx = context.WithoutCancel(ctx) // half of it is worse than all of it
	row, ok, err := m.db.GetCommit(ctx, commit)
	if err != nil {
		return err
	}
	if !ok {
		return noCommit(commit)
	}
	env, err := m.cfg.Roots.Env(b.id)
	if err == nil && env == nil { // killed between the two steps below
		env, err = m.cfg.Roots.LayerEnv(row.Layer)
	}
	if err != nil {
		return err
	}
	if err := m.cfg.Roots.Release(ctx, b.id); err != nil {
		return err
	}
	b.mu.Lock()
	spec := b.sb.Spec
	b.mu.Unlock()
	spec.layer = row.Layer
	plan, err := m.cfg.Roots.Plan(ctx, planRequest(b.id, spec))
	if err != nil {
		return err
	}
	if err := m.cfg.Roots.PutEnv(b.id, env); err != nil {
		return err
	}
	b.mu.Lock()
	from := b.sb.Head
	b.body.Plan, b.body.Checkout, b.sb.Head = plan, "", commit
	b.sb.Spec.Commit = commit
	//casemate:fact server sandbox.checkout commit text
	//casemate:fact server sandbox.checkout from text what its files were last committed to
	done := m.saveLocked(b, event(journal.SandboxCheckout, actor, map[string]string{"commit": commit, "from": from}))
	b.mu.Unlock()
	e, err := done.Wait()
	b.changes.restart(ctx, e.Seq)
	return err
}
