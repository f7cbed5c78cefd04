// Package journal is the append-only record of what happened to each sandbox.
//
// It owns the event types and the Recorder interface; every change of state and every process
// start and end passes through one Recorder. It imports neither the domain nor a backend.
//
// What belongs here: the event types, and keeping them dense, ordered and durable (Log). What does
// not: deciding that something is worth an event; package sandbox does that.
package journal

import (
	"context"
	"encoding/json"
	"time"

	"casemate.dev/internal/store"
)

// Observer names who saw a fact. What only the guest saw is never called proved.
type Observer string

// The observers, the most trusted first.
const (
	Kernel Observer = "kernel" // read from the kernel by the server
	Server Observer = "server" // done or measured by the server itself
	Guest  Observer = "guest"  // said by the guest
)

// Type names what happened.
type Type string

// The event types. A type's facts are documented beside the struct that carries them.
const (
	SandboxCreated   Type = "sandbox.created"
	SandboxStarted   Type = "sandbox.started"  // the isolation is up; facts hold Applied
	SandboxClaimed   Type = "sandbox.claimed"  // identity given: it runs
	SandboxUpdated   Type = "sandbox.updated"  // labels, lifetime, limits
	SandboxPaused    Type = "sandbox.paused"   // every process is frozen
	SandboxResumed   Type = "sandbox.resumed"  // they go on
	SandboxAdopted   Type = "sandbox.adopted"  // taken up after a server restart
	SandboxStopping  Type = "sandbox.stopping" // with the reason; from here on nothing can be used
	SandboxEnded     Type = "sandbox.ended"    // with the reason; nothing is left
	SandboxDegraded  Type = "sandbox.degraded" // a limit is hit and the sandbox still works
	SandboxForked    Type = "sandbox.forked"   // others were made of a commit of it
	SandboxCheckout  Type = "sandbox.checkout" // its files are those of a commit from here on
	CommitMade       Type = "commit.made"      // its files were committed
	CommitMerged     Type = "commit.merged"    // a commit was made of two
	CommitVerified   Type = "commit.verified"  // a commit's files were read whole, and their digest told
	CommitTagged     Type = "commit.tagged"    // a commit of it was given a name, or lost one
	CommitDropped    Type = "commit.dropped"   // a commit of it was deleted
	ProcessStarted   Type = "process.started"
	ProcessEnded     Type = "process.ended"
	ProcessFailed    Type = "process.failed" // it could not be started
	ContextCreated   Type = "context.created"
	ContextRestarted Type = "context.restarted" // its interpreter was replaced
	ContextEnded     Type = "context.ended"     // deleted, or its interpreter ended by itself
	RunStarted       Type = "run.started"       // code was handed over; it may wait for its turn
	RunEnded         Type = "run.ended"
	FileWritten      Type = "file.written"
	FileRead         Type = "file.read"
	FileRemoved      Type = "file.removed"
	FileMoved        Type = "file.moved"
	FileMode         Type = "file.mode"      // mode or owner changed
	DirectoryMade    Type = "directory.made" // also where it was there already
	FilesChanged     Type = "files.changed"  // what differs from an earlier moment: after a process or run, or between two
	PortDialed       Type = "port.dialed"
	UsageMetered     Type = "usage.metered"    // what the sandbox had used up to this moment
	SecretSet        Type = "secret.set"       // made, or given a new value
	SecretRotated    Type = "secret.rotated"   // given a new value
	SecretRemoved    Type = "secret.removed"   //
	SecretBound      Type = "secret.bound"     // to sandboxes and hosts
	SecretUnbound    Type = "secret.unbound"   //
	SecretPolicy     Type = "secret.policy"    // what a class of secrets may be bound to
	SecretUsed       Type = "secret.used"      // put on a request of the sandbox
	SecretMisplaced  Type = "secret.misplaced" // a placeholder stood where its secret is not bound
	SecretMasked     Type = "secret.masked"    // taken out of an answer, or it could not be looked for there
	TemplateNetwork  Type = "template.network" // what sandboxes of a template may reach by default
	CallDefault      Type = "calls.default"    // which system calls are observed by default
	TemplateShared   Type = "template.shared"  // whether every key may start from a template that was built here
	ModelRoute       Type = "model.route"      // a way to a model provider was made, changed or removed
	ModelUsed        Type = "model.used"       // a request to a model provider, with its usage
	// Documents of agents; the sandbox that a version names, or the server.
	DocumentSet       Type = "document.set"       // a version was written
	DocumentDeleted   Type = "document.deleted"   // a version says that it is gone
	DocumentForgotten Type = "document.forgotten" // it was removed with its history
	DocumentsKept     Type = "document.kept"      // how much of an agent's history is kept was set
	// What the gateway saw; package egress names the facts.
	NetworkOpened  Type = "network.opened"
	NetworkClosed  Type = "network.closed"
	NetworkRefused Type = "network.refused"
	NetworkCut     Type = "network.cut"     // by a change of the rules, or a limit
	NetworkRequest Type = "network.request" // an inspected request came to its end, or was answered by the gateway itself
	// System calls that were seen from outside; package sandbox names the facts. What stands behind a call's pointers
	// was read from its caller's memory before the call went on.
	CallExec      Type = "call.exec"      // a process executed a program by itself
	CallConnect   Type = "call.connect"   // a process opened a connection
	CallOpen      Type = "call.open"      // a process opened a file
	CallAttempt   Type = "call.attempt"   // a process was refused what tells of an attempt to get out
	Conflict      Type = "conflict"       // the guest's word and the kernel's differ
	Gap           Type = "gap"            // something was not recorded; facts say what and why
	JournalBegun  Type = "journal.begun"  // the log that proves events was begun
	BodyRedacted  Type = "body.redacted"  // content that an event speaks of was erased on request
	BodiesExpired Type = "bodies.expired" // the oldest content was erased by age or for room
)

// ServerStream is where events are kept that belong to no sandbox. It can be no sandbox's id or name.
const ServerStream = "@server"

// Event is one thing that happened. Sandbox and Type are set by the caller; the Recorder assigns
// Seq and, where it is zero, Time.
type Event struct {
	Sandbox string    `json:"sandbox"`
	Seq     uint64    `json:"seq"` // dense per sandbox, from 1
	Time    time.Time `json:"time"`
	Type    Type      `json:"type"`
	Actor   string    `json:"actor"`             // the principal, or "server"
	Process string    `json:"process,omitempty"` // id of the process it is about
	// Facts holds one JSON object per observer.
	Facts map[Observer]json.RawMessage `json:"facts,omitempty"`
	// Bodies are what the event speaks of and does not hold; see WithKept.
	Bodies []Body `json:"-"`
}

// With returns a copy of e to which v, marshalled as a JSON object, is added as o's facts.
func (e Event) With(o Observer, v any) Event {
	facts := make(map[Observer]json.RawMessage, len(e.Facts)+1)
	for k, f := range e.Facts {
		facts[k] = f
	}
	b, err := json.Marshal(v)
	if err != nil {
		b, _ = json.Marshal(map[string]string{"unrecordable": err.Error()})
	}
	facts[o] = b
	e.Facts = facts
	return e
}

// Recorder takes events. Implementations are safe for concurrent use and keep one sandbox's events
// in the order of the calls.
//
// An event may bring writes of the store with it: they are committed together with it or not at all,
// so that a state and the record of how it came to be never differ.
type Recorder interface {
	// Enqueue gives the event its counter and its place in the order, and returns at once. It is
	// committed when somebody waits for it or for a later one, or else soon after a Post.
	Enqueue(e Event, with ...store.Write) Pending
	// Record is Enqueue and Wait: it returns once the event survives the death of this process (not a
	// power loss, unless the recorder is strict). The returned event carries Seq and Time.
	Record(ctx context.Context, e Event, with ...store.Write) (Event, error)
	// Post is Record without the wait: it is durable with the next Record of anything, or within
	// milliseconds. Starts use it, since they never wait.
	Post(e Event, with ...store.Write) Event
	// Events returns sandbox's events with Seq > after, oldest first, at most limit (0: 1000).
	Events(ctx context.Context, sandbox string, after uint64, limit int) ([]Event, error)
	// EventsOf is Events for those of some types, without what they speak of.
	EventsOf(ctx context.Context, sandbox string, types []string, after uint64, limit int) ([]Event, error)
	// Follow sends events of sandbox with Seq > after until ctx ends or send fails, and returns that
	// error.
	Follow(ctx context.Context, sandbox string, after uint64, send func(Event) error) error
	// Redact erases content that an event speaks of, and records that; also says what else is written then.
	Redact(ctx context.Context, r Redaction, also func(process string, names []string) []store.Write) (Event, error)
	// ReadBody returns content that an event speaks of, as far as it is kept; with its name as "guest.stdout".
	ReadBody(ctx context.Context, sandbox string, event uint64, name string) (Body, error)
}

// Pending is an event that has its place and is not known to be durable yet.
type Pending struct {
	Event Event
	// Done returns once the event is durable or has failed. nil: it is durable already.
	Done func() error
}

// Wait returns the event once it is durable. It does not depend on a context: the event is on its
// way whatever the caller does.
func (p Pending) Wait() (Event, error) {
	if p.Done == nil {
		return p.Event, nil
	}
	return p.Event, p.Done()
}
