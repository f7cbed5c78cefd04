package api

import (
	"context"
	"encoding/json"
	"strings"

	"connectrpc.com/connect"

	"casemate.dev/internal/beat"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/sandbox"
	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// contexts implements ContextService.
type contexts struct{ *API }

var _ casematev1connect.ContextServiceHandler = (*contexts)(nil)

func errNoCode() error {
	return errs.New(errs.InvalidArgument, "the request names no code to run").
		WithHint(`it needs "run": {"language": "python", "code": "1+1"}`)
}

func answerContext(c sandbox.CodeContext, err error) (*v1.Context, error) {
	if err != nil {
		return nil, err
	}
	return contextMessage(c), nil
}

// CreateContext implements ContextServiceHandler.
func (h *contexts) CreateContext(ctx context.Context, req *v1.CreateContextRequest) (*v1.Context, error) {
	s := req.GetContext()
	return answerContext(h.cfg.Manager.CreateContext(ctx, principalOf(ctx), req.GetSandbox(), sandbox.CodeContextSpec{
		ID: s.GetId(), Language: s.GetLanguage(), Dir: s.GetDir(), User: s.GetUser(), Env: s.GetEnv(),
		StartTimeout: s.GetStartTimeout().AsDuration(),
	}))
}

// GetContext implements ContextServiceHandler.
func (h *contexts) GetContext(ctx context.Context, req *v1.GetContextRequest) (*v1.Context, error) {
	return answerContext(h.cfg.Manager.GetContext(ctx, principalOf(ctx), req.GetSandbox(), req.GetContext()))
}

// ListContexts implements ContextServiceHandler.
func (h *contexts) ListContexts(ctx context.Context, req *v1.ListContextsRequest) (*v1.ListContextsResponse, error) {
	all, err := h.cfg.Manager.ListContexts(ctx, principalOf(ctx), req.GetSandbox())
	if err != nil {
		return nil, err
	}
	resp := &v1.ListContextsResponse{Contexts: make([]*v1.Context, 0, len(all))}
	for _, c := range all {
		resp.Contexts = append(resp.Contexts, contextMessage(c))
	}
	return resp, nil
}

// RunCode implements ContextServiceHandler.
func (h *contexts) RunCode(ctx context.Context, req *v1.RunCodeRequest, stream *connect.ServerStream[v1.RunEvent]) error {
	if req.GetRun() == nil {
		return errNoCode()
	}
	key, err := idempotencyKey(ctx)
	if err != nil {
		return err
	}
	sink := h.newRunSink(stream)
	defer sink.beat.Stop()
	r, err := h.cfg.Manager.RunCode(ctx, principalOf(ctx), req.GetSandbox(), codeSpecOf(req.GetRun()), key, sink)
	if err != nil {
		return err
	}
	return sink.ended(r)
}

// ExecuteCode implements ContextServiceHandler.
func (h *contexts) ExecuteCode(ctx context.Context, req *v1.ExecuteCodeRequest) (*v1.ExecuteCodeResponse, error) {
	if req.GetRun() == nil {
		return nil, errNoCode()
	}
	key, err := idempotencyKey(ctx)
	if err != nil {
		return nil, err
	}
	o, err := h.cfg.Manager.ExecuteCode(ctx, principalOf(ctx), req.GetSandbox(), codeSpecOf(req.GetRun()), key)
	if err != nil {
		return nil, err
	}
	resp := &v1.ExecuteCodeResponse{
		Run: runMessage(o.Run), LeftOut: o.LeftOut,
		Stdout: strings.ToValidUTF8(string(o.Stdout), "\uFFFD"), Stderr: strings.ToValidUTF8(string(o.Stderr), "\uFFFD"),
	}
	for i := range o.Results {
		resp.Results = append(resp.Results, resultMessage(o.Numbers[i], &o.Results[i]))
	}
	if o.Error != nil {
		resp.Error = codeErrorMessage(o.ErrorNumber, o.Error)
	}
	for _, g := range o.Gaps {
		resp.Gaps = append(resp.Gaps, gapMessage(g))
	}
	return resp, nil
}

// FollowRun implements ContextServiceHandler.
func (h *contexts) FollowRun(ctx context.Context, req *v1.FollowRunRequest, stream *connect.ServerStream[v1.RunEvent]) error {
	sink := h.newRunSink(stream)
	defer sink.beat.Stop()
	o := sandbox.CodeItemsOptions{Offset: req.GetOffset(), Follow: req.GetFollow(), Hold: req.GetHold()}
	r, err := h.cfg.Manager.CodeItems(ctx, principalOf(ctx), req.GetSandbox(), req.GetContext(), req.GetRun(), o, sink)
	if err != nil {
		return err
	}
	if r.End == sandbox.RunNone {
		return nil // its end is not to be told yet
	}
	return sink.ended(r)
}

// GetRun implements ContextServiceHandler.
func (h *contexts) GetRun(ctx context.Context, req *v1.GetRunRequest) (*v1.CodeRun, error) {
	r, err := h.cfg.Manager.GetRun(ctx, principalOf(ctx), req.GetSandbox(), req.GetContext(), req.GetRun())
	if err != nil {
		return nil, err
	}
	return runMessage(r), nil
}

// ListRuns implements ContextServiceHandler.
func (h *contexts) ListRuns(ctx context.Context, req *v1.ListRunsRequest) (*v1.ListRunsResponse, error) {
	all, err := h.cfg.Manager.ListRuns(ctx, principalOf(ctx), req.GetSandbox(), req.GetContext())
	if err != nil {
		return nil, err
	}
	resp := &v1.ListRunsResponse{Runs: make([]*v1.CodeRun, 0, len(all))}
	for _, r := range all {
		resp.Runs = append(resp.Runs, runMessage(r))
	}
	return resp, nil
}

// InterruptContext implements ContextServiceHandler.
func (h *contexts) InterruptContext(ctx context.Context, req *v1.InterruptContextRequest) (*v1.InterruptContextResponse, error) {
	hit, err := h.cfg.Manager.InterruptContext(ctx, principalOf(ctx), req.GetSandbox(), req.GetContext(), req.GetRun())
	if err != nil {
		return nil, err
	}
	return &v1.InterruptContextResponse{Run: hit}, nil
}

// RestartContext implements ContextServiceHandler.
func (h *contexts) RestartContext(ctx context.Context, req *v1.RestartContextRequest) (*v1.Context, error) {
	return answerContext(h.cfg.Manager.RestartContext(ctx, principalOf(ctx), req.GetSandbox(), req.GetContext()))
}

// DeleteContext implements ContextServiceHandler.
func (h *contexts) DeleteContext(ctx context.Context, req *v1.DeleteContextRequest) (*v1.DeleteContextResponse, error) {
	if err := h.cfg.Manager.DeleteContext(ctx, principalOf(ctx), req.GetSandbox(), req.GetContext()); err != nil {
		return nil, err
	}
	return &v1.DeleteContextResponse{}, nil
}

func contextMessage(c sandbox.CodeContext) *v1.Context {
	return &v1.Context{
		Id: c.ID, Sandbox: c.SandboxID, Language: c.Language, Version: c.Version, Dir: c.Dir, User: c.User, Pid: clamp32(c.PID),
		State: string(c.State), CreatedAt: stamp(c.CreatedAt), StartedAt: stamp(c.StartedAt), Starts: c.Starts, Runs: c.Runs,
		Queued: clamp32(c.Queued), Run: c.Run, End: string(c.End), Code: clamp32(c.Code), Signal: clamp32(c.Signal), Attached: c.Attached,
	}
}

func runMessage(r sandbox.CodeRun) *v1.CodeRun {
	return &v1.CodeRun{
		Id: r.ID, Context: r.ContextID, Sandbox: r.SandboxID, QueuedAt: stamp(r.QueuedAt), BeganAt: stamp(r.BeganAt), EndedAt: stamp(r.EndedAt),
		End: string(r.End), Count: r.Count, Items: r.Items, Dropped: r.Dropped, ErrorName: r.ErrorName, ErrorValue: r.ErrorValue,
		DriverEnd: string(r.Driver), DriverCode: clamp32(r.Code), DriverSignal: clamp32(r.Signal), Attached: r.Attached,
	}
}

func codeSpecOf(s *v1.CodeSpec) sandbox.CodeSpec {
	return sandbox.CodeSpec{
		ID: s.GetId(), Context: s.GetContext(), Language: s.GetLanguage(), Code: s.GetCode(), Env: s.GetEnv(),
		Timeout: s.GetTimeout().AsDuration(), Grace: s.GetGrace().AsDuration(), Hold: s.GetHold(), Buffer: s.GetBuffer(),
		Fresh: s.GetFresh(), Imports: s.GetImports(),
	}
}

// resultMessage puts a result's values into text: strings as they are, what else there is as JSON.
func resultMessage(number int64, r *sandbox.CodeResult) *v1.CodeResult {
	m := &v1.CodeResult{Number: number, Main: r.Main, Data: make(map[string]string, len(r.Data))}
	for mime, value := range r.Data {
		m.Data[mime] = valueText(value)
	}
	return m
}

func valueText(value json.RawMessage) string {
	var text string
	if len(value) > 0 && value[0] == '"' && json.Unmarshal(value, &text) == nil {
		return text
	}
	return string(value)
}

func codeErrorMessage(number int64, e *sandbox.CodeError) *v1.CodeError {
	return &v1.CodeError{Number: number, Name: e.Name, Value: e.Value, Traceback: e.Traceback}
}

// runSink sends what a run says as RunEvents.
type runSink struct {
	stream *connect.ServerStream[v1.RunEvent]
	beat   *beat.Beat
}

var _ sandbox.CodeSink = (*runSink)(nil)

func (a *API) newRunSink(stream *connect.ServerStream[v1.RunEvent]) *runSink {
	s := &runSink{stream: stream}
	s.beat = beat.New(a.cfg.KeepAlive, func() error {
		return stream.Send(&v1.RunEvent{Event: &v1.RunEvent_KeepAlive{KeepAlive: &v1.KeepAlive{}}})
	})
	return s
}

func (s *runSink) send(e *v1.RunEvent) error {
	return s.beat.Send(func() error { return s.stream.Send(e) })
}

// Started implements sandbox.CodeSink.
func (s *runSink) Started(r sandbox.CodeRun) error {
	return s.send(&v1.RunEvent{Event: &v1.RunEvent_Started{Started: runMessage(r)}})
}

// Item implements sandbox.CodeSink.
func (s *runSink) Item(i sandbox.CodeItem) error {
	switch i.Kind {
	case sandbox.ItemResult:
		return s.send(&v1.RunEvent{Event: &v1.RunEvent_Result{Result: resultMessage(i.Number, i.Result)}})
	case sandbox.ItemError:
		return s.send(&v1.RunEvent{Event: &v1.RunEvent_Error{Error: codeErrorMessage(i.Number, i.Error)}})
	}
	stream := v1.Stream_STREAM_STDOUT
	if i.Kind == sandbox.ItemStderr {
		stream = v1.Stream_STREAM_STDERR
	}
	return s.send(&v1.RunEvent{Event: &v1.RunEvent_Text{Text: &v1.CodeText{Number: i.Number, Stream: stream, Data: i.Text}}})
}

// Gap implements sandbox.CodeSink.
func (s *runSink) Gap(g sandbox.Gap) error {
	return s.send(&v1.RunEvent{Event: &v1.RunEvent_Gap{Gap: gapMessage(g)}})
}

func (s *runSink) ended(r sandbox.CodeRun) error {
	return s.send(&v1.RunEvent{Event: &v1.RunEvent_Ended{Ended: runMessage(r)}})
}
