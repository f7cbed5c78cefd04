// Package egress is the way out of sandboxes: the words that its parts share.
//
// # Parts
//
//	rules      what may leave: pure decisions
//	proxy      a proxy on the way out: the host's, or one sandbox's
//	control    the server's side: starts the gateway process, keeps it, tells it who may do what
//	gateway    the gateway process: a user-space network stack per sandbox, DNS, connections
//	(inspect)  an Inspector: looks into TLS and HTTP, puts credentials on
//
// # Who asks
//
// A sandbox is known by the device that its packets come from, never by anything it says. Everything
// below carries the sandbox's id, which the server gave together with the device's descriptor.
//
// # The way of a connection
//
//	packet ──► stack ──► SYN ──► judge (name or address, port) ──► dial ──► judge (address dialled)
//	                                  │ no: RST                                 │ no: RST
//	                                  ▼                                         ▼
//	                       must or may be inspected?                   accept, read first bytes
//	                                  │ yes                                     │ TLS: judge (SNI), HTTP: judge (Host)
//	                                  ▼                                         ▼
//	                         accept, Inspector.Serve                      copy both ways
//
// What belongs here: those shared words. What does not: anything that does something.
package egress

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"time"

	"casemate.dev/internal/egress/rules"
	"casemate.dev/internal/journal/content"
)

// Policy is everything that the gateway knows about one sandbox. The server sends it when a sandbox
// gets its device, and again, whole, with every change.
type Policy struct {
	// Rules are judged in order; the first that matches decides, and none denies.
	Rules  []rules.Rule `json:"rules"`
	Limits Limits       `json:"limits"`
	// Private is the Inspector's part for this sandbox: bindings, with the values of the secrets that
	// this sandbox may use, and nothing else. Only the Inspector reads it.
	Private Private `json:"private,omitempty"`
	// Via is a proxy of this sandbox alone, as host:port; "": none. Proxy is all of it, with its credentials, as package
	// proxy writes it in JSON. Where that can't be read, or is about another proxy, no connection leaves.
	Via   string  `json:"via,omitempty"`
	Proxy Private `json:"proxy,omitempty"`
	// Keep says that the content of inspected requests and answers is kept; else only its hashes are.
	Keep bool `json:"keep,omitempty"`
	// Recorded says that nothing leaves. What a record holds is answered from it (RecordedAnswer), once the gateway was given that, and
	// all else is refused; names are not looked up. It never changes while a gateway serves the sandbox.
	Recorded bool `json:"recorded,omitempty"`
}

// Member is a sandbox as the server presents it to the gateway.
type Member struct {
	ID string
	// Open opens the outer end of its device; see isolation.Instance.Device.
	Open   func(context.Context) (*os.File, error)
	Policy Policy // without the Inspector's part and the proxy's
}

// Limits bound one sandbox. Zero fields mean the defaults of DefaultLimits.
type Limits struct {
	Connections int           `json:"connections,omitempty"` // open at once
	Pending     int           `json:"pending,omitempty"`     // of these, not established yet
	Bytes       int64         `json:"bytes,omitempty"`       // both ways together, in the sandbox's life; 0: no limit
	Rate        int64         `json:"rate,omitempty"`        // bytes a second each way; 0: no limit
	Idle        time.Duration `json:"idle,omitempty"`        // a connection without a byte ends after this
}

// DefaultLimits are what a sandbox has unless its policy says otherwise.
func DefaultLimits() Limits {
	return Limits{Connections: 1024, Pending: 128, Idle: 15 * time.Minute}
}

// Private is text that must not be shown: it prints and logs as "[private]". It crosses the control
// socket (base64 in JSON) and lies in the memory of the gateway, nowhere else.
type Private []byte

// String implements fmt.Stringer.
func (Private) String() string { return "[private]" }

// GoString implements fmt.GoStringer.
func (Private) GoString() string { return "[private]" }

// LogValue implements slog.LogValuer.
func (Private) LogValue() slog.Value { return slog.StringValue("[private]") }

// Target is where a connection leads.
type Target struct {
	// Name is the canonical host name that the sandbox looked up, "" where it connected to an address.
	Name string
	// Addr is the literal address that it connected to; not valid where Name is set.
	Addr netip.Addr
	Port uint16
}

// Want is what an Inspector says about a target before anything is accepted.
type Want int

// The wants.
const (
	// Pass: the Inspector has nothing to do there; the rules alone decide.
	Pass Want = iota
	// Look: the connection must go through the Inspector (a credential is due), if the rules allow it.
	Look
	// Answer: the Inspector answers by itself, nothing is dialled, and no rule is asked (a host of our own,
	// as casemate.internal). Its name resolves without a rule.
	Answer
)

// Flow is one accepted connection that an Inspector serves.
type Flow struct {
	Sandbox string
	Target  Target
	// Client is the sandbox's side. Bytes that were looked at already are read again from it.
	Client net.Conn
	// Hello is the TLS hello that the client began with; nil where it began otherwise.
	Hello *Hello
	// Judge decides on one HTTP request, and records a refusal. The Inspector asks it for every request
	// and answers a refused one itself (403 with Verdict.Reason, or a closed stream), at once.
	Judge func(rules.HTTP) rules.Verdict
	// Dial opens a connection to the target, after the rules have judged the address that is dialled;
	// through the sandbox's own proxy or the host's, where there is one. It may be called again and again. The
	// error is a *RefusedError where a rule forbids it.
	Dial func(ctx context.Context) (net.Conn, error)
	// DialTo opens a connection to a host of the Inspector's own choice, say a model provider's, outside the
	// sandbox's rules. Special addresses (private, loopback …) are refused unless special says that an
	// administrator named this host.
	DialTo func(ctx context.Context, name string, port uint16, special bool) (net.Conn, error)
	// Recorded, where it is set, answers in place of the target: Dial and DialTo open nothing then. The error is a
	// *RefusedError where the request is not in the record, or was answered as often as it stands there.
	Recorded func(method, url string, body []byte) (*RecordedAnswer, error)
	// Event records something, with the sandbox and target filled in.
	Event func(Event)
	// Keep is the sandbox's: whether content of requests and answers is kept.
	Keep bool
}

// Hello is what is read of a TLS hello.
type Hello struct {
	ServerName string   // canonical, "" where there is none
	Protocols  []string // ALPN, in the client's order
	ECH        bool
}

// Inspector looks into connections. It lives in the gateway process, and is asked for every connection
// of every sandbox; methods are safe for concurrent use. A gateway without one refuses what would have to
// be inspected.
type Inspector interface {
	// Setup takes what is the same for all sandboxes (the CA), each time the server connects.
	Setup(Private) error
	// Configure takes the part of one sandbox, whole, in place of an earlier one. Connections under way see
	// it with their next request.
	Configure(sandbox string, part Private) error
	// Remove forgets a sandbox.
	Remove(sandbox string)
	// Want says what is to be done with connections to a target.
	Want(sandbox string, t Target) Want
	// Serve serves a connection to its end and closes Client. ctx ends when the sandbox goes, or the rules
	// stop allowing the target.
	Serve(ctx context.Context, f *Flow) error
}

// Refusal is what was refused.
type Refusal struct {
	Time    time.Time     `json:"time"`
	Proto   rules.Proto   `json:"proto"`
	Target  string        `json:"target"` // host:port, or a name
	Verdict rules.Verdict `json:"verdict"`
	Last    time.Time     `json:"last"`  // when it was refused the last time
	Count   int           `json:"count"` // how often
}

// RefusedError says that the rules forbid a connection, or that it could not be opened.
type RefusedError struct {
	Target  string
	Verdict rules.Verdict
}

// Error implements error.
func (r *RefusedError) Error() string { return r.Target + ": " + r.Verdict.Reason }

// FaultError says that an Inspector met a fault of its own, with where that was.
type FaultError struct {
	Fault any
	Stack []byte
}

// Error implements error.
func (f *FaultError) Error() string { return fmt.Sprintf("a fault: %v\n%s", f.Fault, f.Stack) }

// EventType names what happened. Events go to the journal with the type "network." + EventType, or, where it
// holds a dot, with the type of that name.
type EventType string

// The event types.
const (
	EventOpened  EventType = "opened"      // a connection was established
	EventClosed  EventType = "closed"      // and ended, with its bytes
	EventRefused EventType = "refused"     // something was refused
	EventCut     EventType = "cut"         // an open connection was ended by a change of the rules or a limit
	EventSecret  EventType = "secret.used" // a secret was put on a request; Note names it, never its value
	EventRequest EventType = "request"     // an inspected HTTP request came to its end, or was answered here (Note says why)
	// EventMisplaced: a placeholder stood where its secret is not bound, and was left there; Note says where.
	EventMisplaced EventType = "secret.misplaced"
	// EventMasked: a secret was taken out of a response, or could not be looked for; Note says which.
	EventMasked EventType = "secret.masked"
	// EventModel: a request to a model provider ended; Provider, Model and the tokens say what it used.
	EventModel   EventType = "model.used"
	EventDropped EventType = "dropped" // events of the sandbox are missing; Count says how many, where that is known
)

// Known reports whether t is one of the event types.
func (t EventType) Known() bool {
	switch t {
	case EventOpened, EventClosed, EventRefused, EventCut, EventSecret, EventRequest, EventMisplaced, EventMasked, EventModel, EventDropped:
		return true
	}
	return false
}

// Event is one thing that the gateway saw. Its facts never hold a value of a secret, a query or a body; see Bodies.
//
//casemate:facts server network.opened network.closed network.refused network.cut network.request secret.used secret.misplaced secret.masked model.used = -sandbox,time,type,bodies
type Event struct {
	Sandbox string         `json:"sandbox,omitempty"`
	Time    time.Time      `json:"time,omitzero"`
	Type    EventType      `json:"type,omitempty"`
	Conn    uint64         `json:"conn,omitempty"` // the same for all events of one connection
	Proto   rules.Proto    `json:"proto,omitempty"`
	Target  string         `json:"target,omitempty"` // host:port
	Dialed  string         `json:"dialed,omitempty"` // address:port, or name:port where a proxy looks it up
	Via     string         `json:"via,omitempty"`    // the proxy that dialled it, as host:port
	Verdict *rules.Verdict `json:"verdict,omitempty"`
	Sent    int64          `json:"sent,omitempty"`     // bytes out of the sandbox
	Recv    int64          `json:"received,omitempty"` // bytes into it
	Method  string         `json:"method,omitempty"`
	Path    string         `json:"path,omitempty"`
	Status  int            `json:"status,omitempty"`
	// Began is when the head of a request was there; Time is when the request ended.
	Began time.Time `json:"began,omitzero"`
	// Count says how many events this one is: a sandbox's are summed up where there are too many to stand
	// alone, with their bytes together.
	Count int    `json:"count,omitempty"`
	Note  string `json:"note,omitempty"`
	// Secret and Version name the secret that it is about.
	Secret  string `json:"secret,omitempty"`
	Version uint64 `json:"version,omitempty"`
	// Estimated says that a model provider did not tell what was used.
	Provider  string `json:"provider,omitempty"`
	Model     string `json:"model,omitempty"`
	TokensIn  int64  `json:"tokens_in,omitempty"`
	TokensOut int64  `json:"tokens_out,omitempty"`
	Estimated bool   `json:"estimated,omitempty"`
	// Unfinished names what of a request and its answer did not come to its end; then their content is what passed.
	Unfinished []string `json:"unfinished,omitempty"`
	// NotKept says why content that should be kept is not. Its hashes are there.
	NotKept string `json:"not_kept,omitempty"`
	// Bodies are the request as the sandbox made it, before anything was put on it, and the answer as the sandbox got
	// it, by BodyNames; nil where they were not seen, and where the event is a sum. They go beside the record.
	Bodies map[string]content.Kept `json:"bodies,omitempty"`
}

// The names of a request's bodies and of its answer's, in the order in which they are recorded.
const (
	BodyRequestHead = "request"      // a RequestHead, as JSON
	BodyRequest     = "request_body" //
	BodyAnswerHead  = "answer"       // an AnswerHead, as JSON
	BodyAnswer      = "answer_body"  // as it went to the sandbox, with the encoding that its head tells of
)

// BodyNames returns all of them.
func BodyNames() []string {
	return []string{BodyRequestHead, BodyRequest, BodyAnswerHead, BodyAnswer}
}

// Concealed stands for the value of a header that is a credential, whoever it is of.
const Concealed = "[left out]"

// RequestHead is a request as the sandbox made it.
type RequestHead struct {
	Method string `json:"method"`
	// URL is the whole one, with its query; a placeholder of a secret stands there as the sandbox wrote it.
	URL    string              `json:"url"`
	Header map[string][]string `json:"header,omitempty"`
}

// AnswerHead is an answer as the sandbox got it.
type AnswerHead struct {
	Status int                 `json:"status"`
	Header map[string][]string `json:"header,omitempty"`
}

// Content is how many bytes of content e holds.
func (e Event) Content() int {
	n := 0
	for _, k := range e.Bodies {
		n += len(k.Data)
	}
	return n
}

// WithoutContent returns e with hashes alone, where it holds content, and why that is not kept.
func (e Event) WithoutContent(why string) Event {
	if e.Content() == 0 {
		return e
	}
	bodies := make(map[string]content.Kept, len(e.Bodies))
	for name, k := range e.Bodies {
		bodies[name] = k.WithoutData()
	}
	e.Bodies, e.NotKept = bodies, why
	return e
}

// Usage is what a sandbox has moved and has open.
type Usage struct {
	Sent        int64 `json:"sent"`
	Received    int64 `json:"received"`
	Connections int   `json:"connections"`
}

// Stats count over all sandboxes of a gateway.
type Stats struct {
	Sandboxes   int   `json:"sandboxes"`
	Connections int64 `json:"connections"` // since it began
	Open        int64 `json:"open"`
	Refused     int64 `json:"refused"`
	Sent        int64 `json:"sent"`
	Received    int64 `json:"received"`
	Events      int64 `json:"events"`
	Goroutines  int   `json:"goroutines"`
	HeapBytes   int64 `json:"heap_bytes"`
}
