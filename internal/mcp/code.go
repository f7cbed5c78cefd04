package mcp

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/jsonschema-go/jsonschema"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
	"google.golang.org/protobuf/types/known/durationpb"

	"casemate.dev/client"
)

// interruptTime is how long code that is interrupted may take to notice, before its interpreter is
// started anew and its variables are lost.
const interruptTime = 3 * time.Second

// maxValue bounds one representation of a value among the fields of a result.
const maxValue = 50_000

type codeInput struct {
	target

	Code      string  `json:"code" jsonschema:"The code. The value of a last expression is shown, as in a notebook."`
	Language  string  `json:"language,omitempty"`
	Context   string  `json:"context,omitempty" jsonschema:"The context to run it in, as an earlier call returned it. Default: the sandbox's own one for the language."`
	Restart   bool    `json:"restart,omitempty" jsonschema:"Start the interpreter anew first: variables and imports are gone."`
	Timeout   float64 `json:"timeout_seconds,omitempty" jsonschema:"The code is interrupted after that many seconds; variables are kept where it takes notice."`
	MaxOutput int     `json:"max_output_bytes,omitempty" jsonschema:"Longer output is cut in the middle."`
}

// value is something that code showed: the value of its last expression, a table, a chart.
type value struct {
	Main  bool              `json:"main,omitempty" jsonschema:"Whether it is the value of the last expression."`
	Data  map[string]string `json:"data" jsonschema:"By MIME type; chart and dataframe are figures and tables as JSON."`
	Types []string          `json:"types" jsonschema:"All types that it came in. Images are contents of their own."`
}

type codeFault struct {
	Name      string `json:"name"`
	Value     string `json:"value"`
	Traceback string `json:"traceback,omitempty"`
}

type codeResult struct {
	Sandbox  string     `json:"sandbox"`
	Context  string     `json:"context" jsonschema:"Pass it as context to go on with the same variables."`
	End      string     `json:"end" jsonschema:"completed, failed (it raised an error), interrupted, timed_out, canceled, driver_ended (its interpreter died), sandbox_stopped or lost."`
	Output   string     `json:"output" jsonschema:"What it printed."`
	Bytes    int64      `json:"output_bytes"`
	Values   []value    `json:"values"`
	Error    *codeFault `json:"error,omitempty"`
	Duration string     `json:"duration,omitempty"`
}

func (s *Server) addCodeTools() {
	add(s, tool{
		name: "run_code", title: "Run code", kind: replaces,
		text: "Run code in an interpreter that keeps its variables, imports and functions between calls, as a notebook does. Returns what it printed, " +
			"the value of the last expression, tables, and figures as images. An error that the code raises is a result, with its traceback. " +
			"Canceling the call interrupts the code. For shell commands use run_command.",
		shape: func(in *jsonschema.Schema) {
			l := in.Properties["language"]
			l.Enum = []any{"python", "javascript", "typescript", "bash"}
			l.Default = []byte(`"python"`)
			l.Description = "The language."
			bounds(in, "timeout_seconds", 0.001, maxTimeout, defaultTimeout)
			bounds(in, "max_output_bytes", minOutput, maxOutput, defaultOutput)
		},
	}, runCode)
}

// said is what a run says, as it comes.
type said struct {
	shared

	values []value
	images []sdk.Content
	fault  *codeFault
}

func runCode(ctx context.Context, c call, in codeInput) (answer[codeResult], error) {
	var none answer[codeResult]
	if strings.TrimSpace(in.Code) == "" {
		return none, invalid("pass code, e.g. 1+1", "code is empty")
	}
	if in.Restart {
		own := in.Context == ""
		if _, err := c.client.Contexts.Restart(ctx, c.box, cmp.Or(in.Context, in.Language)); err != nil && !(own && client.KindOf(err) == client.NotFound) {
			return none, err // the sandbox's own context is called as its language, and may not be there yet
		}
	}
	out := &said{shared: shared{window: window{limit: in.MaxOutput}}}
	run, err := c.runToEnd(ctx, in, out)
	var e *client.Error
	if errors.As(err, &e) && e.Kind == client.FailedPrecondition && strings.Contains(e.Message, "context") {
		err = &client.Error{Kind: e.Kind, Message: e.Message, Hint: "pass restart: true; variables are gone"}
	}
	if err != nil {
		return none, err
	}
	seen := out.shown()
	r := codeResult{
		Sandbox: run.GetSandbox(), Context: run.GetContext(), End: run.GetEnd(), Output: seen.text, Bytes: seen.bytes, Values: out.values, Error: out.fault,
	}
	if r.Values == nil {
		r.Values = []value{}
	}
	if run.GetEndedAt() != nil && run.GetBeganAt() != nil {
		r.Duration = run.GetEndedAt().AsTime().Sub(run.GetBeganAt().AsTime()).Round(time.Millisecond).String()
	}
	return answer[codeResult]{text: r.text(run), extra: out.images, out: r}, nil
}

// runToEnd runs code and waits for its end. Where the call ends first it interrupts the code, and where
// that does not help it starts the interpreter anew: nobody else would end it.
func (c call) runToEnd(ctx context.Context, in codeInput, out *said) (*client.CodeRun, error) {
	taken, ended := make(chan *client.CodeRun, 1), make(chan outcome, 1)
	running, giveUp := context.WithCancel(context.WithoutCancel(ctx))
	defer giveUp()
	spec := &client.CodeSpec{
		Id: "run_" + strings.ToLower(rand.Text())[:20], Context: in.Context, Code: in.Code, Timeout: durationpb.New(time.Duration(in.Timeout * float64(time.Second))),
	}
	if in.Context == "" {
		spec.Language = in.Language
	}
	stop := c.progress(ctx, in.Timeout, &out.shared)
	defer stop()
	go func() {
		run, err := c.client.Contexts.Run(running, c.box, spec, client.CodeOptions{
			Stdout: out, Stderr: out, Result: out.result, Error: out.failed,
			Started: func(r *client.CodeRun) { taken <- r },
		})
		ended <- outcome{run, err}
	}()
	select {
	case o := <-ended:
		return o.run, o.err
	case <-ctx.Done():
	}
	select {
	case r := <-taken:
		c.end(ctx, r, ended)
	case <-ended:
	case <-time.After(startTime):
	}
	return nil, context.Cause(ctx)
}

// outcome is how a run, or the way to it, ended.
type outcome struct {
	run *client.CodeRun
	err error
}

// end ends a run whose caller has left.
func (c call) end(ctx context.Context, r *client.CodeRun, ended <-chan outcome) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTime)
	defer cancel()
	if _, err := c.client.Contexts.Interrupt(ctx, c.box, r.GetContext(), r.GetId()); err == nil {
		select {
		case <-ended:
			return
		case <-time.After(interruptTime):
		}
	}
	_, _ = c.client.Contexts.Restart(ctx, c.box, r.GetContext()) // if it can't be reached, its time limit ends it
}

// result takes a value that the code showed.
func (o *said) result(r *client.CodeResult) {
	v := value{Main: r.GetMain(), Data: make(map[string]string)}
	for kind, data := range r.GetData() {
		v.Types = append(v.Types, kind)
		if imageType(kind) {
			if raw, err := base64.StdEncoding.DecodeString(strings.TrimSpace(data)); err == nil {
				o.images = append(o.images, &sdk.ImageContent{Data: raw, MIMEType: kind})
			}
			continue
		}
		if len(data) > maxValue {
			data = fmt.Sprintf("(%d bytes: too long to show; print a part, or write it to a file)", len(data))
		}
		v.Data[kind] = data
	}
	slices.Sort(v.Types)
	o.values = append(o.values, v)
}

func (o *said) failed(e *client.CodeError) {
	o.fault = &codeFault{Name: e.GetName(), Value: cutMiddle(e.GetValue(), maxValue), Traceback: cutMiddle(e.GetTraceback(), maxValue)}
}

// cutMiddle cuts a long text as output is cut.
func cutMiddle(s string, limit int) string {
	w := window{limit: limit}
	_, _ = w.Write([]byte(s))
	return w.shown().text
}

// text is the result for a model that reads no fields.
func (r codeResult) text(run *client.CodeRun) string {
	var b strings.Builder
	b.WriteString(r.Output)
	line := func(s string) {
		if b.Len() > 0 && !strings.HasSuffix(b.String(), "\n") {
			b.WriteByte('\n')
		}
		b.WriteString(s)
	}
	for _, v := range r.Values {
		if s := v.text(); s != "" {
			line(s)
		}
	}
	if r.Error != nil {
		if r.Error.Traceback != "" {
			line(r.Error.Traceback)
		} else {
			line(r.Error.Name + ": " + r.Error.Value)
		}
	}
	if b.Len() == 0 {
		line("(nothing printed or shown)")
	}
	line("[" + r.say(run) + "]")
	return b.String()
}

// text shows a value: as Markdown or text where there is one, else as what there is.
func (v value) text() string {
	for _, kind := range [...]string{"text/markdown", "text/plain", "text/latex", "text/html", "application/json", "image/svg+xml"} {
		if s, ok := v.Data[kind]; ok {
			return s
		}
	}
	if len(v.Data) == 0 {
		return ""
	}
	raw, err := json.Marshal(v.Data)
	if err != nil {
		return ""
	}
	return string(raw)
}

// say tells how a run ended, and what to do about it.
func (r codeResult) say(run *client.CodeRun) string {
	s := r.End
	if r.Duration != "" {
		s += " after " + r.Duration
	}
	switch r.End {
	case "timed_out":
		s += "; set timeout_seconds, or write a script and use start_process"
	case "driver_ended":
		s += ": the interpreter died (" + run.GetDriverEnd() + ") and its variables are gone"
	}
	return s + "; context " + r.Context
}
