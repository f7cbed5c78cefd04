package api

import (
	"context"
	"time"

	"casemate.dev/internal/sandbox"
	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// commits implements CommitService.
type commits struct{ *API }

var _ casematev1connect.CommitServiceHandler = (*commits)(nil)

func commitMessage(c sandbox.Commit) *v1.Commit {
	if c.ID == "" {
		return nil
	}
	return &v1.Commit{
		Id: c.ID, Sandbox: c.Sandbox, Parent: c.Parent, Message: c.Message, Author: c.Author, Owner: c.Owner,
		CreatedAt: stamp(c.CreatedAt), Event: c.Event, Tags: c.Tags, Automatic: c.Automatic, Bytes: c.Bytes,
		Frozen: span(c.Frozen), Template: c.Spec.Template, Profiles: c.Profiles, Name: c.Spec.Name,
		Merged: c.Merged, Digest: c.Digest, Memory: c.Memory,
	}
}

func commitMessages(all []sandbox.Commit) []*v1.Commit {
	out := make([]*v1.Commit, 0, len(all))
	for _, c := range all {
		out = append(out, commitMessage(c))
	}
	return out
}

func commitAnswer(c sandbox.Commit, err error) (*v1.Commit, error) {
	if err != nil {
		return nil, err
	}
	return commitMessage(c), nil
}

// CreateCommit implements CommitServiceHandler.
func (h *commits) CreateCommit(ctx context.Context, req *v1.CreateCommitRequest) (*v1.Commit, error) {
	return commitAnswer(h.cfg.Manager.MakeCommit(ctx, principalOf(ctx), req.GetSandbox(),
		sandbox.CommitOptions{Message: req.GetMessage(), Tag: req.GetTag(), Memory: req.GetMemory()}))
}

// GetCommit implements CommitServiceHandler.
func (h *commits) GetCommit(ctx context.Context, req *v1.GetCommitRequest) (*v1.Commit, error) {
	return commitAnswer(h.cfg.Manager.GetCommit(ctx, principalOf(ctx), req.GetCommit()))
}

// ListCommits implements CommitServiceHandler.
func (h *commits) ListCommits(ctx context.Context, req *v1.ListCommitsRequest) (*v1.ListCommitsResponse, error) {
	all, next, err := h.cfg.Manager.ListCommits(ctx, principalOf(ctx), sandbox.CommitQuery{
		Sandbox: req.GetSandbox(), Tagged: req.GetTagged(), Explicit: !req.GetAutomatic(),
		PageSize: int(req.GetPageSize()), PageToken: req.GetPageToken(),
	})
	if err != nil {
		return nil, err
	}
	return &v1.ListCommitsResponse{Commits: commitMessages(all), NextPageToken: next}, nil
}

// TagCommit implements CommitServiceHandler.
func (h *commits) TagCommit(ctx context.Context, req *v1.TagCommitRequest) (*v1.Commit, error) {
	return commitAnswer(h.cfg.Manager.TagCommit(ctx, principalOf(ctx), req.GetCommit(), req.GetTag(), false))
}

// UntagCommit implements CommitServiceHandler.
func (h *commits) UntagCommit(ctx context.Context, req *v1.UntagCommitRequest) (*v1.Commit, error) {
	return commitAnswer(h.cfg.Manager.TagCommit(ctx, principalOf(ctx), req.GetCommit(), req.GetTag(), true))
}

// DeleteCommit implements CommitServiceHandler.
func (h *commits) DeleteCommit(ctx context.Context, req *v1.DeleteCommitRequest) (*v1.Commit, error) {
	return commitAnswer(h.cfg.Manager.DeleteCommit(ctx, principalOf(ctx), req.GetCommit()))
}

// ForkSandbox implements CommitServiceHandler.
func (h *commits) ForkSandbox(ctx context.Context, req *v1.ForkSandboxRequest) (*v1.ForkSandboxResponse, error) {
	o := sandbox.ForkOptions{Count: int(req.GetCount()), Name: req.GetName(), Live: req.GetLive()}
	if req.GetLifetime() != nil {
		if o.Lifetime = req.GetLifetime().AsDuration(); o.Lifetime <= 0 {
			o.Lifetime = -1 // the domain's "none"
		}
	}
	c, all, err := h.cfg.Manager.Fork(ctx, principalOf(ctx), req.GetSandbox(), o)
	if err != nil {
		return nil, err
	}
	resp := &v1.ForkSandboxResponse{Commit: commitMessage(c)}
	for _, f := range all {
		if f.Err != nil {
			p := h.problemOf(ctx, casematev1connect.CommitServiceForkSandboxProcedure, f.Err)
			resp.Forks = append(resp.Forks, &v1.Fork{Error: p.Message})
			continue
		}
		resp.Forks = append(resp.Forks, &v1.Fork{Sandbox: sandboxMessage(f.Sandbox)})
	}
	return resp, nil
}

// Checkout implements CommitServiceHandler.
func (h *commits) Checkout(ctx context.Context, req *v1.CheckoutRequest) (*v1.CheckoutResponse, error) {
	s, saved, err := h.cfg.Manager.Checkout(ctx, principalOf(ctx), req.GetSandbox(), req.GetCommit(),
		sandbox.CheckoutOptions{Discard: req.GetDiscard()})
	if err != nil {
		return nil, err
	}
	return &v1.CheckoutResponse{Sandbox: sandboxMessage(s), Saved: commitMessage(saved)}, nil
}

// CompareStates implements CommitServiceHandler.
func (h *commits) CompareStates(ctx context.Context, req *v1.CompareStatesRequest) (*v1.CompareStatesResponse, error) {
	changes, err := h.cfg.Manager.Compare(ctx, principalOf(ctx), req.GetFrom(), req.GetTo())
	if err != nil {
		return nil, err
	}
	return &v1.CompareStatesResponse{Changes: changeMessages(changes)}, nil
}

// CollectCommits implements CommitServiceHandler.
func (h *commits) CollectCommits(ctx context.Context, req *v1.CollectCommitsRequest) (*v1.CollectCommitsResponse, error) {
	var older time.Duration
	if req.GetOlderThan() != nil {
		older = max(req.GetOlderThan().AsDuration(), 1)
	}
	got, err := h.cfg.Manager.Collect(ctx, principalOf(ctx), sandbox.CollectOptions{Dry: req.GetDryRun(), OlderThan: older})
	if err != nil {
		return nil, err
	}
	return &v1.CollectCommitsResponse{Commits: commitMessages(got.Commits), Layers: clamp32(len(got.Layers)), Bytes: got.Bytes}, nil
}
