package template

import (
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/sandbox"
)

// State is where a build is in its life.
type State string

// The states.
const (
	Queued   State = "queued" // it waits for its turn
	Building State = "building"
	Ready    State = "ready"
	Failed   State = "failed"
	Canceled State = "canceled"
)

// Over reports whether a build in this state changes no more.
func (s State) Over() bool { return s == Ready || s == Failed || s == Canceled }

// Request asks for a build.
type Request struct {
	// ID is the build's, with prefix id.Build; "": a new one.
	ID string
	// Name is the template's: a name that a commit's tag may have.
	Name string
	// Tags are further names of the result, each as Name:tag.
	Tags []string
	// TagsAlone leaves Name where it is: only Tags lead to the result.
	TagsAlone bool
	// Provision makes User with the home directory Dir before the first step, unless From has it.
	Provision bool
	// From is what Steps begin with: a template, a commit, a tag, or an image's reference.
	From  string
	Steps []Step
	// FromAuth is what the registry of the image From is shown, and no other; zero: what the server has for it. It is
	// kept nowhere.
	FromAuth Credentials
	// Dockerfile takes the place of From and Steps; nil: they hold.
	Dockerfile *Dockerfile
	// Context names the files that a Dockerfile's COPY takes from, as PutFiles returned it; "": there are none.
	Context string
	// User and Dir are those that Steps begin with, and that sandboxes have unless a step says otherwise;
	// "": root, in /, and those of From.
	User, Dir string
	// Start is a command line that every sandbox runs from its start on, and Ready one that exits with 0 as
	// soon as that can be used; "": none. ReadyWithin is how long it may take; 0: 30 s.
	Start, Ready string
	ReadyWithin  time.Duration
	// Serve takes Start from the image's ENTRYPOINT and CMD, and Ready from its HEALTHCHECK.
	Serve bool
	// Limits are those of sandboxes that start from the result and name none; zero fields: the server's.
	Limits sandbox.Limits
	// BuildLimits are those of the steps; zero fields: the server's.
	BuildLimits sandbox.Limits
	// Network is what steps may reach; nil: nothing.
	Network *sandbox.Network
	// Isolation is the backend; "": the server's default.
	Isolation string
	// Timeout ends the build; 0: 1 h. StepTimeout ends a step; 0: none of its own.
	Timeout, StepTimeout time.Duration
	// NoCache runs every step, whatever is kept.
	NoCache bool
	// Locked is what the result must be made of: a step takes the versions that it pins, and a build whose result is
	// another fails, and says what moved. nil: whatever there is.
	Locked *Lock
	// Epoch is the time that files of the result bear at most (SOURCE_DATE_EPOCH); zero: 1980-01-01.
	Epoch time.Time
}

// Credentials are a registry's. They do not print themselves.
type Credentials struct{ User, Password string }

// String implements fmt.Stringer.
func (Credentials) String() string { return "(credentials)" }

// GoString implements fmt.GoStringer.
func (c Credentials) GoString() string { return c.String() }

// MarshalText implements encoding.TextMarshaler.
func (c Credentials) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// Step is one step of a build. Type is one of
//
//	RUN      [command line, user]; user may be left out or ""
//	COPY     [source, destination, user, mode]; the last two may be left out or "", mode is octal. FilesHash
//	         names the archive (see Builder.PutFiles) whose files match source
//	ENV      [name, value, …]
//	WORKDIR  [path]
//	USER     [name]
type Step struct {
	Type      string   `json:"type"`
	Args      []string `json:"args"`
	FilesHash string   `json:"files_hash,omitempty"`
	// Force runs this step, and those after it, whatever is kept.
	Force bool `json:"force,omitempty"`
}

// Dockerfile is a build in Docker's language.
type Dockerfile struct {
	// Name is what errors call it; "": Dockerfile.
	Name string `json:"name"`
	Text string `json:"text"`
	// Target is the stage to build; "": the last.
	Target string `json:"target,omitempty"`
	// Args are the values of ARGs.
	Args map[string]string `json:"args,omitempty"`
}

// Build is a build as callers see it. It is a copy: changing it changes nothing.
type Build struct {
	ID    string   `json:"id"`
	Owner string   `json:"owner"` // principal id
	Name  string   `json:"name"`
	Tags  []string `json:"tags,omitempty"`
	State State    `json:"state"`
	// Reason says why it failed; nil: it did not.
	Reason *Reason `json:"reason,omitempty"`
	// Commit is what came of it; "": nothing yet.
	Commit    string    `json:"commit,omitempty"`
	CreatedAt time.Time `json:"created_at"`
	StartedAt time.Time `json:"started_at,omitzero"`
	EndedAt   time.Time `json:"ended_at,omitzero"`
	// From is what it begins with, Of how many steps it has and Done how many of them are done.
	From string `json:"from"`
	Of   int    `json:"of"`
	Done int    `json:"done"`
	// Steps are those that are done.
	Steps []StepResult `json:"steps,omitempty"`
	// Limits, Start and Ready are the request's.
	Limits sandbox.Limits `json:"limits"`
	Start  string         `json:"start,omitempty"`
	Ready  string         `json:"ready,omitempty"`
	// Image is the result's configuration, Env its environment, User and Dir its defaults.
	Image sandbox.Settings `json:"image"`
	Env   []string         `json:"env,omitempty"`
	User  string           `json:"user,omitempty"`
	Dir   string           `json:"dir,omitempty"`
	// Lock is what the result is made of; nil: it is not ready.
	Lock *Lock `json:"lock,omitempty"`
	// Bytes is what the steps that ran took beyond what was kept already.
	Bytes int64 `json:"bytes"`
}

// StepResult is a step that is done.
type StepResult struct {
	// Step is its number as a log entry has it.
	Step string `json:"step"`
	// Text is the step as it was written, At where: "Dockerfile:7".
	Text   string        `json:"text"`
	At     string        `json:"at,omitempty"`
	Cached bool          `json:"cached,omitempty"`
	Took   time.Duration `json:"took"`
	// Commit is the state after it; "": it changed no files. Digest is of what it changed in them.
	Commit string `json:"commit,omitempty"`
	Digest string `json:"digest,omitempty"`
	// Brings are the packages that a lock file pins for it.
	Brings []Package `json:"brings,omitempty"`
}

// Steps beside those that are numbered from 1.
const (
	StepBase     = "base"     // what the build begins with
	StepFinalize = "finalize" // what follows the last step: the service, the lock
)

// Reason says why a build failed.
type Reason struct {
	Message string `json:"message"`
	// Hint says what to do; "": nothing to say.
	Hint string `json:"hint,omitempty"`
	// Step is where: "1", "2" …, StepBase or StepFinalize.
	Step string `json:"step"`
	// At is the line: "Dockerfile:7".
	At string `json:"at,omitempty"`
	// Command is the step's text.
	Command string `json:"command,omitempty"`
	// Kind is the error's.
	Kind errs.Kind `json:"kind"`
	// ExitCode is a command's; -1: none was seen.
	ExitCode int `json:"exit_code"`
}

// Level is how much an entry of a log matters.
type Level string

// The levels.
const (
	Debug   Level = "debug"
	Info    Level = "info"
	Warning Level = "warn"
	Error   Level = "error"
)

// LogEntry is one line of a build's log.
type LogEntry struct {
	// Offset counts the entries of a build, from 0.
	Offset int       `json:"offset"`
	Time   time.Time `json:"time"`
	Level  Level     `json:"level"`
	// Step is the step that it is about: "1", "2" …, StepBase or StepFinalize.
	Step string `json:"step"`
	// Stream is "stdout" or "stderr" for a line that a command printed; "" for one of the builder's.
	Stream string `json:"stream,omitempty"`
	Text   string `json:"text"`
}
