// Package spawn starts every process of a sandbox, and is where the walls stand: one operating
// system thread of the guest takes the control groups, the bounding set, no_new_privs, the Landlock
// domain and the seccomp filter upon itself, and forks each process from there. PID 1's other threads
// stay outside, above everything that runs inside (HARDENING 2).
//
// What belongs here: putting walls on a thread, and forking from it. What does not: deciding the
// walls (isolation/walls), waiting for children (package guest has the one reaper), output,
// terminals, timeouts.
//
// # One thread
//
// A Landlock domain is made by landlock_restrict_self, and two calls make two domains, whose
// processes could neither signal nor trace each other. All of the payload shares one domain, so one
// thread forks everything. With vfork it is busy for about 60 µs per process.
//
// # Control groups of single processes
//
// The child places itself between fork and exec: it writes "0" to the scope's "tasks" file (v1), or
// is born in the scope's "dir" (v2, CLONE_INTO_CGROUP). The thread itself never enters a scope, so
// that freezing or killing a scope never touches the guest.
package spawn

import (
	"errors"
	"os"

	"casemate.dev/internal/guestwire"
)

// Attr says what to start.
type Attr struct {
	// Paths are the absolute candidates for the program, tried in order as execvp(3) does. The child
	// tries them as the user it runs as; PID 1 resolves no path. Candidates makes them from PATH.
	Paths []string
	Argv  []string
	Env   []string
	Dir   string // working directory, entered as the user; "" for "/"
	// Files become descriptors 0, 1, 2… of the child. Nothing else stays open.
	Files []uintptr
	// UID, GID and Groups are inside-ids. UID 0 is refused where the walls do not allow root.
	UID    uint32
	GID    uint32
	Groups []uint32
	// Setsid makes the child lead a session of its own.
	Setsid bool
	// Ctty is the child's descriptor that becomes its controlling terminal (needs Setsid); -1 for none.
	Ctty int
	// Scope is the process's own control group; the zero value leaves it in the payload's.
	Scope Scope
}

// Scope is the control group of one process, as isolation.Scope hands it over: Files[i] has the role
// Layout[i]. Only "tasks" (v1) and "dir" (v2) matter here; the files stay the caller's.
type Scope struct {
	Layout []string
	Files  []*os.File
}

// Worker says how to start the guest's own program as a worker.
type Worker struct {
	Args   []string // after the program's name
	Env    []string
	Socket *os.File // becomes descriptor 3; 0, 1 and 2 are /dev/null
	UID    uint32
	GID    uint32
	Groups []uint32
	Scope  Scope
}

// Step is the point of a start at which it went wrong.
type Step string

// The steps, in the order they are taken.
const (
	StepCheck   Step = "check"   // the Attr itself: nothing was forked
	StepFork    Step = "fork"    // EAGAIN: the pids limit; ENOMEM: the memory limit
	StepSession Step = "session" // setsid or the controlling terminal
	StepScope   Step = "scope"   // joining the control group
	StepFiles   Step = "files"   // placing descriptors
	StepLimits  Step = "limits"  // resource limits
	StepUser    Step = "user"    // groups, gid, uid
	StepDir     Step = "dir"     // the working directory
	StepSeccomp Step = "seccomp" // the second filter
	StepExec    Step = "exec"    // ENOENT: no candidate exists; EACCES: none may be executed
)

// Error tells why a process did not start.
type Error struct {
	Step Step
	Err  error // a syscall.Errno, except at StepCheck
}

// Error names the step and the reason.
func (e *Error) Error() string { return string(e.Step) + ": " + e.Err.Error() }

// Unwrap returns the reason.
func (e *Error) Unwrap() error { return e.Err }

// Spawner forks processes inside the walls. Its methods are safe for concurrent use.
type Spawner struct{}

// New makes the thread and puts the walls on it. It fails if any of them can't be put in place; then
// nothing was started and the thread is gone. The calling process must be uid 0 of its user namespace
// with all capabilities in it.
//
// join are write-only "tasks" files of the payload's control groups (v1: memory, cpu, pids; not the
// freezer, so that a paused sandbox does not stop a thread of PID 1). On v2 there are none: there a
// process is in the payload's group by its scope. New does not keep join; the caller closes them.
//
// New also opens the guest's own executable (for StartWorker) as a path descriptor that is closed on
// exec, and sets the process's umask to 022, which children inherit.
func New(w guestwire.Walls, join []*os.File) (*Spawner, error) { return nil, errors.ErrUnsupported }

// Applied returns what was put in place.
func (s *Spawner) Applied() guestwire.WallsApplied { return guestwire.WallsApplied{} }

// Start starts a process and returns its pid once it executes the program, or an *Error. Nothing of
// the guest is shared with it: descriptors are Attr.Files, signals are at their defaults and none is
// blocked, the umask is 022.
//
// Reaping is the caller's, also of a child that failed before it executed: that one shows up in
// wait4(-1) as an unknown pid. A child may have ended before Start returns, so the reaper must keep
// the status of unknown pids while a Start is under way.
//
// Start blocks while the child does, e.g. because something froze or stopped it before it executed;
// killing the scope ends that. It does not stop the Go scheduler or the garbage collector meanwhile.
func (s *Spawner) Start(a Attr) (pid int, err error) { return 0, errors.ErrUnsupported }

// StartWorker starts the guest's own executable in the same walls, as the user given: it can do
// nothing that the user's processes couldn't. Its mm belongs to the outer user namespace as PID 1's
// does, since the file is not readable inside, so no process inside can trace it or open its /proc/PID/mem.
func (s *Spawner) StartWorker(w Worker) (pid int, err error) { return 0, errors.ErrUnsupported }

// Close ends the thread. Processes go on.
func (s *Spawner) Close() error { return nil }

// Candidates returns where a program may lie, in the order to try: file itself if it holds a slash
// (relative to dir), else each absolute directory of the PATH value joined with it.
func Candidates(file, path, dir string) []string { return nil }
