package launch

import (
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/cleanup"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/guest/bounds"
	"casemate.dev/internal/guest/signals"
	"casemate.dev/internal/guest/spawn"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/linux/caps"
	"casemate.dev/internal/linux/netns"
)

// Sandbox is what Run leaves to the guest proper.
type Sandbox struct {
	Listener net.Listener
	Spawner  *spawn.Spawner
	Bounds   *bounds.Group // nil where the kernel holds all limits
	Inside   bool          // a runtime's kernel is below
	// Launch is what the server asked for; its file indexes mean nothing any more.
	Launch guestwire.Launch
}

// ErrUnclaimed says that the server went away before it launched this guest, which so has nothing to do.
var ErrUnclaimed = errors.New("the server went away before the launch")

// Run prepares, waits for the launch, builds the sandbox, and answers. Afterwards no descriptor of the
// host is left in the process but the listening socket.
//
// Preconditions: the process is PID 1 in new user, mount, pid, ipc, uts, net and cgroup namespaces, with
// every capability there as an ambient one, and with the descriptors of guestwire.Launch.
func Run() (*Sandbox, error) {
	s := setup{}
	control, listener, err := s.begin()
	if err != nil {
		return nil, err
	}
	defer func() { _ = control.Close() }()
	spawner, err := s.run()
	if err != nil {
		return nil, errors.Join(err, control.Fail(err))
	}
	if err := control.Reply(s.reply); err != nil {
		return nil, errors.Join(fmt.Errorf("answer the launch: %w", err), spawner.Close())
	}
	return &Sandbox{Listener: listener, Spawner: spawner, Launch: s.launch}, nil
}

// begin makes the process fit to be PID 1, prepares what needs nothing of the launch, and waits for that.
func (s *setup) begin() (control *guestwire.Conn, listener net.Listener, err error) {
	// A descriptor that another thread of the server had open without close-on-exec at the wrong
	// moment came along: package syscall opens the id maps of other sandboxes that way. First of all, since nothing of this process has been opened yet.
	if err := unix.CloseRange(guestwire.LaunchSysFD+1, math.MaxUint32, 0); err != nil {
		return nil, nil, os.NewSyscallError("close_range", err)
	}
	// Everything below makes mounts and files, whose owner must have an id in here.
	if err := becomeRoot(guestwire.LaunchControlFD); err != nil {
		return nil, nil, err
	}
	nameProcess()
	// Before the rest, so that no signal finds PID 1 without it (HARDENING 3).
	if err := signals.Shield(); err != nil {
		return nil, nil, fmt.Errorf("shield signals: %w", err)
	}
	conn, err := connOf(guestwire.LaunchControlFD)
	if err != nil {
		return nil, nil, fmt.Errorf("control socket: %w", err)
	}
	undo := cleanup.New(func() { _ = conn.Close() })
	defer undo.Run()
	if listener, err = listenerOf(guestwire.LaunchListenFD); err != nil {
		return nil, nil, fmt.Errorf("listening socket: %w", err)
	}
	s.began, s.micros = time.Now(), map[string]int64{}
	s.prepared = s.prepare(os.NewFile(guestwire.LaunchDevFD, "dev"), os.NewFile(guestwire.LaunchSysFD, "sys"))
	warmUp()

	control = guestwire.NewConn(conn)
	if err := s.receive(control); err != nil {
		return nil, nil, err
	}
	if s.prepared == nil && s.cell != (s.launch.Runtime != nil) {
		s.prepared = errors.New("a guest was started for the one kind of sandbox and launched as the other")
	}
	if s.prepared != nil {
		// Told now, since before there was no call to answer.
		return nil, nil, errors.Join(s.prepared, control.Fail(s.prepared))
	}
	undo.Release()
	return control, listener, nil
}

// becomeRoot waits for the id maps and takes the ids of root in here, in place of those that the server
// executed this program with. The capabilities stay, since the id given up is not root in here
// (capabilities(7), on changes of user ids); that they are ambient ends when prepare cuts them down.
func becomeRoot(control int) error {
	var b [1]byte
	n, err := unix.Read(control, b[:])
	for err == unix.EINTR {
		n, err = unix.Read(control, b[:])
	}
	switch {
	case err != nil:
		return os.NewSyscallError("read control socket", err)
	case n == 0:
		return ErrUnclaimed
	case b[0] != guestwire.LaunchMapped:
		return fmt.Errorf("the control socket begins with byte %d", b[0])
	}
	// Of all threads, and groups first: the server's must not come along.
	if err := syscall.Setgroups(nil); err != nil {
		return os.NewSyscallError("setgroups", err)
	}
	if err := syscall.Setresgid(0, 0, 0); err != nil {
		return os.NewSyscallError("setresgid", err)
	}
	return os.NewSyscallError("setresuid", syscall.Setresuid(0, 0, 0))
}

// receive reads the launch. Until it comes, the server's death ends the waiting.
func (s *setup) receive(control *guestwire.Conn) error {
	call, files, err := control.ReadCall()
	if errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) {
		return ErrUnclaimed
	}
	if err != nil {
		return fmt.Errorf("read launch: %w", err)
	}
	if s.cell && s.ahead == nil && call.Method == guestwire.MethodAhead {
		if err := s.startAhead(control, call.Body, files); err != nil {
			return err
		}
		return s.receive(control)
	}
	s.began, s.files = time.Now(), files
	if call.Method != guestwire.MethodLaunch {
		err = errs.New(errs.InvalidArgument, "the control socket takes %q only, not %q", guestwire.MethodLaunch, call.Method)
	} else {
		err = guestwire.Unmarshal(call.Body, &s.launch)
	}
	if err != nil {
		return errors.Join(err, control.Fail(err))
	}
	s.lap("decode")
	return nil
}

// warmUp decodes and encodes messages of the kinds that are to come, so that what package json learns
// about a type at its first use is learned while nobody waits.
func warmUp() {
	body, _ := guestwire.Marshal(guestwire.Launch{
		Root:   guestwire.Overlay{Lowers: []int{0}},
		Mounts: []guestwire.Mount{{Overlay: &guestwire.Overlay{Lowers: []int{0}}}},
		Walls: guestwire.Walls{
			Capabilities: []uint8{0}, CPUs: []int{0}, Rlimits: []guestwire.Rlimit{{}},
			Landlock: &guestwire.Landlock{Rules: []guestwire.LandlockRule{{}}},
		},
		Env: map[string]string{"": ""}, Filters: []int{0}, Join: []int{0},
	})
	_ = guestwire.Unmarshal(body, new(guestwire.Launch))
	_ = guestwire.Unmarshal([]byte("{}"), new(guestwire.Call))
	_ = guestwire.Unmarshal([]byte("{}"), new(guestwire.Claim))
	_ = guestwire.Unmarshal([]byte(`{"start":{},"output":{}}`), new(guestwire.RunProcess))
	_, _ = guestwire.Marshal(guestwire.LaunchReply{Micros: map[string]int64{"": 0}})
	_, _ = guestwire.Marshal(guestwire.ProcessInfo{})
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
	cell   bool          // a runtime runs the sandbox: see RunCell
	bounds *bounds.Group // inside a runtime, where the launch has any
	launch guestwire.Launch
	files  []*os.File
	reply  guestwire.LaunchReply
	began  time.Time
	micros map[string]int64
	thread *spawn.Thread
	// prepared is what prepare returned, and ahead the runtime that stands at its gate, if any.
	prepared error
	ahead    *ahead
	// detached tells once that the staging area is gone. Nothing may be started before that.
	detached chan error
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

// prepare does what needs nothing of the launch, in the one order that holds: each step says why it
// stands where it stands. When it returns, the process sees nothing of the host any more: its root is
// the staging area, a tmpfs with finished /proc, /dev and /sys in it, and an empty directory.
func (s *setup) prepare(dev, sys *os.File) error {
	defer closeAll([]*os.File{dev, sys})

	// Directories that are made below get exactly the mode that is asked for, and files made by
	// processes later the usual one: the umask is inherited.
	unix.Umask(0o022)

	// PID 1 stands above root inside only if it runs from a file that the sandbox's ids can't read:
	// then the kernel gives its memory to the outer user namespace (would_dump in fs/exec.c).
	// Otherwise root inside could read and write PID 1 through /proc/1/mem (HARDENING 2).
	if err := checkSeparated(); err != nil {
		return err
	}
	s.reply.Separated = true

	// Nothing of what follows may show outside. A mount namespace copied into a new user namespace
	// receives mounts from outside (slave) but sends none; receiving is cut, too, since what the host
	// mounts later is none of this sandbox's business (mount_namespaces(7)).
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("cut mounts off from the host's: %w", err)
	}

	// A new /proc shows this pid namespace. The kernel allows it only while another /proc is in
	// sight that nothing covers (mount_too_revealing in fs/namespace.c), so it is made before the
	// host's goes.
	proc, err := procFS()
	if err != nil {
		return err
	}
	defer func() { _ = proc.Close() }()

	// No user namespace in the sandbox can be made from here on, whatever a filter misses (clone3's
	// flags can't be inspected; HARDENING 5). The file belongs to this user namespace alone
	// (namespaces(7)), and must be written before /proc/sys turns read-only.
	if err := writeAt(proc, "sys/user/max_user_namespaces", s.userNamespaces()); err != nil {
		return fmt.Errorf("forbid user namespaces: %w", err)
	}

	relaxWatcher(proc)

	// From here on the host's files can't be named. A guest may wait long for its launch, and must
	// neither keep the host's file systems busy nor have them in sight.
	stage, err := enterStage()
	if err != nil {
		return err
	}
	defer unix.Close(stage)

	if s.cell {
		return s.prepareCell(stage, dev, proc)
	}

	// /sys is not sysfs, which shows the host's hardware, firmware, modules and network devices, most
	// of it guarded by ownership alone, but a small read-only tree with what programs look up.
	if err := attachTo(stage, "/sys", sys); err != nil {
		return err
	}
	// /dev and the empty directory before the masks, which are made of them; /proc before the masks, too.
	if err := attachNew(stage, "/"+emptyDir, 0, empty); err != nil {
		return err
	}
	if err := attachTo(stage, "/dev", dev); err != nil {
		return err
	}
	if err := checkNull(stage); err != nil {
		return err
	}
	if err := attachTo(stage, "/proc", proc); err != nil {
		return err
	}
	// devpts is each sandbox's own: with the host's, its terminals would be in reach.
	if err := attachNew(stage, "/dev/pts", 0, devPTS); err != nil {
		return err
	}
	if s.reply.Masked, err = maskPaths(stage); err != nil {
		return err
	}
	if s.reply.ReadOnly, err = protectPaths(stage); err != nil {
		return err
	}
	// After protectPaths: it lies on the read-only copy of /proc/sys.
	if err := ownBootID(stage); err != nil {
		return err
	}

	// Loopback is the namespace's own and needs a capability that processes never get.
	if err := netns.LoopbackUp(); err != nil {
		return err
	}

	// The thread that will start every process waits for its walls from here on.
	s.thread = spawn.Prepare()

	// What is left to do needs less, and so does PID 1 from then on. Overlayfs acts on the layers with
	// the capabilities of who mounted it, so those on files stay.
	return caps.LimitProcess(firstCapabilities())
}

// firstCapabilities are what PID 1 may hold once it waits for its launch.
func firstCapabilities() caps.Set {
	return caps.Of(
		unix.CAP_SYS_ADMIN, // mounts, the host name, the walls
		unix.CAP_SETPCAP,   // the bounding set
		unix.CAP_SYS_CHROOT, unix.CAP_NET_BIND_SERVICE, unix.CAP_SETFCAP,
		unix.CAP_CHOWN, unix.CAP_DAC_OVERRIDE, unix.CAP_DAC_READ_SEARCH, unix.CAP_FOWNER, unix.CAP_FSETID,
		unix.CAP_KILL, unix.CAP_SETUID, unix.CAP_SETGID, // other users' processes
	)
}

// run builds the sandbox of a launch. A step that fails ends the process, and the namespaces with all
// that was built go with it.
func (s *setup) run() (*spawn.Spawner, error) {
	if err := s.build(); err != nil {
		return nil, fmt.Errorf("build root: %w", err)
	}
	return s.settle()
}

// fill places the launch's mounts and files in the root.
func (s *setup) fill(root int) error {
	for i, m := range s.launch.Mounts {
		if err := s.mount(root, i, m); err != nil {
			return fmt.Errorf("mount %s: %w", m.Target, err)
		}
	}
	for i, f := range s.launch.Files {
		if err := s.showFile(root, "/f"+strconv.Itoa(i), f); err != nil {
			return fmt.Errorf("show %s: %w", f.Target, err)
		}
	}
	return nil
}

// build makes the sandbox's root file system and enters it, in the one order that holds. When it
// returns, the descriptors that it opened are closed.
func (s *setup) build() error {
	l := &s.launch

	// The layers need places while the overlay is made, because overlayfs before Linux 6.13 takes
	// paths only. Those are relative to the staging area, so that mountinfo inside shows "l0" and "u"
	// rather than where the host keeps its layers (HARDENING 8).
	root, err := s.mountOverlay(l.Root, "root", "u", !l.Suid)
	if err != nil {
		return err
	}
	defer unix.Close(root)
	s.lap("root")

	// The template's binds and the workspaces come first, and what the kernel provides later, so
	// that no bind can lie over /proc, /sys or /dev: their targets must be on the root itself.
	if err := s.fill(root); err != nil {
		return err
	}
	s.lap("mounts")

	// What was prepared moves over, masks and all. An image may hold a link in the place of each
	// (CVE-2025-31133, CVE-2026-41579); target follows none.
	if err := moveTo(root, "/proc"); err != nil {
		return err
	}
	if err := moveTo(root, "/dev"); err != nil {
		return err
	}
	if err := s.attachSys(root); err != nil {
		return err
	}
	if err := attachNew(root, "/dev/shm", 0, func() (*os.File, error) { return shm(l.ShmBytes) }); err != nil {
		return err
	}
	s.lap("kernel")

	// The staging area goes, and the layers' places with it. That takes a while, which settle uses.
	detach, err := pivotOnly(root)
	if err != nil {
		return err
	}
	s.detached = make(chan error, 1)
	go func() { s.detached <- detach() }()
	s.lap("pivot")
	return nil
}

// settle makes the process what PID 1 of a sandbox has to be, in the one order that holds.
func (s *setup) settle() (*spawn.Spawner, error) {
	l := &s.launch

	if err := s.readFilters(); err != nil {
		return nil, err
	}
	// The layers' descriptors are doors to the host until they are closed; overlayfs and the mounts
	// keep what they need. The spawner still needs the control group files.
	sink, err := s.listenerSink()
	if err != nil {
		return nil, err
	}
	join, err := s.keepOnly(l.Join)
	if err != nil {
		return nil, err
	}
	if err := unix.Sethostname([]byte(l.Hostname)); err != nil {
		return nil, fmt.Errorf("set host name: %w", err)
	}
	if err := setLimits(l.Rlimits); err != nil {
		return nil, err
	}
	s.lap("self")

	// The walls come last, since their thread can't mount any more, and before any process: every
	// process is forked from it.
	spawner, err := s.thread.Raise(l.Walls, join, sink.send)
	closeAll(join)
	sink.close()
	if err != nil {
		return nil, fmt.Errorf("walls: %w", err)
	}
	s.lap("walls")

	if err := <-s.detached; err != nil {
		return nil, errors.Join(err, spawner.Close())
	}
	s.lap("detach")

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

// maxFilter bounds a filter: 4096 instructions of 8 bytes is the kernel's own limit (seccomp(2)).
const maxFilter = 4096 * 8

// readFilters reads the filters into the walls. They are read at a position, since the same open file
// is passed to many guests.
func (s *setup) readFilters() error {
	into := []*[]byte{&s.launch.Walls.Seccomp, &s.launch.Walls.SeccompExec}
	if len(s.launch.Filters) > len(into) {
		return fmt.Errorf("%d filters were passed", len(s.launch.Filters))
	}
	for i, index := range s.launch.Filters {
		f, err := s.file(index)
		if err != nil {
			return fmt.Errorf("filter: %w", err)
		}
		buf := make([]byte, maxFilter+1)
		n, err := f.ReadAt(buf, 0)
		if !errors.Is(err, io.EOF) || n == 0 || n > maxFilter {
			return fmt.Errorf("filter of %d bytes: %w", n, errors.Join(err, errors.New("must be between 1 and 4096 instructions")))
		}
		*into[i] = buf[:n]
	}
	return nil
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

// checkSeparated fails unless this process is out of reach of root inside. Its files in /proc then belong
// to root of the user namespace that its memory belongs to (proc(5)); that of the outer one is an id
// that has no name in here, and shows as the overflow id (user_namespaces(7)).
func checkSeparated() error {
	// A host with fs.suid_dumpable=1 makes such programs dumpable after all (proc(5)).
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return os.NewSyscallError("prctl PR_SET_DUMPABLE", err)
	}
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/mem", &st); err != nil {
		return fmt.Errorf("look at own memory: %w", err)
	}
	if st.Uid == 0 {
		return errors.New("PID 1 belongs to the sandbox's own user namespace: it was not started from a sealed file of the host's root")
	}
	return nil
}
