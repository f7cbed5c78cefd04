package spawn

import (
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/linux/seccomp"
)

// This file forks the way package syscall does (forkAndExecInChild1), with what that one lacks: the
// child joins its control group, takes limits and a second filter, closes every descriptor that is
// not its own, and tries several paths. The parent is in a system call as the scheduler sees it, so
// that a child that is frozen or stopped before it executes holds up this thread only, never the
// garbage collector; and since both share memory until then, the child reports by writing to the
// plan, without a pipe.

// The runtime's own preparations for a fork. It keeps these names and signatures for gVisor and
// others (go.dev/issue/67401).

//go:linkname beforeFork syscall.runtime_BeforeFork
func beforeFork()

//go:linkname afterFork syscall.runtime_AfterFork
func afterFork()

//go:linkname entersyscall runtime.entersyscall
func entersyscall()

//go:linkname exitsyscall runtime.exitsyscall
func exitsyscall()

// rawVfork is a clone-like system call whose child shares memory and stack.
func rawVfork(trap, a1, a2, a3 uintptr) (pid, errno uintptr)

// cloneArgs is struct clone_args as of Linux 5.7 (CLONE_ARGS_SIZE_VER2).
type cloneArgs struct {
	flags, pidfd, childTID, parentTID, exitSignal, stack, stackSize, tls, setTID, setTIDSize, cgroup uint64
}

// plan is a start in the kernel's terms: what the child does, without an allocation or a decision
// left. The child writes step, errno and to files; everything else it only reads.
type plan struct {
	trap, a1, a2, a3 uintptr // the fork itself
	clone3           cloneArgs

	ownGroup bool // a control group namespace that begins where the child is born

	session bool
	ctty    int
	tasks   []uintptr // files of control groups to write "0" to
	files   []uintptr // descriptors to place at 0, 1, 2…
	keep    int       // how many of files outlive the exec; what lies above is closed by it
	spare   uintptr   // first descriptor above all in files
	reach   int       // another name of standard error, above all in files; 0: none
	limits  []limit
	filter  []byte
	mark    uintptr // last argument of what may tell of an attempt in others: the unshare for ownGroup, and the exec
	groups  []uint32
	uid     uint32
	gid     uint32
	dir     *byte
	paths   []*byte // what to execute; or
	exe     bool    // the last of files is the program
	argv    []*byte // ends with nil
	envv    []*byte // ends with nil

	// child is the child's pid, which the kernel writes before the child runs (CLONE_PARENT_SETTID).
	child int32
	step  int32 // index into steps
	errno syscall.Errno
}

// limit is what prlimit64 takes.
type limit struct {
	resource uintptr
	value    unix.Rlimit
}

// constants that must have an address in the child
type texts struct {
	zero, empty [2]byte
	byDefault   [4]uint64 // struct sigaction of the kernel: SIG_DFL, nothing else
	noSignal    uint64    // an empty signal mask
}

// fork runs the plan and returns the child's pid once it executes the program or has failed (then
// p.errno is set). Only an error of the fork itself is returned as such.
//
//go:norace
//go:nocheckptr
//go:nosplit
//go:noinline
func fork(p *plan, t *texts) (pid, errno uintptr) {
	// As in syscall.Syscall: from here until exitsyscall this thread has no claim on a processor of the
	// scheduler, and nothing may grow the stack, so all below is nosplit.
	entersyscall()
	beforeFork() // blocks signals: no handler of ours may run in the child
	pid, errno = forkChild(p, t)
	afterFork()
	exitsyscall()
	return pid, errno
}

// forkChild is apart from fork since parent and child share the stack: the child stays in this frame
// for good, and the parent leaves it at once.
//
//go:norace
//go:nocheckptr
//go:nosplit
//go:noinline
func forkChild(p *plan, t *texts) (pid, errno uintptr) {
	pid, errno = rawVfork(p.trap, p.a1, p.a2, p.a3)
	if pid != 0 || errno != 0 {
		return pid, errno
	}
	p.enter(t)
	p.become()
	p.execute(t)
	for {
		_, _, _ = syscall.RawSyscall(unix.SYS_EXIT_GROUP, 127, 0, 0)
	}
}

// enter does what needs the guest's privileges or descriptors.
//
//go:norace
//go:nocheckptr
//go:nosplit
//go:noinline
func (p *plan) enter(t *texts) {
	// First of all into the scope, so that whatever kills the scope takes this child too.
	for i := 0; i < len(p.tasks) && p.errno == 0; i++ {
		p.call(stepScope, unix.SYS_WRITE, p.tasks[i], uintptr(unsafe.Pointer(&t.zero)), 1)
	}
	if p.ownGroup && p.errno == 0 {
		// Not by clone3: such a namespace would begin at the parent's group (cgroup_namespaces(7)).
		_, _, err := syscall.RawSyscall6(unix.SYS_UNSHARE, unix.CLONE_NEWCGROUP, 0, 0, 0, 0, p.mark)
		p.fail(stepScope, err)
	}
	if p.session {
		p.call(stepSession, unix.SYS_SETSID, 0, 0, 0)
	}
	p.calm(t)
	p.place()
	if p.ctty >= 0 {
		// Argument 0: never steal a terminal from another session.
		p.call(stepSession, unix.SYS_IOCTL, uintptr(p.ctty), unix.TIOCSCTTY, 0)
	}
}

// sigSetMask is SIG_SETMASK of Linux on all architectures but alpha, mips, parisc and sparc.
const sigSetMask = 2

// perThread is what the runtime sends to its own threads, besides SIGURG (runtime.sigPerThreadSyscall).
const perThread = 33

// calm gives signals their default actions, then empties the mask, which beforeFork has filled. What
// signals.Shield did for PID 1 holds here too, and spares a call for each of them. Left are the two that the
// runtime handles: until the exec the handlers would run in memory that is PID 1's.
//
//go:norace
//go:nocheckptr
//go:nosplit
//go:noinline
func (p *plan) calm(t *texts) {
	byDefault := uintptr(unsafe.Pointer(&t.byDefault))
	p.call4(stepSession, unix.SYS_RT_SIGACTION, uintptr(unix.SIGURG), byDefault, 0, 8)
	p.call4(stepSession, unix.SYS_RT_SIGACTION, perThread, byDefault, 0, 8)
	p.call4(stepSession, unix.SYS_RT_SIGPROCMASK, sigSetMask, uintptr(unsafe.Pointer(&t.noSignal)), 0, 8)
}

// place puts the descriptors where the child wants them and closes all others now rather than at the
// exec: no path that the child resolves may lead through /proc/self/fd to one of the guest's
// (CVE-2024-21626).
//
//go:norace
//go:nocheckptr
//go:nosplit
//go:noinline
func (p *plan) place() {
	// Out of the way first what would be overwritten below before its turn.
	for i := 0; i < len(p.files); i++ {
		if int(p.files[i]) < i {
			p.call(stepFiles, unix.SYS_DUP3, p.files[i], p.spare, unix.O_CLOEXEC)
			p.files[i] = p.spare
			p.spare++
		}
	}
	for i := 0; i < len(p.files); i++ {
		var flags uintptr
		if i >= p.keep {
			flags = unix.O_CLOEXEC
		}
		if int(p.files[i]) == i { // dup3 refuses equal numbers
			p.call(stepFiles, unix.SYS_FCNTL, uintptr(i), unix.F_SETFD, flags/unix.O_CLOEXEC*unix.FD_CLOEXEC)
		} else {
			p.call(stepFiles, unix.SYS_DUP3, p.files[i], uintptr(i), flags)
		}
	}
	p.call(stepFiles, unix.SYS_CLOSE_RANGE, uintptr(len(p.files)), uintptr(^uint32(0)), 0)
	if p.reach > 0 {
		// The child has the table for itself, so that nothing is waited for.
		p.call(stepFiles, unix.SYS_DUP3, stderrFD, uintptr(p.reach), 0)
	}
}

// become gives up the guest's privileges.
//
//go:norace
//go:nocheckptr
//go:nosplit
//go:noinline
func (p *plan) become() {
	// After the descriptors are in place: a low NOFILE limit would refuse the numbers above it.
	for i := 0; i < len(p.limits) && p.errno == 0; i++ {
		p.call4(stepLimits, unix.SYS_PRLIMIT64, 0, p.limits[i].resource,
			uintptr(unsafe.Pointer(&p.limits[i].value)), 0)
	}
	p.call(stepLimits, unix.SYS_UMASK, 0o022, 0, 0)
	if len(p.filter) > 0 && p.errno == 0 {
		// Before the ids change: without no_new_privs it takes CAP_SYS_ADMIN, which goes with uid 0.
		p.fail(stepSeccomp, seccomp.RawInstall(&p.filter[0], uint16(len(p.filter)/8)))
	}
	// Groups before the uid, with which CAP_SETGID goes. Leaving uid 0 clears the effective and permitted
	// sets (capabilities(7)); staying uid 0, the exec cuts them down to the bounding set.
	p.call(stepUser, unix.SYS_SETGROUPS, uintptr(len(p.groups)), uintptr(unsafe.Pointer(unsafe.SliceData(p.groups))), 0)
	p.call(stepUser, unix.SYS_SETRESGID, uintptr(p.gid), uintptr(p.gid), uintptr(p.gid))
	p.call(stepUser, unix.SYS_SETRESUID, uintptr(p.uid), uintptr(p.uid), uintptr(p.uid))
	// As the user, who may be refused it.
	p.call(stepDir, unix.SYS_CHDIR, uintptr(unsafe.Pointer(p.dir)), 0, 0)
}

// execute replaces the child by the program, or returns with the reason in p. It goes on to the next
// path where execvp(3) does, and like it remembers that one was refused.
//
//go:norace
//go:nocheckptr
//go:nosplit
//go:noinline
func (p *plan) execute(t *texts) {
	if p.errno != 0 {
		return
	}
	argv, envv := uintptr(unsafe.Pointer(&p.argv[0])), uintptr(unsafe.Pointer(&p.envv[0]))
	if p.exe {
		_, _, err := syscall.RawSyscall6(unix.SYS_EXECVEAT, uintptr(len(p.files)-1),
			uintptr(unsafe.Pointer(&t.empty)), argv, envv, unix.AT_EMPTY_PATH, p.mark)
		p.fail(stepExec, err)
		return
	}
	var last, denied syscall.Errno
	for i := 0; i < len(p.paths); i++ {
		_, _, last = syscall.RawSyscall6(unix.SYS_EXECVE, uintptr(unsafe.Pointer(p.paths[i])), argv, envv, 0, 0, p.mark)
		if last == unix.EACCES {
			denied = last
		} else if last != unix.ENOENT && last != unix.ENOTDIR && last != unix.ESTALE {
			denied = 0
			break
		}
	}
	if denied != 0 {
		last = denied
	}
	p.fail(stepExec, last)
}

// call makes a system call unless an earlier one failed.
//
//go:norace
//go:nocheckptr
//go:nosplit
//go:noinline
func (p *plan) call(step int32, trap, a1, a2, a3 uintptr) { p.call4(step, trap, a1, a2, a3, 0) }

//go:norace
//go:nocheckptr
//go:nosplit
//go:noinline
func (p *plan) call4(step int32, trap, a1, a2, a3, a4 uintptr) {
	if p.errno != 0 {
		return
	}
	_, _, err := syscall.RawSyscall6(trap, a1, a2, a3, a4, 0, 0)
	p.fail(step, err)
}

//go:norace
//go:nosplit
func (p *plan) fail(step int32, err syscall.Errno) {
	if err != 0 {
		p.step, p.errno = step, err
	}
}

// run forks and turns the outcome into Go's terms.
func (p *plan) run() (int, error) {
	t := &texts{zero: [2]byte{'0'}}
	if p.clone3.flags != 0 {
		p.clone3.flags |= unix.CLONE_PARENT_SETTID
		p.clone3.parentTID = uint64(uintptr(unsafe.Pointer(&p.child)))
		p.trap, p.a1, p.a2 = unix.SYS_CLONE3, uintptr(unsafe.Pointer(&p.clone3)), unsafe.Sizeof(p.clone3)
	} else {
		p.trap, p.a1, p.a2 = unix.SYS_CLONE, unix.CLONE_VM|unix.CLONE_VFORK|unix.CLONE_PARENT_SETTID|uintptr(unix.SIGCHLD), 0
		p.a3 = uintptr(unsafe.Pointer(&p.child))
	}
	pid, errno := fork(p, t)
	runtime.KeepAlive(p)
	runtime.KeepAlive(t)
	if errno != 0 {
		return 0, &Error{StepFork, syscall.Errno(errno)}
	}
	if p.errno != 0 {
		return 0, &Error{steps()[p.step], p.errno}
	}
	return int(pid), nil
}

// makeClone3 returns the arguments of a fork into the control group of version 2 that dir is.
func makeClone3(dir uintptr) cloneArgs {
	return cloneArgs{
		flags:      unix.CLONE_VM | unix.CLONE_VFORK | unix.CLONE_INTO_CGROUP,
		exitSignal: uint64(unix.SIGCHLD),
		cgroup:     uint64(dir),
	}
}
