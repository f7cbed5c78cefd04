package sandbox

import (
	"slices"
	"testing"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/rootfs"
)

func (s *server) merge(into string, o MergeOptions) MergeResult {
	s.w.t.Helper()
	got, err := s.Merge(s.w.t.Context(), admin, into, o)
	if err != nil {
		s.w.t.Fatal(err)
	}
	return got
}

// forked makes a fork of a sandbox.
func (s *server) forked(id string) Sandbox {
	s.w.t.Helper()
	_, all, err := s.Fork(s.w.t.Context(), admin, id, ForkOptions{})
	if err != nil || all[0].Err != nil {
		s.w.t.Fatal(err, all)
	}
	return all[0].Sandbox
}

func TestMergeOfSandboxes(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(admin, Spec{})
	try := s.forked(sb.ID)
	point := try.Spec.Commit
	dry := s.merge(sb.ID, MergeOptions{From: try.ID, Dry: true})
	if dry.Outcome != MergeDone || dry.Commit.ID != "" || dry.Saved.ID != "" || dry.Base != point || len(dry.Changes) != 1 {
		t.Errorf("dry: %+v", dry)
	}
	got := s.merge(sb.ID, MergeOptions{From: try.ID, CommitOptions: CommitOptions{Tag: "both"}})
	c := got.Commit
	if got.Outcome != MergeDone || got.Base != point || c.Parent != got.Saved.ID || c.Merged == "" || got.Sandbox.Head != c.ID ||
		got.Sandbox.State != Running || !slices.Equal(c.Tags, []string{"both"}) {
		t.Errorf("%+v", got)
	}
	if other, err := s.GetCommit(t.Context(), admin, c.Merged); err != nil || other.Sandbox != try.ID || other.Parent != point {
		t.Errorf("merged %+v, %v", other, err)
	}
	if kept, err := s.GetCommit(t.Context(), admin, "both"); err != nil || kept.Merged != c.Merged {
		t.Errorf("kept %+v, %v", kept, err)
	}
	types := s.types(sb.ID)
	for _, want := range []journal.Type{journal.CommitMerged, journal.SandboxCheckout} {
		if !slices.Contains(types, want) {
			t.Errorf("no event %s in %v", want, types)
		}
	}
	s.exec(sb.ID, "echo")
	// What it was merged from is in it: nothing more is to be done.
	if again := s.merge(sb.ID, MergeOptions{From: c.Merged}); again.Outcome != MergeUpToDate || again.Saved.ID != "" {
		t.Errorf("again: %+v", again)
	}
	if forward := s.merge(point, MergeOptions{From: c.ID}); forward.Outcome != MergeForward || forward.Commit.ID != c.ID {
		t.Errorf("forward: %+v", forward)
	}
}

func TestMergeConflictsChangeNothing(t *testing.T) {
	w := newWorld(t)
	s := w.serve()
	sb := s.create(admin, Spec{})
	try := s.forked(sb.ID)
	s.commit(try.ID, CommitOptions{})
	w.roots.Clash(true)
	before := s.types(sb.ID)
	got := s.merge(sb.ID, MergeOptions{From: try.ID})
	if got.Outcome != MergeConflicts || len(got.Conflicts) != 1 || got.Commit.ID != "" || got.Saved.ID != "" {
		t.Errorf("%+v", got)
	}
	if after := s.types(sb.ID); !slices.Equal(after, before) {
		t.Errorf("events %v", after)
	}
	got = s.merge(sb.ID, MergeOptions{From: try.ID, Choices: []Choice{{"/", rootfs.Ours}, {"/home/user", rootfs.Theirs}}})
	if got.Outcome != MergeDone || len(got.Resolved) != 1 || got.Resolved[0].Resolved != "theirs" {
		t.Errorf("%+v", got)
	}
}

func TestMergeRefuses(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(admin, Spec{})
	c := s.commit(sb.ID, CommitOptions{})
	base := s.create(admin, Spec{Template: "base"})
	for what, want := range map[string]struct {
		into string
		o    MergeOptions
		kind errs.Kind
	}{
		"nothing":         {sb.ID, MergeOptions{}, errs.InvalidArgument},
		"itself":          {sb.ID, MergeOptions{From: sb.ID}, errs.InvalidArgument},
		"no such":         {sb.ID, MergeOptions{From: "nothing"}, errs.NotFound},
		"relative choice": {sb.ID, MergeOptions{From: c.ID, Choices: []Choice{{"a", rootfs.Ours}}}, errs.InvalidArgument},
		"unknown side":    {sb.ID, MergeOptions{From: c.ID, Choices: []Choice{{"/a", "mine"}}}, errs.InvalidArgument},
		"other template":  {sb.ID, MergeOptions{From: base.ID}, errs.FailedPrecondition},
	} {
		if _, err := s.Merge(t.Context(), admin, want.into, want.o); !errs.Is(err, want.kind) {
			t.Errorf("%s: %v, want %s", what, err, want.kind)
		}
	}
	if _, err := s.Merge(t.Context(), bob, sb.ID, MergeOptions{From: c.ID}); !errs.Is(err, errs.NotFound) {
		t.Errorf("somebody else's: %v", err)
	}
}

// History forks, is merged in both directions, and loses a commit.
func TestLineage(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(admin, Spec{})
	try := s.forked(sb.ID)
	point := try.Spec.Commit
	a, b := s.commit(sb.ID, CommitOptions{}), s.commit(try.ID, CommitOptions{})
	near := func(left, right string) []string {
		t.Helper()
		all, err := s.CommonAncestors(t.Context(), admin, left, right)
		if err != nil {
			t.Fatal(err)
		}
		var ids []string
		for _, r := range all {
			ids = append(ids, r.ID)
		}
		return ids
	}
	if got := near(a.ID, b.ID); !slices.Equal(got, []string{point}) {
		t.Errorf("nearest of two forks %v, want %s", got, point)
	}
	if got := near(a.ID, point); !slices.Equal(got, []string{point}) {
		t.Errorf("nearest of a child and its parent %v", got)
	}
	left := s.merge(a.ID, MergeOptions{From: b.ID}).Commit
	right := s.merge(b.ID, MergeOptions{From: a.ID}).Commit
	if got, want := near(left.ID, right.ID), []string{a.ID, b.ID}; !slices.Equal(got, slices.Sorted(slices.Values(want))) {
		t.Errorf("nearest across both merges %v, want %v", got, want)
	}
	if _, err := s.Merge(t.Context(), admin, left.ID, MergeOptions{From: right.ID}); !errs.Is(err, errs.FailedPrecondition) {
		t.Errorf("a merge without one nearest ancestor: %v", err)
	}
	if got := s.merge(left.ID, MergeOptions{From: right.ID, Base: a.ID}); got.Outcome != MergeDone || got.Base != a.ID {
		t.Errorf("with a base: %+v", got)
	}
	l, err := s.GetLineage(t.Context(), admin, a.ID)
	if err != nil || len(l.Ancestors) != 1 || l.Ancestors[0].ID != point || len(l.Descendants) != 3 || len(l.Sandboxes) != 1 || l.Sandboxes[0].ID != sb.ID {
		t.Errorf("lineage %+v, %v", l, err)
	}
	// A commit that was removed keeps its place, and is no base any more.
	if _, err := s.DeleteCommit(t.Context(), admin, point); err != nil {
		t.Fatal(err)
	}
	if l, err = s.GetLineage(t.Context(), admin, a.ID); err != nil || len(l.Ancestors) != 1 || !l.Ancestors[0].Gone {
		t.Errorf("lineage %+v, %v", l, err)
	}
	if _, err := s.Merge(t.Context(), admin, a.ID, MergeOptions{From: b.ID}); !errs.Is(err, errs.FailedPrecondition) {
		t.Errorf("a merge on a removed base: %v", err)
	}
}

func TestVerifyCommitRecordsOnce(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(admin, Spec{})
	c := s.commit(sb.ID, CommitOptions{})
	first, err := s.VerifyCommit(t.Context(), admin, c.ID)
	if err != nil || first.Recorded != "" || !first.Intact() {
		t.Fatalf("%+v, %v", first, err)
	}
	if got, err := s.GetCommit(t.Context(), admin, c.ID); err != nil || got.Digest != first.Digest {
		t.Errorf("%+v, %v", got, err)
	}
	if again, err := s.VerifyCommit(t.Context(), admin, c.ID); err != nil || again.Recorded != first.Digest || !again.Intact() {
		t.Errorf("%+v, %v", again, err)
	}
	if (Verified{Digest: "a", Recorded: "b"}).Intact() {
		t.Error("another digest passes")
	}
}

func TestDiffFromWhatItComesFrom(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(admin, Spec{Name: "web"})
	first := s.commit(sb.ID, CommitOptions{})
	second := s.commit(sb.ID, CommitOptions{})
	for to, want := range map[string]string{first.ID: "", second.ID: first.ID, "web": second.ID} {
		got, err := s.Diff(t.Context(), admin, "", to, DiffOptions{Patches: true})
		if err != nil || got.From != want {
			t.Errorf("%s: from %q, %v, want %q", to, got.From, err, want)
		}
	}
	if _, err := s.Diff(t.Context(), admin, "", "web", DiffOptions{Paths: []string{"a"}}); !errs.Is(err, errs.InvalidArgument) {
		t.Errorf("a relative path: %v", err)
	}
	if _, err := s.DeleteCommit(t.Context(), admin, first.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Diff(t.Context(), admin, "", second.ID, DiffOptions{}); !errs.Is(err, errs.FailedPrecondition) {
		t.Errorf("from a removed parent: %v", err)
	}
}
