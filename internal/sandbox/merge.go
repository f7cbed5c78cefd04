package sandbox

import (
	"context"
	"path"
	"slices"
	"strings"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/id"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/rootfs"
	"casemate.dev/internal/store"
)

// Choice settles the conflicts at a path and below it.
type Choice struct {
	Path string // absolute inside; "/" is everything
	Side Side
}

// MergeOptions say what to merge, and how.
type MergeOptions struct {
	// From is the commit, or the sandbox, whose changes are taken.
	From string
	// Base is the commit that both come from; "": the nearest common ancestor.
	Base string
	// Choices settle conflicts; of several that hold for a path, the longest counts.
	Choices []Choice
	// Text merges text files that both changed line by line, where their changes don't touch.
	Text bool
	// Dry only tells what would come of it.
	Dry bool
	CommitOptions
}

// MergeOutcome is how a merge went.
type MergeOutcome string

// The outcomes.
const (
	// MergeDone: a commit has both sides' changes; in a dry run: it would.
	MergeDone MergeOutcome = "merged"
	// MergeUpToDate: what was to be merged is in it already, and nothing changed.
	MergeUpToDate MergeOutcome = "up-to-date"
	// MergeForward: the one comes from the other, so that the other is the result.
	MergeForward MergeOutcome = "fast-forward"
	// MergeConflicts: there are conflicts, and nothing changed.
	MergeConflicts MergeOutcome = "conflicts"
)

// MergeResult is what came of a merge.
type MergeResult struct {
	Outcome MergeOutcome
	// Commit is the result; its ID is "" where there is none.
	Commit Commit
	// Sandbox is the one that was merged into, its ID "" where it was a commit. Saved is the commit of what it
	// had before; its ID is "" where nothing was made of it.
	Sandbox Sandbox
	Saved   Commit
	// Base is the commit that both come from; "": the template.
	Base string
	// Conflicts are those that are left, Resolved those that choices or a text merge have settled, and Changes
	// what the result has other than what was merged into. Paths are text as in Files.
	Conflicts, Resolved []Conflict
	Changes             []Change
}

// check refuses options that mean nothing.
func (o MergeOptions) check() error {
	if o.From == "" {
		return invalid("from is empty").WithHint("name the commit or the sandbox whose changes are to be taken")
	}
	for _, c := range o.Choices {
		if !path.IsAbs(c.Path) || path.Clean(c.Path) != c.Path {
			return invalid("choice for %s: the path is not absolute and clean", quote(c.Path)).WithHint("use one as in the list of conflicts; / is everything")
		}
		if c.Side != rootfs.Ours && c.Side != rootfs.Theirs {
			return invalid("choice %s for %s", quote(string(c.Side)), quote(c.Path)).WithHint("use ours or theirs")
		}
	}
	return o.CommitOptions.check()
}

// chooser returns what rootfs asks for each conflict.
func (o MergeOptions) chooser() func(path string) Side {
	choices := slices.Clone(o.Choices)
	slices.SortStableFunc(choices, func(a, b Choice) int { return len(b.Path) - len(a.Path) })
	return func(at string) Side {
		at = guestwire.Escape(at)
		for _, c := range choices {
			if c.Path == "/" || at == c.Path || strings.HasPrefix(at, c.Path+"/") {
				return c.Side
			}
		}
		return ""
	}
}

// Merge takes what a commit, or a sandbox as it is now, has changed since a common ancestor into another
// commit, or into a sandbox. The result is a commit with both as parents. Where both sides changed something in
// ways that exclude each other, nothing is changed and the conflicts are told; nothing is guessed.
//
// A sandbox that is merged into has its files committed first. Then it gets those of the result as by
// Checkout: its processes end and it starts anew, unless it was paused, or nothing changes for it. Killed on
// the way, the server leaves its files as before or as after, and goes on.
// Kinds: InvalidArgument, NotFound, FailedPrecondition (the state; different templates or workspaces; no one
// common ancestor that is still there), ResourceExhausted.
func (m *Manager) Merge(ctx context.Context, p Principal, into string, o MergeOptions) (MergeResult, error) {
	if err := o.check(); err != nil {
		return MergeResult{}, err
	}
	ours, err := m.mergeSide(ctx, p, into)
	if err != nil {
		return MergeResult{}, err
	}
	theirs, err := m.mergeSide(ctx, p, o.From)
	if err != nil {
		return MergeResult{}, err
	}
	if ours.box != nil && ours.box == theirs.box {
		return MergeResult{}, invalid("a sandbox can't be merged into itself")
	}
	g := merge{m: m, p: p, o: o, ours: ours, theirs: theirs}
	if err := g.findBase(ctx); err != nil {
		return MergeResult{}, err
	}
	if done, err := g.trivial(ctx); done || err != nil {
		return g.result, err
	}
	return g.run(ctx)
}

// mergeSide is what a merge joins: a commit, or a sandbox.
type mergeSide struct {
	commit Commit // of a sandbox, once it was made
	box    *box
	head   string // the sandbox's, when its history was looked at
}

// tip returns the commit at which a side's history ends.
func (s mergeSide) tip() string {
	if s.box == nil || s.commit.ID != "" {
		return s.commit.ID
	}
	return s.head
}

// unmoved refuses a sandbox whose files became another commit's meanwhile. Preconditions: the caller holds the
// life token.
func (s mergeSide) unmoved() error {
	if now := s.box.snapshot().Head; now != s.head {
		return errs.New(errs.FailedPrecondition, "sandbox %s went from commit %s to %s while it was to be merged", s.box.id,
			or(s.head, "none"), or(now, "none")).WithHint("try again")
	}
	return nil
}

func (s mergeSide) spec() Spec {
	if s.box == nil {
		return s.commit.Spec
	}
	return s.box.snapshot().Spec
}

// state is what rootfs takes for a side.
func (s mergeSide) state() rootfs.State {
	if s.box == nil || s.commit.ID != "" {
		return rootfs.State{Layer: s.commit.layer}
	}
	s.box.mu.Lock()
	defer s.box.mu.Unlock()
	return rootfs.State{ID: s.box.id, Plan: s.box.body.Plan}
}

// mergeSide finds the sandbox, or else the commit, that a reference names.
func (m *Manager) mergeSide(ctx context.Context, p Principal, ref string) (mergeSide, error) {
	b, c, err := m.sandboxOrCommit(ctx, p, ref)
	s := mergeSide{commit: c, box: b}
	if b != nil {
		s.head = b.snapshot().Head
	}
	return s, err
}

// merge is one merge.
type merge struct {
	m            *Manager
	p            Principal
	o            MergeOptions
	ours, theirs mergeSide
	history      history
	base         Commit // its ID "": the template
	result       MergeResult
}

// findBase finds the commit that both sides come from.
func (g *merge) findBase(ctx context.Context) (err error) {
	if g.history, err = g.m.history(ctx); err != nil {
		return err
	}
	ref := g.o.Base
	if ref == "" {
		if ref, err = g.history.commonAncestor(g.ours.tip(), g.theirs.tip()); ref == "" || err != nil {
			return err
		}
	}
	g.base, err = g.m.GetCommit(ctx, g.p, ref)
	g.result.Base = g.base.ID
	return err
}

// trivial does what there is to do where one side's history holds the other's.
func (g *merge) trivial(ctx context.Context) (done bool, err error) {
	if err := fitsTogether(g.ours.spec(), g.theirs.spec()); err != nil {
		return true, err
	}
	if g.theirs.box != nil || g.o.Base != "" {
		return false, nil // a sandbox may have changed since its last commit
	}
	if g.history.ancestors(g.ours.tip())[g.theirs.commit.ID] {
		g.result.Outcome, g.result.Commit = MergeUpToDate, g.ours.commit
		if g.ours.box != nil {
			g.result.Sandbox = g.ours.box.snapshot()
		}
		return true, nil
	}
	if g.ours.box != nil || !g.history.ancestors(g.theirs.commit.ID)[g.ours.commit.ID] {
		return false, nil
	}
	g.result.Outcome, g.result.Commit = MergeForward, g.theirs.commit
	if g.o.Tag != "" && !g.o.Dry {
		g.result.Commit, err = g.m.TagCommit(ctx, g.p, g.theirs.commit.ID, g.o.Tag, false)
	}
	return true, err
}

// fitsTogether refuses to merge files that stand on different things.
func fitsTogether(ours, theirs Spec) error {
	var what string
	switch {
	case ours.Template != theirs.Template:
		what = "template " + theirs.Template + " and " + ours.Template
	case ours.Isolation != theirs.Isolation:
		what = "isolation " + theirs.Isolation + " and " + ours.Isolation
	case !slices.Equal(ours.Workspaces, theirs.Workspaces):
		what = "different workspaces"
	default:
		return nil
	}
	return errs.New(errs.FailedPrecondition, "what is to be merged has %s", what).WithHint("merge what was started from one template")
}

// run merges.
func (g *merge) run(ctx context.Context) (MergeResult, error) {
	merged, err := g.try(ctx, true) // first without a trace
	if err != nil || g.o.Dry || len(merged.Conflicts) > 0 {
		return g.tell(merged), err
	}
	// One sandbox at a time: two that are merged into each other must not wait for each other.
	if b := g.theirs.box; b != nil {
		if g.theirs.commit, err = g.point(ctx, g.theirs, "to be merged into "+g.ours.name()); err != nil {
			return g.result, err
		}
	}
	b := g.ours.box
	if b == nil {
		_, merged, err = g.commit(ctx)
		return g.tell(merged), err
	}
	if err := b.acquire(ctx); err != nil {
		return g.result, err
	}
	defer b.release()
	if g.ours.commit, err = g.pointHeld(ctx, g.ours, "before a merge of "+g.theirs.commit.ID); err != nil {
		return g.result, err
	}
	g.result.Saved = g.ours.commit
	defer b.bindTo("")
	c, merged, err := g.commit(ctx)
	if err == nil && c.ID != "" { // else it changed meanwhile, and conflicts now
		g.result.Sandbox, err = g.m.takeMerge(ctx, g.p.ID, b, c, len(merged.Changes) > 0)
	}
	return g.tell(merged), err
}

// name is what people call a side.
func (s mergeSide) name() string {
	if s.box == nil {
		return s.commit.ID
	}
	return or(s.box.name, s.box.id)
}

// point commits a sandbox as it is now.
func (g *merge) point(ctx context.Context, s mergeSide, message string) (Commit, error) {
	if err := s.box.acquire(ctx); err != nil {
		return Commit{}, err
	}
	defer s.box.release()
	return g.pointHeld(ctx, s, message)
}

// pointHeld is point. Preconditions: the caller holds the life token.
func (g *merge) pointHeld(ctx context.Context, s mergeSide, message string) (Commit, error) {
	if err := s.unmoved(); err != nil {
		return Commit{}, err
	}
	return g.m.commit(ctx, g.p.ID, s.box, CommitOptions{Message: message}, true)
}

// try asks rootfs for the merge.
func (g *merge) try(ctx context.Context, dry bool) (rootfs.Merged, error) {
	base := rootfs.State{Layer: g.base.layer}
	if g.base.ID == "" {
		base = g.ours.state()
		base.Template = true
	}
	return g.m.cfg.Roots.Merge(ctx, rootfs.MergeRequest{
		Base: base, Ours: g.ours.state(), Theirs: g.theirs.state(), Choose: g.o.chooser(), Text: g.o.Text, Dry: dry,
	})
}

// tell fills the result.
func (g *merge) tell(merged rootfs.Merged) MergeResult {
	g.result.Outcome = MergeDone
	if len(merged.Conflicts) > 0 {
		g.result.Outcome = MergeConflicts
	}
	for _, list := range [][]Conflict{merged.Conflicts, merged.Resolved} {
		for i := range list {
			list[i].Path = guestwire.Escape(list[i].Path)
			for k := range list[i].What {
				list[i].What[k] = guestwire.Escape(list[i].What[k])
			}
		}
	}
	g.result.Conflicts, g.result.Resolved = merged.Conflicts, merged.Resolved
	g.result.Changes, _ = legible(merged.Changes, nil)
	return g.result
}

// mergedFacts are the server's facts of commit.merged.
//
//casemate:facts server commit.merged
type mergedFacts struct {
	Commit   string `json:"commit"`
	Ours     string `json:"ours"`
	Theirs   string `json:"theirs"`
	Base     string `json:"base,omitempty"` // "" is the template
	Message  string `json:"message,omitempty"`
	Tag      string `json:"tag,omitempty"`
	Changed  int    `json:"changed"`
	Resolved int    `json:"resolved,omitempty"`
	Bytes    int64  `json:"bytes"`
	Layer    string `json:"layer"`
}

// commit makes the layer of the merge and records its commit. Its ID is "" where there are conflicts.
func (g *merge) commit(ctx context.Context) (Commit, rootfs.Merged, error) {
	m := g.m
	// Until the commit is recorded, nothing but this names its layer.
	m.keep.RLock()
	defer m.keep.RUnlock()
	merged, err := g.try(ctx, false)
	if err != nil || len(merged.Conflicts) > 0 {
		return Commit{}, merged, err
	}
	ours := g.ours.commit
	c := Commit{
		ID: id.New(id.Commit), Owner: ours.Owner, Sandbox: ours.Sandbox, Parent: ours.ID, Merged: g.theirs.commit.ID,
		Author: or(g.p.ID, "server"), Message: or(g.o.Message, "merge of "+g.theirs.commit.ID), CreatedAt: wall(m.clock.Now()),
		Event: ours.Event, Bytes: merged.Layer.Bytes, layer: merged.Layer.ID, Spec: ours.Spec, Profiles: ours.Profiles,
	}
	row, err := c.row()
	if err != nil {
		return Commit{}, merged, err
	}
	writes := []store.Write{store.AddCommit(row)}
	if g.o.Tag != "" {
		c.Tags = []string{g.o.Tag}
		writes = append(writes, store.PutCommitTag(store.CommitTag{Owner: c.Owner, Name: g.o.Tag, Target: c.ID, Moved: row.Created}))
	}
	e := event(journal.CommitMerged, c.Author, mergedFacts{
		Commit: c.ID, Ours: c.Parent, Theirs: c.Merged, Base: g.base.ID, Message: cut(c.Message), Tag: g.o.Tag,
		Changed: len(merged.Changes), Resolved: len(merged.Resolved), Bytes: c.Bytes, Layer: c.layer,
	})
	e.Sandbox = c.Sandbox
	if g.ours.box != nil {
		g.ours.box.bindTo(c.ID) // before anybody finds it unused
	}
	if _, err := m.journal.Record(ctx, e, writes...); err != nil {
		return Commit{}, merged, err
	}
	g.result.Commit = c
	return c, merged, nil
}

// takeMerge gives a sandbox the files of a merge. Where nothing changes for it, it only comes to stand there.
// Preconditions: the caller holds the life token.
func (m *Manager) takeMerge(ctx context.Context, actor string, b *box, c Commit, changes bool) (Sandbox, error) {
	if changes {
		return m.checkOut(ctx, actor, b, c.ID)
	}
	b.mu.Lock()
	from := b.sb.Head
	b.sb.Head = c.ID
	saved := m.saveLocked(b, event(journal.SandboxCheckout, actor, map[string]string{"commit": c.ID, "from": from}))
	b.mu.Unlock()
	_, err := saved.Wait()
	return b.snapshot(), err
}
