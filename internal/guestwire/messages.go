package guestwire

import "time"

// Method names a call. A connection carries one call.
type Method string

// The methods, with the body that each takes and what comes back. "ok" is one FrameReply.
const (
	MethodClaim  Method = "claim"  // Claim → ok: gives the instance its identity, once
	MethodStatus Method = "status" // no body → Status
	MethodEnv    Method = "env"    // no body → Environment, what the claim gave
	MethodBound  Method = "bound"  // Bounds → ok: changes what the guest itself holds the sandbox to
	MethodSync   Method = "sync"   // no body → ok, after dirty data of the sandbox's files is flushed

	MethodPrepare  Method = "image.prepare"  // no body → ok: every connection is closed, for a memory image
	MethodRestored Method = "image.restored" // Restored → ok: the first call after a restore from one

	MethodStart      Method = "process.start"  // StartProcess (+ scope files) → ProcessInfo
	MethodRun        Method = "process.run"    // RunProcess (+ scope files) → FrameReply(ProcessInfo), then as process.output
	MethodOutput     Method = "process.output" // OutputRequest → FrameOutput/FrameGap…, then FrameEnd with ProcessInfo
	MethodInput      Method = "process.input"  // InputRequest, then FrameData…, FrameEnd → InputReply
	MethodSignal     Method = "process.signal" // SignalRequest → ok
	MethodResize     Method = "process.resize" // ResizeRequest → ok
	MethodGet        Method = "process.get"    // ProcessRef → ProcessInfo
	MethodWait       Method = "process.wait"   // ProcessRef → ProcessInfo once it has ended
	MethodList       Method = "process.list"   // no body → FrameEvent(ProcessInfo)…, FrameEnd
	MethodTree       Method = "process.tree"   // ProcessRef → Tree
	MethodForget     Method = "process.forget" // ProcessRef → ok: drops an ended process and its output
	MethodStat       Method = "file.stat"      // PathRequest → FileInfo
	MethodListDir    Method = "file.list"      // ListRequest → FrameEvent(FileInfo)…, FrameEnd
	MethodRead       Method = "file.read"      // ReadRequest → FrameReply(FileInfo), FrameData…, FrameEnd
	MethodWrite      Method = "file.write"     // WriteRequest, FrameData…, FrameEnd → FileInfo
	MethodMakeDir    Method = "file.mkdir"     // MakeDirRequest → FileInfo
	MethodMove       Method = "file.move"      // MoveRequest → FileInfo
	MethodRemove     Method = "file.remove"    // RemoveRequest → ok
	MethodChmod      Method = "file.chmod"     // ChmodRequest → FileInfo
	MethodUnpack     Method = "file.unpack"    // UnpackRequest, FrameData… (see Entry), FrameEnd → UnpackReply
	MethodWatch      Method = "file.watch"     // WatchRequest → FrameReply, then FrameEvent(WatchEvent)… until closed
	MethodDial       Method = "port.dial"      // DialRequest → ok, then the connection is the port's bytes
	MethodListenings Method = "port.list"      // no body → PortList
	MethodListen     Method = "port.listen"    // ListenRequest → ok, FrameEvent(Accepted)… until the caller leaves
	MethodTake       Method = "port.take"      // Accepted → ok, then the connection is the accepted one's bytes
)

// Claim gives an instance its identity in one step. A second Claim is refused.
type Claim struct {
	Sandbox  string            `json:"sandbox"`
	Hostname string            `json:"hostname"`
	Env      map[string]string `json:"env,omitempty"` // for every process, above the template's
	User     string            `json:"user"`          // default user
	Dir      string            `json:"dir"`           // default working directory
}

// Restored tells a guest that its sandbox goes on from a memory image.
type Restored struct {
	// Claim takes the place of the identity that the image has: for a sandbox that is another one. Processes that run
	// keep the environment that they have. Nil: it is the sandbox that the image was made of.
	Claim *Claim `json:"claim,omitempty"`
}

// Environment is what a claim gave every process. It is the guest's word.
type Environment struct {
	Env map[string]string `json:"env,omitempty"`
}

// Status is the guest's own word about itself.
type Status struct {
	Version   int  `json:"version"` // of this protocol
	Claimed   bool `json:"claimed"`
	Processes int  `json:"processes"`
	Open      int  `json:"open"` // descriptors that the guest holds
	// Where it holds Bounds, Alive counts the processes that live, itself included, and OOMKills those that it
	// ended for want of memory.
	Alive    int   `json:"alive,omitempty"`
	OOMKills int64 `json:"oom_kills,omitempty"`
}

// Tree is what lives of a process and its descendants.
type Tree struct {
	Alive int `json:"alive"`
}

// Stdin says what a process reads from.
type Stdin string

// The kinds of standard input.
const (
	StdinNone Stdin = ""     // /dev/null
	StdinPipe Stdin = "pipe" // written by process.input, closed by it or at the process's end
)

// Bounds of a process's output.
const (
	DefaultBuffer = 2 << 20
	MaxBuffer     = 8 << 20
	MinBuffer     = 128 << 10
	// StallLimit is how long a reader with Hold may take nothing before the process goes on without it.
	StallLimit = 30 * time.Second
	// AttachLimit is how long a process with Hold waits for its first reader.
	AttachLimit = 10 * time.Second
)

// StartProcess starts a process. Starting an id that exists attaches: the answer is that process's
// ProcessInfo with Attached set, and nothing is started.
type StartProcess struct {
	ID    string            `json:"id"`
	Argv  []string          `json:"argv"` // Argv[0] is looked up in PATH of the process's environment
	Env   map[string]string `json:"env,omitempty"`
	Dir   string            `json:"dir,omitempty"`
	User  string            `json:"user,omitempty"` // name or number, "" for the default
	Stdin Stdin             `json:"stdin,omitempty"`
	// TTY gives the process a terminal of Rows × Cols as all three standard streams.
	TTY  bool   `json:"tty,omitempty"`
	Rows uint16 `json:"rows,omitempty"`
	Cols uint16 `json:"cols,omitempty"`
	// TimeoutMS ends the whole tree; 0 means no limit.
	TimeoutMS int64 `json:"timeout_ms,omitempty"`
	// GraceMS is the time between SIGTERM and SIGKILL at a timeout; default 2000.
	GraceMS int64 `json:"grace_ms,omitempty"`
	// Buffer bounds the output kept, in bytes; 0 means DefaultBuffer. It is cut to MinBuffer and
	// MaxBuffer. The guest may keep less where all processes together print much.
	Buffer int64 `json:"buffer,omitempty"`
	// Hold makes the process wait for a follower that asked to lose nothing (OutputRequest.Hold) from
	// its first byte on, also before that follower has attached, but not longer than AttachLimit.
	Hold bool `json:"hold,omitempty"`
	// Scope names the roles of the files passed with this call, as isolation.Scope.Layout gives them.
	Scope []string `json:"scope,omitempty"`
}

// End says how a process ended.
type End string

// The ends. Lost means that nobody saw it.
const (
	EndNone           End = "" // still running
	EndExited         End = "exited"
	EndSignaled       End = "signaled"
	EndTimedOut       End = "timed_out"
	EndCanceled       End = "canceled" // killed on request through the API
	EndOOMKilled      End = "oom_killed"
	EndSandboxStopped End = "sandbox_stopped"
	EndLost           End = "lost"
	EndFailed         End = "failed" // never started: Error tells why
)

// ProcessInfo is the state of a process.
type ProcessInfo struct {
	ID       string   `json:"id"`
	Argv     []string `json:"argv"`
	Dir      string   `json:"dir"`
	User     string   `json:"user"`
	PID      int      `json:"pid"` // inside the sandbox
	TTY      bool     `json:"tty,omitempty"`
	Attached bool     `json:"attached,omitempty"`
	// Started and Ended are Unix nanoseconds by the guest's clock; Ended is 0 while it runs.
	Started int64 `json:"started"`
	Ended   int64 `json:"ended,omitempty"`
	End     End   `json:"end,omitempty"`
	// Code is the exit code where End is EndExited; Signal the number where it was a signal.
	Code   int    `json:"code,omitempty"`
	Signal int    `json:"signal,omitempty"`
	Error  string `json:"error,omitempty"`
	// UserMS, SystemMS and MaxRSS (bytes) are the kernel's accounting of the first process.
	UserMS   int64 `json:"user_ms,omitempty"`
	SystemMS int64 `json:"system_ms,omitempty"`
	MaxRSS   int64 `json:"max_rss,omitempty"`
	// Bytes counts what was written in all; Dropped what the buffer no longer holds.
	Bytes   int64 `json:"bytes"`
	Dropped int64 `json:"dropped,omitempty"`
	// Complete says that every writer of the output has closed it, or the grace for that is over.
	Complete bool `json:"complete,omitempty"`
	// Leftover counts processes of the tree that live on after the first one ended.
	Leftover int `json:"leftover,omitempty"`
}

// RunProcess starts a process, as StartProcess does, and follows its output on the same connection.
// Output.ID is ignored. Closing the connection stops the following, not the process.
type RunProcess struct {
	Start  StartProcess  `json:"start"`
	Output OutputRequest `json:"output"`
}

// ProcessRef names a process.
type ProcessRef struct {
	ID string `json:"id"`
}

// OutputRequest asks for a process's output. One offset counts the bytes of all streams in the order
// they were read, so that one number resumes all of them.
type OutputRequest struct {
	ID     string `json:"id"`
	Offset int64  `json:"offset"`
	// Follow keeps sending until the process has ended and its output is complete.
	Follow bool `json:"follow,omitempty"`
	// Hold makes the process wait for this reader rather than drop. It ends when the reader leaves, or
	// has taken nothing of what is there for StallLimit.
	Hold bool `json:"hold,omitempty"`
	// Limit stops after that many bytes; 0 means no limit.
	Limit int64 `json:"limit,omitempty"`
}

// Stream tells which output a FrameOutput carries.
type Stream uint8

// The streams.
const (
	Stdout Stream = 1
	Stderr Stream = 2
	TTY    Stream = 3
)

// InputRequest opens a process's standard input. Offset is how many bytes the caller knows to have
// been taken before, so that a repeated call writes nothing twice; -1 means "wherever it stands".
type InputRequest struct {
	ID     string `json:"id"`
	Offset int64  `json:"offset"`
	Close  bool   `json:"close,omitempty"` // close standard input after the last frame
}

// InputReply tells how many bytes of input were taken in all.
type InputReply struct {
	Offset int64 `json:"offset"`
}

// SignalRequest sends a signal to a process, or with Tree to everything that descends from it.
// Signal 9 with Tree ends the process as EndCanceled.
type SignalRequest struct {
	ID     string `json:"id"`
	Signal int    `json:"signal"`
	Tree   bool   `json:"tree,omitempty"`
}

// ResizeRequest sets a terminal's size.
type ResizeRequest struct {
	ID   string `json:"id"`
	Rows uint16 `json:"rows"`
	Cols uint16 `json:"cols"`
}

// Asker is embedded by every file request: who asks inside the sandbox, and from where relative
// paths and "~" start.
type Asker struct {
	User string `json:"user,omitempty"` // name or number, "" for the default
	Dir  string `json:"dir,omitempty"`  // base of relative paths, "" for the user's home
	// Privileged makes the call ask no permission: it acts as root, while User still tells where paths
	// start and to whom belongs what is made. Where the profile has one user, it acts as that one.
	Privileged bool `json:"privileged,omitempty"`
}

// PathRequest names a file. With Follow, Path's last element may be a symbolic link.
type PathRequest struct {
	Asker
	Path   string `json:"path"`
	Follow bool   `json:"follow,omitempty"`
	// Resolve adds to each FileInfo of the answer where a symbolic link leads.
	Resolve bool `json:"resolve,omitempty"`
	// Attributes adds the extended attributes whose names begin so; it begins with "user." itself. A
	// file.write replaces them.
	Attributes string `json:"attributes,omitempty"`
}

// FileType is what a file is.
type FileType string

// The file types.
const (
	TypeFile    FileType = "file"
	TypeDir     FileType = "dir"
	TypeSymlink FileType = "symlink"
	TypeOther   FileType = "other" // device, FIFO, socket
)

// FileInfo describes a file.
type FileInfo struct {
	Path   string   `json:"path"` // absolute inside
	Name   string   `json:"name"`
	Type   FileType `json:"type"`
	Size   int64    `json:"size"`
	Mode   uint32   `json:"mode"` // permission bits with setuid, setgid and sticky, as in st_mode & 07777
	UID    int      `json:"uid"`
	GID    int      `json:"gid"`
	Owner  string   `json:"owner,omitempty"`
	Group  string   `json:"group,omitempty"`
	MTime  int64    `json:"mtime"` // Unix nanoseconds
	Target string   `json:"target,omitempty"`
	// LeadsTo and Attributes are there where the request asks for them. LeadsTo is nil where a symbolic
	// link leads nowhere; the attributes are those of what it leads to, named without what was asked for.
	LeadsTo    *LinkEnd          `json:"leads_to,omitempty"`
	Attributes map[string]string `json:"attributes,omitempty"`
}

// LinkEnd is what a symbolic link leads to in the end.
type LinkEnd struct {
	Path string   `json:"path"`
	Type FileType `json:"type"`
	Mode uint32   `json:"mode"`
}

// ListRequest lists a directory. Depth 1 is its own entries.
type ListRequest struct {
	PathRequest
	Depth int `json:"depth"`
}

// ReadRequest reads a file, or with Length ≥ 0 a part of it.
type ReadRequest struct {
	PathRequest
	Offset int64 `json:"offset"`
	Length int64 `json:"length"` // -1: to the end
}

// WriteRequest writes a file: into a temporary name in the same directory, then renamed, so that
// nobody sees half of it. With Offset ≥ 0 the bytes go into the existing file at that place instead.
type WriteRequest struct {
	PathRequest
	Mode    uint32 `json:"mode,omitempty"`    // for a new file; default 0644
	Offset  int64  `json:"offset"`            // -1: replace the whole file
	Append  bool   `json:"append,omitempty"`  // add at the end of the file, which is made if missing
	Parents bool   `json:"parents,omitempty"` // make missing directories, owned by the user
	Size    int64  `json:"size"`              // what will be sent; -1: unknown. A mismatch is an error
	// InPlace empties the file that is there and writes into it, or makes one: whoever watches it or has
	// it open sees the new bytes, and an upload that breaks off leaves a part. Offset is -1 then.
	InPlace bool `json:"in_place,omitempty"`
	// SetAttributes takes the place of the extended attributes that PathRequest.Attributes names.
	SetAttributes map[string]string `json:"set_attributes,omitempty"`
}

// MakeDirRequest makes a directory; with Parents it may exist.
type MakeDirRequest struct {
	PathRequest
	Mode    uint32 `json:"mode,omitempty"` // default 0755
	Parents bool   `json:"parents,omitempty"`
}

// MoveRequest renames a file.
type MoveRequest struct {
	PathRequest
	To        string `json:"to"`
	Overwrite bool   `json:"overwrite,omitempty"`
}

// RemoveRequest removes a file, or with Recursive a tree.
type RemoveRequest struct {
	PathRequest
	Recursive bool `json:"recursive,omitempty"`
}

// ChmodRequest changes a file's mode and, where UID or GID is not -1, its owner.
type ChmodRequest struct {
	PathRequest
	Mode *uint32 `json:"mode,omitempty"`
	UID  int     `json:"uid"`
	GID  int     `json:"gid"`
}

// WatchRequest watches a directory.
type WatchRequest struct {
	PathRequest
	Recursive bool `json:"recursive,omitempty"`
}

// WatchEvent is one change. Op is "create", "write", "remove", "rename", "chmod" or "overflow".
type WatchEvent struct {
	Op   string `json:"op"`
	Path string `json:"path"` // absolute inside
}

// DialRequest connects to a port inside. Host defaults to 127.0.0.1, then ::1.
type DialRequest struct {
	Network string `json:"network"` // "tcp"
	Host    string `json:"host,omitempty"`
	Port    int    `json:"port"`
}

// ListenRequest asks the guest to listen on a TCP port of 127.0.0.1, for as long as the call lasts: what is inside
// finds the server there.
type ListenRequest struct {
	Port int `json:"port"`
}

// Accepted is a connection that was made to such a port. It waits a few seconds to be taken.
type Accepted struct {
	ID int64 `json:"id"`
}

// PortList names the TCP ports that something listens on.
type PortList struct {
	Ports []int `json:"ports"`
}

// Call is the payload of a FrameCall. Body is the method's request as JSON.
type Call struct {
	Version int    `json:"v"`
	Method  Method `json:"method"`
	Body    []byte `json:"-"` // travels behind the rest, so that it is looked at once
	// Keep says that another call may follow on the connection, once this one's last frame was read. Only
	// claim, process.run, context.run, context.fork and context.drop keep to it; others, and a FrameFail, end
	// the connection as ever.
	Keep bool `json:"keep,omitempty"`
}

// Keeps reports whether the connection may carry another call after this one.
func (c *Call) Keeps() bool {
	switch c.Method {
	case MethodRun, MethodClaim, MethodContextRun, MethodContextFork, MethodContextDrop:
		return c.Keep
	}
	return false
}

// Failure is the payload of a FrameFail. Kind is a machine word of package errs.
type Failure struct {
	Kind    string `json:"kind"`
	Message string `json:"message"`
	Hint    string `json:"hint,omitempty"`
}
