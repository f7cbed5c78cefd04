package sandbox

import (
	"encoding/json"
	"time"

	"casemate.dev/internal/guestwire"
)

// ContextState is what a code context is doing; see the constants of package guestwire.
type ContextState = guestwire.ContextState

// RunEnd says how a run ended; see the constants of package guestwire, which hold here too.
type RunEnd = guestwire.RunEnd

// The ends of a run.
const (
	RunNone        = guestwire.RunNone // it waits or executes
	RunCompleted   = guestwire.RunCompleted
	RunFailed      = guestwire.RunFailed
	RunInterrupted = guestwire.RunInterrupted
	RunTimedOut    = guestwire.RunTimedOut
	RunCanceled    = guestwire.RunCanceled
	RunDriverEnded = guestwire.RunLost
	RunStopped     = guestwire.RunStopped
	RunUnknown     = guestwire.RunUnknown
)

// CodeContextSpec is a context to create. Zero fields get the sandbox's defaults.
type CodeContextSpec struct {
	// ID is chosen by the caller, or "" for one of ours. Creating an id that exists attaches to it.
	ID       string
	Language string
	Dir      string
	User     string
	Env      map[string]string
	// StartTimeout bounds the start of its interpreter; 0: 30 s.
	StartTimeout time.Duration

	// What follows is for fresh runs: a warm interpreter, with what it imports.
	zygote  bool
	imports []string
}

// CodeContext is a language interpreter that keeps its variables between runs, as callers see it.
type CodeContext struct {
	ID        string
	SandboxID string
	Language  string
	Version   string // of the interpreter, by its driver's word
	Dir       string
	User      string
	PID       int // inside the sandbox
	State     ContextState
	Attached  bool
	CreatedAt time.Time
	StartedAt time.Time // of its interpreter
	// Starts counts its interpreters: 1, and one more with each restart.
	Starts int64
	Runs   int64 // that were taken
	Queued int   // that wait
	Run    string
	// End, Code and Signal tell how its interpreter ended, where State is "ended".
	End    End
	Code   int
	Signal int
}

// CodeSpec is code to run.
type CodeSpec struct {
	// ID of the run is chosen by the caller, or "" for one of ours. Running an id that exists in the
	// context attaches to that run.
	ID string
	// Context is the id of a context. "" is the sandbox's own one for the language, which has the
	// language's name as its id and is created at the first use.
	Context string
	// Language may be left out where Context says it; else it must agree.
	Language string
	Code     string
	Env      map[string]string // for this run, taken back afterwards
	// Timeout counts from the begin of the execution: the code is interrupted, and its interpreter
	// killed where that does not help within Grace (0: 3 s). 0: no limit.
	Timeout time.Duration
	Grace   time.Duration
	// Buffer bounds what is kept of what it says, in bytes; 0: the guest's default.
	Buffer int64
	// Hold makes the code wait for its caller rather than drop what it says.
	Hold bool
	// Fresh runs the code in a process of its own, forked from an interpreter that is warm and has imported
	// Imports, as far as they are there. It sees nothing of other runs, and is thrown away; where the
	// caller leaves before its end, what it said can be read for half a minute more. Context is left out.
	Fresh   bool
	Imports []string
}

// CodeRun is one run, as callers see it.
type CodeRun struct {
	ID        string
	ContextID string
	SandboxID string
	Attached  bool
	QueuedAt  time.Time
	BeganAt   time.Time // of the execution
	EndedAt   time.Time
	End       RunEnd
	// Count is the interpreter's number of the execution.
	Count int64
	// Items counts what it said; Dropped are bytes of it that are not kept any more.
	Items   int64
	Dropped int64
	// ErrorName and ErrorValue are those of the error that it raised, cut.
	ErrorName  string
	ErrorValue string
	// Driver, Code and Signal tell how its interpreter ended, where that ended it.
	Driver End
	Code   int
	Signal int
}

// ItemKind tells what a CodeItem is.
type ItemKind = guestwire.ItemKind

// The kinds of items.
const (
	ItemStdout = guestwire.ItemStdout
	ItemStderr = guestwire.ItemStderr
	ItemResult = guestwire.ItemResult
	ItemError  = guestwire.ItemError
)

// CodeItem is one thing that a run said. Items are numbered from 0 without holes.
type CodeItem struct {
	Kind   ItemKind
	Number int64
	// Text is what it printed: bytes, valid during the sink's call.
	Text []byte
	// Result is set where Kind is ItemResult, and Error where it is ItemError.
	Result *CodeResult
	Error  *CodeError
}

// CodeResult is a value that code showed. All of it is the word of the code itself.
type CodeResult struct {
	// Main marks the value of the last expression; others were shown on the way.
	Main bool `json:"main"`
	// Data holds one JSON value per MIME type, or "chart" and "dataframe". Binary types are base64.
	Data     map[string]json.RawMessage `json:"data"`
	Metadata json.RawMessage            `json:"metadata"`
}

// CodeError is an error that code raised. All of it is the word of the code itself.
type CodeError struct {
	Name      string `json:"name"`
	Value     string `json:"value"`
	Traceback string `json:"traceback"`
}

// CodeSink takes what a run says, in order. An error ends the call and is returned by it; the run
// goes on.
type CodeSink interface {
	// Started comes first, once.
	Started(r CodeRun) error
	Item(i CodeItem) error
	// Gap tells of items From to To that are not kept any more.
	Gap(g Gap) error
}

// CodeItemsOptions says which items to send.
type CodeItemsOptions struct {
	// Offset is the number of the first one.
	Offset int64
	// Follow stays until the run has ended.
	Follow bool
	// Hold makes the code wait for this reader rather than drop.
	Hold bool
}
