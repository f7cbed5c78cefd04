package cgroup

import (
	"context"
	"errors"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
)

// v2Scope is the group of one process.
type v2Scope struct {
	v    *v2
	path string
}

func (g *v2Group) newScope(id string) (*Scope, error) {
	d := v2Scope{v: g.v, path: g.id + "/payload/" + id}
	if err := makeDir(g.v.dir, d.path); errors.Is(err, fs.ErrExist) {
		return nil, errs.Wrap(err, errs.AlreadyExists, "control group %s exists", id)
	} else if err != nil {
		return nil, err
	}
	s, err := g.prepare(d, id)
	if err != nil {
		return nil, errors.Join(err, unix.Unlinkat(g.v.dir, d.path, unix.AT_REMOVEDIR))
	}
	return s, nil
}

// prepare gives a fresh scope to the delegate and opens its files.
func (g *v2Group) prepare(d v2Scope, id string) (*Scope, error) {
	g.mu.Lock()
	uid, gid, delegated := g.uid, g.gid, g.delegated
	g.mu.Unlock()
	if delegated {
		if err := g.v.chownProcs(d.path, uid, gid); err != nil {
			return nil, err
		}
	}
	return d.scope(id)
}

func (g *v2Group) openScope(id string) (*Scope, error) {
	s, err := v2Scope{v: g.v, path: g.id + "/payload/" + id}.scope(id)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errs.Wrap(err, errs.NotFound, "no control group %s", id)
	}
	return s, err
}

// scope opens the files. "dir" is a detached mount of the one group: through a plain directory
// descriptor ".." would lead to all groups of the host.
func (d v2Scope) scope(id string) (*Scope, error) {
	kill, err := openFile(d.v.dir, d.path+"/cgroup.kill", unix.O_WRONLY)
	if err != nil {
		return nil, err
	}
	dir, err := unix.OpenTree(d.v.dir, d.path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		_ = kill.Close()
		return nil, pathError("open_tree", d.path, err)
	}
	return &Scope{
		id: id, driver: d,
		layout: []string{"kill", "dir"},
		files:  []*os.File{kill, os.NewFile(uintptr(dir), d.path)},
	}, nil
}

func (d v2Scope) empty() (bool, error) {
	n, err := readKey(d.v.dir, d.path+"/cgroup.events", "populated")
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return true, nil
	}
	return n == 0, err
}

func (d v2Scope) kill(ctx context.Context) error { return d.v.kill(ctx, d.path) }

func (d v2Scope) remove(ctx context.Context) error {
	if err := unix.Unlinkat(d.v.dir, d.path, unix.AT_REMOVEDIR); err == nil || errors.Is(err, unix.ENOENT) {
		return nil
	}
	return d.v.remove(ctx, d.path)
}
