package guest

import (
	"os"

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

// Kill implements contexts.Place.
func (p *place) Kill() error { return p.kill() }

// Close implements contexts.Place.
func (p *place) Close() { p.close() }

// NewPlace implements contexts.Launcher.
func (l launcher) NewPlace(layout []string, files []*os.File) (contexts.Place, error) {
	scope := spawn.Scope{Layout: layout, Files: files}
	t, err := newTree(scope)
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
	d.PID, d.Dir, d.User = child.pid, p.info.Dir, p.info.User
	d.Signal = child.signal
	return d, nil
}

// driverFiles makes what a driver finds open: nothing to read, two pipes, its control socket and its
// source. It returns our ends, and theirs to close once the driver runs.
func (g *Guest) driverFiles(r *guestwire.CreateContext, attr *spawn.Attr, undo *cleanup.Stack) (*contexts.Driver, []*os.File, error) {
	d := &contexts.Driver{}
	var theirs []*os.File
	undo.Add(func() { closeFiles(theirs) })
	for _, ours := range []**os.File{&d.Output, &d.Errors} {
		rd, wr, err := pipe()
		if err != nil {
			return nil, nil, err
		}
		from := source{fd: rd}
		file := from.take()
		undo.Add(func() { _ = file.Close() })
		*ours, theirs = file, append(theirs, os.NewFile(uintptr(wr), "pipe"))
	}
	var control *os.File
	var err error
	if d.Control, control, err = socketPair(); err != nil {
		return nil, nil, errs.Wrap(err, errs.ResourceExhausted, "no socket to be had: %v", err)
	}
	undo.Add(func() { _ = d.Control.Close() })
	theirs = append(theirs, control)
	source, err := sourceFile(r.Driver, attr.UID)
	if err != nil {
		return nil, nil, err
	}
	theirs = append(theirs, source)
	attr.Files = []uintptr{uintptr(g.null), theirs[0].Fd(), theirs[1].Fd(), control.Fd(), source.Fd()}
	return d, theirs, nil
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
