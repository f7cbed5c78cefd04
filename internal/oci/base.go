package oci

import (
	"context"
	"fmt"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/oci/registry"
	"casemate.dev/internal/sandbox"
)

// Boxes is what CommitOf needs of the domain; sandbox.Manager implements it.
type Boxes interface {
	Create(ctx context.Context, p sandbox.Principal, s sandbox.Spec, o sandbox.CreateOptions) (sandbox.Sandbox, error)
	MakeCommit(ctx context.Context, p sandbox.Principal, ref string, o sandbox.CommitOptions) (sandbox.Commit, error)
	GetCommit(ctx context.Context, p sandbox.Principal, ref string) (sandbox.Commit, error)
	Delete(ctx context.Context, p sandbox.Principal, ref string) (sandbox.Sandbox, error)
}

// CommitOf pulls an image, unless what its name leads to is here, and returns a commit of its files, for whoever
// builds upon it. The commit's spec carries what the image says of its processes. It is tagged with the image's digest,
// so that the same image gives the same commit. auth is as in PullOptions. Only administrators may pull.
// Kinds: those of Pull, and PermissionDenied.
func (s *Service) CommitOf(ctx context.Context, boxes Boxes, p sandbox.Principal, ref string, auth Auth, progress func(line string)) (sandbox.Commit, error) {
	r, err := registry.ParseRef(ref)
	if err != nil {
		return sandbox.Commit{}, err
	}
	if !p.Admin || p.Sandbox != "" {
		return sandbox.Commit{}, errs.New(errs.PermissionDenied, "there is no template %s here, and only an administrator may pull images", r.Short()).
			WithHint("ask one: casemate pull %s", ref)
	}
	step := ""
	got, err := s.Pull(ctx, ref, PullOptions{Auth: auth}, func(now Progress) {
		if now.Step != step {
			step = now.Step
			progress(fmt.Sprintf("%s %s", step, r.Short()))
		}
	})
	if err != nil {
		return sandbox.Commit{}, err
	}
	for _, w := range got.Warnings {
		progress("warning: " + w)
	}
	tag := "image/" + got.Template.Image
	if c, err := boxes.GetCommit(ctx, p, tag); err == nil || !errs.Is(err, errs.NotFound) {
		return c, err
	}
	box, err := boxes.Create(ctx, p, sandbox.Spec{Template: got.Template.Name, Profile: sandbox.Standard}, sandbox.CreateOptions{})
	if err != nil {
		return sandbox.Commit{}, err
	}
	c, err := boxes.MakeCommit(ctx, p, box.ID, sandbox.CommitOptions{Message: "image " + got.Template.Source, Tag: tag})
	if _, derr := boxes.Delete(context.WithoutCancel(ctx), p, box.ID); derr != nil {
		s.log.Warn("remove the sandbox that an image was committed of", "sandbox", box.ID, "error", derr)
	}
	return c, err
}
