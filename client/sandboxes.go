package client

import (
	"context"

	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// Messages of the API's schema, under short names.
type (
	// CreateRequest says what sandbox to make; an empty one gives the server's defaults.
	CreateRequest = v1.CreateSandboxRequest
	// ListRequest says which sandboxes to show.
	ListRequest = v1.ListSandboxesRequest
	// UpdateRequest says what to change of a sandbox.
	UpdateRequest = v1.UpdateSandboxRequest
	// Sandbox is one isolated environment.
	Sandbox = v1.Sandbox
	// Limits bound what a sandbox may use.
	Limits = v1.Limits
	// Usage is what a sandbox uses.
	Usage = v1.Usage
	// Change is one file that differs from what a sandbox started from.
	Change = v1.Change
	// Workspace is a host directory that shows inside as copy-on-write.
	Workspace = v1.Workspace
)

// Sandboxes makes, shows, changes and ends sandboxes. A sandbox is named by its id, a unique
// beginning of it (4 characters or more), or its name.
type Sandboxes struct {
	conn *conn
	rpc  casematev1connect.SandboxServiceClient
}

// Create starts a sandbox and returns when it can be used.
func (s *Sandboxes) Create(ctx context.Context, req *CreateRequest) (*Sandbox, error) {
	return s.CreateOnce(ctx, "", req)
}

// CreateOnce is Create with an idempotency key: for 24 hours the same key and request give the same
// sandbox, so that a call may be repeated when its answer was lost.
func (s *Sandboxes) CreateOnce(ctx context.Context, idempotencyKey string, req *CreateRequest) (*Sandbox, error) {
	sb, err := s.rpc.CreateSandbox(keyed(ctx, idempotencyKey), req)
	return sb, s.conn.wrap(err)
}

// Get shows one sandbox.
func (s *Sandboxes) Get(ctx context.Context, sandbox string) (*Sandbox, error) {
	sb, err := s.rpc.GetSandbox(ctx, &v1.GetSandboxRequest{Sandbox: sandbox})
	return sb, s.conn.wrap(err)
}

// List returns one page of sandboxes, and the token of the next page or "".
func (s *Sandboxes) List(ctx context.Context, req *ListRequest) (page []*Sandbox, next string, err error) {
	resp, err := s.rpc.ListSandboxes(ctx, req)
	if err != nil {
		return nil, "", s.conn.wrap(err)
	}
	return resp.GetSandboxes(), resp.GetNextPageToken(), nil
}

// All returns every sandbox that req names, over all pages.
func (s *Sandboxes) All(ctx context.Context, req *ListRequest) ([]*Sandbox, error) {
	q := &ListRequest{Labels: req.GetLabels(), Label: req.GetLabel(), States: req.GetStates(), PageSize: req.GetPageSize()}
	return allPages(func(token string) ([]*Sandbox, string, error) {
		q.PageToken = token
		return s.List(ctx, q)
	})
}

// allPages returns what list gives, from the first page on (no token) to the last one, after which there is no token.
func allPages[T any](list func(token string) ([]T, string, error)) ([]T, error) {
	var all []T
	for token := ""; ; {
		page, next, err := list(token)
		if err != nil {
			return nil, err
		}
		all = append(all, page...)
		if next == "" {
			return all, nil
		}
		token = next
	}
}

// Update changes labels, lifetime, idle limit or limits.
func (s *Sandboxes) Update(ctx context.Context, req *UpdateRequest) (*Sandbox, error) {
	sb, err := s.rpc.UpdateSandbox(ctx, req)
	return sb, s.conn.wrap(err)
}

// Delete ends a sandbox with its processes and files. Idempotent.
func (s *Sandboxes) Delete(ctx context.Context, sandbox string) (*Sandbox, error) {
	sb, err := s.rpc.DeleteSandbox(ctx, &v1.DeleteSandboxRequest{Sandbox: sandbox})
	return sb, s.conn.wrap(err)
}

// Pause freezes every process of a sandbox. Idempotent.
func (s *Sandboxes) Pause(ctx context.Context, sandbox string) (*Sandbox, error) {
	sb, err := s.rpc.PauseSandbox(ctx, &v1.PauseSandboxRequest{Sandbox: sandbox})
	return sb, s.conn.wrap(err)
}

// PauseToDisk pauses a sandbox and saves its processes with their memory beside its files: Resume goes on where they
// were, and none of them is on the host meanwhile. Only isolation gvisor can. Idempotent.
func (s *Sandboxes) PauseToDisk(ctx context.Context, sandbox string) (*Sandbox, error) {
	sb, err := s.rpc.PauseSandbox(ctx, &v1.PauseSandboxRequest{Sandbox: sandbox, OnDisk: true})
	return sb, s.conn.wrap(err)
}

// PauseFiles pauses a sandbox without its memory: its processes end, and Resume starts it anew on its
// files. Idempotent.
func (s *Sandboxes) PauseFiles(ctx context.Context, sandbox string) (*Sandbox, error) {
	sb, err := s.rpc.PauseSandbox(ctx, &v1.PauseSandboxRequest{Sandbox: sandbox, FilesOnly: true})
	return sb, s.conn.wrap(err)
}

// Resume lets a paused sandbox go on, or starts it anew where it was paused without memory. Idempotent.
func (s *Sandboxes) Resume(ctx context.Context, sandbox string) (*Sandbox, error) {
	sb, err := s.rpc.ResumeSandbox(ctx, &v1.ResumeSandboxRequest{Sandbox: sandbox})
	return sb, s.conn.wrap(err)
}

// Usage tells what a sandbox uses now.
func (s *Sandboxes) Usage(ctx context.Context, sandbox string) (*Usage, error) {
	u, err := s.rpc.GetUsage(ctx, &v1.GetUsageRequest{Sandbox: sandbox})
	return u, s.conn.wrap(err)
}

// Changes tells which files differ from the template, or from the source of the workspace that shows
// at the path workspace.
func (s *Sandboxes) Changes(ctx context.Context, sandbox, workspace string) ([]*Change, error) {
	resp, err := s.rpc.ListChanges(ctx, &v1.ListChangesRequest{Sandbox: sandbox, Workspace: workspace})
	return resp.GetChanges(), s.conn.wrap(err)
}
