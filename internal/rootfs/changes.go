package rootfs

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/linux/fd"
)

// Bounds of an answer: the server holds it whole, and whoever wrote the files chose their names.
const (
	maxChanges = 200_000
	// maxChangePaths bounds the paths together.
	maxChangePaths = 32 << 20
)

// Changes tells which files of a sandbox differ from what it started from: the template, or the source
// of the workspace whose target is given. It looks at a snapshot where the store has them, so the
// sandbox may go on; else the caller freezes it. Sorted by path. A directory that was removed is one
// change, whatever was in it. What lies so deep that no path can name it (4,096 bytes) is left out; the
// directory above it is there.
// Kinds: NotFound (no such layer or workspace), ResourceExhausted (too many changes to hold at once).
func (s *Store) Changes(ctx context.Context, id string, p Plan, workspace string) ([]Change, error) {
	if !validID(id) {
		return nil, errs.New(errs.InvalidArgument, "%q is no sandbox id", id)
	}
	layer := s.live(id)
	d := differ{lowers: p.Lowers, prefix: "/", mounts: mountPoints(p)}
	upper := p.Upper
	if workspace != "" {
		i := slices.IndexFunc(p.Workspaces, func(w Workspace) bool { return w.Target == workspace })
		if i < 0 {
			return nil, errs.New(errs.NotFound, "no workspace at %s", workspace)
		}
		w := p.Workspaces[i]
		// Owners differ by the id map alone, which shows the source's owner as the default user.
		d, upper = differ{lowers: []string{w.Source}, anyOwner: true}, w.Upper
	}
	rel, err := filepath.Rel(layer, upper)
	if err != nil || strings.HasPrefix(rel, "..") {
		return nil, errs.New(errs.InvalidArgument, "the plan's upper directory is not sandbox %s's", id)
	}
	dir, drop, err := s.disk.snapshot(layer)
	if notThere(err) {
		return nil, errs.Wrap(err, errs.NotFound, "sandbox %s has no files any more", id)
	}
	if err != nil {
		return nil, fmt.Errorf("snapshot %s: %w", id, err)
	}
	changes, err := d.run(ctx, filepath.Join(dir, rel))
	if derr := drop(); derr != nil {
		s.warn("drop snapshot", derr)
	}
	if err != nil {
		return nil, fmt.Errorf("compare %s: %w", id, err)
	}
	return changes, nil
}

// differ compares an upper directory of overlayfs with the layers below it.
type differ struct {
	lowers   []string
	prefix   string // of the paths in the answer
	anyOwner bool
	mounts   map[string]bool // directories that were made only to mount something on

	roots []*os.File // the lowers, open
	// added is the depth of the directory, on the way to the current entry, that has nothing below it in
	// the lowers; 0 is none. What is deeper is new, too.
	added   int
	changes []Change
	paths   int // bytes of the paths in changes
}

// mountPoints returns the places where a plan, or the backend, mounts something into the root, and the
// directories above them.
func mountPoints(p Plan) map[string]bool {
	all := map[string]bool{}
	targets := []string{"/dev", "/proc", "/sys"}
	for _, b := range p.Binds {
		targets = append(targets, b.Target)
	}
	for _, w := range p.Workspaces {
		targets = append(targets, w.Target)
	}
	for _, t := range targets {
		for ; t != "/" && t != "."; t = filepath.Dir(t) {
			all[strings.TrimPrefix(t, "/")] = true
		}
	}
	return all
}

func (d *differ) run(ctx context.Context, upper string) ([]Change, error) {
	root, err := fd.OpenRoot(upper)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	for _, dir := range d.lowers {
		lower, err := fd.OpenRoot(dir)
		if err != nil {
			return nil, err
		}
		defer lower.Close()
		d.roots = append(d.roots, lower)
	}
	if err := fd.Walk(ctx, root, d.visit); err != nil {
		return nil, err
	}
	slices.SortFunc(d.changes, func(a, b Change) int { return cmp.Compare(a.Path, b.Path) })
	return d.changes, nil
}

// pathMax is the longest path that a system call takes (PATH_MAX, limits.h).
const pathMax = 4096

// visit judges one entry of the upper directory.
func (d *differ) visit(e fd.Entry) error {
	if len(d.prefix)+len(e.Path) >= pathMax {
		// Paths of a chain of directories add up to the square of its length: one of 2,500, which takes
		// 10 KB of disk, took 2.3 GB of the server.
		return fd.ErrSkipDir
	}
	if len(d.changes) > maxChanges || d.paths > maxChangePaths {
		return errs.New(errs.ResourceExhausted, "more files differ than can be listed (%d, with %d MiB of paths)",
			maxChanges, maxChangePaths>>20).WithHint("look inside the sandbox, or copy the directories you need")
	}
	if d.added > 0 && e.Depth > d.added {
		if !isWhiteout(e) {
			d.add("added", e.Path, e.Info)
		}
		return nil
	}
	d.added = 0
	below, err := d.below(e.Path)
	if err != nil {
		return err
	}
	switch {
	case isWhiteout(e):
		if below != nil {
			d.add("removed", e.Path, below.info)
		}
		return nil
	case below == nil && e.Info.IsDir() && d.mounts[e.Path]:
		return nil // what is in it is looked at, though the sandbox can only see what is mounted there
	case below == nil:
		d.add("added", e.Path, e.Info)
		if e.Info.IsDir() {
			d.added = e.Depth
		}
		return nil
	case e.Info.IsDir() && !below.info.IsDir():
		d.add("modified", e.Path, e.Info)
		d.added = e.Depth
		return nil
	}
	same, err := d.same(e, *below)
	if err != nil {
		return err
	}
	if !same {
		d.add("modified", e.Path, e.Info)
	}
	if e.Info.IsDir() && below.info.IsDir() {
		return d.hidden(e)
	}
	return nil
}

func (d *differ) add(op, path string, i fd.Info) {
	c := Change{Op: op, Path: d.prefix + path, Type: typeName(i), Mode: i.Perm()}
	d.paths += len(c.Path)
	if i.IsRegular() || i.IsSymlink() {
		c.Size = i.Size
	}
	d.changes = append(d.changes, c)
}

func typeName(i fd.Info) string {
	switch {
	case i.IsDir():
		return "dir"
	case i.IsRegular():
		return "file"
	case i.IsSymlink():
		return "symlink"
	}
	return "other"
}

// isWhiteout also knows the form that is an empty file with an attribute (Linux 6.7).
func isWhiteout(e fd.Entry) bool {
	if e.Info.IsWhiteout() {
		return true
	}
	if !e.Info.IsRegular() || e.Info.Size != 0 {
		return false
	}
	_, ok, err := fd.Xattr(e.Dir, e.Name, "user.overlay.whiteout")
	return ok && err == nil
}

// lowerFile is a file as the lowers show it, and which of them.
type lowerFile struct {
	info fd.Info
	root *os.File
}

// below finds what the lowers together show at path; nil where that is nothing.
func (d *differ) below(path string) (*lowerFile, error) {
	for _, root := range d.roots {
		i, err := fd.Lstat(root, path)
		switch {
		case err == nil && i.IsWhiteout():
			return nil, nil
		case err == nil:
			return &lowerFile{info: i, root: root}, nil
		case !fd.Missing(err):
			return nil, err
		}
		covered, err := covers(root, path)
		if err != nil {
			return nil, err
		}
		if covered {
			return nil, nil
		}
	}
	return nil, nil
}

// covers reports whether a layer hides what the layers below it have at path, though it has nothing
// there itself: some directory above is opaque, removed, or a file.
func covers(root *os.File, path string) (bool, error) {
	for at := 0; ; {
		next := strings.IndexByte(path[at:], '/')
		if next < 0 {
			return false, nil
		}
		at += next
		i, err := fd.Lstat(root, path[:at])
		switch {
		case fd.Missing(err):
			return false, nil // nothing of this layer from here on
		case err != nil:
			return false, err
		case !i.IsDir():
			return true, nil
		}
		opaque, err := isOpaque(root, path[:at])
		if opaque || err != nil {
			return opaque, err
		}
		at++
	}
}

// isOpaque reports whether a directory hides what lies below it. Which attribute says so depends on
// how the overlay was mounted.
func isOpaque(root *os.File, path string) (bool, error) {
	dir, err := fd.OpenDir(root, path)
	if err != nil {
		return false, err
	}
	defer dir.Close()
	for _, name := range []string{"user.overlay.opaque", "trusted.overlay.opaque"} {
		if v, ok, err := fd.Xattr(dir, ".", name); err != nil {
			return false, err
		} else if ok && v == "y" {
			return true, nil
		}
	}
	return false, nil
}

// hidden reports what an opaque directory removed: what the lowers have in it and the upper has not.
func (d *differ) hidden(e fd.Entry) error {
	opaque, err := isOpaque(e.Dir, e.Name)
	if err != nil || !opaque {
		return err
	}
	seen := map[string]bool{}
	for _, root := range d.roots {
		dir, err := fd.OpenDir(root, e.Path)
		if fd.Missing(err) {
			continue
		}
		if err != nil {
			return err
		}
		names, err := fd.Names(dir)
		_ = dir.Close()
		if err != nil {
			return err
		}
		for _, n := range names {
			seen[n] = true
		}
	}
	dir, err := fd.OpenDir(e.Dir, e.Name)
	if err != nil {
		return err
	}
	defer dir.Close()
	for n := range seen {
		if _, err := fd.Lstat(dir, n); err == nil {
			continue // the walk comes to it
		} else if !fd.Missing(err) {
			return err
		}
		below, err := d.below(e.Path + "/" + n)
		if err != nil {
			return err
		}
		if below != nil {
			d.add("removed", e.Path+"/"+n, below.info)
		}
	}
	return nil
}

// same reports whether a file in the upper directory equals the one below. Overlayfs copies a file up
// when it is opened for writing or touched, so most of what lies in an upper directory may be equal. Times
// are not compared: nothing depends on them, and a program can set them.
func (d *differ) same(e fd.Entry, below lowerFile) (bool, error) {
	a, b := e.Info, below.info
	if a.Mode != b.Mode || !d.anyOwner && (a.UID != b.UID || a.GID != b.GID) {
		return false, nil
	}
	switch {
	case a.IsDir():
		return true, nil
	case a.IsRegular():
		if a.Size != b.Size {
			return false, nil
		}
		return sameContent(e.Dir, e.Name, below.root, e.Path)
	case a.IsSymlink():
		return sameTarget(e.Dir, e.Name, below.root, e.Path)
	}
	return a.Rdev == b.Rdev, nil
}

func sameTarget(dir *os.File, name string, root *os.File, path string) (bool, error) {
	a, err := fd.Readlink(dir, name)
	if err != nil {
		return false, err
	}
	parent := root
	if cut := strings.LastIndexByte(path, '/'); cut >= 0 {
		if parent, err = fd.OpenDir(root, path[:cut]); err != nil {
			return false, err
		}
		defer parent.Close()
	}
	b, err := fd.Readlink(parent, name)
	return a == b, err
}

// sameContent compares byte by byte: equal size and times prove nothing.
func sameContent(dir *os.File, name string, root *os.File, path string) (bool, error) {
	a, err := fd.OpenFile(dir, name)
	if err != nil {
		return false, err
	}
	defer a.Close()
	b, err := fd.OpenFile(root, path)
	if err != nil {
		return false, err
	}
	defer b.Close()
	var bufA, bufB [64 << 10]byte
	for {
		n, errA := io.ReadFull(a, bufA[:])
		m, errB := io.ReadFull(b, bufB[:])
		if n != m || !bytes.Equal(bufA[:n], bufB[:m]) {
			return false, nil
		}
		for _, err := range []error{errA, errB} {
			if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
				return false, err
			}
		}
		if errA != nil {
			return errB != nil, nil
		}
	}
}
