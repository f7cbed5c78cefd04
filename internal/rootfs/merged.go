package rootfs

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"time"

	"casemate.dev/internal/linux/fd"
)

// opaqueAttr hides what lies below a directory, as overlayfs marks it with option userxattr.
const opaqueAttr = "user.overlay.opaque"

// merged returns one committed layer that shows what l.Below together show, which it makes unless it was
// made before. Preconditions: the caller holds kept.change.
func (s *Store) merged(ctx context.Context, l Layer) (string, error) {
	s.kept.mu.Lock()
	for id, other := range s.kept.layers {
		if slices.Equal(other.Merged, l.Below) {
			s.kept.mu.Unlock()
			return id, nil
		}
	}
	s.kept.mu.Unlock()
	bottom, err := s.Layer(l.Below[len(l.Below)-1])
	if err != nil {
		return "", err
	}
	out := Layer{ID: rand.Text(), Base: l.Base, Plan: l.Plan, Merged: l.Below, Made: time.Now().UTC()}
	work := filepath.Join(s.area("snapshots"), rand.Text())
	defer func() { s.warnIf("remove a merge's leftovers", ignoreMissing(s.disk.dropKept(work))) }()
	if err := s.disk.grow(ctx, s.keptPath(bottom.ID), work); err != nil {
		return "", err
	}
	for _, id := range slices.Backward(l.Below[:len(l.Below)-1]) {
		if err := s.putOver(ctx, id, bottom, work); err != nil {
			return "", fmt.Errorf("put layer %s over: %w", id, err)
		}
	}
	// Workspaces keep the places that they have in the layer at the bottom.
	out.Plan.Workspaces = bottom.Plan.Workspaces
	out, err = s.keepWork(ctx, work, out)
	return out.ID, err
}

func ignoreMissing(err error) error {
	if notThere(err) {
		return nil
	}
	return err
}

// putOver applies a committed layer, with its workspaces, to a copy of one below it.
func (s *Store) putOver(ctx context.Context, id string, bottom Layer, work string) error {
	l, err := s.Layer(id)
	if err != nil {
		return err
	}
	if err := overlayOnto(ctx, s.keptPath(id)+"/upper", work+"/upper"); err != nil {
		return err
	}
	for i, w := range l.Plan.Workspaces {
		at := slices.IndexFunc(bottom.Plan.Workspaces, func(o Workspace) bool { return o.Target == w.Target })
		if at < 0 {
			return fmt.Errorf("workspace %s is not in the layers below", w.Target)
		}
		if err := overlayOnto(ctx, fmt.Sprintf("%s/ws%d/upper", s.keptPath(id), i), fmt.Sprintf("%s/ws%d/upper", work, at)); err != nil {
			return err
		}
	}
	return nil
}

// overlayOnto makes the layer at lower, whose tree nobody else changes, what the layer at upper over it
// shows. What both hide of the layers further below stays hidden.
func overlayOnto(ctx context.Context, upper, lower string) error {
	from, err := fd.OpenRoot(upper)
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := fd.OpenRoot(lower)
	if err != nil {
		return err
	}
	defer to.Close()
	c := fd.NewCopier(to)
	defer c.Close()
	type dir struct {
		path string
		info fd.Info
	}
	var dirs []dir
	err = fd.Walk(ctx, from, func(e fd.Entry) error {
		if e.Info.IsDir() {
			dirs = append(dirs, dir{e.Path, e.Info})
		}
		return putEntry(c, e)
	})
	if err != nil {
		return err
	}
	for _, d := range dirs { // filling them has changed them
		if err := c.Touch(d.path, d.info.Modified); err != nil {
			return err
		}
	}
	return c.CopyRoot(from, overlayXattr)
}

// putEntry applies one entry of an upper layer.
func putEntry(c *fd.Copier, e fd.Entry) error {
	below, err := c.Lstat(e.Path)
	there := err == nil
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if e.Info.IsDir() && there && below.IsDir() {
		opaque, err := isOpaque(e.Dir, e.Name)
		if err != nil {
			return err
		}
		if !opaque {
			return c.Merge(e, overlayXattr)
		}
	}
	if there {
		if err := c.Remove(e.Path); err != nil {
			return err
		}
	}
	if err := c.Copy(e); err != nil {
		return err
	}
	if there && e.Info.IsDir() {
		// What was there hid what lies further below, and so must what takes its place.
		return c.Mark(e.Path, opaqueAttr, "y")
	}
	return nil
}
