package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
)

// refreezeEvery is after how many looks FROZEN is written again: a fork at the wrong moment can
// leave a group in FREEZING (runc sees it too), and writing the state again takes it up.
const refreezeEvery = 16

func (g *v1Group) freeze(ctx context.Context, frozen bool) error {
	fd, err := g.freezer()
	if err != nil {
		return err
	}
	state := g.id + "/payload/freezer.state"
	if !frozen {
		return write(fd, state, "THAWED")
	}
	p := newPacer()
	for i := 0; ; i++ {
		if i%refreezeEvery == 0 {
			if err := write(fd, state, "FROZEN"); err != nil {
				return err
			}
		}
		now, err := read(fd, state)
		if err != nil {
			return err
		}
		if strings.TrimSpace(now) == "FROZEN" {
			return nil
		}
		if err := p.wait(ctx); err != nil {
			// Half frozen is neither: give it back running.
			return errors.Join(fmt.Errorf("freeze %s: %w", g.id, err), write(fd, state, "THAWED"))
		}
	}
}

func (g *v1Group) frozen() (bool, error) {
	fd, err := g.freezer()
	if err != nil {
		return false, err
	}
	n, err := readInt(fd, g.id+"/payload/freezer.self_freezing")
	return n != 0, err
}

func (g *v1Group) freezeFile() (*os.File, string, error) {
	fd, err := g.freezer()
	if err != nil {
		return nil, "", err
	}
	f, err := openFile(fd, g.id+"/payload/freezer.state", unix.O_WRONLY)
	return f, "FROZEN", err
}

// v1Kill ends all processes of some groups: it stops them, so that none forks away from the list,
// signals all, and lets them go on to their death (a frozen process does not die).
type v1Kill struct {
	list    func() ([]int, error)
	freezer int
	states  func() []string // groups to freeze (the first) and thaw (all); nil without a freezer
}

func (k v1Kill) run(ctx context.Context) error {
	p := newPacer()
	for {
		k.set("FROZEN", true)
		n, err := signalAll(k.list)
		k.set("THAWED", false)
		if err != nil || n == 0 {
			return err
		}
		if err := p.wait(ctx); err != nil {
			return fmt.Errorf("%d processes still alive: %w", n, err)
		}
	}
}

// set writes the state to the first group, which holds for those below, or to all. A group that is
// gone needs none; other errors show as processes that don't die.
func (k v1Kill) set(state string, first bool) {
	if k.states == nil {
		return
	}
	for _, s := range k.states() {
		_ = write(k.freezer, s+"/freezer.state", state)
		if first {
			return
		}
	}
}

// v1Scope is the freezer group of one process.
type v1Scope struct {
	fd   int
	path string
}

func (g *v1Group) newScope(id string) (*Scope, error) {
	fd, err := g.freezer()
	if err != nil {
		return nil, err
	}
	d := v1Scope{fd: fd, path: g.id + "/payload/" + id}
	if err := makeDir(fd, d.path); errors.Is(err, fs.ErrExist) {
		return nil, errs.Wrap(err, errs.AlreadyExists, "control group %s exists", id)
	} else if err != nil {
		return nil, err
	}
	s, err := d.scope(id)
	if err != nil {
		return nil, errors.Join(err, unix.Unlinkat(fd, d.path, unix.AT_REMOVEDIR))
	}
	return s, nil
}

func (g *v1Group) openScope(id string) (*Scope, error) {
	fd, err := g.freezer()
	if err != nil {
		return nil, err
	}
	s, err := v1Scope{fd: fd, path: g.id + "/payload/" + id}.scope(id)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errs.Wrap(err, errs.NotFound, "no control group %s", id)
	}
	return s, err
}

// scope opens the files.
func (d v1Scope) scope(id string) (*Scope, error) {
	s := &Scope{id: id, driver: d, layout: []string{"tasks", "procs", "freezer"}}
	for _, f := range [...]struct {
		name  string
		flags int
	}{{"/tasks", unix.O_WRONLY}, {"/cgroup.procs", unix.O_RDONLY}, {"/freezer.state", unix.O_WRONLY}} {
		file, err := openFile(d.fd, d.path+f.name, f.flags)
		if err != nil {
			closeFiles(s.files)
			return nil, err
		}
		s.files = append(s.files, file)
	}
	return s, nil
}

func closeFiles(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

func (g *v1Group) scopes() ([]string, error) {
	fd, err := g.freezer()
	if err != nil {
		return nil, err
	}
	return children(fd, g.id+"/payload")
}

func (d v1Scope) list() ([]int, error) { return readPids(d.fd, d.path+"/cgroup.procs") }

func (d v1Scope) empty() (bool, error) {
	pids, err := d.list()
	return len(pids) == 0, err
}

// rename gives the group another process's name (cgroup1_rename); the open files stay valid.
func (d v1Scope) rename(id string) (scopeDriver, error) {
	to := v1Scope{fd: d.fd, path: path.Join(path.Dir(d.path), id)}
	if err := unix.Renameat(d.fd, d.path, d.fd, to.path); err != nil {
		return nil, &os.LinkError{Op: "rename", Old: d.path, New: to.path, Err: err}
	}
	return to, nil
}

func (d v1Scope) kill(ctx context.Context) error {
	if pids, err := d.list(); err != nil || len(pids) == 0 {
		return err // the usual case on Close: no need to freeze an empty group
	}
	k := v1Kill{list: d.list, freezer: d.fd, states: func() []string { return []string{d.path} }}
	return k.run(ctx)
}

func (d v1Scope) remove(ctx context.Context) error {
	if err := unix.Unlinkat(d.fd, d.path, unix.AT_REMOVEDIR); err == nil || errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err := d.kill(ctx); err != nil {
		return err
	}
	return removeTree(ctx, d.fd, d.path)
}
