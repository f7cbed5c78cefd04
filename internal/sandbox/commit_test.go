package sandbox

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal"
)

func (s *server) commit(ref string, o CommitOptions) Commit {
	s.w.t.Helper()
	c, err := s.MakeCommit(context.Background(), admin, ref, o)
	if err != nil {
		s.w.t.Fatal(err)
	}
	return c
}

// types returns the types of a sandbox's events.
func (s *server) types(id string) []journal.Type {
	s.w.t.Helper()
	events, err := s.Events(context.Background(), admin, id, 0, 1000)
	if err != nil {
		s.w.t.Fatal(err)
	}
	var all []journal.Type
	for _, e := range events {
		all = append(all, e.Type)
	}
	return all
}

func TestCommitAndCreateFromIt(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(admin, Spec{Template: "base", Env: map[string]string{"A": "1", "B": "2"}, Labels: map[string]string{"k": "v"}})
	first := s.commit(sb.ID, CommitOptions{Message: "one", Tag: "ready"})
	second := s.commit(sb.ID, CommitOptions{Message: "two"})
	if first.Parent != "" || second.Parent != first.ID || second.Event <= first.Event || first.Author != "local" {
		t.Errorf("first %+v\nsecond %+v", first, second)
	}
	got, err := s.GetCommit(t.Context(), admin, "ready")
	if err != nil || got.ID != first.ID || got.Message != "one" || got.Bytes != 7 || !slices.Equal(got.Tags, []string{"ready"}) {
		t.Errorf("by tag: %+v, %v", got, err)
	}
	if got, err := s.GetCommit(t.Context(), admin, second.ID[:12]); err != nil || got.ID != second.ID {
		t.Errorf("by prefix: %+v, %v", got, err)
	}
	for _, ref := range []string{first.ID, "ready"} {
		child := s.create(admin, Spec{Template: ref, Env: map[string]string{"B": "3"}})
		if child.Spec.Commit != first.ID || child.Spec.Template != "base" || child.Head != first.ID {
			t.Errorf("%s: commit %q, template %q, head %q", ref, child.Spec.Commit, child.Spec.Template, child.Head)
		}
		if out := string(s.exec(child.ID, "env").Stdout); !strings.Contains(out, "A=1\n") || !strings.Contains(out, "B=3\n") {
			t.Errorf("%s: environment %q", ref, out)
		}
		if c := s.commit(child.ID, CommitOptions{}); c.Parent != first.ID {
			t.Errorf("%s: a commit's parent is %q", ref, c.Parent)
		}
	}
	want := []journal.Type{journal.SandboxCreated, journal.SandboxStarted, journal.SandboxClaimed, journal.CommitMade, journal.CommitMade}
	if got := s.types(sb.ID); !slices.Equal(got, want) {
		t.Errorf("events %v", got)
	}
	_, err = s.Create(t.Context(), admin, Spec{Template: "cmt_aaaaaaaaaaaaaaaaaaaa"}, CreateOptions{})
	if !errs.Is(err, errs.NotFound) {
		t.Errorf("no such commit: %v", err)
	}
}

func TestCommitsBelongToTheirOwner(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{})
	c, err := s.MakeCommit(t.Context(), alice, sb.ID, CommitOptions{Tag: "mine"})
	if err != nil {
		t.Fatal(err)
	}
	for what, err := range map[string]error{
		"get":     second(s.GetCommit(t.Context(), bob, c.ID)),
		"tag ref": second(s.GetCommit(t.Context(), bob, "mine")),
		"tag":     second(s.TagCommit(t.Context(), bob, c.ID, "theirs", false)),
		"delete":  second(s.DeleteCommit(t.Context(), bob, c.ID)),
		"create":  second(s.Create(t.Context(), bob, Spec{Template: c.ID}, CreateOptions{})),
		"by tag":  second(s.Create(t.Context(), bob, Spec{Template: "mine"}, CreateOptions{})),
		"commit":  second(s.MakeCommit(t.Context(), bob, sb.ID, CommitOptions{})),
	} {
		if !errs.Is(err, errs.NotFound) {
			t.Errorf("%s by somebody else: %v", what, err)
		}
	}
	if all, _, err := s.ListCommits(t.Context(), bob, CommitQuery{}); err != nil || len(all) != 0 {
		t.Errorf("bob sees %v, %v", all, err)
	}
	if all, _, err := s.ListCommits(t.Context(), alice, CommitQuery{Sandbox: sb.ID, Tagged: true}); err != nil || len(all) != 1 || all[0].ID != c.ID {
		t.Errorf("alice sees %v, %v", all, err)
	}
}

func second[T any](_ T, err error) error { return err }

func TestTagsMove(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(admin, Spec{})
	a, b := s.commit(sb.ID, CommitOptions{Tag: "x"}), s.commit(sb.ID, CommitOptions{})
	if got, err := s.TagCommit(t.Context(), admin, b.ID, "x", false); err != nil || !slices.Equal(got.Tags, []string{"x"}) {
		t.Fatalf("%+v, %v", got, err)
	}
	if got, err := s.GetCommit(t.Context(), admin, a.ID); err != nil || len(got.Tags) != 0 {
		t.Errorf("the tag is still on the first: %+v, %v", got, err)
	}
	if _, err := s.TagCommit(t.Context(), admin, a.ID, "x", true); err != nil { // not its own
		t.Error(err)
	}
	if got, err := s.TagCommit(t.Context(), admin, b.ID, "x", true); err != nil || len(got.Tags) != 0 {
		t.Errorf("%+v, %v", got, err)
	}
	for _, bad := range []string{"", "X", "a b", "cmt_x", strings.Repeat("a", 129), "-a"} {
		if _, err := s.TagCommit(t.Context(), admin, a.ID, bad, false); !errs.Is(err, errs.InvalidArgument) {
			t.Errorf("tag %q: %v", bad, err)
		}
	}
	// A tag can't hide a template.
	if _, err := s.TagCommit(t.Context(), admin, a.ID, "host", false); err != nil {
		t.Fatal(err)
	}
	if child := s.create(admin, Spec{Template: "host"}); child.Spec.Commit != "" {
		t.Errorf("host became commit %s", child.Spec.Commit)
	}
}

func TestListCommitsByPage(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(admin, Spec{})
	var want []string
	for i := range 7 {
		want = append(want, s.commit(sb.ID, CommitOptions{Message: fmt.Sprint(i)}).ID)
	}
	slices.Reverse(want)
	var got []string
	for token := ""; ; {
		page, next, err := s.ListCommits(t.Context(), admin, CommitQuery{PageSize: 3, PageToken: token})
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range page {
			got = append(got, c.ID)
		}
		if token = next; token == "" {
			break
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %v\nwant %v", got, want)
	}
}

func TestFork(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{Template: "base", Env: map[string]string{"A": "1"}, Labels: map[string]string{"k": "v"}})
	c, all, err := s.Fork(t.Context(), alice, sb.ID, ForkOptions{Count: 20, Name: "f"})
	if err != nil || len(all) != 20 || !c.Automatic {
		t.Fatalf("%+v, %d forks, %v", c, len(all), err)
	}
	seen := map[string]bool{}
	for i, f := range all {
		if f.Err != nil {
			t.Fatal(f.Err)
		}
		got := f.Sandbox
		if seen[got.ID] || got.Spec.Name != fmt.Sprintf("f-%d", i+1) || got.Spec.Commit != c.ID || got.Owner != "key_alice" ||
			got.Spec.Labels["k"] != "v" || got.Spec.Profile != sb.Spec.Profile {
			t.Errorf("fork %d: %+v", i, got)
		}
		seen[got.ID] = true
		if out := string(s.exec(got.ID, "env").Stdout); !strings.Contains(out, "A=1\n") {
			t.Errorf("fork %d: environment %q", i, out)
		}
	}
	for _, n := range []int{-1, MaxForks + 1} {
		if _, _, err := s.Fork(t.Context(), alice, sb.ID, ForkOptions{Count: n}); !errs.Is(err, errs.InvalidArgument) {
			t.Errorf("%d forks: %v", n, err)
		}
	}
	if types := s.types(sb.ID); types[len(types)-1] != journal.SandboxForked {
		t.Errorf("events %v", types)
	}
}

// Some forks fail, and each of them says why.
func TestForkReportsEach(t *testing.T) {
	w := newWorld(t)
	w.shape = func(c *Config) { c.MaxSandboxes = 4 }
	s := w.serve()
	sb := s.create(admin, Spec{})
	_, all, err := s.Fork(t.Context(), admin, sb.ID, ForkOptions{Count: 5})
	if err != nil {
		t.Fatal(err)
	}
	failed := 0
	for _, f := range all {
		if f.Err != nil {
			failed++
			if !errs.Is(f.Err, errs.ResourceExhausted) {
				t.Error(f.Err)
			}
		}
	}
	if failed != 2 {
		t.Errorf("%d of 5 forks failed, want 2", failed)
	}
}

func TestDeleteCommitKeepsWhatIsNeeded(t *testing.T) {
	w := newWorld(t)
	s := w.serve()
	sb := s.create(admin, Spec{})
	c := s.commit(sb.ID, CommitOptions{Tag: "x"})
	child := s.create(admin, Spec{Template: "x"})
	if _, err := s.DeleteCommit(t.Context(), admin, "x"); err != nil {
		t.Fatal(err)
	}
	if len(w.roots.Layers.Layers()) != 1 {
		t.Error("the layer went from below a sandbox")
	}
	if _, err := s.GetCommit(t.Context(), admin, c.ID); !errs.Is(err, errs.NotFound) {
		t.Errorf("it is still there: %v", err)
	}
	if _, err := s.Delete(t.Context(), admin, child.ID); err != nil {
		t.Fatal(err)
	}
	got, err := s.Collect(t.Context(), admin, CollectOptions{})
	if err != nil || len(got.Layers) != 1 || got.Bytes != 7 {
		t.Errorf("collected %+v, %v", got, err)
	}
}

func TestCollectTakesOldCommits(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(admin, Spec{})
	old := s.commit(sb.ID, CommitOptions{})
	s.commit(sb.ID, CommitOptions{Tag: "named"})
	head := s.commit(sb.ID, CommitOptions{})
	if _, err := s.Collect(t.Context(), alice, CollectOptions{}); !errs.Is(err, errs.PermissionDenied) {
		t.Errorf("by no administrator: %v", err)
	}
	for _, dry := range []bool{true, false} {
		got, err := s.Collect(t.Context(), admin, CollectOptions{OlderThan: time.Nanosecond, Dry: dry})
		if err != nil || len(got.Commits) != 1 || got.Commits[0].ID != old.ID || len(got.Layers) != 1 {
			t.Errorf("dry %v: %+v, %v", dry, got, err)
		}
	}
	if _, err := s.GetCommit(t.Context(), admin, head.ID); err != nil {
		t.Errorf("what the sandbox stands on went: %v", err)
	}
}

// Where two lines of history part that both go on, their common ancestor stays; once one is gone, it goes, and
// what is known of the removed ones goes when nothing comes of them any more.
func TestCollectKeepsWhereHistoryParts(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(admin, Spec{})
	try := s.forked(sb.ID)
	point := try.Spec.Commit
	a := s.commit(sb.ID, CommitOptions{Tag: "a"})
	s.commit(try.ID, CommitOptions{}) // goes, and its place in history stays
	b := s.commit(try.ID, CommitOptions{Tag: "b"})
	for _, id := range []string{sb.ID, try.ID} {
		if _, err := s.Delete(t.Context(), admin, id); err != nil {
			t.Fatal(err)
		}
	}
	collect := func() (ids []string) {
		t.Helper()
		got, err := s.Collect(t.Context(), admin, CollectOptions{OlderThan: time.Nanosecond})
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range got.Commits {
			ids = append(ids, c.ID)
		}
		return ids
	}
	if got := collect(); len(got) != 1 || got[0] == point {
		t.Fatalf("removed %v", got)
	}
	if got := s.merge(a.ID, MergeOptions{From: b.ID}); got.Outcome != MergeDone || got.Base != point {
		t.Errorf("%+v", got)
	}
	if _, err := s.TagCommit(t.Context(), admin, b.ID, "b", true); err != nil {
		t.Fatal(err)
	}
	if got := collect(); !slices.Contains(got, point) || !slices.Contains(got, b.ID) {
		t.Errorf("removed %v, want %s and %s among them", got, point, b.ID)
	}
	collect()
	h, err := s.Manager.history(t.Context())
	if err != nil || len(h.commits) != 2 { // a, and that it comes from what was removed
		t.Errorf("%v, %v", h.order, err)
	}
}

func TestCompare(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{Name: "web"})
	c, err := s.MakeCommit(t.Context(), alice, sb.ID, CommitOptions{Tag: "ready"})
	if err != nil {
		t.Fatal(err)
	}
	for _, pair := range [][2]string{{"ready", "web"}, {c.ID, sb.ID}, {"web", "ready"}} {
		if got, err := s.Compare(t.Context(), alice, pair[0], pair[1]); err != nil || len(got) != 1 {
			t.Errorf("%v: %v, %v", pair, got, err)
		}
		if _, err := s.Compare(t.Context(), bob, pair[0], pair[1]); !errs.Is(err, errs.NotFound) {
			t.Errorf("%v by somebody else: %v", pair, err)
		}
	}
	if got, err := s.Compare(t.Context(), alice, "ready", c.ID); err != nil || len(got) != 0 {
		t.Errorf("with itself: %v, %v", got, err)
	}
}

// Where a sandbox's files are certainly those of its head, commits and forks share its layer: no snapshot is made, and
// the layer stays for as long as one of them is there.
func TestCommitsOfUnchangedFilesShareTheirLayer(t *testing.T) {
	w := newWorld(t)
	s := w.serve()
	sb := s.create(admin, Spec{Labels: map[string]string{"k": "v"}})
	first := s.commit(sb.ID, CommitOptions{})
	changed := s.commit(sb.ID, CommitOptions{})
	if changed.Layer() == first.Layer() {
		t.Fatal("twin: what may have changed shares a layer")
	}
	w.roots.Still(sb.ID, changed.Layer())
	c, forks, err := s.Fork(t.Context(), admin, sb.ID, ForkOptions{})
	if err != nil || forks[0].Err != nil {
		t.Fatal(err, forks)
	}
	if c.Layer() != changed.Layer() || c.ID == changed.ID || c.Parent != changed.ID || c.Bytes != 0 || c.Frozen != 0 || !c.Automatic {
		t.Errorf("fork's commit %+v", c)
	}
	if got := forks[0].Sandbox.Spec.Commit; got != c.ID {
		t.Errorf("the fork stands on %s", got)
	}
	settled := s.commit(sb.ID, CommitOptions{Settle: time.Unix(1, 0)})
	if settled.Layer() == changed.Layer() {
		t.Error("a settled commit shares the layer that is not")
	}
	if _, err := s.DeleteCommit(t.Context(), admin, changed.ID); err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(w.roots.Layers.Layers(), c.Layer()) {
		t.Error("the layer went with one of its commits")
	}
}
