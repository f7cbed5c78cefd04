package sandbox

import (
	"time"

	"casemate.dev/internal/guestwire"
)

// End says how a process ended; see the constants of package guestwire, which hold here too.
type End = guestwire.End

// The ends of a process.
const (
	EndNone           = guestwire.EndNone // still running
	EndExited         = guestwire.EndExited
	EndSignaled       = guestwire.EndSignaled
	EndTimedOut       = guestwire.EndTimedOut
	EndCanceled       = guestwire.EndCanceled
	EndOOMKilled      = guestwire.EndOOMKilled
	EndSandboxStopped = guestwire.EndSandboxStopped
	EndProcessLost    = guestwire.EndLost
	EndFailed         = guestwire.EndFailed
)

// Stream tells which output some bytes belong to.
type Stream = guestwire.Stream

// The streams.
const (
	Stdout = guestwire.Stdout
	Stderr = guestwire.Stderr
	TTY    = guestwire.TTY
)

// ProcessSpec is a process to start. Zero fields get the sandbox's defaults.
type ProcessSpec struct {
	// ID is chosen by the caller, or "" for one of ours. Starting an id that exists attaches to it.
	ID string
	// Tag is the caller's word for it, by which FindProcess finds it. Several may have the same.
	Tag  string
	Argv []string
	Env  map[string]string
	Dir  string
	User string
	// Stdin keeps standard input open for Input.
	Stdin bool
	// TTY gives it a terminal of Rows × Cols.
	TTY        bool
	Rows, Cols uint16
	// Timeout ends the whole tree; 0: no limit, but for Execute, which then takes Defaults.Execution.
	Timeout time.Duration
	// Grace is the time between SIGTERM and SIGKILL at a timeout; 0: the guest's default.
	Grace time.Duration
	// Buffer bounds the output kept, in bytes; 0: the guest's default.
	Buffer int64
	// Hold makes the process wait for a follower that asked to lose nothing, from its first byte on.
	Hold bool
}

// Process is a process as callers see it. It is a copy: changing it changes nothing.
type Process struct {
	ID        string
	Tag       string `json:",omitempty"`
	SandboxID string
	Argv      []string
	Dir       string
	User      string
	PID       int // inside the sandbox
	TTY       bool
	// Attached says that this start found a process with that id and started nothing.
	Attached bool
	// StartedAt and EndedAt are by the server's clock; EndedAt is zero while it runs.
	StartedAt time.Time
	EndedAt   time.Time
	End       End
	Code      int // where End is EndExited
	Signal    int // where it was a signal
	Error     string
	// Bytes counts its output in all; Dropped what the buffer no longer holds.
	Bytes      int64
	Dropped    int64
	UserTime   time.Duration
	SystemTime time.Duration
	MaxRSS     int64
	Leftover   int   // processes of its tree that live on
	OOMKills   int64 // in the sandbox while it ran, from the kernel
	// Refused is what the gateway refused to the sandbox while the process ran.
	Refused []Refusal `json:",omitempty"`
}

// Gap is output that the buffer no longer held.
type Gap struct{ From, To int64 }

// OutputOptions says which output to send.
type OutputOptions struct {
	Offset int64
	// Follow stays until the process has ended and its output is complete.
	Follow bool
	// Hold makes the process wait for this reader rather than drop.
	Hold bool
	// Limit stops after that many bytes; 0: no limit.
	Limit int64
}

// OutputSink takes output in order. An error ends the call and is returned by it. data is valid
// only during the call.
type OutputSink interface {
	Output(s Stream, offset int64, data []byte) error
	Gap(g Gap) error
}

// RunSink is an OutputSink that first learns what was started.
type RunSink interface {
	OutputSink
	Started(p Process) error
}

// RunOptions go with Run and Execute.
type RunOptions struct {
	IdempotencyKey string
	// Input is written to standard input, which is then closed. nil: ProcessSpec.Stdin decides.
	Input []byte
	// Hold makes the process wait for this reader rather than drop output.
	Hold bool
}

// Result is what Execute returns.
type Result struct {
	Process Process
	Stdout  []byte
	Stderr  []byte
	Gaps    []Gap
}
