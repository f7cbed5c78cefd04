package sandbox

import (
	"slices"
	"testing"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal"
)

// tagged makes a commit of alice's, or of p's, with tags.
func (s *server) tagged(p Principal, tags ...string) Commit {
	s.w.t.Helper()
	c, err := s.MakeCommit(s.w.t.Context(), p, s.create(p, Spec{Template: "base"}).ID, CommitOptions{})
	if err != nil {
		s.w.t.Fatal(err)
	}
	for _, tag := range tags {
		if c, err = s.TagCommit(s.w.t.Context(), p, c.ID, tag, false); err != nil {
			s.w.t.Fatal(err)
		}
	}
	return c
}

// A shared template is everybody's to start from and to read, by its name and tags, and nobody else's to change; what is
// not shared stays its owner's. It survives the server.
func TestShareTemplate(t *testing.T) {
	w := newWorld(t)
	s := w.serve()
	ctx := t.Context()
	first := s.tagged(alice, "web:v1", "mine:x")
	newest := s.tagged(alice, "web", "web:v2", "mine")
	other := s.tagged(alice, "website", "web/ready")
	start := func(p Principal, ref string) (Sandbox, error) {
		return s.Create(ctx, p, Spec{Template: ref}, CreateOptions{})
	}
	everyRef := []string{"web", "web:v1", "web:v2", first.ID, newest.ID}
	for _, ref := range everyRef {
		if _, err := start(bob, ref); !errs.Is(err, errs.NotFound) {
			t.Errorf("%s before it is shared: %v", ref, err)
		}
	}
	s.tagged(bob, "twice")
	s.tagged(alice, "twice")
	for _, c := range []struct {
		p    Principal
		name string
		want errs.Kind
	}{
		{alice, "web", errs.PermissionDenied},
		{Principal{ID: "sandbox:x", Sandbox: "x", Admin: true}, "web", errs.PermissionDenied},
		{admin, "nothing", errs.NotFound},
		{admin, "web:v1", errs.InvalidArgument},
		{admin, first.ID, errs.InvalidArgument},
		{admin, "base", errs.AlreadyExists},
		{admin, "twice", errs.FailedPrecondition},
	} {
		if err := s.ShareTemplate(ctx, c.p, c.name, true); !errs.Is(err, c.want) {
			t.Errorf("%s of %s: %v, want %v", c.name, c.p.ID, err, c.want)
		}
	}
	for range 2 {
		if err := s.ShareTemplate(ctx, admin, "web", true); err != nil {
			t.Fatal(err)
		}
	}
	s = s.crash()
	var theirs Sandbox
	for _, ref := range everyRef {
		var err error
		if theirs, err = start(bob, ref); err != nil || theirs.Owner != bob.ID {
			t.Errorf("%s: %v", ref, err)
		}
	}
	for _, ref := range []string{other.ID, "website", "web/ready", "mine", "mine:x", newest.ID[:12]} {
		if _, err := start(bob, ref); !errs.Is(err, errs.NotFound) {
			t.Errorf("%s, which is not shared: %v", ref, err)
		}
	}
	if c, err := s.GetCommit(ctx, bob, newest.ID); err != nil || !slices.Equal(c.Tags, []string{"web", "web:v2"}) {
		t.Errorf("what bob sees of it: %q, %v", c.Tags, err)
	}
	if all, _, err := s.ListCommits(ctx, bob, CommitQuery{Tagged: true}); err != nil || len(all) != 1 {
		t.Errorf("bob's list: %v, %v", all, err)
	}
	if _, err := s.TagCommit(ctx, bob, "web", "web:evil", false); !errs.Is(err, errs.NotFound) {
		t.Errorf("bob moves its tag: %v", err)
	}
	if _, err := s.DeleteCommit(ctx, bob, "web"); !errs.Is(err, errs.NotFound) {
		t.Errorf("bob removes it: %v", err)
	}
	s.unshared(first, newest, theirs)
}

// unshared goes on where web is shared, and theirs is a sandbox of bob's that started from it.
func (s *server) unshared(first, newest Commit, theirs Sandbox) {
	t, ctx := s.w.t, s.w.t.Context()
	// What bob has himself goes before it, and he can't share in its place, nor can an administrator.
	own := s.tagged(bob, "web")
	if got, err := s.Create(ctx, bob, Spec{Template: "web"}, CreateOptions{}); err != nil || got.Spec.Commit != own.ID {
		t.Errorf("bob's own: %s, %v", got.Spec.Commit, err)
	}
	s.tagged(admin, "web")
	if err := s.ShareTemplate(ctx, admin, "web", true); !errs.Is(err, errs.AlreadyExists) {
		t.Errorf("another of the name: %v", err)
	}
	if err := s.ShareTemplate(ctx, admin, "web", false); err != nil {
		t.Fatal(err)
	}
	for _, ref := range []string{"web:v1", first.ID, newest.ID} {
		if _, err := s.Create(ctx, bob, Spec{Template: ref}, CreateOptions{}); !errs.Is(err, errs.NotFound) {
			t.Errorf("%s, which is shared no longer: %v", ref, err)
		}
	}
	// Who started from it goes on: changes, commits, forks.
	if _, err := s.Diff(ctx, bob, "", theirs.ID, DiffOptions{}); err != nil {
		t.Errorf("what bob's sandbox changed: %v", err)
	}
	if _, err := s.MakeCommit(ctx, bob, theirs.ID, CommitOptions{}); err != nil {
		t.Errorf("a commit of bob's sandbox: %v", err)
	}
	events, err := s.Events(ctx, admin, journal.ServerStream, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, e := range events {
		if e.Type == journal.TemplateShared {
			n++
		}
	}
	if n != 2 {
		t.Errorf("%d events tell of it, want 2: that it is shared, and that it is so no longer", n)
	}
	// A name that is built anew after its template was removed is not shared by what was before.
	if err := s.ShareTemplate(ctx, admin, "website", true); err != nil {
		t.Fatal(err)
	}
	if err := s.TemplateGone(ctx, alice, bob.ID, "website"); err != nil {
		t.Fatal(err)
	}
	if all, err := s.SharedTemplates(ctx); err != nil || all["website"] != alice.ID {
		t.Errorf("another's was removed: %v, %v", all, err)
	}
	if err := s.TemplateGone(ctx, alice, alice.ID, "website"); err != nil {
		t.Fatal(err)
	}
	if all, err := s.SharedTemplates(ctx); err != nil || len(all) != 0 {
		t.Errorf("%v, %v", all, err)
	}
}
