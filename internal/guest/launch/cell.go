package launch

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/guest/spawn"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/linux/caps"
	"casemate.dev/internal/linux/mount"
	"casemate.dev/internal/linux/netns"
)

// RunCell is Run where a runtime with a kernel of its own runs the sandbox: it builds the same root, but
// stays outside of it, starts the runtime, hands the server's connections on to the guest inside, and
// returns when the runtime has ended. What it returns is for the log.
//
// The cell is the wall around the runtime: ids, namespaces, control groups and file systems are those
// that a sandbox without a runtime has, and no process in it holds a right outside.
func RunCell() error {
	s := setup{cell: true}
	control, listener, err := s.begin()
	if err != nil {
		return err
	}
	l, ok := listener.(*net.UnixListener)
	if !ok {
		return fmt.Errorf("the listening socket is a %T", listener)
	}
	c, err := s.runCell()
	if err != nil {
		return errors.Join(err, control.Fail(err))
	}
	if err := control.Reply(s.reply); err != nil {
		return fmt.Errorf("answer the launch: %w", err)
	}
	_ = control.Close()
	go relay(l, c.inside)
	return <-c.ended
}

// prepareCell finishes the staging area of a cell. Nothing is masked in its /proc: only the runtime sees it,
// which mounts one of its own, and the kernel allows that only while nothing covers this one.
func (s *setup) prepareCell(stage int, dev, proc *os.File) error {
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
	if err := netns.LoopbackUp(); err != nil {
		return err
	}
	s.thread = spawn.Prepare()
	return caps.LimitProcess(firstCapabilities() | cellCapabilities())
}

// cellCapabilities are what PID 1 of a cell and the runtime may hold beside, in the cell's own user namespace: what a
// runtime takes to build a root for itself and to take over the network device.
func cellCapabilities() caps.Set {
	return caps.Of(unix.CAP_SYS_PTRACE, unix.CAP_MKNOD, unix.CAP_NET_ADMIN, unix.CAP_NET_RAW)
}

// cell is a runtime that runs.
type cell struct {
	inside *net.UnixConn // to the guest in it
	up     chan struct{} // closed once the program that was started has ended well
	ended  chan error    // once
}

func (s *setup) runCell() (*cell, error) {
	if s.ahead != nil {
		return s.runAhead()
	}
	if err := s.buildCell(); err != nil {
		return nil, fmt.Errorf("build cell: %w", err)
	}
	trace, err := s.openTrace()
	if err != nil {
		return nil, fmt.Errorf("trace: %w", err)
	}
	if err := s.placeRuntime(); err != nil {
		return nil, fmt.Errorf("build cell: %w", err)
	}
	s.lap("runtime")
	c, err := s.startRuntime()
	if err != nil {
		return nil, err
	}
	if err := s.await(c); err != nil {
		return nil, err
	}
	return c, trace.sent()
}

// buildCell makes the root and places what the runtime needs beside it.
func (s *setup) buildCell() error {
	l := &s.launch
	root, err := s.mountOverlay(l.Root, strings.TrimPrefix(guestwire.RuntimeRoot, "/"), "u", !l.Suid)
	if err != nil {
		return err
	}
	defer unix.Close(root)
	if err := s.fill(root); err != nil {
		return err
	}
	if err := checkTargets(root); err != nil {
		return err
	}
	s.lap("root")
	stage, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: "/", Err: err}
	}
	defer unix.Close(stage)
	r := l.Runtime
	if err := s.placeAt(stage, guestwire.RuntimeGuest, r.Guest, true); err != nil {
		return err
	}
	if r.Image == nil {
		return nil
	}
	return s.placeAt(stage, guestwire.RuntimeImage, *r.Image, false)
}

// placeRuntime places what the runtime begins with: itself, its device, and its files.
func (s *setup) placeRuntime() error {
	stage, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: "/", Err: err}
	}
	defer unix.Close(stage)
	r := s.launch.Runtime
	if err := s.placeAt(stage, guestwire.RuntimeProgram, r.Program, true); err != nil {
		return err
	}
	if r.Device != nil {
		if err := s.placeAt(stage, guestwire.RuntimeDevice, *r.Device, true); err != nil {
			return err
		}
	}
	for name, content := range r.Files {
		if err := os.MkdirAll(path.Dir(name), 0o700); err != nil {
			return err
		}
		if err := os.WriteFile(name, content, 0o600); err != nil {
			return err
		}
	}
	return os.MkdirAll("/tmp", 0o700) // where a runtime builds its own root
}

// checkTargets refuses a root in which what the runtime mounts would come to lie elsewhere: runtimes follow links. An image
// that has no /tmp gets one, since its own is mounted on itself.
func checkTargets(root int) error {
	if err := unix.Mkdirat(root, "tmp", 0o1777); err == nil {
		if err := unix.Fchmodat(root, "tmp", 0o1777, 0); err != nil {
			return &os.PathError{Op: "chmod", Path: "/tmp", Err: err}
		}
	} else if !errors.Is(err, unix.EEXIST) {
		return &os.PathError{Op: "mkdir", Path: "/tmp", Err: err}
	}
	for _, name := range []string{"/dev", "/proc", "/sys", "/tmp"} {
		fd, err := open(root, name, unix.O_PATH|unix.O_DIRECTORY, 0)
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil {
			return err
		}
		_ = unix.Close(fd)
	}
	return nil
}

// placeAt mounts what was passed, a single file or a directory, at a place of the staging area.
func (s *setup) placeAt(stage int, name string, file int, single bool) error {
	f, err := s.file(file)
	if err != nil {
		return fmt.Errorf("place %s: %w", name, err)
	}
	at, err := target(stage, name, single, 0)
	if err != nil {
		return err
	}
	defer unix.Close(at)
	if err := mount.Attach(f, at); err != nil {
		return fmt.Errorf("place %s: %w", name, err)
	}
	return nil
}

// startRuntime starts the runtime, behind walls of its own, and looks after it.
func (s *setup) startRuntime() (*cell, error) {
	l := &s.launch
	join, err := s.keepOnly(append(slices.Clone(l.Join), l.Runtime.Scope...))
	if err != nil {
		return nil, err
	}
	defer closeAll(join)
	if err := setLimits(l.Rlimits); err != nil {
		return nil, err
	}
	walls := guestwire.Walls{RootAllowed: true, Capabilities: l.Runtime.Capabilities, CPUs: l.Walls.CPUs}
	spawner, err := s.thread.Raise(walls, join[:len(l.Join)], nil)
	closeAll(join[:len(l.Join)])
	if err != nil {
		return nil, fmt.Errorf("walls: %w", err)
	}
	s.lap("walls")
	c, err := s.spawnRuntime(spawner, spawn.Scope{Layout: l.Runtime.Layout, Files: join[len(l.Join):]})
	return c, errors.Join(err, spawner.Close())
}

func (s *setup) spawnRuntime(spawner *spawn.Spawner, scope spawn.Scope) (*cell, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socketpair", err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "control")
	defer func() { _ = theirs.Close() }()
	conn, err := connOf(uintptr(fds[0]))
	if err != nil {
		return nil, err
	}
	inside, ok := conn.(*net.UnixConn)
	if !ok {
		return nil, fmt.Errorf("the control socket is a %T", conn)
	}
	r := s.launch.Runtime
	pid, err := spawner.Start(spawn.Attr{
		Paths: []string{guestwire.RuntimeProgram}, Argv: append([]string{"runtime"}, r.Args...),
		// Without TZ the time zone is looked up, and so the gate opened, by the program itself.
		Env: []string{"PATH=/usr/bin:/bin", "TZ="}, Files: []uintptr{theirs.Fd(), 2, 2}, Reach: r.Reach, Setsid: true, Ctty: -1, Scope: scope,
	})
	if err != nil {
		return nil, fmt.Errorf("start the runtime: %w", err)
	}
	_ = theirs.Close() // else the guest's end would not be seen
	closeAll(scope.Files)
	c := &cell{inside: inside, up: make(chan struct{}), ended: make(chan error, 1)}
	go c.reap(pid)
	return c, nil
}

// await waits until the guest inside has taken its launch and the runtime has left it to itself.
func (s *setup) await(c *cell) error {
	if s.launch.Runtime.Image == nil { // else the guest in it is launched already
		if err := s.launchInside(c.inside); err != nil {
			return errors.Join(err, c.failure())
		}
	}
	if err := c.started(); err != nil {
		return err
	}
	return s.arrived()
}

// arrived looks at what is open, and completes the answer.
func (s *setup) arrived() (err error) {
	s.lap("runtime")
	s.reply.Open, err = checkFiles()
	s.reply.Micros = s.micros
	return err
}

// started waits until the program that starts or restores the sandbox has left it to itself, and nothing of that is open
// here any more.
func (c *cell) started() error {
	select {
	case <-c.up:
		return nil
	case err := <-c.ended:
		return err
	}
}

// failure says why the runtime ended, if it has.
func (c *cell) failure() error {
	select {
	case err := <-c.ended:
		return err
	default:
		return nil
	}
}

// launchInside passes the guest inside what concerns it.
func (s *setup) launchInside(conn *net.UnixConn) error {
	l := s.launch
	l.Root, l.Mounts, l.Files, l.Join, l.Filters, l.Runtime = guestwire.Overlay{}, nil, nil, nil, nil, nil
	l.Walls.CPUs, l.Walls.Emulated, l.Listener = nil, true, 0
	// Realtime and priority are nothing that a runtime's kernel gives out.
	l.Rlimits = slices.DeleteFunc(slices.Clone(l.Rlimits), func(r guestwire.Rlimit) bool {
		return r.Resource == unix.RLIMIT_RTPRIO || r.Resource == unix.RLIMIT_NICE
	})
	var reply guestwire.LaunchReply
	if err := guestwire.CallAndKeep(context.Background(), conn, guestwire.MethodLaunch, l, nil, &reply); err != nil {
		return fmt.Errorf("launch inside: %w", err)
	}
	s.reply.Walls = reply.Walls
	return nil
}

// runtimePID is where a runtime leaves the pid of the process that is its sandbox.
const runtimePID = "/run/pid"

// reap waits for every child until the runtime has ended: the one that was started, which may leave the
// sandbox to a process of its own that became our child, and that one.
func (c *cell) reap(started int) {
	var once sync.Once
	end := func(err error) { once.Do(func() { c.ended <- err; _ = c.inside.Close() }) }
	sandbox, gone := 0, map[int]bool{}
	for {
		var st syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &st, 0, nil)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil { // no child is left
			end(errors.New("the runtime has ended"))
			return
		}
		gone[pid] = true
		switch {
		case pid == started && (!st.Exited() || st.ExitStatus() != 0):
			end(fmt.Errorf("the runtime did not start: %s", statusText(st)))
			return
		case pid == started:
			if sandbox, err = readPID(runtimePID); err != nil {
				end(err)
				return
			}
			close(c.up)
		}
		if sandbox != 0 && gone[sandbox] {
			end(fmt.Errorf("the runtime's sandbox has ended: %s", statusText(st)))
			return
		}
	}
}

func statusText(st syscall.WaitStatus) string {
	if st.Signaled() {
		return st.Signal().String()
	}
	return "exit code " + strconv.Itoa(st.ExitStatus())
}

func readPID(path string) (int, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil || pid <= 1 {
		return 0, fmt.Errorf("%s names no process: %q", path, b)
	}
	return pid, nil
}

// relay hands each connection on to the guest inside, until that is gone.
func relay(l *net.UnixListener, inside *net.UnixConn) {
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			continue // no descriptor or no memory: that passes
		}
		err = pass(inside, c)
		_ = c.Close()
		if err != nil {
			return
		}
	}
}

// pass sends a connection's descriptor.
func pass(to, c *net.UnixConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var sent error
	err = raw.Control(func(fd uintptr) {
		_, _, sent = to.WriteMsgUnix([]byte{1}, unix.UnixRights(int(fd)), nil)
	})
	return errors.Join(err, sent)
}

// userNamespaces is how many user namespaces may be made below this one. A runtime makes one for each of its
// processes, to hold rights in nothing but what it makes itself.
func (s *setup) userNamespaces() string {
	if s.cell {
		return "8"
	}
	return "0"
}
