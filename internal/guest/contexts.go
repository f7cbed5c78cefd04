package guest

import (
	"os"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/cleanup"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/guest/contexts"
	"casemate.dev/internal/guest/spawn"
	"casemate.dev/internal/guestwire"
)

// launcher starts the drivers of code contexts as processes are started.
type launcher struct{ g *Guest }

var _ contexts.Launcher = launcher{}

// place is where the drivers of one context live.
type place struct {
	tree
	scope spawn.Scope
}

// Kill implements contexts.Place. Where nothing lives nothing is frozen, which costs all processors time.
func (p *place) Kill() error {
	if pids, err := p.pids(); err == nil && len(pids) == 0 {
		return nil
	}
	return p.kill()
}

// Close implements contexts.Place.
func (p *place) Close() { p.close() }

// NewPlace implements contexts.Launcher.
func (l launcher) NewPlace(layout []string, files []*os.File) (contexts.Place, error) {
	scope, t, err := l.g.tree(layout, files)
	if err != nil {
		closeFiles(files)
		return nil, errs.Wrap(err, errs.InvalidArgument, "%v", err)
	}
	return &place{tree: t, scope: scope}, nil
}

// Launch implements contexts.Launcher.
func (l launcher) Launch(r *guestwire.CreateContext, at contexts.Place, ended func(contexts.Exit)) (*contexts.Driver, error) {
	start := guestwire.StartProcess{ID: r.ID, Argv: r.Argv, Env: r.Env, Dir: r.Dir, User: r.User}
	p := &process{id: r.ID}
	attr, err := l.g.plan(p, &start)
	if err != nil {
		return nil, err
	}
	home, ok := at.(*place)
	if !ok {
		return nil, errs.New(errs.Internal, "the place is none of this guest's")
	}
	attr.Scope = home.scope
	found, noScope := home.tree.(*descent)
	if noScope {
		found.mark = r.ID
		attr.Env = append(attr.Env, markVariable+"="+r.ID)
	}
	undo := cleanup.New()
	defer undo.Run()
	d, theirs, err := l.g.driverFiles(r, attr, undo)
	if err != nil {
		return nil, err
	}
	child, err := l.g.reaper.start(func() (int, error) { return l.g.cfg.Spawner.Start(*attr) },
		func(e exit) { ended(driverExit(e)) })
	if err != nil {
		return nil, startError(err, &start, attr)
	}
	undo.Release()
	closeFiles(theirs)
	if noScope {
		found.pid = child.pid
	}
	d.PID, d.Dir, d.User, d.UID = child.pid, p.info.Dir, p.info.User, attr.UID
	d.Signal = child.signal
	return d, nil
}

// driverFiles makes what a driver finds open: nothing to read, two pipes, its control socket, its source, and
// where it wants one a file for long code. It returns our ends, and theirs to close once the driver runs.
func (g *Guest) driverFiles(r *guestwire.CreateContext, attr *spawn.Attr, undo *cleanup.Stack) (*contexts.Driver, []*os.File, error) {
	d, theirs, err := driverEnds(attr.UID, undo)
	if err != nil {
		return nil, nil, err
	}
	source, err := sourceFile(r.Driver, attr.UID)
	if err != nil {
		return nil, nil, err
	}
	undo.Add(func() { _ = source.Close() })
	attr.Files = []uintptr{uintptr(g.null), theirs[0].Fd(), theirs[1].Fd(), theirs[2].Fd(), source.Fd()}
	if r.CodeFile {
		if d.Code, err = sourceFile("", attr.UID); err != nil {
			return nil, nil, err
		}
		undo.Add(func() { _ = d.Code.Close() })
		attr.Files = append(attr.Files, d.Code.Fd())
	}
	return d, append(theirs, source), nil
}

// driverEnds makes a driver's streams: our ends, and in theirs the driver's output, errors and control.
func driverEnds(uid uint32, undo *cleanup.Stack) (d *contexts.Driver, theirs []*os.File, err error) {
	d = &contexts.Driver{}
	for _, ours := range []**os.File{&d.Output, &d.Errors} {
		rd, wr, err := pipe(uid)
		if err != nil {
			return nil, nil, err
		}
		from := source{fd: rd}
		file, end := from.take(), os.NewFile(uintptr(wr), "pipe")
		undo.Add(func() { closeFiles([]*os.File{file, end}) })
		*ours, theirs = file, append(theirs, end)
	}
	conn, control, err := socketPair()
	if err != nil {
		return nil, nil, errs.Wrap(err, errs.ResourceExhausted, "no socket to be had: %v", err)
	}
	undo.Add(func() {
		_ = conn.Close()
		_ = control.Close()
	})
	d.Control = conn
	return d, append(theirs, control), nil
}

// sourceFile returns a memory file with a driver's source, which belongs to its user.
func sourceFile(text string, uid uint32) (*os.File, error) {
	fd, err := unix.MemfdCreate("driver", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, errs.Wrap(err, errs.ResourceExhausted, "no memory file to be had: %v", err)
	}
	f := os.NewFile(uintptr(fd), "driver")
	if _, err = f.WriteString(text); err == nil {
		_, err = f.Seek(0, 0)
	}
	if err == nil && uid != 0 {
		err = f.Chown(int(uid), -1)
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// driverExit puts an end into the words of package contexts.
func driverExit(e exit) contexts.Exit {
	switch st := e.status; {
	case st.Exited():
		return contexts.Exit{End: guestwire.EndExited, Code: st.ExitStatus()}
	case st.Signaled():
		return contexts.Exit{End: guestwire.EndSignaled, Signal: int(st.Signal())}
	}
	return contexts.Exit{End: guestwire.EndLost}
}

// Ends implements contexts.Launcher.
func (l launcher) Ends(uid uint32) (*contexts.Driver, []*os.File, error) {
	undo := cleanup.New()
	defer undo.Run()
	d, theirs, err := driverEnds(uid, undo)
	if err != nil {
		return nil, nil, err
	}
	undo.Release()
	return d, []*os.File{theirs[2], theirs[0], theirs[1]}, nil
}

// Enter implements contexts.Launcher. The pid is the zygote's word, so that it is looked at first: its
// child is what it says it has forked, and stays, if only as a zombie, until the zygote is told to reap.
func (l launcher) Enter(pid, parent int, at contexts.Place) error {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return err
	}
	if stat, ok := parseStat(text); !ok || stat.parent != parent {
		return errs.New(errs.PermissionDenied, "process %d is no child of the interpreter", pid)
	}
	home, ok := at.(*place)
	if !ok {
		return errs.New(errs.Internal, "the place is none of this guest's")
	}
	switch t := home.tree.(type) {
	case *descent:
		t.pid, t.parent = pid, parent
		return nil
	case *scopeV1:
		return nil // it goes through the door
	case *scopeV2:
		f, err := t.with(t.dir, func(dir int) (*os.File, error) {
			fd, err := unix.Openat(dir, "cgroup.procs", unix.O_WRONLY|unix.O_CLOEXEC, 0)
			if err != nil {
				return nil, os.NewSyscallError("openat cgroup.procs", err)
			}
			return os.NewFile(uintptr(fd), "cgroup.procs"), nil
		})
		if err != nil {
			return err
		}
		defer f.Close()
		return writePid(f, pid)
	}
	return errs.New(errs.Internal, "the place has ended")
}

// Door implements contexts.Launcher. The file is of one control group of version 1, and moves nothing but
// the thread that writes to it, and that only from one place of the sandbox to this one.
func (l launcher) Door(at contexts.Place) *os.File {
	home, ok := at.(*place)
	if !ok {
		return nil
	}
	if _, v1 := home.tree.(*scopeV1); !v1 {
		return nil
	}
	return home.scope.Files[slices.Index(home.scope.Layout, "tasks")]
}

// Entered implements contexts.Launcher.
func (l launcher) Entered(pid int, at contexts.Place) error {
	if l.Door(at) == nil {
		return nil // the guest itself has put it there
	}
	pids, err := at.(*place).pids()
	if err == nil && !slices.Contains(pids, pid) {
		err = errs.New(errs.PermissionDenied, "process %d has not gone there", pid)
	}
	return err
}

func writePid(f *os.File, pid int) error {
	_, err := f.WriteString(strconv.Itoa(pid))
	return err
}
