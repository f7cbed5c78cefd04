package api

import (
	"context"

	"connectrpc.com/connect"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/sandbox"
	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// sandboxes implements SandboxService.
type sandboxes struct{ *API }

var _ casematev1connect.SandboxServiceHandler = (*sandboxes)(nil)

// maxIdempotencyKey bounds the header Idempotency-Key.
const maxIdempotencyKey = 255

// idempotencyKey returns the request's Idempotency-Key, "" where it has none.
func idempotencyKey(ctx context.Context) (string, error) {
	info, ok := connect.CallInfoForHandlerContext(ctx)
	if !ok {
		return "", nil
	}
	return checkIdempotencyKey(info.RequestHeader().Get("Idempotency-Key"))
}

func checkIdempotencyKey(key string) (string, error) {
	if len(key) > maxIdempotencyKey {
		return "", errs.New(errs.InvalidArgument, "the idempotency key is longer than %d bytes", maxIdempotencyKey)
	}
	return key, nil
}

// answer turns what the Manager returns into what a handler returns.
func answer(s sandbox.Sandbox, err error) (*v1.Sandbox, error) {
	if err != nil {
		return nil, err
	}
	return sandboxMessage(s), nil
}

// CreateSandbox implements SandboxServiceHandler.
func (h *sandboxes) CreateSandbox(ctx context.Context, req *v1.CreateSandboxRequest) (*v1.Sandbox, error) {
	key, err := idempotencyKey(ctx)
	if err != nil {
		return nil, err
	}
	return answer(h.cfg.Manager.Create(ctx, principalOf(ctx), specOf(req), sandbox.CreateOptions{IdempotencyKey: key}))
}

// GetSandbox implements SandboxServiceHandler.
func (h *sandboxes) GetSandbox(ctx context.Context, req *v1.GetSandboxRequest) (*v1.Sandbox, error) {
	return answer(h.cfg.Manager.Get(ctx, principalOf(ctx), req.GetSandbox()))
}

// ListSandboxes implements SandboxServiceHandler.
func (h *sandboxes) ListSandboxes(ctx context.Context, req *v1.ListSandboxesRequest) (*v1.ListSandboxesResponse, error) {
	labels, err := labelsOf(req.GetLabels(), req.GetLabel())
	if err != nil {
		return nil, err
	}
	q := sandbox.Query{Labels: labels, PageSize: int(req.GetPageSize()), PageToken: req.GetPageToken()}
	for _, s := range req.GetStates() {
		q.States = append(q.States, sandbox.State(s))
	}
	page, next, err := h.cfg.Manager.List(ctx, principalOf(ctx), q)
	if err != nil {
		return nil, err
	}
	resp := &v1.ListSandboxesResponse{NextPageToken: next, Sandboxes: make([]*v1.Sandbox, 0, len(page))}
	for _, s := range page {
		resp.Sandboxes = append(resp.Sandboxes, sandboxMessage(s))
	}
	return resp, nil
}

// UpdateSandbox implements SandboxServiceHandler.
func (h *sandboxes) UpdateSandbox(ctx context.Context, req *v1.UpdateSandboxRequest) (*v1.Sandbox, error) {
	var u sandbox.Update
	if req.GetLabels() != nil {
		labels := req.GetLabels().GetLabels()
		u.Labels = &labels
	}
	if req.GetLifetime() != nil {
		d := req.GetLifetime().AsDuration()
		u.Lifetime = &d
	}
	if req.GetIdle() != nil {
		d := req.GetIdle().AsDuration()
		u.Idle = &d
	}
	if req.GetLimits() != nil {
		l := limitsOf(req.GetLimits())
		u.Limits = &l
	}
	return answer(h.cfg.Manager.Update(ctx, principalOf(ctx), req.GetSandbox(), u))
}

// DeleteSandbox implements SandboxServiceHandler.
func (h *sandboxes) DeleteSandbox(ctx context.Context, req *v1.DeleteSandboxRequest) (*v1.Sandbox, error) {
	return answer(h.cfg.Manager.Delete(ctx, principalOf(ctx), req.GetSandbox()))
}

// PauseSandbox implements SandboxServiceHandler.
func (h *sandboxes) PauseSandbox(ctx context.Context, req *v1.PauseSandboxRequest) (*v1.Sandbox, error) {
	switch {
	case req.GetFilesOnly() && req.GetOnDisk():
		return nil, errs.New(errs.InvalidArgument, "files_only keeps no memory, and on_disk does").WithHint("set one of them")
	case req.GetFilesOnly():
		return answer(h.cfg.Manager.PauseFiles(ctx, principalOf(ctx), req.GetSandbox()))
	case req.GetOnDisk():
		return answer(h.cfg.Manager.PauseToDisk(ctx, principalOf(ctx), req.GetSandbox()))
	}
	return answer(h.cfg.Manager.Pause(ctx, principalOf(ctx), req.GetSandbox()))
}

// ResumeSandbox implements SandboxServiceHandler.
func (h *sandboxes) ResumeSandbox(ctx context.Context, req *v1.ResumeSandboxRequest) (*v1.Sandbox, error) {
	return answer(h.cfg.Manager.Resume(ctx, principalOf(ctx), req.GetSandbox()))
}

// GetUsage implements SandboxServiceHandler.
func (h *sandboxes) GetUsage(ctx context.Context, req *v1.GetUsageRequest) (*v1.Usage, error) {
	u, err := h.cfg.Manager.Usage(ctx, principalOf(ctx), req.GetSandbox())
	if err != nil {
		return nil, err
	}
	return &v1.Usage{
		Cpu:             span(u.CPU),
		MemoryBytes:     u.MemoryBytes,
		MemoryPeakBytes: u.MemoryPeak,
		Pids:            clamp32(u.Pids),
		DiskBytes:       u.DiskBytes,
		OomKills:        u.OOMKills,
	}, nil
}

// ListChanges implements SandboxServiceHandler.
func (h *sandboxes) ListChanges(ctx context.Context, req *v1.ListChangesRequest) (*v1.ListChangesResponse, error) {
	changes, err := h.cfg.Manager.Changes(ctx, principalOf(ctx), req.GetSandbox(), req.GetWorkspace())
	if err != nil {
		return nil, err
	}
	return &v1.ListChangesResponse{Changes: changeMessages(changes)}, nil
}

func changeMessages(changes []sandbox.Change) []*v1.Change {
	out := make([]*v1.Change, 0, len(changes))
	for _, c := range changes {
		out = append(out, &v1.Change{Op: c.Op, Path: c.Path, Type: c.Type, Size: c.Size, Mode: c.Mode})
	}
	return out
}
