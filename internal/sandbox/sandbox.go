// Package sandbox is the domain: what a sandbox is, which changes of state are legal, and the
// Manager, the only one that makes them.
//
// What belongs here: states, rules about them, timers, limits, idempotency, and what is recorded of
// each change. What does not: wire protocols, which packages api, e2b and mcp translate to it; who a
// caller is, which package policy finds out; the kernel, which it reaches only through an
// isolation.Backend; and files, only through package rootfs and the guest.
package sandbox

import (
	"fmt"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation"
)

// State is where a sandbox is in its life.
type State string

// The states. Legal transitions:
//
//	starting ──► running ──► stopping ──► stopped
//	    │          │ ▲ │                     ▲
//	    │          ▼ │ └────────(guest dies)─┤
//	    │         paused ─────► stopping     │
//	    └────────────────────────────────────┘ (start failed)
const (
	Starting State = "starting"
	Running  State = "running"
	Paused   State = "paused"
	Stopping State = "stopping"
	Stopped  State = "stopped"
)

// EndReason says why a sandbox stopped.
type EndReason string

// The reasons.
const (
	EndDeleted     EndReason = "deleted"       // asked for
	EndLifetime    EndReason = "lifetime"      // its lifetime ran out
	EndIdle        EndReason = "idle"          // nobody used it for its idle limit
	EndParent      EndReason = "parent_ended"  // its parent sandbox ended
	EndGuestDied   EndReason = "guest_died"    // its first process ended by itself
	EndStartFailed EndReason = "start_failed"  // it never ran
	EndLost        EndReason = "lost"          // found dead when the server started, or without what held it
	EndServerDown  EndReason = "server_closed" // the server was told to take its sandboxes along
	EndAttempt     EndReason = "attempt"       // it attempted a call that was to end it
)

// Principal is who asks.
type Principal struct {
	// ID is a key's id, "local" for the Unix socket, or "sandbox:<id>" for a sandbox calling back.
	ID string
	// Sandbox is set where a sandbox asks: what it creates becomes its child.
	Sandbox string
	// Admin may see and change every sandbox; others only those they own.
	Admin bool
	// Inside is set where the code of a sandbox asks for that sandbox, which it may as far as who sets it lets
	// it: ID is the owner's then, and what is recorded says who it was.
	Inside bool
}

// actor is who is recorded to have asked, about a sandbox.
func (p Principal) actor(sandboxID string) string {
	if p.Inside {
		return "sandbox:" + sandboxID
	}
	return p.ID
}

// Spec is what a caller asks for. Zero fields get the Manager's defaults.
type Spec struct {
	Template  string
	Isolation string
	Profile   isolation.Profile
	Limits    isolation.Limits
	Name      string // host name inside; default the id
	Labels    map[string]string
	Env       map[string]string
	User      string
	Dir       string
	// Lifetime ends the sandbox that long after its start; 0: the default, < 0: none.
	Lifetime time.Duration
	// Idle ends it after that long without activity (see docs/architecture.md); 0: no idle limit.
	Idle       time.Duration
	Workspaces []Workspace
	// Network is the way out. In a create, nil is the template's default, and where that has none, none; NoNetwork is
	// none even so. In a sandbox, nil is none.
	Network   *Network `json:",omitempty"`
	NoNetwork bool     `json:",omitempty"`
	// AllowMissing names isolation layers that may be absent.
	AllowMissing []string
	// Record says how much content the journal keeps; "": RecordContent.
	Record Recording `json:",omitempty"`
	// Calls says which system calls are observed. In a create, nil is the server's default.
	Calls *Calls `json:",omitempty"`
	// RestPaused makes the lifetime rest while the sandbox is paused, and begin anew when it is resumed.
	RestPaused bool
	// Commit is the id of the commit that the files began with; "": the template's.
	Commit string
	// PauseAtEnd makes the end of the lifetime pause the sandbox rather than end it; it includes
	// RestPaused.
	PauseAtEnd bool
	// PauseFilesOnly makes that pause one without memory, and PauseOnDisk, where the isolation has memory images, one
	// with its memory on disk.
	PauseFilesOnly bool
	PauseOnDisk    bool `json:",omitempty"`
	// FileChanges says how much is recorded of the files that processes change; "": nothing.
	FileChanges FileChanges `json:",omitempty"`
	// Contexts are started as soon as the sandbox runs, ahead of their first use; nil: those that the template
	// names. A create does not wait for them.
	Contexts []CodeContextSpec `json:"-"`
	// Service runs from the start on; nil: nothing does.
	Service *Service `json:",omitempty"`
	// Image is what the template's image says; commits and forks carry it along. nil: nothing.
	Image *Settings `json:",omitempty"`
	// Extra is what the interface that made the sandbox keeps with it. Nothing in this package reads it.
	Extra map[string]string

	// layer is Commit's, and from the commit itself where it need not be looked up.
	layer string
	from  *Commit
}

// rests reports whether the lifetime rests while the sandbox is paused.
func (s Spec) rests() bool { return s.RestPaused || s.PauseAtEnd }

// Workspace is a host directory that shows inside as copy-on-write.
type Workspace struct {
	Source string // host path
	Target string // path inside; default /workspace
}

// Sandbox is a sandbox as callers see it. It is a copy: changing it changes nothing.
type Sandbox struct {
	ID    string
	State State
	// Spec is what it has by now, defaults filled in, but for Env: values of the environment may be
	// secrets and are not kept.
	Spec      Spec
	Owner     string // principal id
	Parent    string // sandbox id, where a sandbox asked
	CreatedAt time.Time
	StartedAt time.Time
	EndedAt   time.Time
	// ExpiresAt is when its lifetime runs out; zero: never.
	ExpiresAt time.Time
	// FilesOnly says, of a paused sandbox, that it was paused without memory: it has no processes, and
	// Resume starts it anew on its files.
	FilesOnly bool
	// OnDisk says, of a paused sandbox, that its processes lie in a memory image with its files: none of them runs, and
	// Resume restores them.
	OnDisk bool
	// Head is the commit that its files were last committed to or checked out from; "": none.
	Head string
	// LastActive is the last activity that the idle limit counts from.
	LastActive time.Time
	EndReason  EndReason
	EndDetail  string
	Applied    isolation.Applied
	// Timings are how long the steps of its start took, for people who wonder.
	Timings map[string]time.Duration
}

// asleep reports whether nothing of the sandbox is on the host but its files.
func (s Sandbox) asleep() bool { return s.FilesOnly || s.OnDisk }

// TransitionError says that a sandbox's state does not allow a request.
type TransitionError struct {
	ID   string
	From State
	To   State // what the request would have needed; may be "" for "in use"
}

// Error implements error.
func (e *TransitionError) Error() string {
	if e.To == "" {
		return fmt.Sprintf("sandbox %s is %s", e.ID, e.From)
	}
	return fmt.Sprintf("sandbox %s is %s and can't become %s", e.ID, e.From, e.To)
}

// Unwrap gives it its kind.
func (e *TransitionError) Unwrap() error {
	return errs.New(errs.FailedPrecondition, "%s", e.Error())
}

// CanBecome reports whether s → to is a legal transition.
func (s State) CanBecome(to State) bool {
	switch s {
	case Starting:
		return to == Running || to == Stopping || to == Stopped
	case Running:
		return to == Paused || to == Stopping || to == Stopped
	case Paused:
		return to == Running || to == Stopping || to == Stopped
	case Stopping:
		return to == Stopped
	}
	return false
}
