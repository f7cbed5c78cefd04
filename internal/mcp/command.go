package mcp

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/google/jsonschema-go/jsonschema"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
	"google.golang.org/protobuf/types/known/durationpb"

	"casemate.dev/client"
)

// The limits of a command, and what holds where a call names none.
const (
	defaultTimeout = 60.0  // seconds: most clients wait no longer for a tool
	maxTimeout     = 86400 // seconds
	defaultOutput  = 30_000
	maxOutput      = 1 << 20
	minOutput      = 200
	progressEvery  = time.Second
	startTime      = 30 * time.Second
	killTime       = 10 * time.Second // to end what a call started, after the call was canceled
)

// end is how a process ended, and what it left.
type end struct {
	Process  string `json:"process" jsonschema:"Its id, for read_output."`
	Sandbox  string `json:"sandbox"`
	End      string `json:"end,omitempty" jsonschema:"exited, signaled, timed_out, canceled, oom_killed, sandbox_stopped, lost or failed; absent while it runs."`
	ExitCode *int   `json:"exit_code,omitempty"`
	Signal   int    `json:"signal,omitempty"`
	Error    string `json:"error,omitempty" jsonschema:"Why it could not be started."`
	Leftover int    `json:"leftover,omitempty" jsonschema:"Processes that it started and that still run."`
	Seconds  string `json:"duration,omitempty"`
}

func endOf(p *client.Process) end {
	e := end{
		Process: p.GetId(), Sandbox: p.GetSandbox(), End: p.GetEnd(), Error: p.GetError(), Leftover: int(p.GetLeftover()),
	}
	switch p.GetEnd() {
	case "exited":
		code := int(p.GetCode())
		e.ExitCode = &code
	case "signaled":
		e.Signal = int(p.GetSignal())
	}
	if p.GetEndedAt() != nil {
		e.Seconds = p.GetEndedAt().AsTime().Sub(p.GetStartedAt().AsTime()).Round(time.Millisecond).String()
	}
	return e
}

// say tells a model how a process ended, and what to do about it.
func (e end) say() string {
	in := ""
	if e.Seconds != "" {
		in = " after " + e.Seconds
	}
	var s string
	switch e.End {
	case "":
		return "still running"
	case "exited":
		s = fmt.Sprintf("exit code %d%s", *e.ExitCode, in)
	case "timed_out":
		s = "timed out" + in + "; it was ended with everything it started. Set timeout_seconds, or use start_process for what runs on"
	case "oom_killed":
		s = "killed" + in + ": the sandbox ran out of memory; a sandbox of create_sandbox can have more (memory_mb)"
	case "signaled":
		s = fmt.Sprintf("ended by signal %d%s", e.Signal, in)
	default:
		s = e.End + in
	}
	if e.Error != "" {
		s += ": " + e.Error
	}
	if e.Leftover > 0 {
		s += fmt.Sprintf("; %d processes that it started still run", e.Leftover)
	}
	return s
}

// command is what run_command and start_process share.
type command struct {
	target

	Command string            `json:"command" jsonschema:"A command line for bash, e.g. cd src && make test 2>&1 | tail"`
	Cwd     string            `json:"cwd,omitempty" jsonschema:"The directory to run it in. Default: the sandbox's, usually the user's home."`
	Env     map[string]string `json:"env,omitempty" jsonschema:"Environment variables beside the sandbox's."`
	User    string            `json:"user,omitempty" jsonschema:"Who to run it as, e.g. root where the profile is standard. Default: the sandbox's user."`
}

func (c command) spec() (*client.ProcessSpec, error) {
	if strings.TrimSpace(c.Command) == "" {
		return nil, invalid("pass a command line, e.g. ls -la", "command is empty")
	}
	return &client.ProcessSpec{Argv: []string{"bash", "-c", oneStream, c.Command}, Dir: c.Cwd, Env: c.Env, User: c.User}, nil
}

// oneStream runs a command line with its standard error in its standard output: two streams would
// arrive in an order that is not the one in which they were written.
const oneStream = `exec bash -c "$0" 2>&1`

// line returns the command line of a process that spec started, or its arguments.
func line(argv []string) string {
	if len(argv) == 4 && argv[2] == oneStream {
		return argv[3]
	}
	return strings.Join(argv, " ")
}

type runInput struct {
	command

	Stdin     string  `json:"stdin,omitempty" jsonschema:"Text for its standard input."`
	Timeout   float64 `json:"timeout_seconds,omitempty" jsonschema:"It is ended after that many seconds, with everything it started."`
	MaxOutput int     `json:"max_output_bytes,omitempty" jsonschema:"Longer output is cut in the middle."`
}

type runResult struct {
	end

	Output      string `json:"output" jsonschema:"Standard output and error in the order in which they came."`
	Bytes       int64  `json:"output_bytes" jsonschema:"How many bytes it printed in all."`
	OmittedFrom int64  `json:"omitted_from,omitempty" jsonschema:"Where bytes were left out of output: read_output with this offset returns them."`
	OmittedTo   int64  `json:"omitted_to,omitempty"`
}

func (s *Server) addCommandTools() {
	add(s, tool{
		name: "run_command", title: "Run a command", kind: replaces,
		text: "Run a bash command line in a sandbox, wait for its end, and return its output and exit code. A non-zero exit code is a result, not an error. " +
			"Each call is a new shell: the directory and variables of an earlier one are gone, files are not. " +
			"Canceling the call ends the command and everything it started. What it left in the background runs on until the sandbox ends. " +
			"For servers and long work use start_process.",
		shape: func(in *jsonschema.Schema) {
			bounds(in, "timeout_seconds", 0.001, maxTimeout, defaultTimeout)
			bounds(in, "max_output_bytes", minOutput, maxOutput, defaultOutput)
		},
	}, runCommand)
}

func runCommand(ctx context.Context, c call, in runInput) (answer[runResult], error) {
	spec, err := in.spec()
	if err != nil {
		return answer[runResult]{}, err
	}
	spec.Timeout = durationpb.New(time.Duration(in.Timeout * float64(time.Second)))
	spec.Stdin = in.Stdin != ""
	// Not cut short with the call: whatever was started is known, and can be ended.
	begin, cancel := context.WithTimeout(context.WithoutCancel(ctx), startTime)
	defer cancel()
	p, err := c.client.Processes.Start(begin, c.box, spec)
	if err != nil {
		return answer[runResult]{}, err
	}
	out := &shared{window: window{limit: in.MaxOutput}}
	if p, err = c.follow(ctx, p, in, out); err != nil {
		return answer[runResult]{}, err
	}
	seen := out.shown()
	r := runResult{end: endOf(p), Output: seen.text, Bytes: seen.bytes, OmittedFrom: seen.from, OmittedTo: seen.to}
	return answer[runResult]{text: r.text(), out: r}, nil
}

// follow waits for the end of a process. Where the call ends first, or the way to the server breaks, it
// ends the process: nobody else would.
func (c call) follow(ctx context.Context, p *client.Process, in runInput, out *shared) (*client.Process, error) {
	o := client.RunOptions{Stdout: out, Stderr: out, Gap: func(g *client.Gap) { out.skip(g.GetTo() - g.GetFrom()) }}
	if in.Stdin != "" {
		o.Stdin = strings.NewReader(in.Stdin)
	}
	stop := c.progress(ctx, in.Timeout, out)
	defer stop()
	ended, err := c.client.Processes.Attach(ctx, c.box, p.GetId(), 0, o)
	if err != nil {
		kill, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTime)
		defer cancel()
		_ = c.client.Processes.Kill(kill, c.box, p.GetId()) // if it can't be reached, its time limit ends it
	}
	return ended, err
}

// text is the result for a model that reads no fields.
func (r runResult) text() string {
	var b strings.Builder
	b.WriteString(r.Output)
	if r.Output != "" && !strings.HasSuffix(r.Output, "\n") {
		b.WriteByte('\n')
	}
	if r.Bytes == 0 {
		b.WriteString("(no output)\n")
	}
	b.WriteString("[" + r.say())
	if r.OmittedTo > r.OmittedFrom {
		fmt.Fprintf(&b, "; read_output with process %s, sandbox %s and offset %d returns what was left out", r.Process, r.Sandbox, r.OmittedFrom)
	}
	b.WriteString("]")
	return b.String()
}

// shared is a window that output comes into while progress looks at it.
type shared struct {
	// mu guards the field below.
	mu sync.Mutex
	window
}

// Write implements io.Writer.
func (s *shared) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.window.Write(p)
}

func (s *shared) skip(n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.window.skip(n)
}

func (s *shared) last() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lastLine()
}

// progress tells the client every second how long a call has run and what it printed last, if the
// client asked for that. The caller calls stop when the call is through.
func (c call) progress(ctx context.Context, total float64, out *shared) (stop func()) {
	token := c.req.Params.GetProgressToken()
	if token == nil {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		begin := time.Now()
		tick := time.NewTicker(progressEvery)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			n := &sdk.ProgressNotificationParams{
				ProgressToken: token, Progress: time.Since(begin).Seconds(), Total: total, Message: out.last(),
			}
			_ = c.req.Session.NotifyProgress(ctx, n) // the result tells it all again
		}
	}()
	return func() { cancel(); <-done }
}
