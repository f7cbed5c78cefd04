package client

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	v1 "casemate.dev/proto/casemate/v1"
)

// Kind says what a caller can do about an error. The words are stable.
type Kind string

// The kinds.
const (
	Internal           Kind = "internal"            // a fault of the server's; ID is in its log
	InvalidArgument    Kind = "invalid_argument"    // the request is wrong whatever the state
	NotFound           Kind = "not_found"           // it does not exist, or may not be seen
	AlreadyExists      Kind = "already_exists"      // the name or id is taken
	FailedPrecondition Kind = "failed_precondition" // wrong state for the request
	Conflict           Kind = "conflict"            // same idempotency key, other request
	PermissionDenied   Kind = "permission_denied"   // the key may not do this
	Unauthenticated    Kind = "unauthenticated"     // no key, or a bad one
	ResourceExhausted  Kind = "resource_exhausted"  // a limit is reached
	Unsupported        Kind = "unsupported"         // this host, backend or version can't do it
	DeadlineExceeded   Kind = "deadline_exceeded"   // a time limit ran out
	Canceled           Kind = "canceled"            // the caller's context was canceled
	Unavailable        Kind = "unavailable"         // the server can't be reached, or not now
	TooLarge           Kind = "too_large"           // what was sent is larger than is taken
)

// Error is what every call returns.
type Error struct {
	Kind    Kind
	Message string // what was wrong
	Hint    string // what to do next; may be empty
	ID      string // names the entry in the server's log, for Internal
	Err     error  // the cause, for errors.Is and errors.As
}

// Error returns the message.
func (e *Error) Error() string { return e.Message }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// KindOf returns the kind of err, and "" for nil or an error that is none of this package's.
func KindOf(err error) Kind {
	var e *Error
	if errors.As(err, &e) {
		return e.Kind
	}
	return ""
}

// wrap turns an error of Connect or the transport into an *Error; nil stays nil.
func (c *conn) wrap(err error) error {
	if err == nil {
		return nil
	}
	var own *Error
	if errors.As(err, &own) {
		return err
	}
	var ce *connect.Error
	if !errors.As(err, &ce) {
		return c.transportError(err)
	}
	out := &Error{Kind: kindOfCode(ce.Code()), Message: ce.Message(), Err: err}
	for _, d := range ce.Details() {
		v, verr := d.Value()
		if verr != nil {
			continue
		}
		if detail, ok := v.(*v1.ErrorDetail); ok {
			out.Kind, out.Hint, out.ID = Kind(detail.GetKind()), detail.GetHint(), detail.GetId()
			return out
		}
	}
	if connect.IsWireError(err) {
		return out
	}
	// No answer of the server's: the connection or the context failed.
	return c.transportError(err)
}

// transportError describes an error that arose on the way to the server.
func (c *conn) transportError(err error) error {
	switch {
	case errors.Is(err, context.Canceled):
		return &Error{Kind: Canceled, Message: "the request was canceled", Err: err}
	case errors.Is(err, context.DeadlineExceeded):
		return &Error{Kind: DeadlineExceeded, Message: "the request took too long", Err: err}
	case errors.Is(err, proto.Error) && strings.Contains(err.Error(), "invalid UTF-8"):
		return &Error{Kind: InvalidArgument, Message: "a text in the request is no UTF-8", Err: err}
	}
	var ce *connect.Error
	if errors.As(err, &ce) {
		if code := ce.Code(); code != connect.CodeUnavailable && code != connect.CodeUnknown && code != connect.CodeInternal {
			return &Error{Kind: kindOfCode(code), Message: ce.Message(), Err: err}
		}
	}
	hint := "start one with `casemate up`, or set CASEMATE_URL to one that runs"
	var untrusted *tls.CertificateVerificationError
	switch {
	case errors.As(err, &untrusted):
		hint = "a server with an authority of its own tells how to trust it: `casemate ca`, there or over its http:// address"
	case errors.Is(err, os.ErrPermission):
		hint = "only root and the server's user may use its socket: become root, or set CASEMATE_URL and CASEMATE_API_KEY"
	}
	return &Error{
		Kind:    Unavailable,
		Message: fmt.Sprintf("cannot reach the server at %s: %s", c.name, cause(err)),
		Hint:    hint,
		Err:     err,
	}
}

// cause returns the innermost text, without the chain of methods and URLs above it.
func cause(err error) string {
	for {
		next := errors.Unwrap(err)
		if next == nil {
			return err.Error()
		}
		err = next
	}
}

func kindOfCode(code connect.Code) Kind {
	switch code {
	case connect.CodeInvalidArgument, connect.CodeOutOfRange:
		return InvalidArgument
	case connect.CodeNotFound:
		return NotFound
	case connect.CodeAlreadyExists:
		return AlreadyExists
	case connect.CodeFailedPrecondition:
		return FailedPrecondition
	case connect.CodeAborted:
		return Conflict
	case connect.CodePermissionDenied:
		return PermissionDenied
	case connect.CodeUnauthenticated:
		return Unauthenticated
	case connect.CodeResourceExhausted:
		return ResourceExhausted
	case connect.CodeUnimplemented:
		return Unsupported
	case connect.CodeDeadlineExceeded:
		return DeadlineExceeded
	case connect.CodeCanceled:
		return Canceled
	case connect.CodeUnavailable:
		return Unavailable
	case connect.CodeInternal, connect.CodeUnknown, connect.CodeDataLoss:
	}
	return Internal
}

// httpError reads the plain JSON error that the server's HTTP paths answer.
func httpError(resp *http.Response) error {
	body, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	var j struct {
		Code    string `json:"code"`
		Message string `json:"message"`
		Hint    string `json:"hint"`
		ID      string `json:"id"`
	}
	if err := json.Unmarshal(body, &j); err != nil || j.Code == "" {
		return &Error{Kind: kindOfStatus(resp.StatusCode), Message: "the server answered " + resp.Status}
	}
	return &Error{Kind: Kind(j.Code), Message: j.Message, Hint: j.Hint, ID: j.ID}
}

func kindOfStatus(status int) Kind {
	switch status {
	case http.StatusNotFound:
		return NotFound
	case http.StatusUnauthorized:
		return Unauthenticated
	case http.StatusForbidden:
		return PermissionDenied
	case http.StatusRequestEntityTooLarge:
		return TooLarge
	case http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return Unavailable
	}
	if status >= 400 && status < 500 {
		return InvalidArgument
	}
	return Internal
}
