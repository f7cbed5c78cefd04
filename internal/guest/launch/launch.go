package launch

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guest/spawn"
	"casemate.dev/internal/guestwire"
)

// Sandbox is what Run leaves to the guest proper.
type Sandbox struct {
	Listener net.Listener
	Spawner  *spawn.Spawner
	// Launch is what the server asked for; its file indexes mean nothing any more.
	Launch guestwire.Launch
}

// ErrUnclaimed says that the server went away before it launched this guest, which so has nothing to do.
var ErrUnclaimed = errors.New("the server went away before the launch")

// Run waits for the launch, builds the sandbox, and answers. Afterwards no descriptor of the host is
// left in the process but the listening socket.
//
// Preconditions: the process is PID 1 in new user, mount, pid, ipc, uts, net and cgroup namespaces,
// uid 0 there, with the descriptors of guestwire.Launch.
func Run() (*Sandbox, error) {
	// Before anything else: PID 1 may be signalled by root inside from the moment that one exists,
	// and Go's default for these signals is to die (HARDENING 3).
	ignoreSignals()
	conn, err := connOf(guestwire.LaunchControlFD)
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	defer func() { _ = conn.Close() }()
	listener, err := listenerOf(guestwire.LaunchListenFD)
	if err != nil {
		return nil, fmt.Errorf("listening socket: %w", err)
	}
	control := guestwire.NewConn(conn)
	l, files, err := receive(control)
	if err != nil {
		return nil, err
	}
	s := setup{launch: l, files: files, began: time.Now(), micros: map[string]int64{}}
	spawner, err := s.run()
	if err != nil {
		err = fmt.Errorf("launch: %w", err)
		return nil, errors.Join(err, control.Fail(err))
	}
	if err := control.Reply(s.reply); err != nil {
		return nil, fmt.Errorf("answer the launch: %w", err)
	}
	return &Sandbox{Listener: listener, Spawner: spawner, Launch: l}, nil
}

func receive(control *guestwire.Conn) (guestwire.Launch, []*os.File, error) {
	var l guestwire.Launch
	call, files, err := control.ReadCall()
	if errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) {
		return l, nil, ErrUnclaimed
	}
	if err != nil {
		return l, nil, fmt.Errorf("read launch: %w", err)
	}
	if call.Method != guestwire.MethodLaunch {
		err = errs.New(errs.InvalidArgument, "the control socket takes %q only, not %q", guestwire.MethodLaunch, call.Method)
	} else {
		err = guestwire.Unmarshal(call.Body, &l)
	}
	if err != nil {
		return l, nil, errors.Join(err, control.Fail(err))
	}
	return l, files, nil
}

// connOf takes over a descriptor that the process was started with. The number itself is free
// afterwards.
func connOf(fd uintptr) (net.Conn, error) {
	f := os.NewFile(fd, "control")
	defer func() { _ = f.Close() }()
	return net.FileConn(f)
}

func listenerOf(fd uintptr) (net.Listener, error) {
	f := os.NewFile(fd, "listener")
	defer func() { _ = f.Close() }()
	return net.FileListener(f)
}

// setup is one launch while it is under way.
type setup struct {
	launch guestwire.Launch
	files  []*os.File
	reply  guestwire.LaunchReply
	began  time.Time
	micros map[string]int64
}

// file returns the file that the server passed at index i.
func (s *setup) file(i int) (*os.File, error) {
	if i < 0 || i >= len(s.files) {
		return nil, fmt.Errorf("file %d of %d was not passed", i, len(s.files))
	}
	return s.files[i], nil
}

// lap notes how long the steps since the last lap took.
func (s *setup) lap(name string) {
	now := time.Now()
	s.micros[name] += now.Sub(s.began).Microseconds()
	s.began = now
}

// run is the start of a sandbox, in the one order that holds. Each step says why it stands where it
// stands; a step that fails ends the process, and the namespaces with all that was built go with it.
func (s *setup) run() (*spawn.Spawner, error) {
	l := &s.launch

	// Directories that are made below get exactly the mode that is asked for, and files made by
	// processes later the usual one: the umask is inherited.
	unix.Umask(0o022)

	// Nothing of what follows may show outside. A mount namespace copied into a new user namespace
	// receives mounts from outside (slave) but sends none; receiving is cut, too, since what the host
	// mounts later is none of this sandbox's business (mount_namespaces(7)).
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return nil, fmt.Errorf("cut mounts off from the host's: %w", err)
	}

	// The layers need places while the overlay is made, because overlayfs before Linux 6.13 takes
	// paths only. They are relative to a private tmpfs, so that mountinfo inside shows "l0" and "u"
	// rather than where the host keeps its layers (HARDENING 8).
	if err := enterStage(l.Stage); err != nil {
		return nil, err
	}
	root, err := s.mountOverlay(l.Root, "root", "u", !l.Suid)
	if err != nil {
		return nil, fmt.Errorf("root: %w", err)
	}
	defer unix.Close(root)
	s.lap("root")

	// The template's binds and the workspaces come first, and what the kernel provides later, so
	// that no bind can lie over /proc, /sys or /dev: their targets must be on the root itself.
	for i, m := range l.Mounts {
		if err := s.mount(root, i, m); err != nil {
			return nil, fmt.Errorf("mount %s: %w", m.Target, err)
		}
	}
	s.lap("mounts")

	// A new /proc shows this pid namespace. The kernel allows it only while another /proc is in
	// sight that nothing covers (mount_too_revealing in fs/namespace.c), so it comes before the host's goes.
	proc, err := attachNew(root, "/proc", unix.RESOLVE_NO_XDEV, procFS)
	if err != nil {
		return nil, err
	}
	defer func() { _ = proc.Close() }()

	// No user namespace in the sandbox can be made from here on, whatever a filter misses (clone3's
	// flags can't be inspected; HARDENING 5). The file belongs to this user namespace alone
	// (namespaces(7)), and must be written before /proc/sys turns read-only.
	if err := writeAt(proc, "sys/user/max_user_namespaces", "0"); err != nil {
		return nil, fmt.Errorf("forbid user namespaces: %w", err)
	}

	// /sys and /dev are read-only trees made by the server, the same for all sandboxes. /sys is not
	// sysfs: that shows the host's hardware, firmware, modules and network devices, and most of it is
	// guarded by ownership alone. /dev holds device nodes that root inside couldn't make.
	if err := s.attachTrees(root); err != nil {
		return nil, err
	}
	s.lap("kernel")

	// Masks need /dev/null, and must be in place before any process. /dev is ours (just mounted), so
	// this null is no link that an image left (CVE-2025-31133).
	if s.reply.Masked, err = maskPaths(root); err != nil {
		return nil, err
	}
	if s.reply.ReadOnly, err = protectPaths(root); err != nil {
		return nil, err
	}
	s.lap("masks")

	// The point of no return: from here on the host's files can't be named any more.
	if err := pivot(root); err != nil {
		return nil, err
	}
	// The layers' descriptors are doors to the host until they are closed; overlayfs and the mounts
	// keep what they need. The spawner still needs the control group files.
	join, err := s.keepOnly(l.Join)
	if err != nil {
		return nil, err
	}
	s.lap("pivot")

	// Name and loopback are the namespaces' own and need capabilities that processes never get.
	if err := s.finishNamespaces(); err != nil {
		return nil, err
	}

	// PID 1 stands above root inside only if it runs from a file that the sandbox's ids can't read:
	// then the kernel gives its memory to the outer user namespace (would_dump in fs/exec.c).
	// Otherwise root inside could read and write PID 1 through /proc/1/mem (HARDENING 2).
	if s.reply.Separated, err = separated(); err != nil {
		return nil, err
	}
	if !s.reply.Separated {
		return nil, errors.New("PID 1 belongs to the sandbox's own user namespace: it was not started from a sealed file of the host's root")
	}
	if err := setLimits(l.Rlimits); err != nil {
		return nil, err
	}
	s.lap("self")

	// The walls come last, since their thread can't mount any more, and before any process: every
	// process is forked from it.
	spawner, err := spawn.New(l.Walls, join)
	if err != nil {
		return nil, fmt.Errorf("walls: %w", err)
	}
	closeAll(join)
	s.lap("walls")

	// Last look before the answer: no door may be left open (HARDENING 1). It comes after everything
	// that opens files, so that nothing escapes it.
	if s.reply.Open, err = checkFiles(); err != nil {
		return nil, errors.Join(err, spawner.Close())
	}
	s.lap("files")
	s.reply.Walls = spawner.Applied()
	s.reply.Micros = s.micros
	return spawner, nil
}

// keepOnly closes the files that the server passed, except those at the given indexes.
func (s *setup) keepOnly(indexes []int) ([]*os.File, error) {
	kept := make([]*os.File, 0, len(indexes))
	for _, i := range indexes {
		f, err := s.file(i)
		if err != nil {
			return nil, fmt.Errorf("control group: %w", err)
		}
		kept = append(kept, f)
		s.files[i] = nil
	}
	for _, f := range s.files {
		if f != nil {
			_ = f.Close()
		}
	}
	s.files = nil
	return kept, nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

func (s *setup) finishNamespaces() error {
	if err := unix.Sethostname([]byte(s.launch.Hostname)); err != nil {
		return fmt.Errorf("set host name: %w", err)
	}
	return loopbackUp()
}

// setLimits sets the guest's own limits. syscall.Setrlimit rather than unix's: package syscall
// otherwise restores the limit on open files that the program was started with in every child.
func setLimits(limits []guestwire.Rlimit) error {
	for _, r := range limits {
		if err := syscall.Setrlimit(r.Resource, &syscall.Rlimit{Cur: r.Max, Max: r.Max}); err != nil {
			return fmt.Errorf("limit resource %d to %d: %w", r.Resource, r.Max, err)
		}
	}
	return nil
}

// separated reports whether this process is out of reach of root inside. Its directory in /proc then
// belongs to root of the outer user namespace, an id that has no name in here and shows as the
// overflow id (proc(5), user_namespaces(7)).
func separated() (bool, error) {
	// A host with fs.suid_dumpable=1 makes such programs dumpable after all (proc(5)).
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return false, os.NewSyscallError("prctl PR_SET_DUMPABLE", err)
	}
	var st unix.Stat_t
	if err := unix.Stat("/proc/"+strconv.Itoa(os.Getpid()), &st); err != nil {
		return false, fmt.Errorf("look at own process: %w", err)
	}
	return st.Uid != 0, nil
}
