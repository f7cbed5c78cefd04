package api

import (
	"context"

	"connectrpc.com/connect"

	"casemate.dev/internal/beat"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/sandbox"
	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// processes implements ProcessService.
type processes struct{ *API }

var _ casematev1connect.ProcessServiceHandler = (*processes)(nil)

func errNoProcess() error {
	return errs.New(errs.InvalidArgument, "the request names no process to start").
		WithHint(`it needs "process": {"argv": ["echo", "hello"]}`)
}

func answerProcess(p sandbox.Process, err error) (*v1.Process, error) {
	if err != nil {
		return nil, err
	}
	return processMessage(p), nil
}

// StartProcess implements ProcessServiceHandler.
func (h *processes) StartProcess(ctx context.Context, req *v1.StartProcessRequest) (*v1.Process, error) {
	if req.GetProcess() == nil {
		return nil, errNoProcess()
	}
	key, err := idempotencyKey(ctx)
	if err != nil {
		return nil, err
	}
	return answerProcess(h.cfg.Manager.StartProcess(ctx, principalOf(ctx), req.GetSandbox(), processSpecOf(req.GetProcess()), key))
}

// Run implements ProcessServiceHandler.
func (h *processes) Run(ctx context.Context, req *v1.RunRequest, stream *connect.ServerStream[v1.ProcessEvent]) error {
	if req.GetProcess() == nil {
		return errNoProcess()
	}
	key, err := idempotencyKey(ctx)
	if err != nil {
		return err
	}
	sink := h.newEventSink(stream)
	defer sink.beat.Stop()
	spec := processSpecOf(req.GetProcess())
	o := sandbox.RunOptions{IdempotencyKey: key, Hold: spec.Hold}
	p, err := h.cfg.Manager.Run(ctx, principalOf(ctx), req.GetSandbox(), spec, o, sink)
	if err != nil {
		return err
	}
	return sink.ended(p)
}

// Execute implements ProcessServiceHandler.
func (h *processes) Execute(ctx context.Context, req *v1.ExecuteRequest) (*v1.ExecuteResponse, error) {
	if req.GetProcess() == nil {
		return nil, errNoProcess()
	}
	key, err := idempotencyKey(ctx)
	if err != nil {
		return nil, err
	}
	o := sandbox.RunOptions{IdempotencyKey: key, Input: req.GetInput()}
	r, err := h.cfg.Manager.Execute(ctx, principalOf(ctx), req.GetSandbox(), processSpecOf(req.GetProcess()), o)
	if err != nil {
		return nil, err
	}
	resp := &v1.ExecuteResponse{Process: processMessage(r.Process), Stdout: r.Stdout, Stderr: r.Stderr}
	for _, g := range r.Gaps {
		resp.Gaps = append(resp.Gaps, gapMessage(g))
	}
	return resp, nil
}

// Output implements ProcessServiceHandler.
func (h *processes) Output(ctx context.Context, req *v1.OutputRequest, stream *connect.ServerStream[v1.ProcessEvent]) error {
	sink := h.newEventSink(stream)
	defer sink.beat.Stop()
	o := sandbox.OutputOptions{Offset: req.GetOffset(), Follow: req.GetFollow(), Hold: req.GetHold(), Limit: req.GetLimit()}
	p, err := h.cfg.Manager.Output(ctx, principalOf(ctx), req.GetSandbox(), req.GetProcess(), o, sink)
	if err != nil {
		return err
	}
	if p.End == sandbox.EndNone {
		return nil // its end is not to be told yet
	}
	return sink.ended(p)
}

// GetProcess implements ProcessServiceHandler.
func (h *processes) GetProcess(ctx context.Context, req *v1.GetProcessRequest) (*v1.Process, error) {
	return answerProcess(h.cfg.Manager.GetProcess(ctx, principalOf(ctx), req.GetSandbox(), req.GetProcess()))
}

// ListProcesses implements ProcessServiceHandler.
func (h *processes) ListProcesses(ctx context.Context, req *v1.ListProcessesRequest) (*v1.ListProcessesResponse, error) {
	all, err := h.cfg.Manager.ListProcesses(ctx, principalOf(ctx), req.GetSandbox())
	if err != nil {
		return nil, err
	}
	resp := &v1.ListProcessesResponse{Processes: make([]*v1.Process, 0, len(all))}
	for _, p := range all {
		resp.Processes = append(resp.Processes, processMessage(p))
	}
	return resp, nil
}

// WaitProcess implements ProcessServiceHandler.
func (h *processes) WaitProcess(ctx context.Context, req *v1.WaitProcessRequest) (*v1.Process, error) {
	ctx, stop := h.whileServing(ctx) // a wait may have no end of its own
	defer stop()
	if t := req.GetTimeout(); t != nil {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, t.AsDuration())
		defer cancel()
	}
	return answerProcess(h.cfg.Manager.WaitProcess(ctx, principalOf(ctx), req.GetSandbox(), req.GetProcess()))
}

// WriteInput implements ProcessServiceHandler.
func (h *processes) WriteInput(ctx context.Context, req *v1.WriteInputRequest) (*v1.WriteInputResponse, error) {
	offset := int64(-1)
	if req.Offset != nil {
		offset = req.GetOffset()
	}
	taken, err := h.cfg.Manager.Input(ctx, principalOf(ctx), req.GetSandbox(), req.GetProcess(), offset, req.GetData(), req.GetClose())
	if err != nil {
		return nil, err
	}
	return &v1.WriteInputResponse{Offset: taken}, nil
}

// SignalProcess implements ProcessServiceHandler.
func (h *processes) SignalProcess(ctx context.Context, req *v1.SignalProcessRequest) (*v1.SignalProcessResponse, error) {
	sig, err := signalNumber(req.GetSignal())
	if err != nil {
		return nil, err
	}
	if err := h.cfg.Manager.Signal(ctx, principalOf(ctx), req.GetSandbox(), req.GetProcess(), sig, req.GetTree()); err != nil {
		return nil, err
	}
	return &v1.SignalProcessResponse{}, nil
}

// ResizeTerminal implements ProcessServiceHandler.
func (h *processes) ResizeTerminal(ctx context.Context, req *v1.ResizeTerminalRequest) (*v1.ResizeTerminalResponse, error) {
	rows, cols := terminalSize(req.GetTerminal())
	if rows == 0 || cols == 0 {
		return nil, errs.New(errs.InvalidArgument, "a terminal has at least one row and one column")
	}
	if err := h.cfg.Manager.Resize(ctx, principalOf(ctx), req.GetSandbox(), req.GetProcess(), rows, cols); err != nil {
		return nil, err
	}
	return &v1.ResizeTerminalResponse{}, nil
}

// eventSink sends output as ProcessEvents. Connect marshals a message before Send returns, so data
// need not be copied.
type eventSink struct {
	stream *connect.ServerStream[v1.ProcessEvent]
	beat   *beat.Beat
}

var _ sandbox.RunSink = (*eventSink)(nil)

func (a *API) newEventSink(stream *connect.ServerStream[v1.ProcessEvent]) *eventSink {
	s := &eventSink{stream: stream}
	s.beat = beat.New(a.cfg.KeepAlive, func() error {
		return stream.Send(&v1.ProcessEvent{Event: &v1.ProcessEvent_KeepAlive{KeepAlive: &v1.KeepAlive{}}})
	})
	return s
}

func (s *eventSink) send(e *v1.ProcessEvent) error {
	return s.beat.Send(func() error { return s.stream.Send(e) })
}

// Started implements sandbox.RunSink.
func (s *eventSink) Started(p sandbox.Process) error {
	return s.send(&v1.ProcessEvent{Event: &v1.ProcessEvent_Started{Started: processMessage(p)}})
}

// Output implements sandbox.OutputSink.
func (s *eventSink) Output(stream sandbox.Stream, offset int64, data []byte) error {
	out := &v1.Output{Stream: v1.Stream(stream), Offset: offset, Data: data}
	return s.send(&v1.ProcessEvent{Event: &v1.ProcessEvent_Output{Output: out}})
}

// Gap implements sandbox.OutputSink.
func (s *eventSink) Gap(g sandbox.Gap) error {
	return s.send(&v1.ProcessEvent{Event: &v1.ProcessEvent_Gap{Gap: gapMessage(g)}})
}

func (s *eventSink) ended(p sandbox.Process) error {
	return s.send(&v1.ProcessEvent{Event: &v1.ProcessEvent_Ended{Ended: processMessage(p)}})
}
