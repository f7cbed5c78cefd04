package envd

import (
	"context"
	"strconv"
	"time"

	"connectrpc.com/connect"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/sandbox"
	"casemate.dev/proto/e2b/process"
)

func itoa(n int) string { return strconv.Itoa(n) }

// find returns the process that a selector names, also one that has ended.
func (s *processes) find(ctx context.Context, c *call, sel *process.ProcessSelector) (sandbox.Process, error) {
	pid, tag := sel.GetPid(), sel.GetTag()
	if pid == 0 && tag == "" {
		return sandbox.Process{}, refuse(connect.CodeInvalidArgument, "the request names no process")
	}
	p, err := s.m.FindProcess(ctx, c.p, c.sandbox, int(pid), tag)
	return p, s.rpcError(ctx, "process", err)
}

// running is find for a process that must not have ended.
func (s *processes) running(ctx context.Context, c *call, sel *process.ProcessSelector) (sandbox.Process, error) {
	p, err := s.find(ctx, c, sel)
	if err == nil && p.End != sandbox.EndNone {
		err = refuse(connect.CodeNotFound, "process with pid %d not found", p.PID)
	}
	return p, err
}

// List implements ProcessHandler.
func (s *processes) List(ctx context.Context, _ *process.ListRequest) (*process.ListResponse, error) {
	c := callOf(ctx)
	all, err := s.m.RunningProcesses(ctx, c.p, c.sandbox)
	if err != nil {
		return nil, s.rpcError(ctx, "list", err)
	}
	resp := &process.ListResponse{Processes: make([]*process.ProcessInfo, 0, len(all))}
	for _, p := range all {
		info := &process.ProcessInfo{
			Pid:    uint32(p.PID), //nolint:gosec // pids are positive
			Config: &process.ProcessConfig{Cmd: p.Argv[0], Args: p.Argv[1:], Cwd: &p.Dir},
		}
		if p.Tag != "" {
			info.Tag = &p.Tag
		}
		resp.Processes = append(resp.Processes, info)
	}
	return resp, nil
}

// Update implements ProcessHandler.
func (s *processes) Update(ctx context.Context, req *process.UpdateRequest) (*process.UpdateResponse, error) {
	c := callOf(ctx)
	p, err := s.running(ctx, c, req.GetProcess())
	if err != nil {
		return nil, err
	}
	if req.GetPty() == nil {
		return &process.UpdateResponse{}, nil
	}
	if !p.TTY {
		return nil, refuse(connect.CodeInvalidArgument, "tty not assigned to process")
	}
	rows, cols, err := terminalSize(req.GetPty())
	if err != nil {
		return nil, err
	}
	if err := s.m.Resize(ctx, c.p, c.sandbox, p.ID, rows, cols); err != nil {
		return nil, s.rpcError(ctx, "update", err)
	}
	return &process.UpdateResponse{}, nil
}

// SendInput implements ProcessHandler.
func (s *processes) SendInput(ctx context.Context, req *process.SendInputRequest) (*process.SendInputResponse, error) {
	c := callOf(ctx)
	p, err := s.running(ctx, c, req.GetProcess())
	if err == nil {
		err = s.input(ctx, c, p, req.GetInput())
	}
	if err != nil {
		return nil, err
	}
	return &process.SendInputResponse{}, nil
}

// input writes to a process what is meant for the kind of input that it has.
func (s *processes) input(ctx context.Context, c *call, p sandbox.Process, in *process.ProcessInput) error {
	data, kind := in.GetStdin(), "stdin"
	switch in.GetInput().(type) {
	case *process.ProcessInput_Stdin:
		if p.TTY {
			return refuse(connect.CodeInternal, "tty assigned to process — input should be written to the pty, not the stdin")
		}
	case *process.ProcessInput_Pty:
		if !p.TTY {
			return refuse(connect.CodeInternal, "tty not assigned to process")
		}
		data, kind = in.GetPty(), "pty"
	default:
		return refuse(connect.CodeUnimplemented, "the request holds no input")
	}
	_, err := s.m.Input(ctx, c.p, c.sandbox, p.ID, -1, data, false)
	if errs.Is(err, errs.FailedPrecondition) && !gone(err) {
		return refuse(connect.CodeInternal, "error writing to %s: %s not enabled or closed", kind, kind)
	}
	return s.rpcError(ctx, "input", err)
}

// StreamInput implements ProcessHandler.
func (s *processes) StreamInput(ctx context.Context, stream *connect.ClientStream[process.StreamInputRequest]) (*process.StreamInputResponse, error) {
	c := callOf(ctx)
	var p sandbox.Process
	for stream.Receive() {
		var err error
		switch e := stream.Msg().GetEvent().(type) {
		case *process.StreamInputRequest_Start:
			p, err = s.running(ctx, c, e.Start.GetProcess())
		case *process.StreamInputRequest_Data:
			if p.ID == "" {
				err = refuse(connect.CodeInvalidArgument, "the first message must name the process")
			} else {
				err = s.input(ctx, c, p, e.Data.GetInput())
			}
		}
		if err != nil {
			return nil, err
		}
	}
	if err := stream.Err(); err != nil {
		return nil, err
	}
	return &process.StreamInputResponse{}, nil
}

// CloseStdin implements ProcessHandler.
func (s *processes) CloseStdin(ctx context.Context, req *process.CloseStdinRequest) (*process.CloseStdinResponse, error) {
	c := callOf(ctx)
	p, err := s.running(ctx, c, req.GetProcess())
	if err != nil {
		return nil, err
	}
	if p.TTY {
		return nil, refuse(connect.CodeInternal, "cannot close stdin for PTY process — send Ctrl+D (0x04) instead")
	}
	_, err = s.m.Input(ctx, c.p, c.sandbox, p.ID, -1, nil, true)
	if errs.Is(err, errs.FailedPrecondition) && !gone(err) {
		return nil, refuse(connect.CodeInternal, "error closing stdin: stdin not enabled or closed")
	}
	if err != nil {
		return nil, s.rpcError(ctx, "close stdin", err)
	}
	return &process.CloseStdinResponse{}, nil
}

// The signals that the protocol has, by their numbers on Linux.
const (
	sigKill = 9
	sigTerm = 15
)

// killedWait is how long SendSignal waits until a killed process is known to have ended, so that a List
// after it does not show it.
const killedWait = 2 * time.Second

// SendSignal implements ProcessHandler. SIGKILL is for the whole tree: nobody is left to clean up after
// what it takes away.
func (s *processes) SendSignal(ctx context.Context, req *process.SendSignalRequest) (*process.SendSignalResponse, error) {
	c := callOf(ctx)
	p, err := s.running(ctx, c, req.GetProcess())
	if err != nil {
		return nil, err
	}
	switch req.GetSignal() {
	case process.Signal_SIGNAL_SIGTERM:
		err = s.m.Signal(ctx, c.p, c.sandbox, p.ID, sigTerm, false)
	case process.Signal_SIGNAL_SIGKILL:
		if err = s.m.Signal(ctx, c.p, c.sandbox, p.ID, sigKill, true); err == nil {
			wctx, cancel := context.WithTimeout(ctx, killedWait)
			defer cancel()
			_, err = s.m.WaitProcess(wctx, c.p, c.sandbox, p.ID)
		}
	default:
		return nil, refuse(connect.CodeUnimplemented, "invalid signal: %s", req.GetSignal())
	}
	if errs.Is(err, errs.FailedPrecondition) && !gone(err) {
		return nil, refuse(connect.CodeNotFound, "process with pid %d not found", p.PID) // it has ended meanwhile
	}
	if err != nil {
		return nil, s.rpcError(ctx, "signal", err)
	}
	return &process.SendSignalResponse{}, nil
}
