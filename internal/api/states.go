package api

import (
	"context"
	"errors"
	"io"
	"net/http"
	"path"
	"strconv"
	"strings"

	"connectrpc.com/connect"

	"casemate.dev/internal/beat"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/httpfile"
	"casemate.dev/internal/state"
	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// states implements StateService.
type states struct{ *API }

var _ casematev1connect.StateServiceHandler = (*states)(nil)

func documentMessage(d state.Document) *v1.Document {
	return &v1.Document{
		Owner: d.Owner, Agent: d.Agent, Name: d.Name, Version: d.Version, Revision: d.Revision, ContentType: d.ContentType,
		Size: d.Size, Sha256: d.Digest, Deleted: d.Deleted, CreatedAt: stamp(d.At), Author: d.Author, Sandbox: d.Sandbox,
		Commit: d.Commit, Content: d.Content,
	}
}

func documentMessages(all []state.Document) []*v1.Document {
	out := make([]*v1.Document, len(all))
	for i, d := range all {
		out[i] = documentMessage(d)
	}
	return out
}

func documentAnswer(d state.Document, err error) (*v1.Document, error) {
	if err != nil {
		return nil, err
	}
	return documentMessage(d), nil
}

func agentMessage(a state.Agent) *v1.StateAgent {
	return &v1.StateAgent{
		Owner: a.Owner, Agent: a.Name, Documents: a.Documents, Bytes: a.Bytes, Revision: a.Revision,
		Retention: &v1.Retention{Versions: clamp32(a.Versions), Age: span(a.For)},
	}
}

// GetDocument implements StateServiceHandler.
func (h *states) GetDocument(ctx context.Context, req *v1.GetDocumentRequest) (*v1.Document, error) {
	ref := state.Ref{Owner: req.GetOwner(), Agent: req.GetAgent(), Name: req.GetName()}
	return documentAnswer(h.cfg.State.Get(ctx, principalOf(ctx), ref, req.GetVersion()))
}

// SetDocument implements StateServiceHandler.
func (h *states) SetDocument(ctx context.Context, req *v1.SetDocumentRequest) (*v1.Document, error) {
	return documentAnswer(h.cfg.State.Set(ctx, principalOf(ctx), state.SetRequest{
		Ref:     state.Ref{Owner: req.GetOwner(), Agent: req.GetAgent(), Name: req.GetName()},
		Links:   state.Links{Sandbox: req.GetSandbox(), Commit: req.GetCommit()},
		Content: req.GetContent(), ContentType: req.GetContentType(), Expect: req.ExpectedVersion, //nolint:protogetter // unset is not 0
	}))
}

// PatchDocument implements StateServiceHandler.
func (h *states) PatchDocument(ctx context.Context, req *v1.PatchDocumentRequest) (*v1.Document, error) {
	return documentAnswer(h.cfg.State.Patch(ctx, principalOf(ctx), state.PatchRequest{
		Ref:   state.Ref{Owner: req.GetOwner(), Agent: req.GetAgent(), Name: req.GetName()},
		Links: state.Links{Sandbox: req.GetSandbox(), Commit: req.GetCommit()},
		Patch: []byte(req.GetPatch()), Expect: req.ExpectedVersion, //nolint:protogetter // unset is not 0
	}))
}

// DeleteDocument implements StateServiceHandler.
func (h *states) DeleteDocument(ctx context.Context, req *v1.DeleteDocumentRequest) (*v1.Document, error) {
	r := state.DeleteRequest{
		Ref:    state.Ref{Owner: req.GetOwner(), Agent: req.GetAgent(), Name: req.GetName()},
		Expect: req.ExpectedVersion, //nolint:protogetter // unset is not 0
	}
	if req.GetForget() {
		return documentAnswer(h.cfg.State.Forget(ctx, principalOf(ctx), r))
	}
	return documentAnswer(h.cfg.State.Delete(ctx, principalOf(ctx), r))
}

// ListDocuments implements StateServiceHandler.
func (h *states) ListDocuments(ctx context.Context, req *v1.ListDocumentsRequest) (*v1.ListDocumentsResponse, error) {
	all, next, revision, err := h.cfg.State.List(ctx, principalOf(ctx), state.Query{
		Owner: req.GetOwner(), Agent: req.GetAgent(), Prefix: req.GetPrefix(), Deleted: req.GetDeleted(),
		PageSize: int(req.GetPageSize()), PageToken: req.GetPageToken(),
	})
	if err != nil {
		return nil, err
	}
	return &v1.ListDocumentsResponse{Documents: documentMessages(all), NextPageToken: next, Revision: revision}, nil
}

// ListVersions implements StateServiceHandler.
func (h *states) ListVersions(ctx context.Context, req *v1.ListVersionsRequest) (*v1.ListVersionsResponse, error) {
	ref := state.Ref{Owner: req.GetOwner(), Agent: req.GetAgent(), Name: req.GetName()}
	all, err := h.cfg.State.History(ctx, principalOf(ctx), ref, req.GetBelow(), int(req.GetLimit()))
	if err != nil {
		return nil, err
	}
	return &v1.ListVersionsResponse{Versions: documentMessages(all)}, nil
}

// ListAgents implements StateServiceHandler.
func (h *states) ListAgents(ctx context.Context, req *v1.ListAgentsRequest) (*v1.ListAgentsResponse, error) {
	all, next, err := h.cfg.State.Agents(ctx, principalOf(ctx), req.GetOwner(), req.GetEverybody(), int(req.GetPageSize()), req.GetPageToken())
	if err != nil {
		return nil, err
	}
	resp := &v1.ListAgentsResponse{NextPageToken: next}
	for _, a := range all {
		resp.Agents = append(resp.Agents, agentMessage(a))
	}
	return resp, nil
}

// SetRetention implements StateServiceHandler.
func (h *states) SetRetention(ctx context.Context, req *v1.SetRetentionRequest) (*v1.StateAgent, error) {
	a, err := h.cfg.State.Keep(ctx, principalOf(ctx), req.GetOwner(), req.GetAgent(), state.Retention{
		Versions: int(req.GetRetention().GetVersions()), For: req.GetRetention().GetAge().AsDuration(),
	})
	if err != nil {
		return nil, err
	}
	return agentMessage(a), nil
}

// WatchDocuments implements StateServiceHandler.
func (h *states) WatchDocuments(ctx context.Context, req *v1.WatchDocumentsRequest, stream *connect.ServerStream[v1.WatchDocumentsResponse]) error {
	b := beat.New(h.cfg.KeepAlive, func() error { return stream.Send(&v1.WatchDocumentsResponse{}) })
	defer b.Stop()
	err := h.cfg.State.Watch(ctx, principalOf(ctx), state.WatchQuery{
		Owner: req.GetOwner(), Agent: req.GetAgent(), Name: req.GetName(), Prefix: req.GetPrefix(), After: req.GetAfter(),
		AfterVersion: req.GetAfterVersion(), Content: req.GetContent(),
	}, &documentStream{b, stream.Send})
	return endOfFollow(ctx, err)
}

// documentStream sends a watch's items as messages.
type documentStream struct {
	beat *beat.Beat
	to   func(*v1.WatchDocumentsResponse) error
}

var _ state.WatchSink = (*documentStream)(nil)

func (s *documentStream) send(m *v1.WatchDocumentsResponse) error {
	return s.beat.Send(func() error { return s.to(m) })
}

// Ready implements state.WatchSink.
func (s *documentStream) Ready() error { return s.send(&v1.WatchDocumentsResponse{}) }

// Version implements state.WatchSink.
func (s *documentStream) Version(d state.Document) error {
	return s.send(&v1.WatchDocumentsResponse{Document: documentMessage(d)})
}

// Gap implements state.WatchSink.
func (s *documentStream) Gap(g state.Gap) error {
	return s.send(&v1.WatchDocumentsResponse{GapTo: g.To})
}

// documentFeed sends a watch's items over plain HTTP.
type documentFeed struct{ *feed }

var _ state.WatchSink = documentFeed{}

// Ready implements state.WatchSink.
func (f documentFeed) Ready() error {
	return f.item("ready", "", struct {
		Type string `json:"type"`
	}{"ready"})
}

// Version implements state.WatchSink.
func (f documentFeed) Version(d state.Document) error {
	kind := "set"
	if d.Deleted {
		kind = "deleted"
	}
	return f.item(kind, strconv.FormatUint(d.Revision, 10), struct {
		Type     string `json:"type"`
		Document raw    `json:"document"`
	}{kind, raw{documentMessage(d)}})
}

// Gap implements state.WatchSink.
func (f documentFeed) Gap(g state.Gap) error {
	return f.item("gap", "", struct {
		Type string `json:"type"`
		From uint64 `json:"from"`
		To   uint64 `json:"to"`
	}{"gap", g.From, g.To})
}

// serveDocuments is the twin of StateService.WatchDocuments.
func (a *API) serveDocuments(w http.ResponseWriter, r *http.Request) error {
	v := r.URL.Query()
	q := state.WatchQuery{Owner: v.Get("owner"), Agent: r.PathValue("agent"), Name: v.Get("name"), Prefix: v.Get("prefix")}
	var err error
	if q.Content, err = boolParam(v.Get("content"), false); err != nil {
		return err
	}
	after, err := resumeOffset(r, "after")
	if err != nil {
		return err
	}
	if q.After = uint64(after); q.After == 0 { //nolint:gosec // not negative
		if q.AfterVersion, err = versionParam(v.Get("after_version")); err != nil {
			return err
		}
	}
	f := a.newFeed(w, r)
	defer f.beat.Stop()
	err = a.cfg.State.Watch(r.Context(), principalOf(r.Context()), q, documentFeed{f})
	return a.endFeed(r.Context(), f, "watch", endOfFollow(r.Context(), err))
}

func versionParam(s string) (uint64, error) {
	if s == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(s, 10, 63)
	if err != nil {
		return 0, errs.New(errs.InvalidArgument, "version %.40q is no number", s)
	}
	return n, nil
}

// contentRef returns the document that a request for content is about.
func contentRef(r *http.Request) state.Ref {
	q := r.URL.Query()
	return state.Ref{Owner: q.Get("owner"), Agent: r.PathValue("agent"), Name: q.Get("name")}
}

func documentTag(d state.Document) string { return `"` + strconv.FormatUint(d.Version, 10) + `"` }

// serveDocument is the twin of StateService.GetDocument: the content as it is, with the version as its ETag.
func (a *API) serveDocument(w http.ResponseWriter, r *http.Request) error {
	version, err := versionParam(r.URL.Query().Get("version"))
	if err != nil {
		return err
	}
	d, err := a.cfg.State.Get(r.Context(), principalOf(r.Context()), contentRef(r), version)
	if err != nil {
		return err
	}
	h := w.Header()
	// As with files: what somebody wrote must never run as a page of the server's origin.
	h.Set("Content-Type", d.ContentType)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Content-Security-Policy", "sandbox")
	h.Set("Content-Disposition", disposition(path.Base(d.Name)))
	h.Set("Cache-Control", "no-cache")
	h.Set("Etag", documentTag(d))
	h.Set("Last-Modified", d.At.Format(http.TimeFormat))
	h.Set("Casemate-Revision", strconv.FormatUint(d.Revision, 10))
	if d.Commit != "" {
		h.Set("Casemate-Commit", d.Commit)
	}
	if matches(r.Header.Get("If-None-Match"), documentTag(d)) {
		w.WriteHeader(http.StatusNotModified)
		return nil
	}
	h.Set("Content-Length", strconv.Itoa(len(d.Content)))
	if r.Method != http.MethodHead {
		_, _ = w.Write(d.Content) // who went away hears nothing
	}
	return nil
}

// saveDocument is the twin of StateService.SetDocument: the body is the content.
func (a *API) saveDocument(w http.ResponseWriter, r *http.Request) error {
	expect, err := expectation(r)
	if err != nil {
		return err
	}
	if r.ContentLength > state.MaxDocument {
		return errs.New(errs.TooLarge, "the document has %d bytes, limit %d", r.ContentLength, state.MaxDocument)
	}
	body := httpfile.NewBody(r.Body)
	data, err := io.ReadAll(io.LimitReader(body, state.MaxDocument+1)) // one more shows that it is too long
	if err = errors.Join(body.Err(), err); err != nil {
		return errs.Wrap(err, errs.InvalidArgument, "the request's body broke off; the document is as it was")
	}
	kind := r.Header.Get("Content-Type")
	if strings.HasPrefix(kind, "application/x-www-form-urlencoded") {
		kind = "" // what curl says of any -d
	}
	q := r.URL.Query()
	d, err := a.cfg.State.Set(r.Context(), principalOf(r.Context()), state.SetRequest{
		Ref: contentRef(r), Links: state.Links{Sandbox: q.Get("sandbox"), Commit: q.Get("commit")},
		Content: data, ContentType: kind, Expect: expect,
	})
	if err != nil {
		return err
	}
	w.Header().Set("Etag", documentTag(d))
	return writeMessage(w, documentMessage(d))
}

// expectation reads the version that a write expects from If-Match, or from If-None-Match: *.
func expectation(r *http.Request) (*uint64, error) {
	var n uint64
	switch match, none := r.Header.Get("If-Match"), r.Header.Get("If-None-Match"); {
	case match == "" && none == "":
		return nil, nil //nolint:nilnil // nothing is expected
	case none != "" && (none != "*" || match != ""):
		return nil, errs.New(errs.InvalidArgument, "If-None-Match %.40q does not go with a write", none).
			WithHint("use If-None-Match: * for a document that is not there, or If-Match with a version")
	case none == "*":
		return &n, nil
	default:
		n, err := strconv.ParseUint(strings.Trim(match, `"`), 10, 63)
		if err != nil || n == 0 {
			return nil, errs.New(errs.InvalidArgument, "If-Match %.40q is no version", match).WithHint(`write it like an ETag: "3"`)
		}
		return &n, nil
	}
}
