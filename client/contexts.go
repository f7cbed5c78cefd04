package client

import (
	"context"
	"crypto/rand"
	"io"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// Messages of the API's schema, under short names.
type (
	// ContextSpec is a context to create.
	ContextSpec = v1.ContextSpec
	// Context is a language interpreter that keeps its variables between runs.
	Context = v1.Context
	// CodeSpec is code to run.
	CodeSpec = v1.CodeSpec
	// CodeRun is one run of code.
	CodeRun = v1.CodeRun
	// CodeOutcome is a run that has ended, with what it said.
	CodeOutcome = v1.ExecuteCodeResponse
	// CodeResult is a value that code showed.
	CodeResult = v1.CodeResult
	// CodeError is an error that code raised.
	CodeError = v1.CodeError
)

// Contexts runs code in interpreters that keep their variables between runs.
type Contexts struct {
	conn *conn
	rpc  casematev1connect.ContextServiceClient
}

// Create starts an interpreter and returns when it is ready. Creating an id that exists attaches to it.
func (c *Contexts) Create(ctx context.Context, sandbox string, spec *ContextSpec) (*Context, error) {
	m, err := c.rpc.CreateContext(ctx, &v1.CreateContextRequest{Sandbox: sandbox, Context: spec})
	return m, c.conn.wrap(err)
}

// Get shows one context.
func (c *Contexts) Get(ctx context.Context, sandbox, id string) (*Context, error) {
	m, err := c.rpc.GetContext(ctx, &v1.GetContextRequest{Sandbox: sandbox, Context: id})
	return m, c.conn.wrap(err)
}

// List shows the contexts of a sandbox, the oldest first.
func (c *Contexts) List(ctx context.Context, sandbox string) ([]*Context, error) {
	m, err := c.rpc.ListContexts(ctx, &v1.ListContextsRequest{Sandbox: sandbox})
	return m.GetContexts(), c.conn.wrap(err)
}

// Interrupt interrupts what a context executes, or with run that run, and returns the run that it hit,
// "" for none. Variables are kept.
func (c *Contexts) Interrupt(ctx context.Context, sandbox, id, run string) (string, error) {
	m, err := c.rpc.InterruptContext(ctx, &v1.InterruptContextRequest{Sandbox: sandbox, Context: id, Run: run})
	return m.GetRun(), c.conn.wrap(err)
}

// Restart gives a context a new interpreter. What ran or waited is canceled.
func (c *Contexts) Restart(ctx context.Context, sandbox, id string) (*Context, error) {
	m, err := c.rpc.RestartContext(ctx, &v1.RestartContextRequest{Sandbox: sandbox, Context: id})
	return m, c.conn.wrap(err)
}

// Delete ends a context and every process that descends from its interpreter.
func (c *Contexts) Delete(ctx context.Context, sandbox, id string) error {
	_, err := c.rpc.DeleteContext(ctx, &v1.DeleteContextRequest{Sandbox: sandbox, Context: id})
	return c.conn.wrap(err)
}

// Runs shows the runs of a context that are kept, the oldest first.
func (c *Contexts) Runs(ctx context.Context, sandbox, id string) ([]*CodeRun, error) {
	m, err := c.rpc.ListRuns(ctx, &v1.ListRunsRequest{Sandbox: sandbox, Context: id})
	return m.GetRuns(), c.conn.wrap(err)
}

// GetRun shows one run, waiting, executing or ended.
func (c *Contexts) GetRun(ctx context.Context, sandbox, id, run string) (*CodeRun, error) {
	m, err := c.rpc.GetRun(ctx, &v1.GetRunRequest{Sandbox: sandbox, Context: id, Run: run})
	return m, c.conn.wrap(err)
}

// Execute runs code, waits for its end and returns what it said, as far as the buffer holds it. Without
// a timeout in the spec the server's default holds (30 s); Run has none. An error that the code raised
// is part of the outcome, not an error of the call.
func (c *Contexts) Execute(ctx context.Context, sandbox string, spec *CodeSpec) (*CodeOutcome, error) {
	return c.ExecuteOnce(ctx, "", sandbox, spec)
}

// ExecuteOnce is Execute with an idempotency key, so that a call whose answer was lost may be repeated
// without running twice.
func (c *Contexts) ExecuteOnce(ctx context.Context, idempotencyKey, sandbox string, spec *CodeSpec) (*CodeOutcome, error) {
	m, err := c.rpc.ExecuteCode(keyed(ctx, idempotencyKey), &v1.ExecuteCodeRequest{Sandbox: sandbox, Run: spec})
	return m, c.conn.wrap(err)
}

// CodeOptions say where goes what code says. The zero value discards it.
type CodeOptions struct {
	// Stdout and Stderr take what it prints; nil discards it.
	Stdout, Stderr io.Writer
	// Started is called once, with the run as it was taken.
	Started func(*CodeRun)
	// Result and Error are called for what it shows and raises; nil ignores it.
	Result func(*CodeResult)
	Error  func(*CodeError)
	// Gap is called for items that were dropped; nil ignores it.
	Gap func(*Gap)
}

// Run runs code, passes on what it says and returns the run when it has ended. A broken connection, also
// one broken by a restart of the server, is taken up again at the item reached, so that nothing is lost
// or seen twice. When ctx ends the run goes on: use Interrupt to end it.
func (c *Contexts) Run(ctx context.Context, sandbox string, spec *CodeSpec, o CodeOptions) (*CodeRun, error) {
	spec = proto.CloneOf(spec)
	if spec.GetId() == "" {
		spec.Id = "run_" + strings.ToLower(rand.Text())[:20]
	}
	l := &listener{c: c, sandbox: sandbox, run: spec.GetId(), spec: spec, o: o}
	return l.listen(ctx)
}

// Follow passes on what a run says, from an item on, like Run.
func (c *Contexts) Follow(ctx context.Context, sandbox, id, run string, offset int64, o CodeOptions) (*CodeRun, error) {
	l := &listener{c: c, sandbox: sandbox, context: id, run: run, o: o, next: offset}
	return l.listen(ctx)
}

// listener is one Run or Follow under way.
type listener struct {
	c       *Contexts
	sandbox string
	context string // "" until the server has told where it runs
	run     string
	spec    *CodeSpec // nil: follow only
	o       CodeOptions
	next    int64 // the number of the next item
	ended   *CodeRun
}

func (l *listener) listen(ctx context.Context) (*CodeRun, error) {
	again := newRetry(l.c.conn.retry)
	for {
		err := l.stream(ctx, again)
		if err == nil && l.ended == nil {
			err = &Error{Kind: Unavailable, Message: "the server closed the stream before the run ended", Err: io.ErrUnexpectedEOF}
		}
		if err == nil {
			return l.ended, nil
		}
		if !again.worth(ctx, err) {
			return nil, unmark(err)
		}
	}
}

// stream opens one stream, at the item reached, and passes it on until it breaks or ends.
func (l *listener) stream(ctx context.Context, again *retry) error {
	var s *connect.ServerStreamForClient[v1.RunEvent]
	var err error
	if l.context != "" {
		s, err = l.c.rpc.FollowRun(ctx, &v1.FollowRunRequest{
			Sandbox: l.sandbox, Context: l.context, Run: l.run, Offset: l.next, Follow: true, Hold: l.spec.GetHold(),
		})
	} else {
		// Repeating this is safe: a run whose id exists is attached to.
		s, err = l.c.rpc.RunCode(ctx, &v1.RunCodeRequest{Sandbox: l.sandbox, Run: l.spec})
	}
	if err != nil {
		return l.c.conn.wrap(err)
	}
	defer func() { _ = s.Close() }()
	for s.Receive() {
		again.progress()
		if err := l.event(s.Msg()); err != nil {
			return err
		}
	}
	if l.ended != nil {
		return nil
	}
	return l.c.conn.wrap(s.Err())
}

func (l *listener) event(e *v1.RunEvent) error {
	switch {
	case e.GetStarted() != nil:
		if l.context == "" && l.o.Started != nil {
			l.o.Started(e.GetStarted())
		}
		l.context = e.GetStarted().GetContext()
	case e.GetText() != nil:
		return l.text(e.GetText())
	case e.GetResult() != nil:
		if l.fresh(e.GetResult().GetNumber()) && l.o.Result != nil {
			l.o.Result(e.GetResult())
		}
	case e.GetError() != nil:
		if l.fresh(e.GetError().GetNumber()) && l.o.Error != nil {
			l.o.Error(e.GetError())
		}
	case e.GetGap() != nil:
		if g := e.GetGap(); g.GetTo() > l.next {
			l.next = g.GetTo()
			if l.o.Gap != nil {
				l.o.Gap(g)
			}
		}
	case e.GetEnded() != nil:
		l.ended = e.GetEnded()
	}
	return nil
}

// fresh notes that an item came, and reports whether it did for the first time.
func (l *listener) fresh(number int64) bool {
	if number < l.next {
		return false
	}
	l.next = number + 1
	return true
}

func (l *listener) text(t *v1.CodeText) error {
	w := l.o.Stdout
	if t.GetStream() == v1.Stream_STREAM_STDERR {
		w = l.o.Stderr
	}
	if !l.fresh(t.GetNumber()) || w == nil {
		return nil
	}
	if _, err := w.Write(t.GetData()); err != nil {
		return callerError{err}
	}
	return nil
}
