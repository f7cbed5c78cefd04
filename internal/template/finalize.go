package template

import (
	"context"
	"fmt"
	"slices"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/sandbox"
)

// finalize commits what the steps came to under the template's name, and sees it start.
func (x *execution) finalize(ctx context.Context, s *state) error {
	service, err := x.service(s)
	if err != nil {
		return err
	}
	lock, err := x.makeLock(ctx, s)
	if err != nil {
		return fmt.Errorf("find out what the result is made of: %w", err)
	}
	if x.req.Locked != nil {
		if err := drift(x.req.Locked, lock, func(step int) string { return x.otherFiles(ctx, step) }); err != nil {
			return err
		}
		x.say(Info, "the result is what the lock file says: %d packages, %s", len(lock.Packages), short(lock.Digest))
	}
	made, err := x.commit(ctx, s, service)
	if err != nil {
		return err
	}
	if service != nil {
		x.say(Info, "starting the service, to see that it comes up")
		if err := x.tryService(ctx, s, made); err != nil {
			_, derr := x.b.m.DeleteCommit(context.WithoutCancel(ctx), x.p, made.ID)
			if derr != nil {
				x.b.log.Warn("cannot delete the commit of a failed build", "build", x.req.ID, "commit", made.ID, "error", derr)
			}
			return err
		}
	}
	for _, tag := range x.tags() {
		if _, err := x.b.m.TagCommit(ctx, x.p, made.ID, tag, false); err != nil {
			return fmt.Errorf("tag %s: %w", tag, err)
		}
	}
	x.run.change(func(bd *Build) {
		bd.Commit, bd.Image, bd.Env = made.ID, cloneImage(s.image), s.env.list()
		bd.Lock = lock
		bd.User, bd.Dir = made.Spec.User, made.Spec.Dir
		bd.Bytes += made.Bytes
	})
	return nil
}

// tags are the names that the result gets.
func (x *execution) tags() []string {
	var all []string
	if !x.req.TagsAlone {
		all = append(all, x.req.Name)
	}
	for _, t := range x.req.Tags {
		all = append(all, x.req.Name+":"+t)
	}
	return all
}

// commit makes the commit that sandboxes start from: the last step's files, and beside them the environment.
func (x *execution) commit(ctx context.Context, s *state, service *sandbox.Service) (sandbox.Commit, error) {
	spec := x.stepSpec(s, nil)
	spec.Env = s.env.toMap()
	b, err := x.openBox(ctx, s, spec)
	if err != nil {
		return sandbox.Commit{}, err
	}
	defer b.close()
	return x.b.m.MakeCommit(ctx, x.p, b.id, sandbox.CommitOptions{
		Message: "template " + x.req.Name + ", build " + x.req.ID,
		Shape: func(spec *sandbox.Spec) {
			x.shape(spec, s)
			spec.Service = service
		},
	})
}

// service is what sandboxes of the template run from their start on; nil: nothing.
func (x *execution) service(s *state) (*sandbox.Service, error) {
	line := func(l string) []string {
		if l == "" {
			return nil
		}
		return append(slices.Clone(s.shell()), l)
	}
	out := &sandbox.Service{Start: line(x.req.Start), Ready: line(x.req.Ready), Within: x.req.ReadyWithin}
	if x.req.Serve {
		if len(out.Start) == 0 {
			out.Start = append(slices.Clone(s.image.Entrypoint), s.image.Cmd...)
		}
		if h := s.image.Healthcheck; len(out.Ready) == 0 && h != nil && len(h.Test) > 1 {
			switch h.Test[0] {
			case "CMD":
				out.Ready = h.Test[1:]
			case "CMD-SHELL":
				out.Ready = line(h.Test[1])
			}
		}
		if len(out.Start) == 0 {
			return nil, errs.New(errs.InvalidArgument, "the image has no ENTRYPOINT and no CMD to serve").
				WithHint("give a start command: --start")
		}
	}
	if len(out.Start) == 0 && len(out.Ready) == 0 {
		return nil, nil
	}
	return out, nil
}

// tryService starts a sandbox of the result, which returns once the service is ready.
func (x *execution) tryService(ctx context.Context, s *state, made sandbox.Commit) error {
	spec := x.stepSpec(s, x.req.Network)
	spec.Template, spec.Service, spec.Limits = made.ID, nil, x.req.Limits
	b, err := x.openBox(ctx, s, spec)
	if err != nil {
		return err
	}
	b.close()
	x.say(Info, "the service is ready")
	return nil
}
