package envd

import (
	"context"
	"errors"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/sandbox"
	"casemate.dev/proto/e2b/process"
	"casemate.dev/proto/e2b/process/processconnect"
)

// processes implements E2B's service of that name.
type processes struct{ *Handler }

var _ processconnect.ProcessHandler = (*processes)(nil)

// killGrace is how long a process that has run out of time has for SIGTERM: the protocol kills at once.
const killGrace = time.Millisecond

// Start implements ProcessHandler.
func (s *processes) Start(ctx context.Context, req *process.StartRequest, stream *connect.ServerStream[process.StartResponse]) error {
	c := callOf(ctx)
	spec, err := startSpec(c, req)
	if err != nil {
		return err
	}
	sink := s.newSink(c, func(e *process.ProcessEvent) error { return stream.Send(&process.StartResponse{Event: e}) })
	defer sink.beat.Stop()
	p, err := s.run(ctx, c, spec, sink)
	return s.ended(ctx, c, sink, p, err)
}

// run starts a process and follows it. SDKs begin every command with /bin/bash; a sandbox that has only
// another shell gets that.
func (s *processes) run(ctx context.Context, c *call, spec sandbox.ProcessSpec, sink *eventSink) (sandbox.Process, error) {
	o := sandbox.RunOptions{Hold: true}
	p, err := s.m.Run(ctx, c.p, c.sandbox, spec, o, sink)
	if !errs.Is(err, errs.NotFound) || sink.started {
		return p, err
	}
	if reason := s.notStarted(ctx, c, spec, err); reason != nil {
		return p, reason
	}
	if spec.Argv[0] != "/bin/bash" {
		return p, err
	}
	spec.Argv[0] = "/bin/sh"
	if p, again := s.m.Run(ctx, c.p, c.sandbox, spec, o, sink); again == nil || sink.started {
		return p, again
	}
	return p, err
}

// notStarted tells why something that a start needs is not there, nil where that is not the user or the
// directory.
func (s *processes) notStarted(ctx context.Context, c *call, spec sandbox.ProcessSpec, err error) error {
	if s.unknownUser(ctx, c, err) {
		return invalidUsername(c.user)
	}
	if spec.Dir == "" {
		return nil
	}
	fs, err := s.m.Files(ctx, c.p, c.sandbox)
	if err != nil {
		return err
	}
	_, err = fs.Stat(ctx, sandbox.PathRequest{Asker: sandbox.Asker{User: c.user, Privileged: true}, Path: spec.Dir, Follow: true})
	if errs.Is(err, errs.NotFound) {
		return refuse(connect.CodeInvalidArgument, "cwd '%s' does not exist", spec.Dir)
	}
	return nil
}

func startSpec(c *call, req *process.StartRequest) (sandbox.ProcessSpec, error) {
	conf := req.GetProcess()
	if conf.GetCmd() == "" {
		return sandbox.ProcessSpec{}, refuse(connect.CodeInvalidArgument, "the request names no command")
	}
	spec := sandbox.ProcessSpec{
		Argv: append([]string{conf.GetCmd()}, conf.GetArgs()...), Env: conf.GetEnvs(), Dir: conf.GetCwd(),
		Tag: req.GetTag(), User: c.user, Stdin: req.GetStdin(), Timeout: c.timeout, Grace: killGrace, Hold: true,
	}
	if pty := req.GetPty(); pty != nil {
		rows, cols, err := terminalSize(pty)
		if err != nil {
			return spec, err
		}
		spec.TTY, spec.Stdin, spec.Rows, spec.Cols = true, false, rows, cols
	}
	return spec, nil
}

func terminalSize(pty *process.PTY) (rows, cols uint16, err error) {
	const most = 1<<16 - 1
	r, c := pty.GetSize().GetRows(), pty.GetSize().GetCols()
	if r == 0 || c == 0 || r > most || c > most {
		return 0, 0, refuse(connect.CodeInvalidArgument, "a terminal has 1 to %d rows and columns, not %d and %d", most, r, c)
	}
	return uint16(r), uint16(c), nil
}

// Connect implements ProcessHandler.
func (s *processes) Connect(ctx context.Context, req *process.ConnectRequest, stream *connect.ServerStream[process.ConnectResponse]) error {
	c := callOf(ctx)
	p, err := s.find(ctx, c, req.GetProcess())
	if err != nil {
		return err
	}
	sink := s.newSink(c, func(e *process.ProcessEvent) error { return stream.Send(&process.ConnectResponse{Event: e}) })
	defer sink.beat.Stop()
	if err := sink.Started(p); err != nil {
		return err
	}
	o := sandbox.OutputOptions{Follow: true, Hold: true}
	if o.Offset = c.offset; o.Offset < 0 {
		o.Offset = s.seen.upTo(p.ID)
	}
	end, err := s.m.Output(ctx, c.p, c.sandbox, p.ID, o, sink)
	if errs.Is(err, errs.NotFound) && p.End != sandbox.EndNone {
		end, err = p, nil // its output is not kept any more, but how it ended is
	}
	return s.ended(ctx, c, sink, end, err)
}

// ended sends how a process ended and returns what its stream ends with.
func (s *processes) ended(ctx context.Context, c *call, sink *eventSink, p sandbox.Process, err error) error {
	if p.End != sandbox.EndNone && p.TTY {
		s.seen.forget(p.ID)
	}
	switch {
	case err == nil:
	case errors.Is(err, context.DeadlineExceeded):
		return deadlineExceeded()
	case sink.started && (errors.Is(ctx.Err(), context.Canceled) || s.over(ctx, c)):
		cutOff()
	case !sink.started && s.unknownUser(ctx, c, err):
		return invalidUsername(c.user)
	default:
		return s.rpcError(ctx, "process", err)
	}
	switch p.End {
	case sandbox.EndTimedOut:
		return deadlineExceeded()
	case sandbox.EndSandboxStopped, sandbox.EndProcessLost:
		cutOff()
	case sandbox.EndNone:
		return refuse(connect.CodeInternal, "the output ended before the process did")
	}
	return sink.send(&process.ProcessEvent{Event: &process.ProcessEvent_End{End: endEvent(p)}})
}

// over reports whether the sandbox can't be used any more.
func (h *Handler) over(ctx context.Context, c *call) bool {
	sb, err := h.m.Get(context.WithoutCancel(ctx), c.p, c.sandbox)
	return err == nil && (sb.State == sandbox.Stopping || sb.State == sandbox.Stopped)
}

// endEvent tells an end as Go's os.ProcessState prints it, which is what SDKs show.
func endEvent(p sandbox.Process) *process.ProcessEvent_EndEvent {
	e := &process.ProcessEvent_EndEvent{}
	if p.End == sandbox.EndExited {
		e.Exited, e.ExitCode = true, int32(p.Code) //nolint:gosec // 0 to 255
		e.Status = "exit status " + itoa(p.Code)
		if p.Code != 0 {
			e.Error = &e.Status
		}
		return e
	}
	sig := p.Signal
	if sig == 0 {
		sig = int(syscall.SIGKILL)
	}
	e.ExitCode = -1
	e.Status = "signal: " + syscall.Signal(sig).String()
	text := e.Status
	if p.End == sandbox.EndOOMKilled {
		text += " (out of memory)"
	}
	e.Error = &text
	return e
}
