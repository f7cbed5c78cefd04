package mcp

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/google/jsonschema-go/jsonschema"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"casemate.dev/client"
)

// call is one call of a tool.
type call struct {
	*session
	req *sdk.CallToolRequest
	// box is the sandbox that the call is for; "" where the tool is for none.
	box string
}

// answer is what a tool returns: the same for a model that reads text, and for one that reads fields.
type answer[Out any] struct {
	text  string
	extra []sdk.Content // beside the text
	out   Out
}

// kind says what a tool does to its world; it becomes the annotations.
type kind int

const (
	reads    kind = iota // changes nothing
	adds                 // makes something new
	replaces             // may overwrite or end what is there
)

// target is the argument by which a tool names a sandbox.
type target struct {
	Sandbox string `json:"sandbox,omitempty" jsonschema:"Id or name of the sandbox. Leave it out for this session's own sandbox."`
}

// named returns the argument. Inputs of tools that need a sandbox embed target.
func (t target) named() string { return t.Sandbox }

// tool describes one tool.
type tool struct {
	name, title, text string
	kind              kind
	idempotent        bool
	// shape completes the schema that is read from the input's type.
	shape func(*jsonschema.Schema)
}

// add registers a tool. Where its input names a sandbox, the session's own one is made for it if need
// be. An error of the API becomes a result that says what was wrong and what to do.
func add[In, Out any](s *Server, t tool, f func(context.Context, call, In) (answer[Out], error)) {
	schema, err := jsonschema.For[In](nil)
	if err != nil {
		panic(fmt.Sprintf("schema of %s: %v", t.name, err)) // a mistake in this package, seen by every test
	}
	if t.shape != nil {
		t.shape(schema)
	}
	s.arguments[t.name] = namesOf(schema)
	no, destroys := false, t.kind == replaces
	sdk.AddTool(s.mcp, &sdk.Tool{
		Name: t.name, Title: t.title, Description: t.text, InputSchema: schema,
		Annotations: &sdk.ToolAnnotations{
			Title: t.title, ReadOnlyHint: t.kind == reads, DestructiveHint: &destroys, IdempotentHint: t.idempotent || t.kind == reads, OpenWorldHint: &no,
		},
	}, func(ctx context.Context, req *sdk.CallToolRequest, in In) (*sdk.CallToolResult, Out, error) {
		a, err := run(ctx, s, req, in, f)
		if err != nil {
			return nil, a.out, err
		}
		return &sdk.CallToolResult{Content: append([]sdk.Content{&sdk.TextContent{Text: a.text}}, a.extra...)}, a.out, nil
	})
}

func run[In, Out any](ctx context.Context, s *Server, req *sdk.CallToolRequest, in In, f func(context.Context, call, In) (answer[Out], error)) (answer[Out], error) {
	var none answer[Out]
	x, err := s.session(req)
	if err != nil {
		return none, toolError(err)
	}
	ctx, stop := x.bind(ctx)
	defer stop()
	c := call{session: x, req: req}
	if t, ok := any(in).(interface{ named() string }); ok {
		if c.box, err = x.sandbox(ctx, t.named()); err != nil {
			return none, toolError(err)
		}
	}
	a, err := f(ctx, c, in)
	if err != nil && ctx.Err() == nil && x.lost(ctx, c.box) {
		err = &client.Error{
			Kind: client.NotFound, Message: "this session's sandbox is gone, with its processes and files",
			Hint: "call again: a new one is made, empty",
		}
	}
	return a, toolError(err)
}

// toolError words an error for a model.
func toolError(err error) error {
	var e *client.Error
	if !errors.As(err, &e) {
		return err
	}
	text := e.Message
	if e.Kind != "" {
		text = string(e.Kind) + ": " + text
	}
	hint := e.Hint
	if e.Kind == client.NotFound && (hint == "" || strings.HasPrefix(hint, "casemate ")) { // the command line's own hints
		hint = "list_sandboxes, list_processes and list_files show what there is"
	}
	if hint != "" {
		text += "\nWhat to do: " + hint
	}
	return errors.New(text)
}

// explainArguments completes the SDK's word about arguments that do not fit a tool's schema: a model
// that misspelt one should not have to guess.
func (s *Server) explainArguments(next sdk.MethodHandler) sdk.MethodHandler {
	return func(ctx context.Context, method string, req sdk.Request) (sdk.Result, error) {
		res, err := next(ctx, method, req)
		r, ok := res.(*sdk.CallToolResult)
		call, isCall := req.(*sdk.CallToolRequest)
		if err != nil || !ok || !isCall || !r.IsError || len(r.Content) != 1 {
			return res, err
		}
		t, ok := r.Content[0].(*sdk.TextContent)
		if !ok || !strings.HasPrefix(t.Text, `validating "arguments"`) {
			return res, err
		}
		t.Text = strings.TrimPrefix(t.Text, `validating "arguments": validating `)
		t.Text = "invalid_argument: " + t.Text + "\nWhat to do: " + call.Params.Name + " takes " + s.arguments[call.Params.Name]
		return res, nil
	}
}

// namesOf lists a tool's arguments for an error.
func namesOf(schema *jsonschema.Schema) string {
	var names []string
	for _, n := range slices.Sorted(maps.Keys(schema.Properties)) {
		if slices.Contains(schema.Required, n) {
			n += " (required)"
		}
		names = append(names, n)
	}
	return strings.Join(names, ", ")
}

// invalid is an error about an argument.
func invalid(hint, format string, args ...any) error {
	return &client.Error{Kind: client.InvalidArgument, Message: fmt.Sprintf(format, args...), Hint: hint}
}

// bounds sets the limits and default of a numeric argument.
func bounds(s *jsonschema.Schema, name string, least, most, unset float64) {
	p := s.Properties[name]
	p.Minimum, p.Maximum = &least, &most
	p.Default = []byte(fmt.Sprintf("%g", unset))
}
