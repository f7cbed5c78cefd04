package namespace

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/walls"
	"casemate.dev/internal/linux/caps"
	"casemate.dev/internal/linux/mount"
)

// A cell is an instance whose root a runtime runs, with a kernel of its own. Ids, namespaces, layers, limits
// and device are as ever; what differs is here: PID 1 keeps the runtime rather than the sandbox's processes,
// and the walls on processes are the runtime's to put up.

var _ isolation.Cell = (*Instance)(nil)

// runtimeScope is the control group of a runtime and all that it starts.
const runtimeScope = "runtime"

// guestArgs are what the guest's program is started with.
func (b *Backend) guestArgs() []string {
	if b.cfg.Cells {
		return []string{"casemate-guest", guestwire.CellArg}
	}
	return []string{"casemate-guest"}
}

// placeInside writes the guest's program where cells mount it from: a runtime takes programs from files. It is
// named for its content, since cells of an earlier server may have another one mounted.
func (b *Backend) placeInside() error {
	sum := sha256.Sum256(b.cfg.Guest)
	b.inside = filepath.Join(b.cfg.RunDir, "inside-"+hex.EncodeToString(sum[:8]))
	if have, err := os.ReadFile(b.inside); err == nil && bytes.Equal(have, b.cfg.Guest) {
		return nil
	}
	tmp := b.inside + ".new"
	if err := os.WriteFile(tmp, b.cfg.Guest, 0o555); err != nil {
		return fmt.Errorf("place the guest's program: %w", err)
	}
	return os.Rename(tmp, b.inside)
}

// checkRuntime refuses what this kind of backend can't start.
func (b *Backend) checkRuntime(s isolation.Spec) error {
	if b.cfg.Cells != (s.Runtime != nil) {
		return errs.New(errs.InvalidArgument, "a backend of cells starts runtimes, and only that one does")
	}
	return nil
}

// allowDevice lets cells open the device that a runtime drives its kernel with. Each finds it only where it was mounted for it.
func (b *Backend) allowDevice(s isolation.Spec) error {
	if s.Runtime == nil || s.Runtime.Device == "" || b.groups == nil {
		return nil
	}
	var st unix.Stat_t
	if err := unix.Stat(s.Runtime.Device, &st); err != nil {
		return &os.PathError{Op: "stat", Path: s.Runtime.Device, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFCHR {
		return errs.New(errs.InvalidArgument, "%q is no character device", s.Runtime.Device)
	}
	return b.groups.AllowDevice(unix.Major(st.Rdev), unix.Minor(st.Rdev))
}

// cellWalls are the walls that the guest inside puts up: what a profile holds, without the host's filters,
// since no system call of a process reaches the host's kernel.
func (b *Backend) cellWalls(s isolation.Spec, cpus []int) (wallPlan, error) {
	decide, err := b.telling()
	return wallPlan{decide: decide, walls: guestwire.Walls{
		ExecMark:    s.Runtime.ExecMark,
		RootAllowed: s.Profile == isolation.Standard, Capabilities: walls.Capabilities(s.Profile),
		NoNewPrivs: s.Profile == isolation.Locked, CPUs: cpus, OwnGroup: s.Runtime.GroupNamespaces,
		Rlimits: []guestwire.Rlimit{
			{Resource: unix.RLIMIT_CORE, Max: 0},
			{Resource: unix.RLIMIT_NOFILE, Max: uint64(s.Limits.OpenFiles)},
		},
	}}, err
}

// programAttr is what a program is mounted with: it must run, also where the run directory forbids that.
const programAttr = mount.ReadOnly | mount.NoSuid | mount.NoDev

// runtime adds what a cell needs to a launch.
func (b *builder) runtime(inside string, g *guest) error {
	r := b.spec.Runtime
	out := said(r)
	b.launch.Runtime = out
	b.launch.Bounds = &guestwire.Bounds{MemoryBytes: r.Inside.MemoryBytes, Pids: r.Inside.Pids}
	var err error
	if out.Guest, err = b.program(inside); err != nil {
		return err
	}
	if r.Image != "" {
		m, err := layer(r.Image, b.userNS, layerAttr|mount.ReadOnly)
		if err != nil {
			return err
		}
		at := b.add(m)
		out.Image = &at
	}
	if g.ahead != nil {
		return nil // it has the rest
	}
	return b.begin(g)
}

// said is what a launch says of a runtime, but for what is passed along.
func said(r *isolation.Runtime) *guestwire.Runtime {
	return &guestwire.Runtime{Args: r.Args, Reach: r.Reach, Gate: r.Gate, Files: r.Files, Capabilities: r.Capabilities, Trace: r.Trace}
}

// begin adds what a runtime is started with.
func (b *builder) begin(g *guest) error {
	r, out := b.spec.Runtime, b.launch.Runtime
	var err error
	if out.Program, err = b.program(r.Program); err != nil {
		return err
	}
	if r.Device != "" {
		at, err := b.device(r.Device)
		if err != nil {
			return err
		}
		out.Device = &at
	}
	if g.group == nil {
		return nil
	}
	join, err := g.group.PayloadFiles()
	if err != nil {
		return err
	}
	for _, f := range join {
		b.launch.Join = append(b.launch.Join, b.add(f))
	}
	scope, err := g.group.NewScope(runtimeScope)
	if err != nil {
		return err
	}
	out.Layout = slices.Clone(scope.Layout())
	for _, f := range scope.Files() {
		dup, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return os.NewSyscallError("fcntl F_DUPFD_CLOEXEC", err)
		}
		out.Scope = append(out.Scope, b.add(os.NewFile(uintptr(dup), f.Name())))
	}
	return nil
}

func (b *builder) program(path string) (int, error) {
	path, err := filepath.EvalSymlinks(path) // a mount of a link is a link
	if err != nil {
		return 0, err
	}
	return b.single(path, mount.Change{Set: programAttr, Clear: mount.NoExec})
}

// device adds a device, which can be opened but for which nothing can be put in its place.
func (b *builder) device(path string) (int, error) {
	return b.single(path, mount.Change{Set: mount.NoSuid | mount.NoExec, Clear: mount.NoDev})
}

func (b *builder) single(path string, c mount.Change) (int, error) {
	m, err := mount.Clone(path, false)
	if err != nil {
		return 0, err
	}
	if err := mount.SetAttr(m, c); err != nil {
		_ = m.Close()
		return 0, err
	}
	return b.add(m), nil
}

// already is a device that was waited for.
func already(d device, err error) func() (device, error) {
	return func() (device, error) { return d, err }
}

// verifyCell is verify for a cell: it looks at every process of the runtime.
func (b *Backend) verifyCell(s isolation.Spec, g *guest, reply guestwire.LaunchReply) (isolation.Applied, error) {
	p := g.posture
	if !p.separated || !reply.Separated {
		return isolation.Applied{}, errors.New("the cell's PID 1 is not separated from the sandbox")
	}
	processes, err := cellProcesses(g.proc.PID(), p.first)
	if err != nil {
		return isolation.Applied{}, err
	}
	if len(processes) == 0 {
		return isolation.Applied{}, errors.New("the runtime has no process")
	}
	version := 0
	if b.groups != nil {
		version = b.groups.Version()
	}
	observed := observers()
	observed["no_new_privs"], observed["capabilities"], observed["guest_separated"] = "guest", "guest", "server"
	observed["host_processes"], observed["runtime"] = "kernel", "server"
	held := isolation.ImageWalls{Capabilities: caps.Names(reply.Walls.Capabilities), NoNewPrivs: reply.Walls.NoNewPrivs}
	if s.Runtime.Image != "" { // they were put up before
		held = s.Runtime.Walls
	}
	return isolation.Applied{
		Backend: Name, Profile: s.Profile, HostUID: p.first, UIDCount: p.count, Namespaces: p.namespaces,
		Capabilities: held.Capabilities, NoNewPrivs: held.NoNewPrivs,
		CgroupVersion: version, Limits: b.limitsApplied(s, g), Disk: s.Root.Disk.Mechanism,
		Network: networkApplied(s.Network), HostProcesses: named(processes), Calls: coverage(s.Calls),
		Observed: observed,
	}, nil
}

// named leaves out processes without a command line: those that lend a runtime's processes an address space,
// which come and go.
func named(all []isolation.HostProcess) []isolation.HostProcess {
	return slices.DeleteFunc(slices.Clone(all), func(p isolation.HostProcess) bool { return p.Name == "" })
}

// cellProcesses lists the processes of a cell but its first, and fails if one has an id outside of the range.
func cellProcesses(first int, ids uint32) ([]isolation.HostProcess, error) {
	var out []isolation.HostProcess
	pending := []int{first}
	for len(pending) > 0 {
		pid := pending[0]
		pending = pending[1:]
		children, err := childrenOf(pid)
		if err != nil {
			return nil, err
		}
		pending = append(pending, children...)
		if pid == first {
			continue
		}
		p, err := hostProcess(pid)
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			continue // ended meanwhile
		}
		if err != nil {
			return nil, err
		}
		if p.UID < ids || p.UID >= ids+rangeSize || p.GID < ids || p.GID >= ids+rangeSize {
			return nil, fmt.Errorf("process %d (%s) of the cell runs as %d:%d on the host, outside of its range from %d on", pid, p.Name, p.UID, p.GID, ids)
		}
		out = append(out, p)
	}
	return out, nil
}

func childrenOf(pid int) ([]int, error) {
	tasks, err := filepath.Glob("/proc/" + strconv.Itoa(pid) + "/task/*/children")
	if err != nil {
		return nil, err
	}
	var out []int
	for _, t := range tasks {
		b, err := os.ReadFile(t)
		if err != nil {
			continue // the thread ended
		}
		for _, f := range strings.Fields(string(b)) {
			n, err := strconv.Atoi(f)
			if err != nil {
				return nil, fmt.Errorf("read %s: %w", t, err)
			}
			out = append(out, n)
		}
	}
	return out, nil
}

func hostProcess(pid int) (isolation.HostProcess, error) {
	p := isolation.HostProcess{PID: pid}
	dir := "/proc/" + strconv.Itoa(pid)
	line, err := os.ReadFile(dir + "/cmdline")
	if err != nil {
		return p, err
	}
	name, _, _ := bytes.Cut(line, []byte{0})
	p.Name = string(name)
	status, err := os.ReadFile(dir + "/status")
	if err != nil {
		return p, err
	}
	for text := range strings.Lines(string(status)) {
		key, value, _ := strings.Cut(text, ":")
		fields := strings.Fields(value)
		switch {
		case key == "Uid" && len(fields) == 4:
			p.UID, err = parseID(fields[1])
		case key == "Gid" && len(fields) == 4:
			p.GID, err = parseID(fields[1])
		case key == "Seccomp" && len(fields) == 1:
			p.Seccomp, err = strconv.Atoi(fields[0])
		}
		if err != nil {
			return p, fmt.Errorf("status of process %d: %w", pid, err)
		}
	}
	return p, nil
}

func parseID(s string) (uint32, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	return uint32(n), err
}

// HostProcesses implements isolation.Cell.
func (i *Instance) HostProcesses() ([]isolation.HostProcess, error) {
	all, err := cellProcesses(i.proc.PID(), i.first)
	if err == nil && !i.proc.Alive() {
		err = errs.New(errs.Unavailable, "the sandbox has ended")
	}
	return all, err
}

// DialCell implements isolation.Cell.
func (i *Instance) DialCell(ctx context.Context, path string) (net.Conn, error) {
	f, err := i.openCell(path, unix.O_PATH)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", "/proc/self/fd/"+strconv.Itoa(int(f.Fd())))
	if err != nil {
		return nil, errs.Wrap(err, errs.Unavailable, "the runtime does not answer")
	}
	return c, nil
}

// OpenCell implements isolation.Cell.
func (i *Instance) OpenCell(path string) (*os.File, error) {
	return i.openCell(path, unix.O_RDWR|unix.O_NONBLOCK) // what lies there may not be a file any more
}

// openCell opens a path in the cell's own file system. It is resolved in the cell's root alone and follows no link: what
// is in the cell may be the sandbox's, should it have taken over its runtime.
func (i *Instance) openCell(path string, flags uint64) (*os.File, error) {
	root, err := unix.Open(fmt.Sprintf("/proc/%d/root", i.proc.PID()), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	// Looked at afterwards: what was opened by a pid is this cell's only if its first process lives still.
	if err == nil && !i.proc.Alive() {
		unix.Close(root)
		err = unix.ESRCH
	}
	if err != nil {
		return nil, errs.Wrap(err, errs.Unavailable, "the sandbox has ended")
	}
	defer unix.Close(root)
	fd, err := unix.Openat2(root, path, &unix.OpenHow{
		Flags:   flags | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV,
	})
	if err != nil {
		return nil, errs.Wrap(&os.PathError{Op: "open", Path: path, Err: err}, errs.Unavailable, "%s of the runtime is not there", path)
	}
	return os.NewFile(uintptr(fd), path), nil
}
