package spawn

import (
	"errors"
	"os"
	"path"
	"strings"
	"syscall"
)

// Attr says what to start.
type Attr struct {
	// Paths are the absolute candidates for the program, tried in order as execvp(3) does. The child
	// tries them as the user it runs as; PID 1 resolves no path. Candidates makes them from PATH.
	Paths []string
	Argv  []string
	Env   []string
	Dir   string // working directory, entered as the user; "" for "/"
	// Files become descriptors 0, 1, 2… of the child. Nothing else stays open. They must stay open here
	// until Start has returned.
	Files []uintptr
	// Reach, if not 0, is a descriptor above those of Files that the child has open, too, as another name of its
	// standard error: its table of descriptors is large enough for that number then, and so is that of each process that it
	// forks while the descriptor is open. To enlarge the table of a process that has threads, the kernel waits until every
	// processor has switched tasks (expand_fdtable in fs/file.c), which takes milliseconds.
	Reach int
	// UID, GID and Groups are inside-ids. UID 0 is refused where the walls do not allow root.
	UID    uint32
	GID    uint32
	Groups []uint32
	// Setsid makes the child lead a session of its own.
	Setsid bool
	// Ctty is the child's descriptor that becomes its controlling terminal (needs Setsid); -1 for none.
	Ctty int
	// Scope is the process's own control group. The zero value leaves the process where the forking
	// thread is: in the groups that New joined (v1), or in the guest's own (v2).
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
	StepScope   Step = "scope"   // joining the control group
	StepSession Step = "session" // setsid or the controlling terminal
	StepFiles   Step = "files"   // placing descriptors
	StepLimits  Step = "limits"  // resource limits
	StepSeccomp Step = "seccomp" // the second filter
	StepUser    Step = "user"    // groups, gid, uid
	StepDir     Step = "dir"     // the working directory
	StepExec    Step = "exec"    // ENOENT: no candidate exists; EACCES: none may be executed
)

// Indexes into steps, for the child, which can't write a string.
const (
	stepScope int32 = iota
	stepSession
	stepFiles
	stepLimits
	stepSeccomp
	stepUser
	stepDir
	stepExec
)

func steps() []Step {
	return []Step{StepScope, StepSession, StepFiles, StepLimits, StepSeccomp, StepUser, StepDir, StepExec}
}

// Error tells why a process did not start.
type Error struct {
	Step Step
	Err  error // a syscall.Errno, except at StepCheck
}

// Error names the step and the reason.
func (e *Error) Error() string { return string(e.Step) + ": " + e.Err.Error() }

// Unwrap returns the reason.
func (e *Error) Unwrap() error { return e.Err }

// What StepCheck refuses.
var (
	ErrRoot  = errors.New("the profile has no root user")
	ErrUnset = errors.New("no user or group has the id 4294967295") // to setresuid it means "unchanged"
	errEmpty = errors.New("no program or no argument zero")
	errPath  = errors.New("the program's path is not absolute")
	errCtty  = errors.New("a controlling terminal needs a session and a descriptor")
	errReach = errors.New("a descriptor to reach lies above all others, standard error among them")
	errScope = errors.New("the walls give each process a group of its own, and this start names none")
)

// check refuses what the kernel would take in a sense that nobody meant.
func (a Attr) check(rootAllowed bool) error {
	const unset = ^uint32(0)
	if a.UID == 0 && !rootAllowed {
		return ErrRoot
	}
	if a.UID == unset || a.GID == unset {
		return ErrUnset
	}
	for _, g := range a.Groups {
		if g == unset {
			return ErrUnset
		}
	}
	if len(a.Argv) == 0 {
		return errEmpty
	}
	for _, p := range a.Paths {
		if !path.IsAbs(p) {
			return errPath
		}
	}
	if a.Ctty >= 0 && (!a.Setsid || a.Ctty >= len(a.Files)) {
		return errCtty
	}
	if a.Reach != 0 && (len(a.Files) <= stderrFD || a.Reach < len(a.Files)) {
		return errReach
	}
	return nil
}

// stderrFD is the descriptor of standard error.
const stderrFD = 2

// plan puts a into the kernel's terms. exe, if not negative, is the descriptor of the program.
func (s *Spawner) plan(a Attr, exe int) (*plan, error) {
	if err := a.check(s.walls.RootAllowed); err != nil {
		return nil, err
	}
	if exe < 0 && len(a.Paths) == 0 {
		return nil, errEmpty
	}
	p := &plan{
		session: a.Setsid, ctty: a.Ctty, reach: a.Reach, keep: len(a.Files), limits: s.limits, filter: s.walls.SeccompExec, mark: uintptr(s.walls.ExecMark),
		groups: a.Groups, uid: a.UID, gid: a.GID, exe: exe >= 0, ownGroup: s.walls.OwnGroup,
		files: append(make([]uintptr, 0, len(a.Files)+1), a.Files...),
	}
	if p.exe {
		p.files = append(p.files, uintptr(exe))
	}
	p.spare = uintptr(len(p.files))
	for _, f := range p.files {
		p.spare = max(p.spare, f+1)
	}
	for i, role := range a.Scope.Layout {
		switch role {
		case "tasks":
			p.tasks = append(p.tasks, a.Scope.Files[i].Fd())
		case "dir":
			p.clone3 = makeClone3(a.Scope.Files[i].Fd())
		}
	}
	if p.ownGroup && p.clone3.flags == 0 {
		return nil, errScope
	}
	return p, p.strings(a)
}

func (p *plan) strings(a Attr) (err error) {
	if a.Dir == "" {
		a.Dir = "/"
	}
	if p.dir, err = syscall.BytePtrFromString(a.Dir); err != nil {
		return err
	}
	if p.argv, err = syscall.SlicePtrFromStrings(a.Argv); err != nil {
		return err
	}
	if p.envv, err = syscall.SlicePtrFromStrings(a.Env); err != nil {
		return err
	}
	p.paths = make([]*byte, len(a.Paths))
	for i, s := range a.Paths {
		if p.paths[i], err = syscall.BytePtrFromString(s); err != nil {
			return err
		}
	}
	return nil
}

// Candidates returns where a program may lie, in the order to try: file itself if it holds a slash
// (relative to dir), else joined with each absolute directory of the PATH value. Relative and empty
// directories in PATH are left out.
func Candidates(file, pathValue, dir string) []string {
	if file == "" {
		return nil
	}
	if strings.Contains(file, "/") {
		if !path.IsAbs(file) {
			file = dir + "/" + file // not cleaned: ".." after a symbolic link means what the kernel says
		}
		return []string{file}
	}
	var out []string
	for d := range strings.SplitSeq(pathValue, ":") {
		if path.IsAbs(d) {
			out = append(out, d+"/"+file)
		}
	}
	return out
}
