package e2b

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/id"
	"casemate.dev/internal/sandbox"
)

// A snapshot of E2B's is a commit here. Its name with its tag, "web:v2", is the commit's tag; one without a
// name goes by the commit's id.

// namespace stands before names in answers, as a team's does there. In requests any is taken.
const namespace = "casemate/"

// snapshotJSON is a snapshot.
type snapshotJSON struct {
	SnapshotID string   `json:"snapshotID"`
	Names      []string `json:"names"`
}

func snapshotShape(c sandbox.Commit) snapshotJSON {
	out := snapshotJSON{SnapshotID: c.ID + ":" + defaultTag, Names: []string{}}
	for _, t := range c.Tags {
		if !strings.Contains(t, ":") {
			t += ":" + defaultTag // given by other means than this protocol
		}
		out.Names = append(out.Names, namespace+t)
	}
	if len(out.Names) > 0 {
		out.SnapshotID = out.Names[0]
	}
	return out
}

// commitOf finds the commit that a template's reference names.
func (a *API) commitOf(ctx context.Context, p sandbox.Principal, ref string) (sandbox.Commit, error) {
	name, tag := parseTemplate(ref)
	var candidates []string
	switch {
	case strings.HasPrefix(name, id.Commit) && tag == defaultTag:
		candidates = []string{name}
	case tag == defaultTag:
		candidates = []string{name + ":" + tag, name}
	default:
		candidates = []string{name + ":" + tag}
	}
	err := fail(http.StatusNotFound, "template '%s' not found", name)
	for _, ref := range candidates {
		c, cerr := a.cfg.Manager.GetCommit(ctx, p, ref)
		if cerr == nil || !errs.Is(cerr, errs.NotFound) && !errs.Is(cerr, errs.InvalidArgument) {
			return c, cerr
		}
	}
	return sandbox.Commit{}, err
}

// live reports whether what is made of a sandbox goes on with its processes: where its isolation can save them, and
// there are any.
func (a *API) live(c call, s sandbox.Sandbox) bool {
	return !s.FilesOnly && a.cfg.Manager.HasImages(c.r.Context(), s.Spec.Isolation)
}

// snapshot saves a sandbox's files, and its processes where they can be.
func (a *API) snapshot(c call) error {
	s, err := a.alive(c)
	if err != nil {
		return err
	}
	var req struct {
		Name string `json:"name"`
	}
	if err := c.decode(&req); err != nil {
		return err
	}
	o := sandbox.CommitOptions{Message: "snapshot", Memory: a.live(c, s)}
	if req.Name != "" {
		name, tag := parseTemplate(req.Name)
		o.Tag = name + ":" + tag
	}
	made, err := a.cfg.Manager.MakeCommit(c.r.Context(), c.p, s.ID, o)
	if errs.Is(err, errs.InvalidArgument) {
		return fail(http.StatusBadRequest, "Invalid name: %s", publicText(err))
	}
	if err != nil {
		return gone(s, err)
	}
	return c.json(http.StatusCreated, snapshotShape(made))
}

// snapshots lists what snapshot made, the newest first.
func (a *API) snapshots(c call) error {
	q := c.r.URL.Query()
	size, err := pageSize(q)
	if err != nil {
		return err
	}
	query := sandbox.CommitQuery{Sandbox: sandboxID(q.Get("sandboxID")), Explicit: true, PageSize: size, PageToken: q.Get("nextToken")}
	out := []snapshotJSON{}
	for {
		page, next, err := a.cfg.Manager.ListCommits(c.r.Context(), c.p, query)
		if errs.Is(err, errs.NotFound) { // no such sandbox
			break
		}
		if err != nil {
			return err
		}
		for _, commit := range page {
			if one := snapshotShape(commit); one.named(q.Get("name")) {
				out = append(out, one)
			}
		}
		if query.PageToken = next; next == "" {
			break
		}
		if q.Get("name") == "" || len(out) > 0 {
			c.w.Header().Set("X-Next-Token", next)
			break
		}
	}
	return c.json(http.StatusOK, out)
}

// named reports whether a filter, a name or an id with or without a tag, names a snapshot; "" names all.
func (s snapshotJSON) named(filter string) bool {
	if filter == "" {
		return true
	}
	name, tag := parseTemplate(filter)
	anyTag := !strings.Contains(filter[strings.LastIndexByte(filter, '/')+1:], ":")
	return slices.ContainsFunc(append(s.Names, s.SnapshotID), func(full string) bool {
		n, t := parseTemplate(full)
		return n == name && (anyTag || t == tag)
	})
}

// maxForks is how many forks one call may make.
const maxForks = sandbox.MaxForks

// forkResult is what became of one fork: exactly one of the two.
type forkResult struct {
	Sandbox *sandboxJSON `json:"sandbox,omitempty"`
	Error   *problem     `json:"error,omitempty"`
}

// fork makes sandboxes with the files that one has now.
func (a *API) fork(c call) error {
	s, err := a.alive(c)
	if err != nil {
		return err
	}
	req := struct {
		Count   int64 `json:"count"`
		Timeout int64 `json:"timeout"`
	}{Count: 1, Timeout: timeoutV2}
	if err := c.decode(&req); err != nil {
		return err
	}
	switch {
	case req.Count < 1:
		return fail(http.StatusBadRequest, "Count must be at least 1")
	case req.Count > maxForks:
		return fail(http.StatusBadRequest, "Count cannot be greater than %d", maxForks)
	}
	life, err := lifetime(req.Timeout, 1)
	if err != nil {
		return err
	}
	if s.State != sandbox.Running {
		return fail(http.StatusConflict, "Sandbox '%s' cannot be forked while in '%s' state", s.ID, s.State)
	}
	return a.forkInto(c, s, int(req.Count), life)
}

func (a *API) forkInto(c call, s sandbox.Sandbox, count int, life time.Duration) error {
	bare := make(map[string]error) // forks that lack the headers of their origin
	_, all, err := a.cfg.Manager.Fork(c.r.Context(), c.p, s.ID, sandbox.ForkOptions{
		Count: count, Lifetime: life, Live: a.live(c, s),
		Shape: func(sandboxID string, spec *sandbox.Spec) {
			spec.Env = map[string]string{"E2B_SANDBOX_ID": sandboxID}
			if err := a.copyTransforms(c, s.ID, sandboxID); err != nil {
				bare[sandboxID] = err
			}
		},
	})
	if err != nil {
		return gone(s, err)
	}
	out := make([]forkResult, len(all))
	for i, f := range all {
		if err := bare[f.Sandbox.ID]; f.Err == nil && err != nil {
			f.Err = err
			if _, err := a.cfg.Manager.Delete(c.r.Context(), c.p, f.Sandbox.ID); err != nil {
				a.log.Error("cannot delete a fork that lacks its origin's headers", "sandbox", f.Sandbox.ID, "error", err)
			}
		}
		if f.Err != nil {
			out[i].Error = &problem{Code: errs.KindOf(f.Err).Map().HTTP, Message: publicText(f.Err)}
			continue
		}
		made := a.created(f.Sandbox)
		out[i].Sandbox = &made
	}
	return c.json(http.StatusCreated, out)
}
