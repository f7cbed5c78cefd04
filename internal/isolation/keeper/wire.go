package keeper

import (
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
)

// Protocol is the version of what follows. A server does without a keeper that speaks another one.
const Protocol = 2

// Verb is the program's first argument that makes it a keeper.
const Verb = "keeper"

// The calls.
const (
	MethodHello   guestwire.Method = "keeper.hello"   // → Hello
	MethodAttach  guestwire.Method = "keeper.attach"  // Attach, files → nothing
	MethodState   guestwire.Method = "keeper.state"   // Ref → State
	MethodRelease guestwire.Method = "keeper.release" // Ref → nothing
	MethodEvents  guestwire.Method = "keeper.events"  // After → Events; waits until there are some
	MethodExit    guestwire.Method = "keeper.exit"    // ends the process, where it watches nothing
)

// Hello tells what a keeper is and watches.
type Hello struct {
	Protocol  int      `json:"protocol"`
	Sandboxes []string `json:"sandboxes,omitempty"`
}

// Attach gives a keeper a sandbox's listener. Its files are, in this order: the listener, a pidfd of the first process,
// and where the reaction is to pause, the file that freezes.
type Attach struct {
	// PID is the keeper's that is meant: another one, which came in its place, refuses.
	PID     int             `json:"pid"`
	Sandbox string          `json:"sandbox"`
	Calls   isolation.Calls `json:"calls"`
	// Arch is what the filter was made for, and Decide the filter as it would be without a listener.
	Arch   string `json:"arch"`
	Decide []byte `json:"decide"`
	// Trace says that the first file is a connection by which a runtime's kernel tells of calls once it has answered
	// them. Decide is then a filter that hands over what tells of an attempt, and ExecMark the last argument of
	// executions that are not told of.
	Trace    bool   `json:"trace,omitempty"`
	ExecMark uint64 `json:"exec_mark,omitempty"`
	// Freeze is what is written to the third file.
	Freeze string `json:"freeze,omitempty"`
}

// Ref names a sandbox.
type Ref struct {
	Sandbox string `json:"sandbox"`
}

// State is what a keeper knows of a sandbox.
type State struct {
	// Watched says that its calls are answered.
	Watched bool `json:"watched,omitempty"`
	// Held says that it was frozen because of an attempt, and nobody has released it since.
	Held bool `json:"held,omitempty"`
	// Killed says which attempt ended it; "": none did.
	Killed string `json:"killed,omitempty"`
}

// After asks for the events after a number, which so are known to be recorded up to it. Numbers are one process's: another
// than PID, which came in its place, would forget what nobody has recorded, and refuses.
type After struct {
	After uint64 `json:"after"`
	PID   int    `json:"pid"`
}

// Events are events and the number of the last one.
type Events struct {
	Events []isolation.CallEvent `json:"events"`
	Last   uint64                `json:"last"`
}
