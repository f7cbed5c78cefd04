// Package isolation is the contract between the domain and the backends that keep sandboxes apart.
//
// A Backend starts an Instance from a Spec. Package isolation/conformance is the suite that every
// backend passes. What does not belong here: anything that knows HTTP, SQL or a sandbox's lifetime;
// those are package sandbox and above.
//
// # Lifecycle
//
//	Start ──► Instance (no identity) ──► guestwire claim ──► in use ──► Destroy
//	                 ▲                                          │
//	              Adopt (after a server restart) ◄──── Record ──┘
//
// # Failing closed
//
// A layer that the profile requires and the host lacks stops Start with errs.Unsupported, whose text
// names the layer and whose hint names the remedy. Applied tells what was put in place.
package isolation

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/netip"
	"os"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/rootfs"
)

// ErrDeviceGone says that an instance's network device is not the one that was made: somebody inside had rights over it
// that no sandbox has.
var ErrDeviceGone = errors.New("the network device is not the one that was made")

// Profile is how much a sandbox's code may do inside its own walls.
type Profile string

// The profiles.
const (
	// Locked is for code that nobody read: one unprivileged user, no capabilities, no_new_privs.
	Locked Profile = "locked"
	// Standard is for agents that install packages: root inside its own uid range, a short list of
	// capabilities, sudo works.
	Standard Profile = "standard"
)

// Root is the planned root file system of an instance.
type Root = rootfs.Plan

// Limits bound what an instance may use. Zero means "the default" nowhere below the Manager: every
// field is set.
type Limits struct {
	MemoryBytes int64   `json:"memory_bytes"`
	CPUs        float64 `json:"cpus"` // shares of one core's time, as 1.5; more than the host has is cut
	Pids        int     `json:"pids"`
	OpenFiles   int     `json:"open_files"`
	DiskBytes   int64   `json:"disk_bytes"`
	Inodes      int64   `json:"inodes"` // 0: limited by DiskBytes where the store can't count files
}

// Spec is what Start needs. It carries no identity: names, environment and labels come with the claim.
type Spec struct {
	ID      string  `json:"id"`
	Profile Profile `json:"profile"`
	Root    Root    `json:"root"`
	Limits  Limits  `json:"limits"`
	// Network gives the instance a device that leads out; nil: it has none, and no way to get one.
	Network *Network `json:"network,omitempty"`
	// Files are shown read-only in the root, each in the place of what the layers hold there.
	Files []File `json:"files,omitempty"`
	// AllowMissing names layers that may be absent. Each one that is shows in Applied.Missing.
	AllowMissing []string `json:"allow_missing,omitempty"`
	// Calls says which system calls are observed.
	Calls Calls `json:"calls,omitzero"`
	// Runtime is set by a backend that puts a kernel of its own into the cells of another one; callers
	// leave it nil.
	Runtime *Runtime `json:"-"`
}

// Runtime is a program that runs a sandbox with a kernel of its own, inside the walls of a backend that makes
// cells (see Cell). It is started with the arguments given, in the cell's own ids, namespaces and groups, and
// finds things where package guestwire's Runtime constants say.
type Runtime struct {
	Program string   // on the host; must be root's alone to write
	Args    []string // without the program's name
	// Reach, if not 0, is a descriptor that it has open as another name of its standard error, so that the kernel has made
	// room for as many before the program has threads.
	Reach int
	// Gate is a path in the cell's own file system that its processes open to read before any of them looks at the root. A pipe there
	// holds them up, so that a cell may start it before it is known what for. "": it can't be started ahead.
	Gate string
	// Files are written into the cell's own file system, which nothing in the sandbox sees, by absolute path.
	Files map[string][]byte
	// Capabilities is its bounding set, in the cell's user namespace.
	Capabilities []uint8
	// GroupNamespaces says that its kernel has control group namespaces (version 2), with which the guest keeps each
	// process in its group.
	GroupNamespaces bool
	// Inside are the limits of the processes inside, which the guest there holds. Spec.Limits are the cell's, and
	// leave room for the runtime itself.
	Inside Limits
	// Device is the path of a device on the host that its kernel is driven with, which shows in the cell as
	// guestwire.RuntimeDevice; "": it needs none.
	Device string
	// Image is a host directory with a memory image, which shows in the cell as guestwire.RuntimeImage: the program
	// restores the sandbox from it and ends. "": it starts one.
	Image string
	// Walls are, where there is an image, those that its guest has put up.
	Walls ImageWalls
	// Trace is the path of a socket in the cell's own file system that the program connects to, and by which its kernel
	// tells of the calls that Spec.Calls names (see guestwire.Runtime.Trace); "": it tells of none.
	Trace string
	// ExecMark is the last argument of what the guest inside executes for the server; see guestwire.Walls.ExecMark.
	ExecMark uint64
}

// ImageWalls are the walls of the processes in a memory image, as Applied has them.
type ImageWalls struct {
	Capabilities []string `json:"capabilities"`
	NoNewPrivs   bool     `json:"no_new_privs"`
}

// HostProcess is a process of a cell as the host's kernel shows it.
type HostProcess struct {
	Name    string `json:"name"` // the first word of its command line
	PID     int    `json:"pid"`
	UID     uint32 `json:"uid"` // effective, of the host
	GID     uint32 `json:"gid"`
	Seccomp int    `json:"seccomp"` // mode; 2 is a filter
}

// Cell is an instance that holds a runtime.
type Cell interface {
	Instance
	// DialCell connects to a socket in the cell's own file system, by its absolute path there.
	DialCell(ctx context.Context, path string) (net.Conn, error)
	// OpenCell opens a file there, to read and write. The caller closes it.
	OpenCell(path string) (*os.File, error)
	// HostProcesses lists the cell's processes but its first.
	HostProcesses() ([]HostProcess, error)
}

// Network is a TAP device in the instance's network namespace, the only one there beside loopback. What
// it leads to is whoever holds Instance.Device.
type Network struct {
	Device string `json:"device"` // its name inside
	MTU    int    `json:"mtu"`
	// MAC is the instance's end of the link, PeerMAC the other one.
	MAC     net.HardwareAddr `json:"mac"`
	PeerMAC net.HardwareAddr `json:"peer_mac"`
	// Addrs are the instance's addresses, Gateways the next hops of its default routes.
	Addrs    []netip.Prefix `json:"addrs"`
	Gateways []netip.Addr   `json:"gateways"`
}

// File is a small file that an instance sees and can't change. Its content must be fit for everybody inside.
type File struct {
	Path    string `json:"path"` // absolute and clean
	Content []byte `json:"content"`
}

// MemoryImages is the name of the Capability to save and restore sandboxes with their processes.
const MemoryImages = "memory-images"

// NoMemoryImages is what backends without memory images answer.
func NoMemoryImages(backend string) error {
	return errs.New(errs.Unsupported, "isolation %s has no memory images: a sandbox's processes can't be saved", backend).
		WithHint("use isolation gvisor, or keep the files only")
}

// Capability is one thing that a backend could do on this host.
type Capability struct {
	Name string `json:"name"`
	OK   bool   `json:"ok"`
	// Required says that a profile can't start without it.
	Required bool   `json:"required"`
	Detail   string `json:"detail,omitempty"` // version, mechanism or why not
	Remedy   string `json:"remedy,omitempty"` // what to do where OK is false
}

// Applied is what was really put in place for one instance. Nothing in it is a plan or a wish.
//
//casemate:facts server sandbox.started
type Applied struct {
	Backend string  `json:"backend"`
	Profile Profile `json:"profile"`
	// HostUID is the first host uid of the instance's range and UIDCount its length.
	HostUID        uint32   `json:"host_uid"`
	UIDCount       uint32   `json:"uid_count"`
	Namespaces     []string `json:"namespaces"`
	Capabilities   []string `json:"capabilities"` // bounding set of every process, without "CAP_"
	NoNewPrivs     bool     `json:"no_new_privs"`
	Seccomp        string   `json:"seccomp"`      // "allow-list, N calls" or ""
	LandlockABI    int      `json:"landlock_abi"` // 0: not applied
	CgroupVersion  int      `json:"cgroup_version"`
	Limits         Limits   `json:"limits"`
	Disk           string   `json:"disk"`            // the mechanism, as in rootfs.DiskLimit
	Network        string   `json:"network"`         // "none" or the gateway's device
	GuestSeparated bool     `json:"guest_separated"` // PID 1 belongs to the outer user namespace
	// Calls says, for "exec", "connect", "open" and "attempts", whether they are seen: "recorded", "off", or why
	// not. "on_attempt" is the reaction.
	Calls map[string]string `json:"calls,omitempty"`
	// Missing names the layers that the profile wants and this instance lacks.
	Missing []string `json:"missing,omitempty"`
	// Runtime is the kernel of its own that runs the sandbox, with version and platform; empty: the host's runs it.
	Runtime string `json:"runtime,omitempty"`
	// HostProcesses are the runtime's, as the host's kernel shows them once it has started.
	HostProcesses []HostProcess `json:"host_processes,omitempty"`
	// Fields says who observed each group: "kernel" (read back), "server", "guest".
	Observed map[string]string `json:"observed,omitempty"`
}

// Usage is what an instance has used so far, from the kernel's accounting.
type Usage struct {
	CPU            time.Duration
	MemoryBytes    int64
	MemoryPeak     int64
	CacheBytes     int64 // of MemoryBytes, what holds files and can be given back
	Pids           int
	DiskBytes      int64
	OOMKills       int64
	ObservedByHost bool
}

// Exit says how an instance came to its end.
type Exit struct {
	// Reason is "destroyed", "guest_exited", "guest_killed", or "attempt" where a Reaction ended it.
	Reason string
	Detail string
}

// Scope is the control group of one process and its descendants. The files go to the guest with
// the start of the process; the guest places the process and kills its whole tree through them.
type Scope interface {
	// Files returns the descriptors to pass, in the order that Layout names. Each is a single file,
	// never a directory. They stay owned by the Scope.
	Files() []*os.File
	// Layout names the files' roles: "tasks" (v1, write), "procs" (v1, read), "freezer" (v1, write),
	// "kill" (v2, write), "dir" (v2, a detached mount of the one group). "procs" must be opened anew
	// for every look, by /proc/self/fd/N: v1 caches the list per open file for a second.
	Layout() []string
	// Empty reports whether no process is left in the scope.
	Empty() (bool, error)
	// Kill ends everything in the scope from the host's side. Idempotent.
	Kill(ctx context.Context) error
	// Recycle is Close for a process that ended by itself and left nothing alive, and whose guest will not
	// touch the files any more: the group may then serve another process. It takes no time, and reports
	// false where it can't be; then Close is due. That nothing lives in it is the caller's word: no process
	// can get into an empty group but by the guest.
	Recycle() bool
	// Close closes the files, kills what is left and removes the group. Idempotent.
	Close() error
}

// Instance is one running sandbox as its backend sees it. Methods are safe for concurrent use.
type Instance interface {
	// ID is the Spec's.
	ID() string
	// Record returns what Adopt needs after the server was restarted. Stable for the instance's life.
	Record() json.RawMessage
	// Applied returns what was put in place. Never blocks.
	Applied() Applied
	// Dial opens a new connection to the guest, which speaks package guestwire. The caller closes it.
	// The returned connection is a *net.UnixConn where the backend can pass files.
	Dial(ctx context.Context) (net.Conn, error)
	// Device opens the other end of the instance's network device: whole frames, each behind a struct
	// virtio_net_hdr, in non-blocking mode. One at a time can be open; the device outlives its closing. The
	// caller closes it. Kinds: FailedPrecondition (the instance has none, or it is no longer the one that
	// was made: ErrDeviceGone), Unavailable (it is open elsewhere).
	Device(ctx context.Context) (*os.File, error)
	// NewScope makes the control group for one process. Backends without one return a Scope with no
	// files; the guest then kills by session and parentage.
	NewScope(ctx context.Context, processID string) (Scope, error)
	// OpenScope returns the scope of a process that was started before a server restart.
	OpenScope(processID string) (Scope, error)
	// Freeze stops every process of the payload, not the guest, unless a runtime runs the guest as well. Idempotent.
	Freeze(ctx context.Context) error
	// Thaw lets them go on. Idempotent.
	Thaw(ctx context.Context) error
	// Checkpoint saves the processes with their memory as a memory image in dir, an empty directory of the host that
	// nobody but root can enter. The guest closes all its connections for it (guestwire.MethodPrepare). Afterwards
	// the instance is frozen, so that its files stay those that belong to the image, until Thaw; on error it is as it
	// was before. What the image takes counts on the disk that dir lies on. It does not promise to survive a power
	// loss before its files are flushed. Kinds: Unsupported, ResourceExhausted (no room), FailedPrecondition (the
	// guest can't close its connections). It returns for how long the processes have stood still by then.
	Checkpoint(ctx context.Context, dir string) (stood time.Duration, err error)
	// Usage reads the kernel's accounting.
	Usage(ctx context.Context) (Usage, error)
	// Update changes limits of the running instance.
	Update(ctx context.Context, l Limits) error
	// Done is closed when the instance's first process has ended for whatever reason.
	Done() <-chan struct{}
	// Exit tells how, after Done is closed.
	Exit() Exit
	// Destroy ends every process and releases uid range, cgroups, mounts and run directory. It does
	// not touch the Plan's directories. Idempotent; returns when nothing is left, within ctx.
	Destroy(ctx context.Context) error
}

// Backend makes instances. Methods are safe for concurrent use.
type Backend interface {
	// Name is "namespace", "gvisor", "wasm" or "fake".
	Name() string
	// Capabilities probes the host; conclusive answers are cached.
	Capabilities(ctx context.Context) []Capability
	// Start builds an instance and returns when its guest answers. On error nothing is left behind.
	// Kinds: Unsupported (a required layer is missing), ResourceExhausted (uid ranges), Internal.
	Start(ctx context.Context, s Spec) (Instance, error)
	// Restore builds an instance whose processes are those of a memory image, which Checkpoint made in dir, on files that
	// are as they were then. It returns when its guest answers, who is to be told (guestwire.MethodRestored). The image
	// stays as it is, and may be restored many times, also side by side, each time with another id; Profile,
	// whether there is a network, and OpenFiles are the image's. Nothing in dir is needed once it returns. On error
	// nothing is left behind. Kinds: those of Start, Unsupported (the backend has no memory images),
	// FailedPrecondition (the image does not fit this server or the spec; the text says why), NotFound.
	Restore(ctx context.Context, s Spec, dir string) (Instance, error)
	// Adopt takes up an instance that an earlier server started. errs.NotFound means that it is gone.
	Adopt(ctx context.Context, record json.RawMessage) (Instance, error)
	// Sweep removes everything this server's backend left behind whose sandbox id is not in keep:
	// processes, cgroups, mounts, run directories, uid claims. It returns what it removed, one line each.
	Sweep(ctx context.Context, keep map[string]bool) ([]string, error)
	// Close releases what the backend itself holds. Running instances go on.
	Close() error
}
