package sandbox

import (
	"context"
	"log/slog"
	"net"
	"runtime"
	"time"

	"casemate.dev/internal/clock"
	"casemate.dev/internal/egress/proxy"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/rootfs"
	"casemate.dev/internal/store"
)

// These names let packages above speak of a sandbox without importing what lies below it.
type (
	// Profile is how much a sandbox's code may do inside its own walls.
	Profile = isolation.Profile
	// Limits bound what a sandbox may use; a zero field means the default.
	Limits = isolation.Limits
	// Applied is what isolation was really put in place.
	Applied = isolation.Applied
	// Usage is what a sandbox has used so far.
	Usage = isolation.Usage
	// Capability is one thing that a backend could do on this host.
	Capability = isolation.Capability
	// Change is one file that differs from what a sandbox started from.
	Change = rootfs.Change
	// Template is what a sandbox starts from.
	Template = rootfs.Template
	// FileDiff is one file that differs between two states.
	FileDiff = rootfs.FileDiff
	// FileState is what a state has at a path.
	FileState = rootfs.FileState
	// Conflict is a path that two merged states changed in ways that exclude each other.
	Conflict = rootfs.Conflict
	// Side is one of the two states that a merge joins.
	Side = rootfs.Side
	// Freed is a committed layer that was removed, or could be.
	Freed = rootfs.Freed
)

// The profiles.
const (
	Locked   = isolation.Locked
	Standard = isolation.Standard
)

// Config is what New needs.
type Config struct {
	DB      *store.DB
	Journal journal.Recorder
	// Backends holds the isolation backends by name.
	Backends map[string]isolation.Backend
	Roots    Roots
	// Clock defaults to the system's, Log to nowhere.
	Clock    clock.Clock
	Log      *slog.Logger
	Defaults Defaults
	// MaxSandboxes bounds the sandboxes that exist at once, and MaxPerPrincipal those of one principal;
	// 0: no bound.
	MaxSandboxes    int
	MaxPerPrincipal int
	// Gateway is the way out; nil: sandboxes with a network can't be made. NetworkSet returns the rules of a
	// named set; nil: there are none.
	Gateway    Gateway
	NetworkSet func(name string) ([]string, error)
	// Grants says what a sandbox with a network gets beside it; nil: nothing. It must not wait for the
	// sandbox, which is starting.
	Grants func(ctx context.Context, s Sandbox) Granted
	// Beyond says what becomes of a sandbox's connections to a name beyond what its rules say, for explaining; nil:
	// nothing.
	Beyond func(ctx context.Context, s Sandbox, name string, port uint16) NetworkBeyond
	// NetworkSets returns the names of the named sets, beside open; nil: there are none.
	NetworkSets func() []string
	// Resolver looks up names where rules are explained; nil: the host's.
	Resolver *net.Resolver
	// Proxy is the one that the gateway's connections leave through, for explaining; nil: none.
	Proxy *proxy.Proxy
	// Up is told, in a goroutine of its own, of every sandbox that has come to run: made, resumed, or adopted
	// from an earlier server. ctx ends when it is paused or stops. nil: nobody is told.
	Up func(ctx context.Context, s Sandbox)
	// HostPaths are directories of the server itself (data, keys, run): no workspace may lie in one, or
	// hold one.
	HostPaths []string
}

// Roots is what the Manager needs of package rootfs; rootfs.Store implements it.
type Roots interface {
	// Plan makes the writable layer of a sandbox and returns its root file system as a value.
	Plan(ctx context.Context, r rootfs.Request) (rootfs.Plan, error)
	// Release removes the writable layer. Idempotent.
	Release(ctx context.Context, id string) error
	// Sweep removes writable layers whose sandbox is not in keep and returns what it removed.
	Sweep(ctx context.Context, keep map[string]bool) ([]string, error)
	// Changes tells which files differ from the template, or from a workspace's source.
	Changes(ctx context.Context, id string, p rootfs.Plan, workspace string) ([]rootfs.Change, error)
	// Compare tells which files differ between two states.
	Compare(ctx context.Context, from, to rootfs.State) ([]rootfs.Change, error)
	// Settle returns a layer like one that was just committed, but without what tells when it was made.
	Settle(ctx context.Context, layer string, until time.Time) (rootfs.Layer, error)
	// Tree opens the files of a committed layer for reading.
	Tree(layer string) (*rootfs.Tree, error)
	// Diff tells which files differ between two states, and how.
	Diff(ctx context.Context, from, to rootfs.State, o rootfs.DiffOptions) ([]rootfs.FileDiff, error)
	// Digest reads all files of a committed layer and returns their digest.
	Digest(ctx context.Context, layer string) (rootfs.Digest, error)
	// Merge takes what a state changed since another one into a third, as a layer unless it is dry.
	Merge(ctx context.Context, r rootfs.MergeRequest) (rootfs.Merged, error)
	// Templates lists what a sandbox can start from.
	Templates(ctx context.Context) ([]rootfs.Template, error)
	// Unchanged reports whether it is certain that a sandbox's files are what a layer holds that was made of them.
	Unchanged(id, layer string) bool
	// Flush writes out what a sandbox's files hold in memory, without all only where it is much.
	Flush(id string, all bool) error
	// Commit keeps a sandbox's files, and those of its workspaces, as a layer. hold stops the sandbox and
	// release lets it go on.
	Commit(ctx context.Context, id string, p rootfs.Plan, hold, release func() error) (rootfs.Layer, error)
	// Collect removes layers that are neither in keep nor below one that is nor below a sandbox.
	Collect(ctx context.Context, keep map[string]bool, dry bool) ([]rootfs.Freed, error)
	// PutEnv keeps a sandbox's environment with its files, and Env and LayerEnv return what was kept with a
	// sandbox's, or a layer's.
	PutEnv(id string, env map[string]string) error
	Env(id string) (map[string]string, error)
	LayerEnv(layer string) (map[string]string, error)
	// Rest gives back the room that a sandbox's files were promised and don't use, until Rouse.
	Rest(id string) error
	Rouse(id string) error
	// Lend raises the disk limit of a sandbox a little until back is called, for a mount.
	Lend(id string) (back func() error, err error)
	// HasPoints returns an error where the calls below can't be made.
	HasPoints() error
	// MakePoint fixes what a sandbox's files are now, KeepPoint makes that the one point which is kept of it, PointOf
	// returns that, and DropPoint removes one that is not to be kept.
	MakePoint(ctx context.Context, id string) (rootfs.Point, error)
	KeepPoint(id string, p rootfs.Point) error
	PointOf(id string) (rootfs.Point, error)
	DropPoint(p rootfs.Point) error
	// AtPoint reports whether it is certain that a sandbox's files are those of a point.
	AtPoint(id string, p rootfs.Point) bool
	// Between tells which files differ between two points, with hashes of their contents as far as sums says.
	Between(ctx context.Context, id string, p rootfs.Plan, from, to rootfs.Point, sums rootfs.SumLimits) ([]rootfs.FileChange, error)
	// NewMemory returns an empty directory for a memory image of a sandbox, and KeepMemory makes what was put there its
	// image, which goes with its files: a commit keeps it, too. DropMemory removes it.
	NewMemory(id string) (dir string, err error)
	KeepMemory(id string) error
	DropMemory(id string) error
	// StageMemory returns an empty directory in the host's memory for an image of up to bytes, and AddMemory brings what was
	// put there into a committed layer, in whose place comes the one that it returns; limit is the sandbox's disk
	// limit. ResourceExhausted: there is no memory, or no room on the disk.
	StageMemory(bytes int64) (dir string, drop func() error, err error)
	AddMemory(ctx context.Context, layer, dir string, limit int64) (rootfs.Layer, error)
	// Memory and LayerMemory return the directory of the memory image that a sandbox, or a committed layer, has.
	// NotFound: it has none.
	Memory(id string) (dir string, err error)
	LayerMemory(layer string) (dir string, err error)
	// Durable reports whether a sandbox's files survive a restart of the server without a process in it.
	Durable() bool
}

// Defaults fill the zero fields of a Spec, and hold the layered timeouts. Each timeout has its own
// error, which names it. New fills zero fields with the values in the comments.
type Defaults struct {
	Template  string        // "host"
	Isolation string        // "namespace"
	Profile   Profile       // "": the first that the template allows
	Limits    Limits        // 1 GiB, all cores but 0.2, 512 pids, 4,096 open files, 2 GiB disk
	Calls     Calls         // none; as far as a backend can observe them
	Lifetime  time.Duration // 1 h; < 0: none
	Connect   time.Duration // 5 s: a guest says that it lives
	Execution time.Duration // 30 s: Execute without a timeout
	Stop      time.Duration // 10 s: a caller waits for the end of a sandbox
	Start     time.Duration // 60 s: a whole create, and a guest that lives answers a call that it could answer at once
	Retain    time.Duration // 24 h: idempotency keys are kept
	// Sync flushes what is waited for to disk before it is acknowledged. Whoever opens the journal
	// passes it on (journal.Options.Strict).
	Sync bool
}

func (d Defaults) filled() Defaults {
	d.Template = or(d.Template, "host")
	d.Isolation = or(d.Isolation, "namespace")
	d.Limits = DefaultLimits(d.Limits)
	d.Lifetime = or(d.Lifetime, time.Hour)
	d.Connect = or(d.Connect, 5*time.Second)
	d.Execution = or(d.Execution, 30*time.Second)
	d.Stop = or(d.Stop, 10*time.Second)
	d.Start = or(d.Start, 60*time.Second)
	d.Retain = or(d.Retain, 24*time.Hour)
	return d
}

// DefaultLimits replaces the zero fields of l by the limits of a sandbox that names none.
func DefaultLimits(l Limits) Limits {
	return fillLimits(l, Limits{
		MemoryBytes: 1 << 30,
		CPUs:        max(float64(runtime.NumCPU())-0.2, 0.5),
		Pids:        512,
		OpenFiles:   4096,
		DiskBytes:   2 << 30,
	})
}

// fillLimits replaces the zero fields of l by those of other.
func fillLimits(l, other Limits) Limits {
	l.MemoryBytes = or(l.MemoryBytes, other.MemoryBytes)
	l.CPUs = or(l.CPUs, other.CPUs)
	l.Pids = or(l.Pids, other.Pids)
	l.OpenFiles = or(l.OpenFiles, other.OpenFiles)
	l.DiskBytes = or(l.DiskBytes, other.DiskBytes)
	l.Inodes = or(l.Inodes, other.Inodes)
	return l
}

// or returns v, or other where v is zero.
func or[T comparable](v, other T) T {
	var zero T
	if v == zero {
		return other
	}
	return v
}
