package oci

import (
	"context"
	"testing"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/sandbox"
)

// fakeBoxes makes commits of nothing.
type fakeBoxes struct {
	made    []sandbox.Spec
	deleted int
	tags    map[string]bool
}

// Create implements Boxes.
func (b *fakeBoxes) Create(_ context.Context, _ sandbox.Principal, s sandbox.Spec, _ sandbox.CreateOptions) (sandbox.Sandbox, error) {
	b.made = append(b.made, s)
	return sandbox.Sandbox{ID: "box"}, nil
}

// MakeCommit implements Boxes.
func (b *fakeBoxes) MakeCommit(_ context.Context, _ sandbox.Principal, ref string, o sandbox.CommitOptions) (sandbox.Commit, error) {
	b.tags[o.Tag] = true
	return sandbox.Commit{ID: "cmt_1", Sandbox: ref}, nil
}

// GetCommit implements Boxes.
func (b *fakeBoxes) GetCommit(_ context.Context, _ sandbox.Principal, ref string) (sandbox.Commit, error) {
	if !b.tags[ref] {
		return sandbox.Commit{}, errs.New(errs.NotFound, "no commit %s", ref)
	}
	return sandbox.Commit{ID: "cmt_1"}, nil
}

// Delete implements Boxes.
func (b *fakeBoxes) Delete(context.Context, sandbox.Principal, string) (sandbox.Sandbox, error) {
	b.deleted++
	return sandbox.Sandbox{}, nil
}

func TestCommitOf(t *testing.T) {
	h := newHub(t)
	h.push(t, "app:1", app(t))
	w := newWorld(t, trusting(h))
	boxes := &fakeBoxes{tags: map[string]bool{}}
	admin := sandbox.Principal{ID: "local", Admin: true}
	said := 0
	for range 2 { // the second time it is there
		c, err := w.CommitOf(t.Context(), boxes, admin, h.host()+"/app:1", Auth{}, func(string) { said++ })
		if err != nil || c.ID != "cmt_1" {
			t.Fatalf("%+v, %v", c, err)
		}
	}
	if len(boxes.made) != 1 || boxes.deleted != 1 || boxes.made[0].Template != h.host()+"/app:1" || said == 0 {
		t.Errorf("%+v, %d deleted, %d lines", boxes.made, boxes.deleted, said)
	}
	for _, p := range []sandbox.Principal{{ID: "key"}, {ID: "sandbox:x", Sandbox: "x", Admin: true}} {
		if _, err := w.CommitOf(t.Context(), boxes, p, h.host()+"/app:1", Auth{}, func(string) {}); !errs.Is(err, errs.PermissionDenied) {
			t.Errorf("%+v: %v", p, err)
		}
	}
}
