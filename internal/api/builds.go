package api

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"

	"connectrpc.com/connect"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/httpfile"
	"casemate.dev/internal/template"
	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// builds implements BuildService.
type builds struct{ *API }

var _ casematev1connect.BuildServiceHandler = (*builds)(nil)

// builder returns what builds templates, or an error where this server has none.
func (a *API) builder() (*template.Builder, error) {
	if a.cfg.Builder == nil {
		return nil, errs.New(errs.Unsupported, "this server builds no templates")
	}
	return a.cfg.Builder, nil
}

func buildRequest(m *v1.CreateBuildRequest) (template.Request, error) {
	r := template.Request{
		Name: m.GetName(), Tags: m.GetTags(), From: m.GetFrom(), Context: m.GetFiles(), Start: m.GetStart(), Ready: m.GetReady(),
		ReadyWithin: m.GetReadyWithin().AsDuration(), Serve: m.GetServe(), Limits: limitsOf(m.GetLimits()),
		BuildLimits: limitsOf(m.GetBuildLimits()), Network: networkOf(m.GetNetwork()), Timeout: m.GetTimeout().AsDuration(),
		StepTimeout: m.GetStepTimeout().AsDuration(), NoCache: m.GetNoCache(), Isolation: m.GetIsolation(),
	}
	if m.GetEpoch() != nil {
		r.Epoch = m.GetEpoch().AsTime()
	}
	for _, s := range m.GetSteps() {
		r.Steps = append(r.Steps, template.Step{Type: s.GetType(), Args: s.GetArgs(), FilesHash: s.GetFiles(), Force: s.GetForce()})
	}
	if d := m.GetDockerfile(); d != nil {
		r.Dockerfile = &template.Dockerfile{Name: d.GetName(), Text: d.GetText(), Target: d.GetTarget(), Args: d.GetArgs()}
	}
	var err error
	if m.GetLock() != "" {
		r.Locked, err = template.ParseLock(m.GetLock())
	}
	return r, err
}

func buildMessage(b template.Build) *v1.Build {
	out := &v1.Build{
		Id: b.ID, Owner: b.Owner, Name: b.Name, Tags: b.Tags, State: string(b.State), Commit: b.Commit, CreatedAt: stamp(b.CreatedAt),
		StartedAt: stamp(b.StartedAt), EndedAt: stamp(b.EndedAt), From: b.From, Of: clamp32(b.Of), Done: clamp32(b.Done),
		Limits: limitsMessage(b.Limits), User: b.User, Dir: b.Dir, Env: b.Env, Entrypoint: b.Image.Entrypoint, Cmd: b.Image.Cmd,
		Exposed: b.Image.Exposed, Labels: b.Image.Labels, Start: b.Start, Ready: b.Ready, Bytes: b.Bytes,
	}
	for _, s := range b.Steps {
		out.Steps = append(out.Steps, &v1.BuildStepResult{
			Step: s.Step, Text: s.Text, At: s.At, Cached: s.Cached, Took: span(s.Took), Commit: s.Commit, Digest: s.Digest,
		})
	}
	if b.Lock != nil {
		out.Lock, out.Digest = b.Lock.Text(), b.Lock.Digest
	}
	if r := b.Reason; r != nil {
		out.Failure = &v1.BuildFailure{
			Message: r.Message, Hint: r.Hint, Step: r.Step, At: r.At, Command: r.Command, ExitCode: clamp32(r.ExitCode),
		}
	}
	return out
}

func buildAnswer(b template.Build, err error) (*v1.Build, error) {
	if err != nil {
		return nil, err
	}
	return buildMessage(b), nil
}

func logEntryMessage(e template.LogEntry) *v1.BuildLogEntry {
	return &v1.BuildLogEntry{
		Offset: clamp32(e.Offset), Time: stamp(e.Time), Level: string(e.Level), Step: e.Step, Stream: e.Stream, Text: e.Text,
	}
}

// CreateBuild implements BuildServiceHandler.
func (h *builds) CreateBuild(ctx context.Context, req *v1.CreateBuildRequest) (*v1.Build, error) {
	b, err := h.builder()
	if err != nil {
		return nil, err
	}
	r, err := buildRequest(req)
	if err != nil {
		return nil, err
	}
	return buildAnswer(b.Start(ctx, principalOf(ctx), r))
}

// GetBuild implements BuildServiceHandler.
func (h *builds) GetBuild(ctx context.Context, req *v1.GetBuildRequest) (*v1.Build, error) {
	b, err := h.builder()
	if err != nil {
		return nil, err
	}
	one, err := b.Get(ctx, principalOf(ctx), req.GetBuild())
	if err != nil {
		return nil, err
	}
	shared, err := h.cfg.Manager.SharedTemplates(ctx)
	out := buildMessage(one)
	out.Shared = shared[one.Name] == one.Owner
	return out, err
}

// ListBuilds implements BuildServiceHandler.
func (h *builds) ListBuilds(ctx context.Context, req *v1.ListBuildsRequest) (*v1.ListBuildsResponse, error) {
	resp := &v1.ListBuildsResponse{}
	if h.cfg.Builder == nil {
		return resp, nil // there are none
	}
	if req.GetLimit() < 0 {
		return nil, errs.New(errs.InvalidArgument, "limit is %d", req.GetLimit()).WithHint("use 0 for no limit")
	}
	all, err := h.cfg.Builder.List(ctx, principalOf(ctx), template.Query{Name: req.GetName(), Latest: req.GetLatest(), Limit: int(req.GetLimit())})
	if err != nil {
		return nil, err
	}
	shared, err := h.cfg.Manager.SharedTemplates(ctx)
	if err != nil {
		return nil, err
	}
	for _, one := range all {
		m := buildMessage(one)
		m.Shared = shared[one.Name] == one.Owner
		m.Lock = "" // of many builds that is megabytes; GetBuild has it
		resp.Builds = append(resp.Builds, m)
	}
	return resp, nil
}

// The bounds of a page of a build's log.
const (
	defaultLogPage = 1000
	maxLogPage     = 10_000
)

// ListBuildLogs implements BuildServiceHandler.
func (h *builds) ListBuildLogs(ctx context.Context, req *v1.ListBuildLogsRequest) (*v1.ListBuildLogsResponse, error) {
	b, err := h.builder()
	if err != nil {
		return nil, err
	}
	limit := int(req.GetLimit())
	if limit < 0 || limit > maxLogPage || req.GetOffset() < 0 {
		return nil, errs.New(errs.InvalidArgument, "offset %d and limit %d can't be", req.GetOffset(), limit).WithHint("use a limit of at most %d", maxLogPage)
	}
	if limit == 0 {
		limit = defaultLogPage
	}
	all, err := b.Logs(ctx, principalOf(ctx), req.GetBuild(), int(req.GetOffset()), limit)
	if err != nil {
		return nil, err
	}
	resp := &v1.ListBuildLogsResponse{}
	for _, e := range all {
		resp.Entries = append(resp.Entries, logEntryMessage(e))
	}
	return resp, nil
}

// FollowBuild implements BuildServiceHandler.
func (h *builds) FollowBuild(ctx context.Context, req *v1.FollowBuildRequest, stream *connect.ServerStream[v1.BuildUpdate]) error {
	ctx, stop := h.whileServing(ctx)
	defer stop()
	send, stopBeat := kept(h.API, stream, &v1.BuildUpdate{})
	defer stopBeat()
	return h.followBuild(ctx, req, send)
}

func (a *API) followBuild(ctx context.Context, req *v1.FollowBuildRequest, send func(*v1.BuildUpdate) error) error {
	b, err := a.builder()
	if err != nil {
		return err
	}
	done, err := b.Follow(ctx, principalOf(ctx), req.GetBuild(), int(req.GetOffset()), func(e template.LogEntry) error {
		return send(&v1.BuildUpdate{Entry: logEntryMessage(e)})
	})
	if err != nil {
		return err
	}
	return send(&v1.BuildUpdate{Build: buildMessage(done)})
}

// serveBuildLogs is the twin of BuildService.FollowBuild.
func (a *API) serveBuildLogs(w http.ResponseWriter, r *http.Request) error {
	offset := 0
	text := r.Header.Get("Last-Event-ID")
	if text == "" {
		text = r.URL.Query().Get("offset")
	}
	if text != "" {
		var err error
		if offset, err = strconv.Atoi(text); err != nil || offset < 0 {
			return errs.New(errs.InvalidArgument, "offset %q is no number of entries", text)
		}
	}
	ctx, stop := a.whileServing(r.Context())
	defer stop()
	f := a.newFeed(w, r)
	defer f.beat.Stop()
	type update struct {
		Type  string `json:"type"`
		Entry *raw   `json:"entry,omitempty"`
		Build *raw   `json:"build,omitempty"`
	}
	err := a.followBuild(ctx, &v1.FollowBuildRequest{Build: r.PathValue("build"), Offset: clamp32(offset)}, func(m *v1.BuildUpdate) error {
		if b := m.GetBuild(); b != nil {
			return f.item("build", "", update{Type: "build", Build: &raw{b}})
		}
		e := m.GetEntry()
		return f.item("entry", strconv.Itoa(int(e.GetOffset())+1), update{Type: "entry", Entry: &raw{e}})
	})
	return a.endFeed(ctx, f, "build", err)
}

// CancelBuild implements BuildServiceHandler.
func (h *builds) CancelBuild(ctx context.Context, req *v1.CancelBuildRequest) (*v1.Build, error) {
	b, err := h.builder()
	if err != nil {
		return nil, err
	}
	return buildAnswer(b.Cancel(ctx, principalOf(ctx), req.GetBuild()))
}

// DeleteBuiltTemplate implements BuildServiceHandler.
func (h *builds) DeleteBuiltTemplate(ctx context.Context, req *v1.DeleteBuiltTemplateRequest) (*v1.DeleteBuiltTemplateResponse, error) {
	b, err := h.builder()
	if err != nil {
		return nil, err
	}
	return &v1.DeleteBuiltTemplateResponse{}, b.Delete(ctx, principalOf(ctx), req.GetName())
}

// ShareTemplate implements BuildServiceHandler.
func (h *builds) ShareTemplate(ctx context.Context, req *v1.ShareTemplateRequest) (*v1.ShareTemplateResponse, error) {
	return &v1.ShareTemplateResponse{}, h.cfg.Manager.ShareTemplate(ctx, principalOf(ctx), req.GetName(), !req.GetStop())
}

// CompareBuilds implements BuildServiceHandler.
func (h *builds) CompareBuilds(ctx context.Context, req *v1.CompareBuildsRequest) (*v1.BuildDifference, error) {
	b, err := h.builder()
	if err != nil {
		return nil, err
	}
	d, err := b.Diff(ctx, principalOf(ctx), req.GetFrom(), req.GetTo())
	if err != nil {
		return nil, err
	}
	out := &v1.BuildDifference{Files: changeMessages(d.Files), MoreFiles: d.MoreFiles}
	for _, p := range d.Packages {
		out.Packages = append(out.Packages, &v1.PackageChange{Manager: p.Manager, Name: p.Name, Place: p.Place, From: p.From, To: p.To})
	}
	for _, s := range d.Settings {
		out.Settings = append(out.Settings, &v1.SettingChange{Name: s.Name, From: s.From, To: s.To})
	}
	return out, nil
}

// UploadBuildFiles implements BuildServiceHandler.
func (h *builds) UploadBuildFiles(ctx context.Context, stream *connect.ClientStream[v1.UploadBuildFilesRequest]) (*v1.BuildFiles, error) {
	b, err := h.builder()
	if err != nil {
		return nil, err
	}
	if !stream.Receive() {
		if err := stream.Err(); err != nil {
			return nil, err
		}
		return nil, errs.New(errs.InvalidArgument, "the stream ended before its first message")
	}
	first := stream.Msg()
	name, err := b.PutFiles(ctx, principalOf(ctx), first.GetName(), &archiveReader{stream: stream, rest: first.GetData()})
	if err != nil {
		return nil, err
	}
	return &v1.BuildFiles{Name: name}, nil
}

// archiveReader reads the data of a stream of messages.
type archiveReader struct {
	stream *connect.ClientStream[v1.UploadBuildFilesRequest]
	rest   []byte
}

// Read implements io.Reader.
func (m *archiveReader) Read(b []byte) (int, error) {
	for len(m.rest) == 0 {
		if !m.stream.Receive() {
			if err := m.stream.Err(); err != nil {
				return 0, err
			}
			return 0, io.EOF
		}
		m.rest = m.stream.Msg().GetData()
	}
	n := copy(b, m.rest)
	m.rest = m.rest[n:]
	return n, nil
}

// saveBuildFiles is the twin of BuildService.UploadBuildFiles: PUT.
func (a *API) saveBuildFiles(w http.ResponseWriter, r *http.Request) error {
	b, err := a.builder()
	if err != nil {
		return err
	}
	body := httpfile.NewBody(r.Body)
	name, err := b.PutFiles(r.Context(), principalOf(r.Context()), r.URL.Query().Get("name"), body)
	if body.Err() != nil {
		return errs.Wrap(errors.Join(body.Err(), err), errs.InvalidArgument, "the request's body broke off; nothing of it is kept")
	}
	if err != nil {
		return err
	}
	return writeMessage(w, &v1.BuildFiles{Name: name})
}
