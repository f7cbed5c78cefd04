package guestwire

// MethodLaunch is the one call on the control socket: Launch (+ files) → LaunchReply, after which
// the socket is closed and the guest answers on its listening socket. A guest whose control socket
// closes before it has answered ends: nobody knows of it.
const MethodLaunch Method = "launch"

// MethodAhead may come before MethodLaunch where a runtime runs the root: Launch (+ files) → nothing. The runtime is started with what
// the launch says of it alone (Runtime, Join, Rlimits, Walls.CPUs), and stands still at its gate until the launch itself, which must say
// the same.
const MethodAhead Method = "ahead"

// The descriptors that a guest is started with, beside 0, 1 and 2.
const (
	LaunchControlFD = 3 // socket on which MethodLaunch arrives
	LaunchListenFD  = 4 // listening socket for every other method
	LaunchDevFD     = 5 // detached mount for /dev: a read-only tree
	LaunchSysFD     = 6 // the same for /sys
)

// LaunchMapped is the one byte that comes on the control socket before MethodLaunch: the server has written
// the id maps of the guest's user namespace.
const LaunchMapped byte = 'm'

// Prepared stands for the index of a mount that the guest has prepared itself: Launch.Sys for what came
// as LaunchSysFD, Mount.File for an empty read-only directory.
const Prepared = -1

// Launch tells a guest, which sits in new namespaces and has left the host's root, what to build
// around itself. It is data only: every mount is a descriptor that the server made and that travels
// with the call, so that the guest resolves no path of the host.
type Launch struct {
	// Profile is an isolation.Profile, for messages.
	Profile string `json:"profile"`
	// Root is the root file system. Suid says that setuid files and file capabilities have effect there.
	Root Overlay `json:"root"`
	Suid bool    `json:"suid,omitempty"`
	// Mounts are placed into the root in order, before /proc, /sys and /dev, which so can't be hidden.
	Mounts []Mount `json:"mounts,omitempty"`
	// Files are shown read-only, each in the place of what the layers hold there.
	Files []LaunchFile `json:"files,omitempty"`
	// Sys indexes the file that is mounted on /sys, a read-only tree, or is Prepared.
	Sys int `json:"sys"`
	// ShmBytes is the size of /dev/shm.
	ShmBytes int64 `json:"shm_bytes"`
	// Join indexes the control group files for the spawner.
	Join []int `json:"join,omitempty"`
	// Walls hold every process of the payload. Their filters come as files, which Filters indexes in
	// the order Seccomp, SeccompExec: as text they would be most of the message.
	Walls   Walls `json:"walls"`
	Filters []int `json:"filters,omitempty"`
	// Listener indexes a socket, where Walls.Listen is set: the filter's listener is sent there, and the guest keeps
	// none. What holds a listener may let refused calls through. Where Runtime.Trace is set, the connection that
	// came there is sent.
	Listener int `json:"listener,omitempty"`
	// Rlimits are the guest's own.
	Rlimits []Rlimit `json:"rlimits,omitempty"`
	// Bounds are limits that the guest holds its processes to, because the kernel below does not. Nil: none.
	Bounds *Bounds `json:"bounds,omitempty"`
	// Hostname stands until the claim gives another one.
	Hostname string `json:"hostname"`
	// Env, User and Dir are the template's, lowest in precedence.
	Env  map[string]string `json:"env,omitempty"`
	User string            `json:"user"`
	Dir  string            `json:"dir"`
	// Runtime runs the root, in place of the guest itself, which only keeps the cell around it.
	Runtime *Runtime `json:"runtime,omitempty"`
}

// Bounds are limits on all processes of a sandbox together.
type Bounds struct {
	MemoryBytes int64 `json:"memory_bytes"`
	Pids        int   `json:"pids"`
}

// Runtime is a program that runs a sandbox inside the namespaces with a kernel of its own. It finds the
// root at RuntimeRoot, and the guest's program, which is to be the first process there, at RuntimeGuest.
type Runtime struct {
	// Program indexes the detached mount of the program, a single file, and Guest that of the guest's.
	Program int `json:"program"`
	Guest   int `json:"guest"`
	// Args are the program's, without its name.
	Args []string `json:"args"`
	// Reach, if not 0, is a descriptor that it has open as another name of its standard error.
	Reach int `json:"reach,omitempty"`
	// Gate, where MethodAhead starts it, is the path of a pipe that its processes open to read, and stand still there until it is
	// opened for writing.
	Gate string `json:"gate,omitempty"`
	// Files are written before it starts, by absolute path; directories on the way are made.
	Files map[string][]byte `json:"files,omitempty"`
	// Scope indexes the files of the control group that the program is born in, and Layout has their roles.
	Scope  []int    `json:"scope,omitempty"`
	Layout []string `json:"layout,omitempty"`
	// Capabilities is the program's bounding set, in the cell's own user namespace.
	Capabilities []uint8 `json:"capabilities"`
	// Image indexes the detached mount of a directory with a memory image, from which the program restores the sandbox:
	// the guest inside is launched already, and the program ends when it has restored it. Nil: it starts one.
	Image *int `json:"image,omitempty"`
	// Device indexes the detached mount of a device that the program drives its kernel with. Nil: it needs none.
	Device *int `json:"device,omitempty"`
	// Trace is the path of a socket, of kind SOCK_SEQPACKET, that the program connects to before it runs anything, and
	// by which the kernel that it brings tells of system calls; "": there is none. The cell's first process makes it,
	// greets the program as TraceGreeting says, and hands the connection on.
	Trace string `json:"trace,omitempty"`
}

// TraceGreeting is what both sides of a trace's connection say first: gVisor's message Handshake with version 1
// (pkg/sentry/seccheck/points/common.proto).
const TraceGreeting = "\x08\x01"

// Where a runtime finds things in the cell's own file system, which no process of the sandbox sees.
const (
	RuntimeRoot    = "/root"
	RuntimeProgram = "/runtime"
	RuntimeGuest   = "/guest"
	RuntimeImage   = "/image"  // where there is one
	RuntimeDevice  = "/device" // the same
	// RuntimeControlFD is the descriptor at which the program gets the guest's control socket, and at which
	// it hands it on to the guest inside. The first message on it is MethodLaunch; after its answer, each
	// byte brings one connection as a passed descriptor. It is standard input, which a runtime restores like the other
	// two with what it is given anew.
	RuntimeControlFD = 0
)

// The arguments that tell a guest that is not PID 1 of the sandbox itself what it is.
const (
	CellArg   = "cell"   // PID 1 of the namespaces around a runtime
	InsideArg = "inside" // PID 1 inside a runtime
)

// Overlay is one overlay file system. Numbers index the files of the call, each a detached mount.
type Overlay struct {
	// Lowers are the read-only layers, the topmost first.
	Lowers []int `json:"lowers"`
	// Upper is a mount that holds both UpperDir and WorkDir, relative paths in it: overlayfs wants
	// them on one mount. NoUpper makes the overlay a read-only view.
	Upper    int    `json:"upper"`
	UpperDir string `json:"upper_dir"`
	WorkDir  string `json:"work_dir"`
}

// NoUpper stands for Overlay.Upper where there is no writable layer.
const NoUpper = -1

// Mount is one step of building the root.
type Mount struct {
	// Target is an absolute path inside. Missing directories are made; a symbolic link on the way is
	// an error.
	Target string `json:"target"`
	// File indexes a detached mount, or is Prepared, where Overlay is nil.
	File int `json:"file"`
	// Single says that File is a single file, not a directory.
	Single bool `json:"single,omitempty"`
	// Overlay is mounted instead of File.
	Overlay *Overlay `json:"overlay,omitempty"`
	// UID, GID and Mode are given to the root directory of Overlay.
	UID  uint32 `json:"uid,omitempty"`
	GID  uint32 `json:"gid,omitempty"`
	Mode uint32 `json:"mode,omitempty"`
}

// LaunchFile is a file of the server's making. File indexes a file of the call that holds what it shall: as text
// that would be most of the message.
type LaunchFile struct {
	Target string `json:"target"` // absolute, clean; made where it is missing
	File   int    `json:"file"`
}

// LaunchReply is what the guest really put in place: the guest's word, except that it read the walls
// back from the kernel.
type LaunchReply struct {
	Walls WallsApplied `json:"walls"`
	// Separated says that PID 1 found itself not dumpable and owned by the outer user namespace.
	Separated bool `json:"separated"`
	// Masked and ReadOnly count the paths of /proc that were covered.
	Masked   int `json:"masked"`
	ReadOnly int `json:"read_only"`
	// Open counts the descriptors that the guest holds, each of which it has looked at.
	Open int `json:"open"`
	// Micros says how long the steps took, in microseconds, by name.
	Micros map[string]int64 `json:"micros,omitempty"`
}
