// Package errs holds the closed set of error kinds, and the one table that maps a kind to HTTP,
// gRPC, MCP and exit codes.
//
// What belongs here: kinds, the Error type with its public and private halves, and the mapping.
// What does not: errors of one package's own domain; those are typed where they arise and wrap a
// kind from here.
//
// A public text may be shown to any caller: it names neither host paths nor secrets. The private
// cause is for the log only.
package errs

import (
	"context"
	"errors"
	"fmt"
)

// Kind classifies an error by what the caller can do about it. The set is closed.
type Kind uint8

// The kinds, in the order of the table.
const (
	Internal           Kind = iota // a fault of ours; the public text carries an id that is in the log
	InvalidArgument                // the request is wrong whatever the state; fix it and call again
	NotFound                       // the named thing does not exist, or may not be seen
	AlreadyExists                  // the name or id is taken
	FailedPrecondition             // wrong state for the request
	Conflict                       // same idempotency key, other body; lost compare-and-set
	PermissionDenied               // the principal may not do this
	Unauthenticated                // no or a bad key
	ResourceExhausted              // a limit or quota is reached
	Unsupported                    // this host, backend or version can't do it
	DeadlineExceeded               // a time limit of ours or the caller's ran out
	Canceled                       // the caller went away
	Unavailable                    // try again later
	TooLarge                       // what was sent is larger than is taken; sending it again won't help
	numKinds
)

// Mapping is one row of the table: what a kind is called and how it shows at each edge.
type Mapping struct {
	Kind Kind
	Code string // stable machine word in every API answer
	HTTP int    // RFC 9110 status
	GRPC int    // google.rpc.Code, the same numbers as connect.Code
	MCP  int    // JSON-RPC 2.0 error code
	Exit int    // CLI exit code when no child's own code is to be handed on
}

// Table returns the mapping of every kind, indexed by Kind.
func Table() [numKinds]Mapping {
	return [numKinds]Mapping{
		Internal:           {Internal, "internal", 500, 13, -32603, 125},
		InvalidArgument:    {InvalidArgument, "invalid_argument", 400, 3, -32602, 125},
		NotFound:           {NotFound, "not_found", 404, 5, -32001, 125},
		AlreadyExists:      {AlreadyExists, "already_exists", 409, 6, -32002, 125},
		FailedPrecondition: {FailedPrecondition, "failed_precondition", 412, 9, -32003, 125},
		Conflict:           {Conflict, "conflict", 409, 10, -32004, 125},
		PermissionDenied:   {PermissionDenied, "permission_denied", 403, 7, -32005, 125},
		Unauthenticated:    {Unauthenticated, "unauthenticated", 401, 16, -32006, 125},
		ResourceExhausted:  {ResourceExhausted, "resource_exhausted", 429, 8, -32007, 125},
		Unsupported:        {Unsupported, "unsupported", 501, 12, -32008, 125},
		DeadlineExceeded:   {DeadlineExceeded, "deadline_exceeded", 504, 4, -32009, 124},
		Canceled:           {Canceled, "canceled", 499, 1, -32010, 125},
		Unavailable:        {Unavailable, "unavailable", 503, 14, -32011, 125},
		TooLarge:           {TooLarge, "too_large", 413, 8, -32012, 125}, // gRPC has no code of its own for it
	}
}

// Map returns the row of k; an unknown kind maps as Internal.
func (k Kind) Map() Mapping {
	if k >= numKinds {
		k = Internal
	}
	return Table()[k]
}

// String returns the kind's stable machine word.
func (k Kind) String() string { return k.Map().Code }

// FromCode returns the kind whose machine word is code, and whether there is one.
func FromCode(code string) (Kind, bool) {
	for _, m := range Table() {
		if m.Code == code {
			return m.Kind, true
		}
	}
	return Internal, false
}

// FromGRPC returns the kind of a google.rpc.Code, of several with one code the first; codes without a row are Internal.
func FromGRPC(code int) Kind {
	for _, m := range Table() {
		if m.GRPC == code {
			return m.Kind
		}
	}
	return Internal
}

// Error is an error with a kind. Public and Hint may be shown to the caller; Err stays in the log.
type Error struct {
	Kind   Kind
	Public string // what was wrong, as "cannot <verb> <object>: <reason>" or a plain reason
	Hint   string // what to do next; may be empty
	Err    error  // private cause; may be nil
}

// Error returns the full chain, for logs and tests. At the edge use PublicText.
func (e *Error) Error() string {
	if e.Err == nil {
		return e.Public
	}
	if e.Public == "" {
		return e.Err.Error()
	}
	return e.Public + ": " + e.Err.Error()
}

// Unwrap returns the private cause.
func (e *Error) Unwrap() error { return e.Err }

// New returns an error whose whole text is public.
func New(k Kind, format string, args ...any) *Error {
	return &Error{Kind: k, Public: fmt.Sprintf(format, args...)}
}

// Wrap gives err a kind and a public text; err itself stays private.
func Wrap(err error, k Kind, format string, args ...any) *Error {
	return &Error{Kind: k, Public: fmt.Sprintf(format, args...), Err: err}
}

// WithHint returns a copy of e that carries a hint.
func (e *Error) WithHint(format string, args ...any) *Error {
	c := *e
	c.Hint = fmt.Sprintf(format, args...)
	return &c
}

// KindOf returns the kind of the outermost Error in err's chain. Context errors map to Canceled
// and DeadlineExceeded; anything else is Internal. KindOf(nil) is Internal: ask only about errors.
func KindOf(err error) Kind {
	var e *Error
	if errors.As(err, &e) {
		return e.Kind
	}
	switch {
	case errors.Is(err, context.Canceled):
		return Canceled
	case errors.Is(err, context.DeadlineExceeded):
		return DeadlineExceeded
	}
	return Internal
}

// Is reports whether err is of kind k.
func Is(err error, k Kind) bool { return err != nil && KindOf(err) == k }

// PublicText returns what a caller may see of err, and a hint (which may be empty). An error
// without public text gives a fixed sentence, so that no cause leaks by accident.
func PublicText(err error) (text, hint string) {
	var e *Error
	if errors.As(err, &e) && e.Public != "" {
		return e.Public, e.Hint
	}
	switch KindOf(err) {
	case Canceled:
		return "the request was canceled", ""
	case DeadlineExceeded:
		return "the request took too long", ""
	default:
		return "internal error", ""
	}
}
