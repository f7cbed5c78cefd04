package isolation

import (
	"context"
	"strconv"
	"strings"
	"time"
)

// Calls says which system calls of an instance are observed from outside. The zero value observes none.
type Calls struct {
	// Attempts are calls that the walls refuse and that tell of an attempt to get out or at the kernel: mounts, new
	// namespaces, tracing, modules and the like. Each backend's Applied says what it sees of them.
	Attempts bool `json:"attempts,omitempty"`
	// Exec, Connect and Open observe calls that go on: programs that processes of the instance execute themselves
	// (not those that the guest was asked to start), connections, opened files.
	Exec    bool `json:"exec,omitempty"`
	Connect bool `json:"connect,omitempty"`
	Open    bool `json:"open,omitempty"`
	// OnAttempt is what an attempt brings about; "" is ReactRecord. It also is what becomes of an instance whose
	// calls can't be observed any more.
	OnAttempt Reaction `json:"on_attempt,omitempty"`
}

// Any reports whether anything is observed.
func (c Calls) Any() bool { return c.Attempts || c.Exec || c.Connect || c.Open }

// Reaction is what an attempt brings about.
type Reaction string

// The reactions. Whatever it is, the call is refused and the attempt recorded.
const (
	ReactRecord Reaction = "record"
	ReactPause  Reaction = "pause" // every process is frozen, before the caller hears of the refusal
	ReactKill   Reaction = "kill"  // the instance ends
)

// CallKind says why a call was noted.
type CallKind string

// The kinds.
const (
	CallExec    CallKind = "exec"
	CallConnect CallKind = "connect"
	CallOpen    CallKind = "open"
	CallAttempt CallKind = "attempt"
	// CallGap: something was not noted, for a reason in Note.
	CallGap CallKind = "gap"
)

// CallEvent is a system call that was seen from outside. What stands behind a call's pointers (Target, Argv) was read from
// the caller's memory before the call went on; other threads of it can change that meanwhile.
type CallEvent struct {
	Sandbox string    `json:"sandbox"`
	Time    time.Time `json:"time"`
	Kind    CallKind  `json:"kind"`
	Call    string    `json:"call,omitempty"`    // the system call's name
	Process string    `json:"process,omitempty"` // whose scope the caller is in
	PID     int       `json:"pid,omitempty"`     // inside
	Command string    `json:"command,omitempty"` // what the caller calls itself (proc(5), comm)
	Target  string    `json:"target,omitempty"`  // file or address
	Argv    []string  `json:"argv,omitempty"`    // of what is executed, perhaps cut
	Args    []string  `json:"args,omitempty"`    // of an attempt, as far as they say something
	Errno   string    `json:"errno,omitempty"`   // what the caller was answered; "": the call went on
	// Count is how many more calls like this one there were since the event before, or how many were not noted.
	Count int `json:"count,omitempty"`
	// Reaction is what was done about an attempt, beyond refusing it.
	Reaction Reaction `json:"reaction,omitempty"`
	// Lost says of a gap that nothing more is observed of the sandbox.
	Lost bool   `json:"lost,omitempty"`
	Note string `json:"note,omitempty"`
}

// String says in a few words what was called, as "mount /mnt by sh (7)".
func (e CallEvent) String() string {
	words := append([]string{e.Call}, e.Args...)
	if e.Target != "" {
		words = append([]string{e.Call, e.Target}, e.Args...)
	}
	if e.Command != "" {
		words = append(words, "by", e.Command)
	}
	if e.PID != 0 {
		words = append(words, "("+strconv.Itoa(e.PID)+")")
	}
	return strings.Join(words, " ")
}

// Observer is a Backend that can observe system calls.
type Observer interface {
	// Observes returns which it can.
	Observes() Calls
	// EndedBy says which attempt ended an instance, as far as that is still known; "": none did.
	EndedBy(ctx context.Context, id string) string
}

// Holder is an Instance that may have been paused from outside the server, by a Reaction. Until Release, Thaw leaves it
// frozen.
type Holder interface {
	// Held reports whether the instance is frozen because of an attempt, and nobody has said Release since.
	Held(ctx context.Context) bool
	// Release says that somebody wants it to go on. It thaws nothing itself.
	Release(ctx context.Context) error
}
