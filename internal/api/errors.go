package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"runtime/debug"

	"connectrpc.com/connect"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/id"
	v1 "casemate.dev/proto/casemate/v1"
)

// errDraining ends streams when the server goes down.
var errDraining error = errs.New(errs.Unavailable, "the server is shutting down").
	WithHint("call again with the offset reached: nothing is lost")

// headerKind tells an error's kind in plain HTTP, where the status alone is ambiguous.
const headerKind = "Casemate-Error"

// problem is the public half of an error: what any caller may see. It is also the JSON that plain
// HTTP paths answer.
type problem struct {
	Code    string `json:"code"`
	Message string `json:"message"`
	Hint    string `json:"hint,omitempty"`
	ID      string `json:"id,omitempty"`

	kind errs.Kind
}

// problemOf splits err: the cause of an internal error goes to the log under an id, and only the id
// to the caller.
func (a *API) problemOf(ctx context.Context, what string, err error) problem {
	if cause := context.Cause(ctx); errors.Is(cause, errDraining) && errors.Is(err, context.Canceled) {
		err = cause
	}
	kind := errs.KindOf(err)
	text, hint := errs.PublicText(err)
	p := problem{Code: kind.String(), Message: text, Hint: hint, kind: kind}
	if kind == errs.Internal {
		p.ID = id.New(id.Error)
		p.Message = fmt.Sprintf("%s (%s in the server's log)", text, p.ID)
		a.log.LogAttrs(ctx, levelError, "request failed", attr("id", p.ID), attr("request", what), attr("cause", err.Error()))
	}
	return p
}

// rpcError turns err into what Connect sends.
func (a *API) rpcError(ctx context.Context, procedure string, err error) error {
	var ready *connect.Error
	if errors.As(err, &ready) {
		return ready // from Connect itself: a message that can't be read
	}
	p := a.problemOf(ctx, procedure, err)
	out := connect.NewError(connect.Code(p.kind.Map().GRPC), errors.New(p.Message))
	if d, derr := connect.NewErrorDetail(&v1.ErrorDetail{Kind: p.Code, Hint: p.Hint, Id: p.ID}); derr == nil {
		out.AddDetail(d)
	}
	out.Meta().Set(headerKind, p.Code)
	return out
}

// writeError answers a plain HTTP request with err, unless its handler has reported it already.
func (a *API) writeError(w http.ResponseWriter, r *http.Request, err error) {
	if errors.Is(err, errReported) {
		return
	}
	p := a.problemOf(r.Context(), r.Method+" "+r.URL.Path, err)
	p.write(w, p.kind.Map().HTTP)
}

func (p problem) write(w http.ResponseWriter, status int) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set(headerKind, p.Code)
	for _, name := range []string{"Content-Length", "Content-Disposition", "Content-Range", "Etag", "Last-Modified"} {
		h.Del(name) // they told about an answer that is not given
	}
	if p.kind == errs.Unauthenticated {
		h.Set("WWW-Authenticate", `Bearer realm="casemate"`)
	}
	w.WriteHeader(status)
	body, _ := json.Marshal(p) // strings only: can't fail
	_, _ = w.Write(append(body, '\n'))
}

// errReported says that a handler has told its error in its own stream.
var errReported = errors.New("reported in the stream")

func errNoRoute(r *http.Request) error {
	return errs.New(errs.NotFound, "no such path: %s %s", r.Method, r.URL.EscapedPath()).
		WithHint("docs/api.md lists the paths")
}

// recovered turns a panic in an RPC handler into an internal error; its trace goes to the log.
func (a *API) recovered(_ context.Context, spec connect.Spec, _ http.Header, v any) error {
	return panicError(spec.Procedure, v)
}

func panicError(what string, v any) error {
	return fmt.Errorf("panic in %s: %v\n%s", what, v, debug.Stack())
}

// guarded calls h and turns a panic into an error; http.ErrAbortHandler goes on to net/http.
func (a *API) guarded(h plainHandler, w http.ResponseWriter, r *http.Request) (err error) {
	defer func() {
		if v := recover(); v != nil {
			if v == http.ErrAbortHandler { //nolint:errorlint // net/http compares it so
				panic(v)
			}
			err = panicError(r.Method+" "+r.URL.Path, v)
		}
	}()
	return h(w, r)
}
