package e2b

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/id"
)

// errDraining ends streams when the server goes down.
var errDraining error = errs.New(errs.Unavailable, "the server is shutting down")

// problem is the body of every error. The SDKs read the code from it, not from the status line.
type problem struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
}

// statusError is an error whose status and text the protocol prescribes.
type statusError struct {
	status int
	text   string
}

// Error implements error.
func (e *statusError) Error() string { return e.text }

func fail(status int, format string, args ...any) error {
	return &statusError{status: status, text: fmt.Sprintf(format, args...)}
}

// notYet says that a part of the protocol is not served. SDKs show the text.
func notYet(what string) error {
	return fail(http.StatusNotImplemented, "%s: this server does not support it yet", what)
}

// errNoSandbox is the text that the SDKs turn into their own error.
func errNoSandbox(sandboxID string) error {
	return fail(http.StatusNotFound, "Sandbox %q doesn't exist or you don't have access to it", sandboxID)
}

// publicText is what a caller may see of err, with its hint.
func publicText(err error) string {
	text, hint := errs.PublicText(err)
	if hint != "" {
		text += " (" + hint + ")"
	}
	return text
}

// answerError answers with err. The cause of an internal error goes to the log under an id.
func (a *API) answerError(w http.ResponseWriter, r *http.Request, err error) {
	var ready *statusError
	if errors.As(err, &ready) {
		writeError(w, ready.status, ready.text)
		return
	}
	if cause := context.Cause(r.Context()); errors.Is(cause, errDraining) && errors.Is(err, context.Canceled) {
		err = cause
	}
	kind := errs.KindOf(err)
	text := publicText(err)
	status := kind.Map().HTTP
	switch kind {
	case errs.FailedPrecondition:
		status = http.StatusConflict // the protocol knows no 412
	case errs.ResourceExhausted:
		w.Header().Set("Retry-After", "1")
	case errs.Internal:
		ref := id.New(id.Error)
		text = fmt.Sprintf("%s (%s in the server's log)", text, ref)
		a.log.LogAttrs(r.Context(), slog.LevelError, "request failed", slog.String("id", ref),
			slog.String("request", r.Method+" "+r.URL.Path), slog.String("cause", err.Error()))
	}
	writeError(w, status, text)
}

// writeError writes an error's body.
func writeError(w http.ResponseWriter, status int, text string) {
	writeJSON(w, status, problem{Code: status, Message: text})
}

// writeJSON answers with v. What it is given is data of this package: it can't fail to encode.
func writeJSON(w http.ResponseWriter, status int, v any) {
	body, _ := json.Marshal(v)
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_, _ = w.Write(append(body, '\n'))
}

// guarded calls h and turns a panic into an error; http.ErrAbortHandler goes on to net/http.
func guarded(h handler, c call) (err error) {
	defer func() {
		if v := recover(); v != nil {
			if v == http.ErrAbortHandler { //nolint:errorlint // net/http compares it so
				panic(v)
			}
			err = fmt.Errorf("panic in %s %s: %v\n%s", c.r.Method, c.r.URL.Path, v, debug.Stack())
		}
	}()
	return h(c)
}
