package envd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"

	"connectrpc.com/connect"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/id"
	"casemate.dev/internal/sandbox"
)

// statusError is an error with the HTTP status that the protocol has for it.
type statusError struct {
	status int
	text   string
}

// Error implements error.
func (e *statusError) Error() string { return e.text }

func statusf(status int, format string, args ...any) error {
	return &statusError{status, fmt.Sprintf(format, args...)}
}

func refuse(code connect.Code, format string, args ...any) error {
	return connect.NewError(code, fmt.Errorf(format, args...))
}

// WriteError answers with an error in the protocol's JSON.
func WriteError(w http.ResponseWriter, status int, message string) {
	h := w.Header()
	h.Set("Content-Type", "application/json; charset=utf-8")
	h.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	body, _ := json.Marshal(struct { // plain data: can't fail
		Code    int    `json:"code"`
		Message string `json:"message"`
	}{status, message})
	_, _ = w.Write(append(body, '\n'))
}

// fail answers a plain request with err.
func (h *Handler) fail(w http.ResponseWriter, r *http.Request, err error) {
	var ready *statusError
	if errors.As(err, &ready) {
		WriteError(w, ready.status, ready.text)
		return
	}
	kind := errs.KindOf(err)
	status := kind.Map().HTTP
	switch {
	case gone(err):
		status = http.StatusBadGateway // as for a sandbox that is not there: SDKs say so then
	case kind == errs.FailedPrecondition, kind == errs.PermissionDenied:
		status = http.StatusBadRequest // 403 and 412 mean nothing to SDKs
	case kind == errs.ResourceExhausted:
		status = http.StatusInsufficientStorage
	}
	WriteError(w, status, h.text(r.Context(), r.Method+" "+r.URL.Path, err))
}

// gone reports whether err says that the sandbox can't be used: it is paused or has ended.
func gone(err error) bool {
	var transition *sandbox.TransitionError
	return errors.As(err, &transition)
}

// text returns what a caller may see of err. The cause of an internal error goes to the log.
func (h *Handler) text(ctx context.Context, what string, err error) string {
	text, hint := errs.PublicText(err)
	if hint != "" {
		text += " (" + hint + ")"
	}
	if errs.KindOf(err) == errs.Internal {
		n := id.New(id.Error)
		text = fmt.Sprintf("%s (%s in the server's log)", text, n)
		h.log.LogAttrs(ctx, slog.LevelError, "request failed",
			slog.String("id", n), slog.String("request", what), slog.String("cause", err.Error()))
	}
	return text
}

// rpcError turns err into what Connect sends.
func (h *Handler) rpcError(ctx context.Context, what string, err error) error {
	var ready *connect.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &ready):
		return ready
	case errors.Is(err, context.DeadlineExceeded):
		return deadlineExceeded()
	case gone(err):
		return refuse(connect.CodeUnavailable, "%s", h.text(ctx, what, err))
	}
	return refuse(connect.Code(errs.KindOf(err).Map().GRPC), "%s", h.text(ctx, what, err)) //nolint:gosec // a small number
}

// deadlineExceeded is what ends a stream whose process has run out of time.
func deadlineExceeded() error {
	return connect.NewError(connect.CodeDeadlineExceeded, context.DeadlineExceeded)
}

// cutOff drops the connection: a stream that ends so, and nothing else, makes SDKs look whether the
// sandbox is still there. It is also right for a call whose context was canceled: either the client has
// left, or the sandbox was paused or has ended.
func cutOff() { panic(http.ErrAbortHandler) }

// unknownUser reports whether an error came from a user that the sandbox does not have.
func (h *Handler) unknownUser(ctx context.Context, c *call, err error) bool {
	if c.user == "" || !errs.Is(err, errs.NotFound) {
		return false
	}
	fs, err := h.m.Files(ctx, c.p, c.sandbox)
	if err != nil {
		return false
	}
	_, err = fs.Stat(ctx, sandbox.PathRequest{Asker: sandbox.Asker{User: c.user}, Path: "/"})
	return errs.Is(err, errs.NotFound) // the root directory is always there
}

func invalidUsername(user string) error {
	return refuse(connect.CodeUnauthenticated, "invalid username: '%s'", user)
}
