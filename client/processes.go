package client

import (
	"context"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// Messages of the API's schema, under short names.
type (
	// ProcessSpec is what to start.
	ProcessSpec = v1.ProcessSpec
	// Process is one command started in a sandbox.
	Process = v1.Process
	// Result is a process that has ended, with its output.
	Result = v1.ExecuteResponse
	// Terminal is the size of a terminal in characters.
	Terminal = v1.Terminal
	// Gap is output that the server's buffer no longer held.
	Gap = v1.Gap
)

// Processes starts and steers processes in sandboxes.
type Processes struct {
	conn *conn
	rpc  casematev1connect.ProcessServiceClient
}

// Execute starts a process with input as its standard input, waits for its end and returns its output
// whole, as far as the buffer holds it. Without a timeout in the spec the server's default holds
// (30 s); Run has none.
func (p *Processes) Execute(ctx context.Context, sandbox string, spec *ProcessSpec, input []byte) (*Result, error) {
	return p.ExecuteOnce(ctx, "", sandbox, spec, input)
}

// ExecuteOnce is Execute with an idempotency key, so that a call whose answer was lost may be
// repeated without running twice.
func (p *Processes) ExecuteOnce(ctx context.Context, idempotencyKey, sandbox string, spec *ProcessSpec, input []byte) (*Result, error) {
	res, err := p.rpc.Execute(keyed(ctx, idempotencyKey), &v1.ExecuteRequest{Sandbox: sandbox, Process: spec, Input: input})
	return res, p.conn.wrap(err)
}

// Start starts a process and returns at once. Starting an id that exists attaches to it.
func (p *Processes) Start(ctx context.Context, sandbox string, spec *ProcessSpec) (*Process, error) {
	return p.StartOnce(ctx, "", sandbox, spec)
}

// StartOnce is Start with an idempotency key.
func (p *Processes) StartOnce(ctx context.Context, idempotencyKey, sandbox string, spec *ProcessSpec) (*Process, error) {
	proc, err := p.rpc.StartProcess(keyed(ctx, idempotencyKey), &v1.StartProcessRequest{Sandbox: sandbox, Process: spec})
	return proc, p.conn.wrap(err)
}

// Get shows one process, running or ended.
func (p *Processes) Get(ctx context.Context, sandbox, process string) (*Process, error) {
	proc, err := p.rpc.GetProcess(ctx, &v1.GetProcessRequest{Sandbox: sandbox, Process: process})
	return proc, p.conn.wrap(err)
}

// List shows the processes that the API started in a sandbox.
func (p *Processes) List(ctx context.Context, sandbox string) ([]*Process, error) {
	resp, err := p.rpc.ListProcesses(ctx, &v1.ListProcessesRequest{Sandbox: sandbox})
	return resp.GetProcesses(), p.conn.wrap(err)
}

// Wait returns when the process has ended, or after timeout with what it is then; 0 waits until ctx
// ends.
func (p *Processes) Wait(ctx context.Context, sandbox, process string, timeout time.Duration) (*Process, error) {
	req := &v1.WaitProcessRequest{Sandbox: sandbox, Process: process}
	if timeout > 0 {
		req.Timeout = durationpb.New(timeout)
	}
	proc, err := p.rpc.WaitProcess(ctx, req)
	return proc, p.conn.wrap(err)
}

// WriteInput writes data to a process's standard input or terminal and closes it afterwards where
// closeAfter says so. offset is how many bytes the caller knows to be taken, so that a repeated call
// writes nothing twice; -1 writes without that check. It returns the bytes taken in all.
func (p *Processes) WriteInput(ctx context.Context, sandbox, process string, offset int64, data []byte, closeAfter bool) (int64, error) {
	req := &v1.WriteInputRequest{Sandbox: sandbox, Process: process, Data: data, Close: closeAfter}
	if offset >= 0 {
		req.Offset = &offset
	}
	resp, err := p.rpc.WriteInput(ctx, req)
	return resp.GetOffset(), p.conn.wrap(err)
}

// Signal sends a signal (a number, or a name such as TERM) to a process, or with tree to everything
// that descends from it.
func (p *Processes) Signal(ctx context.Context, sandbox, process, signal string, tree bool) error {
	_, err := p.rpc.SignalProcess(ctx, &v1.SignalProcessRequest{Sandbox: sandbox, Process: process, Signal: signal, Tree: tree})
	return p.conn.wrap(err)
}

// Kill ends a process and everything that descends from it. Its end is "canceled".
func (p *Processes) Kill(ctx context.Context, sandbox, process string) error {
	return p.Signal(ctx, sandbox, process, "KILL", true)
}

// Resize sets the size of a process's terminal.
func (p *Processes) Resize(ctx context.Context, sandbox, process string, size *Terminal) error {
	_, err := p.rpc.ResizeTerminal(ctx, &v1.ResizeTerminalRequest{Sandbox: sandbox, Process: process, Terminal: size})
	return p.conn.wrap(err)
}
