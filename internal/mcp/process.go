package mcp

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/google/jsonschema-go/jsonschema"
	"google.golang.org/protobuf/types/known/durationpb"

	"casemate.dev/client"
)

// maxWait bounds how long read_output waits, in seconds: below what clients wait for a tool.
const maxWait = 50

type startInput struct {
	command

	Terminal bool    `json:"terminal,omitempty" jsonschema:"Give it a terminal, for programs that ask for one."`
	Timeout  float64 `json:"timeout_seconds,omitempty" jsonschema:"It is ended after that many seconds, with everything it started. 0: never."`
}

// processInput names a process.
type processInput struct {
	target

	Process string `json:"process" jsonschema:"The id that start_process or run_command returned."`
}

type readOutputInput struct {
	processInput

	Offset int64   `json:"offset,omitempty" jsonschema:"Where to begin, in bytes from the first that it printed: next_offset of the call before."`
	Wait   float64 `json:"wait_seconds,omitempty" jsonschema:"Where there is nothing new, wait that long for more output or the end."`
	Max    int     `json:"max_output_bytes,omitempty" jsonschema:"Return at most that many bytes."`
}

type readOutputResult struct {
	Output   string `json:"output"`
	Offset   int64  `json:"offset"`
	Next     int64  `json:"next_offset" jsonschema:"Pass it as offset to go on."`
	Dropped  int64  `json:"dropped_bytes,omitempty" jsonschema:"Bytes that the buffer no longer held."`
	Running  bool   `json:"running" jsonschema:"False once it has ended and this is the last of its output."`
	End      string `json:"end,omitempty"`
	ExitCode *int   `json:"exit_code,omitempty"`
}

type sendInput struct {
	processInput

	Text  string `json:"text,omitempty" jsonschema:"What to write. Lines end in \\n; to a terminal \\u0003 is Ctrl-C."`
	Close bool   `json:"close,omitempty" jsonschema:"Close its standard input afterwards, as at the end of a file."`
}

type sendResult struct {
	Offset int64 `json:"offset" jsonschema:"Bytes of input that it has taken in all."`
}

type stopInput struct {
	processInput

	Signal string `json:"signal,omitempty" jsonschema:"KILL ends it and everything it started, at once. Others, such as TERM, INT or HUP, go to the process alone."`
}

type processList struct {
	Processes []listed `json:"processes"`
}

type listed struct {
	end

	Command string `json:"command"`
	Bytes   int64  `json:"output_bytes"`
}

func (s *Server) addProcessTools() {
	add(s, tool{
		name: "start_process", title: "Start a background process", kind: adds,
		text: "Start a bash command line in the background and return at once, with the id of the process. It runs until it ends, stop_process, its timeout, " +
			"or the end of the sandbox; its output is kept. Use read_output to follow it and send_input to feed it.",
		shape: func(in *jsonschema.Schema) { bounds(in, "timeout_seconds", 0, maxTimeout*365, 0) },
	}, startProcess)
	add(s, tool{
		name: "list_processes", title: "List processes", kind: reads,
		text: "List the processes that were started in a sandbox by tools, running and ended.",
	}, listProcesses)
	add(s, tool{
		name: "read_output", title: "Read a process's output", kind: reads,
		text: "Return what a process of start_process or run_command printed, standard output and error in one, from a byte offset on, and whether it still runs. " +
			"Nothing is lost between calls: pass next_offset as offset. Works for a while after its end, too.",
		shape: func(in *jsonschema.Schema) {
			bounds(in, "offset", 0, 1<<53, 0)
			bounds(in, "wait_seconds", 0, maxWait, 0)
			bounds(in, "max_output_bytes", minOutput, maxOutput, defaultOutput)
		},
	}, readOutput)
	add(s, tool{
		name: "send_input", title: "Send input to a process", kind: replaces,
		text: "Write text to the standard input, or the terminal, of a process of start_process.",
	}, writeInput)
	add(s, tool{
		name: "stop_process", title: "Stop a process", kind: replaces, idempotent: true,
		text: "End a process with everything it started, or send it another signal.",
		shape: func(in *jsonschema.Schema) {
			in.Properties["signal"].Default = []byte(`"KILL"`)
		},
	}, stopProcess)
}

func startProcess(ctx context.Context, c call, in startInput) (answer[end], error) {
	spec, err := in.spec()
	if err != nil {
		return answer[end]{}, err
	}
	spec.Stdin = !in.Terminal
	if in.Terminal {
		spec.Terminal = &client.Terminal{Rows: 40, Cols: 120}
	}
	if in.Timeout > 0 {
		spec.Timeout = durationpb.New(time.Duration(in.Timeout * float64(time.Second)))
	}
	p, err := c.client.Processes.Start(ctx, c.box, spec)
	if err != nil {
		return answer[end]{}, err
	}
	e := endOf(p)
	return answer[end]{text: fmt.Sprintf("started process %s in sandbox %s", e.Process, e.Sandbox), out: e}, nil
}

func listProcesses(ctx context.Context, c call, _ struct{ target }) (answer[processList], error) {
	all, err := c.client.Processes.List(ctx, c.box)
	if err != nil {
		return answer[processList]{}, err
	}
	out := processList{Processes: make([]listed, len(all))}
	lines := make([]string, len(all))
	for i, p := range all {
		l := listed{end: endOf(p), Command: line(p.GetArgv()), Bytes: p.GetBytes()}
		out.Processes[i] = l
		lines[i] = fmt.Sprintf("%s [%s, %d bytes of output] %s", l.Process, l.say(), l.Bytes, l.Command)
	}
	t := strings.Join(lines, "\n")
	if len(all) == 0 {
		t = "no processes"
	}
	return answer[processList]{text: t, out: out}, nil
}

func readOutput(ctx context.Context, c call, in readOutputInput) (answer[readOutputResult], error) {
	p, err := c.client.Processes.ReadOutput(ctx, c.box, in.Process, in.Offset, int64(in.Max), time.Duration(in.Wait*float64(time.Second)))
	if err != nil {
		return answer[readOutputResult]{}, err
	}
	data, next := p.Data, p.Next
	if whole := wholeEnd(data); p.End == "" && len(whole) > 0 && len(whole) < len(data) {
		next -= int64(len(data) - len(whole)) // the rest of the character comes with the next call
		data = whole
	}
	r := readOutputResult{Output: text(data), Offset: in.Offset, Next: next, Dropped: p.Dropped, Running: p.End == "", End: p.End}
	state := fmt.Sprintf("still running or more to read; next_offset %d", r.Next)
	if p.End != "" {
		state = p.End
		if p.End == "exited" {
			r.ExitCode = &p.Code
			state = fmt.Sprintf("ended with exit code %d", p.Code)
		}
	}
	t := r.Output
	if t != "" && !strings.HasSuffix(t, "\n") {
		t += "\n"
	}
	if r.Dropped > 0 {
		state += fmt.Sprintf("; %d bytes were no longer kept", r.Dropped)
	}
	return answer[readOutputResult]{text: t + "[" + state + "]", out: r}, nil
}

func writeInput(ctx context.Context, c call, in sendInput) (answer[sendResult], error) {
	if in.Text == "" && !in.Close {
		return answer[sendResult]{}, invalid("pass text, or close: true", "there is nothing to send")
	}
	n, err := c.client.Processes.WriteInput(ctx, c.box, in.Process, -1, []byte(in.Text), in.Close)
	if err != nil {
		return answer[sendResult]{}, err
	}
	return answer[sendResult]{text: fmt.Sprintf("sent %d bytes", len(in.Text)), out: sendResult{Offset: n}}, nil
}

func stopProcess(ctx context.Context, c call, in stopInput) (answer[end], error) {
	signal := strings.TrimPrefix(strings.ToUpper(in.Signal), "SIG")
	kill := signal == "KILL" || signal == "9"
	if err := c.client.Processes.Signal(ctx, c.box, in.Process, signal, kill); err != nil {
		return answer[end]{}, err
	}
	var p *client.Process
	var err error
	if kill {
		p, err = c.client.Processes.Wait(ctx, c.box, in.Process, killTime)
	} else {
		p, err = c.client.Processes.Get(ctx, c.box, in.Process)
	}
	if err != nil {
		return answer[end]{}, err
	}
	e := endOf(p)
	return answer[end]{text: fmt.Sprintf("sent %s to %s: %s", signal, e.Process, e.say()), out: e}, nil
}
