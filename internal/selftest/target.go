package selftest

import (
	"context"
	"time"
)

// Command is one command to run in a sandbox.
type Command struct {
	Argv    []string
	Env     map[string]string
	Dir     string
	User    string // "" is the sandbox's default
	Input   string
	TTY     bool
	Timeout time.Duration // of the sandbox's own; 0 is none
}

// Result is what came of a Command.
type Result struct {
	// End is the end reason as the API names it: exited, signaled, timed_out, oom_killed, …
	End    string
	Code   int
	Signal int
	// Output is what it printed, as far as it was kept; Bytes counts all of it.
	Output string
	Bytes  int64
	Took   time.Duration
}

// Limits bound a sandbox that the battery makes.
type Limits struct {
	MemoryBytes int64
	CPUs        float64
	Pids        int
	OpenFiles   int
	DiskBytes   int64
}

// Spec is the sandbox that the battery asks for.
type Spec struct {
	Isolation string // "" is the server's default
	Profile   string
	Limits    Limits
	Env       map[string]string
	// Network are the rules of its network; nil is no network, and an empty list one that leads nowhere.
	Network []string
}

// Sandbox is one sandbox under attack. Methods are safe for concurrent use.
type Sandbox interface {
	// ID names it.
	ID() string
	// Run runs a command to its end. An error means that there is no result, not that the command
	// failed.
	Run(ctx context.Context, c Command) (Result, error)
	// List returns the names in a directory, through the file API.
	List(ctx context.Context, path string) ([]string, error)
	// Read returns a file, through the file API.
	Read(ctx context.Context, path string) ([]byte, error)
	// CPU returns the processor time that it has taken so far, as the host counts it.
	CPU(ctx context.Context) (time.Duration, error)
	// Ended tells how it came to its end, as its server knows it; "" while it lives.
	Ended(ctx context.Context) (string, error)
	// Delete ends it. Idempotent.
	Delete(ctx context.Context) error
}

// Target makes sandboxes to attack.
type Target interface {
	// Create makes one.
	Create(ctx context.Context, s Spec) (Sandbox, error)
	// Local reports whether the sandboxes run on this machine, so that what the battery sees of its
	// own process can be compared with what it sees inside.
	Local() bool
}
