package sandbox

import (
	"context"
	"io"
	"net"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/journal"
)

// Manager owns every sandbox of a server. It is the only one that changes a sandbox's state, and
// every change passes through the journal. Its methods are safe for concurrent use.
type Manager struct{ cfg Config }

// RecoverReport tells what Recover did.
type RecoverReport struct {
	Adopted   []string // sandboxes taken up again
	Lost      []string // sandboxes found dead
	Processes int      // processes followed again
	Removed   []string // leftovers, one line each
	Took      time.Duration
}

// CreateOptions go with a create.
type CreateOptions struct {
	// ID is the sandbox's id, or "" for a new one.
	ID string
	// IdempotencyKey makes a repeated create give the same answer.
	IdempotencyKey string
}

// Query selects sandboxes.
type Query struct {
	// Labels must each be there with this value.
	Labels map[string]string
	// States default to every state but stopped.
	States []State
	// Parent, where set, selects the children of one sandbox.
	Parent string
	// PageSize defaults to 100, at most 1000.
	PageSize  int
	PageToken string
}

// Update changes a sandbox; nil fields stay as they are.
type Update struct {
	Labels *map[string]string
	// Lifetime counts from now on; ≤ 0: no end.
	Lifetime *time.Duration
	Idle     *time.Duration
	// Limits' zero fields stay as they are.
	Limits *Limits
}

// RunOptions go with Run and Execute.
type RunOptions struct {
	IdempotencyKey string
	// Input is written to standard input, which is then closed. nil: ProcessSpec.Stdin decides.
	Input []byte
	// Hold makes the process wait for this reader rather than drop output.
	Hold bool
}

var errUnbuilt = errs.New(errs.Unsupported, "not built yet")

// New returns a Manager. Call Recover before anything else.
func New(cfg Config) (*Manager, error) { return &Manager{cfg: cfg}, nil }

// Recover takes up what an earlier server left: it adopts running sandboxes, marks the others as
// lost, and removes leftovers.
func (m *Manager) Recover(ctx context.Context) (RecoverReport, error) {
	return RecoverReport{}, errUnbuilt
}

// Close stops following sandboxes; with stopSandboxes it ends them too, else they go on.
func (m *Manager) Close(ctx context.Context, stopSandboxes bool) error { return errUnbuilt }

// Create starts a sandbox and returns when its guest answers.
func (m *Manager) Create(ctx context.Context, p Principal, s Spec, o CreateOptions) (Sandbox, error) {
	return Sandbox{}, errUnbuilt
}

// Get returns a sandbox by its id, a unique prefix of it of at least 4 characters, or its name.
func (m *Manager) Get(ctx context.Context, p Principal, id string) (Sandbox, error) {
	return Sandbox{}, errUnbuilt
}

// List returns a page of sandboxes, the newest first, and the token of the next page.
func (m *Manager) List(ctx context.Context, p Principal, q Query) ([]Sandbox, string, error) {
	return nil, "", errUnbuilt
}

// Update changes labels, lifetime, idle limit or limits.
func (m *Manager) Update(ctx context.Context, p Principal, id string, u Update) (Sandbox, error) {
	return Sandbox{}, errUnbuilt
}

// Delete ends a sandbox with all its processes and files at once. Idempotent.
func (m *Manager) Delete(ctx context.Context, p Principal, id string) (Sandbox, error) {
	return Sandbox{}, errUnbuilt
}

// Pause freezes every process; memory is kept. Idempotent.
func (m *Manager) Pause(ctx context.Context, p Principal, id string) (Sandbox, error) {
	return Sandbox{}, errUnbuilt
}

// Resume lets them go on. Idempotent.
func (m *Manager) Resume(ctx context.Context, p Principal, id string) (Sandbox, error) {
	return Sandbox{}, errUnbuilt
}

// Usage reads the kernel's accounting.
func (m *Manager) Usage(ctx context.Context, p Principal, id string) (Usage, error) {
	return Usage{}, errUnbuilt
}

// Changes tells which files differ from the template, or with workspace, the target of one, from
// that workspace's source.
func (m *Manager) Changes(ctx context.Context, p Principal, id, workspace string) ([]Change, error) {
	return nil, errUnbuilt
}

// StartProcess starts a process and returns at once.
func (m *Manager) StartProcess(ctx context.Context, p Principal, id string, s ProcessSpec, key string) (Process, error) {
	return Process{}, errUnbuilt
}

// Run starts a process, sends its output to sink and returns it once it has ended. If ctx ends or
// sink fails before that, the process goes on.
func (m *Manager) Run(ctx context.Context, p Principal, id string, s ProcessSpec, o RunOptions, sink RunSink) (Process, error) {
	return Process{}, errUnbuilt
}

// Execute starts a process, waits for its end and returns its output as far as the buffer holds it.
func (m *Manager) Execute(ctx context.Context, p Principal, id string, s ProcessSpec, o RunOptions) (Result, error) {
	return Result{}, errUnbuilt
}

// GetProcess returns a process, also after its sandbox has ended.
func (m *Manager) GetProcess(ctx context.Context, p Principal, id, process string) (Process, error) {
	return Process{}, errUnbuilt
}

// ListProcesses returns the processes of a sandbox, the oldest first.
func (m *Manager) ListProcesses(ctx context.Context, p Principal, id string) ([]Process, error) {
	return nil, errUnbuilt
}

// WaitProcess returns a process once it has ended, or as it is when ctx ends.
func (m *Manager) WaitProcess(ctx context.Context, p Principal, id, process string) (Process, error) {
	return Process{}, errUnbuilt
}

// Output sends what a process printed to sink.
func (m *Manager) Output(ctx context.Context, p Principal, id, process string, o OutputOptions, sink OutputSink) (Process, error) {
	return Process{}, errUnbuilt
}

// Input writes to a process's standard input and returns how many bytes it took in all. offset is
// how many the caller knows to be taken, or -1.
func (m *Manager) Input(ctx context.Context, p Principal, id, process string, offset int64, data []byte, closeAfter bool) (int64, error) {
	return 0, errUnbuilt
}

// Signal sends a signal to a process, or with tree to everything that descends from it.
func (m *Manager) Signal(ctx context.Context, p Principal, id, process string, sig int, tree bool) error {
	return errUnbuilt
}

// Resize sets the size of a process's terminal.
func (m *Manager) Resize(ctx context.Context, p Principal, id, process string, rows, cols uint16) error {
	return errUnbuilt
}

// Files gives access to a sandbox's files.
func (m *Manager) Files(ctx context.Context, p Principal, id string) (*Files, error) {
	return nil, errUnbuilt
}

// DialPort connects to a TCP port inside a sandbox. The caller closes the connection.
func (m *Manager) DialPort(ctx context.Context, p Principal, id string, port int) (net.Conn, error) {
	return nil, errUnbuilt
}

// Ports returns the TCP ports that something inside listens on.
func (m *Manager) Ports(ctx context.Context, p Principal, id string) ([]int, error) {
	return nil, errUnbuilt
}

// Events returns a sandbox's events with a counter greater than after, oldest first.
func (m *Manager) Events(ctx context.Context, p Principal, id string, after uint64, limit int) ([]journal.Event, error) {
	return nil, errUnbuilt
}

// FollowEvents sends a sandbox's events from after on until ctx ends or send fails.
func (m *Manager) FollowEvents(ctx context.Context, p Principal, id string, after uint64, send func(journal.Event) error) error {
	return errUnbuilt
}

// Capabilities tells what each backend could do on this host.
func (m *Manager) Capabilities(ctx context.Context) map[string][]Capability { return nil }

// Templates lists what a sandbox can start from.
func (m *Manager) Templates(ctx context.Context) ([]Template, error) { return nil, errUnbuilt }

// FileInfo describes a file.
type FileInfo = guestwire.FileInfo

// WatchEvent is one change below a watched directory.
type WatchEvent = guestwire.WatchEvent

// The requests of Files, as package guestwire documents them.
type (
	PathRequest    = guestwire.PathRequest
	Asker          = guestwire.Asker
	ListRequest    = guestwire.ListRequest
	ReadRequest    = guestwire.ReadRequest
	WriteRequest   = guestwire.WriteRequest
	MakeDirRequest = guestwire.MakeDirRequest
	MoveRequest    = guestwire.MoveRequest
	RemoveRequest  = guestwire.RemoveRequest
	ChmodRequest   = guestwire.ChmodRequest
	WatchRequest   = guestwire.WatchRequest
)

// Files works on one sandbox's files, as the asking user and inside its walls. Changes are recorded.
type Files struct{}

// Stat describes a file.
func (f *Files) Stat(ctx context.Context, r PathRequest) (FileInfo, error) {
	return FileInfo{}, errUnbuilt
}

// List calls each for every entry below a directory.
func (f *Files) List(ctx context.Context, r ListRequest, each func(FileInfo) error) error {
	return errUnbuilt
}

// Read calls head with the file's description, then copies its bytes to w.
func (f *Files) Read(ctx context.Context, r ReadRequest, head func(FileInfo) error, w io.Writer) (FileInfo, error) {
	return FileInfo{}, errUnbuilt
}

// Write replaces or changes a file with what r holds.
func (f *Files) Write(ctx context.Context, req WriteRequest, r io.Reader) (FileInfo, error) {
	return FileInfo{}, errUnbuilt
}

// MakeDir makes a directory.
func (f *Files) MakeDir(ctx context.Context, r MakeDirRequest) (FileInfo, error) {
	return FileInfo{}, errUnbuilt
}

// Move renames a file.
func (f *Files) Move(ctx context.Context, r MoveRequest) (FileInfo, error) {
	return FileInfo{}, errUnbuilt
}

// Remove removes a file, or with Recursive a tree.
func (f *Files) Remove(ctx context.Context, r RemoveRequest) error { return errUnbuilt }

// Chmod changes a file's mode and owner.
func (f *Files) Chmod(ctx context.Context, r ChmodRequest) (FileInfo, error) {
	return FileInfo{}, errUnbuilt
}

// Watch calls ready once the watch stands, then each for every change, until ctx ends or each fails.
func (f *Files) Watch(ctx context.Context, r WatchRequest, ready func() error, each func(WatchEvent) error) error {
	return errUnbuilt
}
