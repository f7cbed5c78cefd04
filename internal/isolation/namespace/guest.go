package namespace

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/cleanup"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/linux/cgroup"
	"casemate.dev/internal/linux/pidfd"
	"casemate.dev/internal/linux/sched"
	"casemate.dev/internal/linux/userns"
)

// namespaces are what every guest gets of its own, with the names of their files in /proc/pid/ns.
func namespaces() map[string]uintptr {
	return map[string]uintptr{
		"user": syscall.CLONE_NEWUSER, "mnt": syscall.CLONE_NEWNS, "pid": syscall.CLONE_NEWPID,
		"ipc": syscall.CLONE_NEWIPC, "uts": syscall.CLONE_NEWUTS, "net": syscall.CLONE_NEWNET,
		"cgroup": syscall.CLONE_NEWCGROUP,
	}
}

// guest is a started guest program, launched or not.
type guest struct {
	name    string // names its files in the run directory and its control groups
	first   uint32 // its id range
	owner   uint32 // the user that its user namespace belongs to; 0: root
	inReach bool   // of the keeper, whose user namespace it is
	proc    *pidfd.Handle
	group   *cgroup.Group
	control net.Conn // until the launch
	userNS  *os.File // until the launch
	log     *os.File // what the guest program itself wrote: nothing, unless it crashed
	socket  string
	inodes  map[string]string // of its namespaces
	limits  cgroup.Limits
	posture posture // as the kernel showed it once the program was executed
	start   uint64  // of the process, in clock ticks after boot
	ahead   *ahead  // the runtime that stands at its gate in there; nil: none
}

// newName returns the name of an instance's files and control groups. It is not the sandbox's id:
// the guest is made before anybody has asked for a sandbox.
func newName() string {
	var b [6]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand.Read
	return "g" + hex.EncodeToString(b[:])
}

// startGuest makes a guest that waits for its launch. inReach says that the keeper is to look at its processes.
func (b *Backend) startGuest(limits cgroup.Limits, inReach bool) (*guest, error) {
	first, err := b.ids.acquire()
	if err != nil {
		return nil, err
	}
	g := &guest{name: newName(), first: first, owner: first, inReach: inReach, limits: limits}
	if inReach {
		g.owner = b.owner
	}
	g.socket = b.socketPath(g.name)
	b.known(g.name)
	undo := cleanup.New(func() { b.ids.release(first); b.unknown(g.name) })
	defer undo.Run()

	// The groups come before the process: it is born in them, since moving it later costs a lock
	// that all of fork and exec share.
	if b.groups != nil {
		if g.group, err = b.groups.Create(g.name, limits); err != nil {
			return nil, err
		}
		undo.Add(func() { b.logError("remove control groups", b.removeGroup(g.group)) })
		if err := g.group.Delegate(int(first), int(first)); err != nil {
			return nil, fmt.Errorf("delegate control groups: %w", err)
		}
	}
	if err := b.failpoint("groups"); err != nil {
		return nil, err
	}
	if err := b.fork(g); err != nil {
		return nil, err
	}
	undo.Add(func() { b.logError("end guest", b.endGuest(g)) })
	if err := b.failpoint("forked"); err != nil {
		return nil, err
	}
	if err := resetOOM(g.proc.PID()); err != nil {
		return nil, err
	}
	if g.userNS, err = userns.Of(g.proc.PID()); err != nil {
		return nil, fmt.Errorf("open user namespace: %w", err)
	}
	if g.inodes, err = b.observeNamespaces(g.proc.PID()); err != nil {
		return nil, err
	}
	if g.start, err = pidfd.StartTime(g.proc.PID()); err != nil {
		return nil, fmt.Errorf("read start time of guest: %w", err)
	}
	if g.posture, err = observe(g); err != nil {
		return nil, err
	}
	undo.Release()
	return g, nil
}

// fork starts the guest program. On error nothing of it is left.
func (b *Backend) fork(g *guest) error {
	undo := cleanup.New()
	defer undo.Run()
	control, theirs, err := socketPair()
	if err != nil {
		return err
	}
	defer func() { _ = theirs.Close() }()
	undo.Add(func() { _ = control.Close() })
	listener, err := listen(g.socket)
	if err != nil {
		return err
	}
	defer func() { _ = listener.Close() }()
	undo.Add(func() { _ = os.Remove(g.socket) })
	log, err := newLog()
	if err != nil {
		return err
	}
	undo.Add(func() { _ = log.Close() })
	dev, err := newDev()
	if err != nil {
		return fmt.Errorf("make /dev: %w", err)
	}
	defer func() { _ = dev.Close() }()
	sys, err := newSys(b.cpus)
	if err != nil {
		return fmt.Errorf("make /sys: %w", err)
	}
	defer func() { _ = sys.Close() }()

	// With vfork: a copy of the server's memory, which package syscall makes otherwise for a new user
	// namespace, took a third of the time that a start cost the server. A child that shares the memory can't
	// wait for its id map, so the program is executed without one: as root of the host, by the id that it
	// keeps until then, with every capability in the new namespace alone. Ambient ones, since an exec
	// keeps no others for an id that is not root there (capabilities(7)).
	flags := uintptr(syscall.CLONE_VFORK | syscall.CLONE_VM)
	for _, f := range namespaces() {
		flags |= f
	}
	fd := -1
	attr := &syscall.ProcAttr{
		Dir: "/",
		Env: b.env,
		// In the order of guestwire's Launch descriptors, and the program. Descriptor 2 is a file in memory, not a pipe:
		// it must go on when the server does not.
		Files: []uintptr{b.null.Fd(), b.null.Fd(), log.Fd(), theirs.Fd(), listener.Fd(), dev.Fd(), sys.Fd(), b.program.f.Fd()},
		Sys: &syscall.SysProcAttr{
			// The server's controlling terminal must not come along.
			Cloneflags: flags, AmbientCaps: b.allCaps, Setsid: true, PidFD: &fd,
		},
	}
	var pid int
	start := func(dir int) error {
		if dir >= 0 {
			attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, dir
		}
		return sched.Normally(func() (err error) {
			pid, err = b.execGuest(g.owner, attr)
			return err
		})
	}
	if g.group != nil {
		err = g.group.InGuest(start)
	} else {
		err = start(-1)
	}
	if err != nil {
		return fmt.Errorf("start guest: %w", explainFork(err))
	}
	if g.proc, err = handleOf(fd, pid); err != nil {
		_ = syscall.Kill(pid, syscall.SIGKILL) // not reaped yet, so the pid is still its
		_, _ = syscall.Wait4(pid, nil, 0, nil)
		return err
	}
	undo.Add(func() { b.logError("end guest", killAndWait(g.proc)) })
	if err := b.giveIDs(g, control); err != nil {
		return err
	}
	g.control, g.log = control, log
	undo.Release()
	return nil
}

// guestSlack is by how many nanoseconds the kernel may delay the guest's timers: what a thread has by default.
// The server's own threads may have more.
const guestSlack = 50_000

// inReach reports whether a sandbox's user namespace is to belong to the keeper's user. Of some pools, watches of files
// (inotify(7)) among them, the kernel counts what is taken in such a namespace with its owner, too, and each user gets the same
// (kernel/ucount.c): sandboxes whose namespaces belong to one user share that. So others belong to their own root, as whom
// nothing runs outside. In a cell such pools are the runtime's own.
func (b *Backend) inReach(s isolation.Spec) bool { return b.cfg.Cells || s.Calls.Any() }

// execGuest forks and executes the guest program, whose threads inherit the slack of the one that forks.
func (b *Backend) execGuest(owner uint32, attr *syscall.ProcAttr) (pid int, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, guestSlack, 0, 0, 0); err != nil {
		return 0, os.NewSyscallError("prctl PR_SET_TIMERSLACK", err)
	}
	// A user namespace belongs to the user that makes it, and a process of that user outside has every capability in it
	// (user_namespaces(7)): so the keeper, whose it is where calls are observed, needs none of the host's to look at the
	// sandbox's processes.
	err = userns.OwnedBy(owner, func() error {
		pid, err = syscall.ForkExec(programPath(), b.guestArgs(), attr) //nolint:forbidigo // the guest is no process of a sandbox
		return err
	})
	return pid, err
}

// giveIDs maps the guest's ids and tells it so: it waits for that before it does anything else.
func (b *Backend) giveIDs(g *guest, control net.Conn) error {
	ids := userns.Range{Inside: 0, Outside: g.first, Count: rangeSize}
	if err := userns.Map(g.proc.PID(), ids); err != nil {
		return fmt.Errorf("map the guest's ids: %w", err)
	}
	if _, err := control.Write([]byte{guestwire.LaunchMapped}); err != nil {
		return fmt.Errorf("tell the guest its ids: %w", err)
	}
	return nil
}

// resetOOM undoes what a server that protects itself from the out-of-memory killer hands down to its
// children: a sandbox must be killed before the host's own services, and processes in it may not lower
// the value again (proc(5), oom_score_adj).
func resetOOM(pid int) error {
	path := "/proc/" + strconv.Itoa(pid) + "/oom_score_adj"
	now, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("read out-of-memory score: %w", err)
	}
	if !bytes.HasPrefix(now, []byte("-")) {
		return nil
	}
	if err := os.WriteFile(path, []byte("0"), 0); err != nil {
		return fmt.Errorf("reset out-of-memory score: %w", err)
	}
	return nil
}

func handleOf(fd, pid int) (*pidfd.Handle, error) {
	if fd < 0 {
		return pidfd.Open(pid)
	}
	return pidfd.FromFD(fd, pid)
}

// socketPair returns the server's end as a connection and the guest's as a file.
func socketPair() (net.Conn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "control"), os.NewFile(uintptr(fds[1]), "control")
	conn, err := net.FileConn(ours)
	_ = ours.Close()
	if err != nil {
		_ = theirs.Close()
		return nil, nil, err
	}
	return conn, theirs, nil
}

// listen makes the guest's listening socket. Connections that arrive before the guest accepts wait in
// the queue.
func listen(path string) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	f := os.NewFile(uintptr(fd), "listener")
	// Before bind, which gives the socket's file this mode: whoever may connect commands the guest.
	if err := unix.Fchmod(fd, 0o600); err != nil {
		_ = f.Close()
		return nil, os.NewSyscallError("fchmod", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		_ = f.Close()
		return nil, &os.PathError{Op: "bind", Path: path, Err: err}
	}
	if err := unix.Listen(fd, 1024); err != nil {
		_ = f.Close()
		_ = os.Remove(path)
		return nil, os.NewSyscallError("listen", err)
	}
	return f, nil
}

// newLog makes the file in memory that the guest's own standard error goes to. Its memory counts as
// the guest's.
func newLog() (*os.File, error) {
	fd, err := unix.MemfdCreate("casemate-guest-log", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	// Appending, so that the server's reading does not move where the guest writes.
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFL, unix.O_APPEND); err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("fcntl F_SETFL", err)
	}
	return os.NewFile(uintptr(fd), "guest log"), nil
}

// endGuest kills a guest, waits until it is gone, and frees what is its alone; groups and ids are not.
// Its pid namespace takes every process of the sandbox along (pid_namespaces(7)).
func (b *Backend) endGuest(g *guest) error {
	err := killAndWait(g.proc)
	g.closeFiles()
	return errors.Join(err, g.proc.Close(), removeFile(g.socket))
}

func (g *guest) closeFiles() {
	if g.control != nil {
		_ = g.control.Close()
	}
	if g.userNS != nil {
		_ = g.userNS.Close()
	}
	if g.log != nil {
		_ = g.log.Close()
	}
}

func killAndWait(p *pidfd.Handle) error {
	if err := p.Signal(syscall.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), endTimeout)
	defer cancel()
	_, err := p.Wait(ctx)
	return err
}

func removeFile(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// launch sends the launch and returns the guest's answer. The control socket is closed then.
func (g *guest) launch(ctx context.Context, l guestwire.Launch, files []*os.File) (guestwire.LaunchReply, error) {
	conn := g.control
	g.control = nil
	var reply guestwire.LaunchReply
	err := guestwire.CallOn(ctx, conn, guestwire.MethodLaunch, l, files, &reply)
	return reply, err
}

// lastWords returns the end of what the guest program itself wrote.
func lastWords(log *os.File) string {
	if log == nil {
		return ""
	}
	const keep = 4 << 10
	size, err := log.Seek(0, io.SeekEnd)
	if err != nil {
		return ""
	}
	buf := make([]byte, min(size, keep))
	n, _ := log.ReadAt(buf, max(0, size-keep))
	return strings.ToValidUTF8(strings.TrimSpace(string(buf[:n])), "?")
}
