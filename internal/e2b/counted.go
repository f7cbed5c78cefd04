package e2b

import (
	"context"
	"io"
	"net/http"

	"casemate.dev/internal/e2b/envd"
	"casemate.dev/internal/e2b/interpreter"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/observe"
)

// counted is a request that is counted, and the writer that its answer passes. A request is used by one goroutine at a time.
type counted struct {
	http.ResponseWriter
	call   observe.Call
	status int // of the answer; 0: there is none yet
	// failed is how it ended where the status doesn't tell.
	failed observe.Outcome
	// forwarded says that a program in the sandbox answers: its status is its own.
	forwarded bool
}

type countedKey struct{}

func countedOf(ctx context.Context) *counted {
	c, _ := ctx.Value(countedKey{}).(*counted)
	return c
}

// counts serves a request and counts it as one of m; nil: nowhere.
func counts(m *observe.Method, w http.ResponseWriter, r *http.Request, serve http.HandlerFunc) {
	if m == nil {
		serve(w, r)
		return
	}
	c := &counted{ResponseWriter: w, call: m.Begin()}
	defer c.call.End(observe.Aborted())
	serve(c, r.WithContext(context.WithValue(r.Context(), countedKey{}, c)))
	c.call.End(c.outcome(r))
}

// counting returns serve, counted as a route of the control plane.
func (a *API) counting(pattern string, serve http.HandlerFunc) http.HandlerFunc {
	m := a.cfg.Calls.Method(pattern)
	return func(w http.ResponseWriter, r *http.Request) { counts(m, w, r, serve) }
}

// admitted begins the span of a counted request whose caller may make it, and returns the request with it.
func admitted(r *http.Request) *http.Request {
	c := countedOf(r.Context())
	if c == nil {
		return r
	}
	return r.WithContext(c.call.Admit(r.Context(), r.Header))
}

// CallFailed says that the request whose context it is has failed in a way that the status of its answer doesn't tell, as a
// stream does. It is for package envd.
func CallFailed(ctx context.Context, kind errs.Kind) {
	if c := countedOf(ctx); c != nil {
		c.failed = observe.Failed(kind)
	}
}

func (c *counted) outcome(r *http.Request) observe.Outcome {
	switch {
	case c.failed != observe.OK:
		return c.failed
	case c.status == 0 && r.Context().Err() != nil:
		return observe.Aborted()
	case c.forwarded:
		return observe.OK
	}
	return observe.OfStatus(c.status)
}

// WriteHeader implements http.ResponseWriter.
func (c *counted) WriteHeader(status int) {
	if c.status < http.StatusOK { // what comes before an answer is none
		c.status = status
	}
	c.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (c *counted) Write(p []byte) (int, error) {
	c.begun()
	return c.ResponseWriter.Write(p)
}

// ReadFrom implements io.ReaderFrom, as what net/http gives does: a file goes out without a copy.
func (c *counted) ReadFrom(r io.Reader) (int64, error) {
	c.begun()
	return io.Copy(c.ResponseWriter, r)
}

func (c *counted) begun() {
	if c.status < http.StatusOK {
		c.status = http.StatusOK
	}
}

// Flush implements http.Flusher, which Connect asks of writers of streams.
func (c *counted) Flush() { _ = c.FlushError() }

// FlushError is for http.ResponseController: whoever streams is told that nobody is there any more.
func (c *counted) FlushError() error {
	c.begun()
	return http.NewResponseController(c.ResponseWriter).Flush()
}

// Unwrap is for http.ResponseController.
func (c *counted) Unwrap() http.ResponseWriter { return c.ResponseWriter }

// dataMethod returns the method that a request to a port of a sandbox is counted as; nil: none.
func (a *API) dataMethod(r *http.Request, port int) *observe.Method {
	name := "HTTP :port" // whatever a program in the sandbox serves
	switch port {
	case envdPort:
		name = envd.Route(r)
	case interpreterPort:
		name = interpreter.Route(r)
	}
	if name == "" {
		return nil
	}
	return a.cfg.Calls.Method(name)
}
