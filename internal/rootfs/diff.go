package rootfs

import (
	"bytes"
	"context"
	"os"
	"strings"

	"github.com/rogpeppe/go-internal/diff"

	"casemate.dev/internal/linux/fd"
)

// maxPatches bounds the patches of one answer together.
const maxPatches = 16 << 20

// Why a file's contents differ and there is no patch.
const (
	LeftBinary = "binary"
	LeftLarge  = "large" // above 1 MiB
	LeftLimit  = "limit" // the answer has as many patches as it may
)

// FileDiff is one file that differs between two states.
type FileDiff struct {
	Change
	// Before and After are what it was and is; nil: nothing.
	Before, After *FileState
	// TargetBefore and TargetAfter are those of symbolic links.
	TargetBefore, TargetAfter string
	// Patch is a unified diff of the contents, without the names of the files; Added and Removed count its
	// lines. LeftOut says why there is none though the contents differ.
	Patch          string
	Added, Removed int
	LeftOut        string
	// Attributes are the names of extended attributes that differ.
	Attributes []string
}

// DiffOptions say what Diff tells.
type DiffOptions struct {
	// Paths are absolute inside; only what lies at or below one of them is told. None: everything.
	Paths []string
	// Patches tells which lines of text files differ.
	Patches bool
}

// Diff is Compare with what changed in each file.
// Kinds: NotFound (no such layer), ResourceExhausted (too many changes to hold at once).
func (s *Store) Diff(ctx context.Context, from, to State, o DiffOptions) ([]FileDiff, error) {
	defer s.hold(from, to)()
	roots := map[string]*os.File{}
	defer func() {
		for _, f := range roots {
			_ = f.Close()
		}
	}()
	var sides [2]view
	for i, state := range []State{from, to} {
		dirs, drop, err := s.layersOf(state)
		if err != nil {
			return nil, err
		}
		defer drop()
		if sides[i], err = openView(roots, dirs); err != nil {
			return nil, err
		}
	}
	d := differ{comparison: newPair(ctx, sides[0], sides[1]), o: o, left: maxPatches}
	d.first, d.prefix, d.mounts = false, "/", mountPoints(Plan{})
	changes, err := d.all()
	if err != nil {
		return nil, err
	}
	var out []FileDiff
	for _, c := range changes {
		if !o.holds(c.Path) {
			continue
		}
		f, err := d.file(c)
		if err != nil {
			return nil, err
		}
		out = append(out, f)
	}
	return out, ctx.Err()
}

// openView opens layers, each once.
func openView(roots map[string]*os.File, dirs []string) (view, error) {
	var v view
	for _, dir := range dirs {
		root, ok := roots[dir]
		if !ok {
			var err error
			if root, err = fd.OpenRoot(dir); err != nil {
				return nil, err
			}
			roots[dir] = root
		}
		v = append(v, root)
	}
	return v, nil
}

func (o DiffOptions) holds(path string) bool {
	for _, p := range o.Paths {
		if p == "/" || path == p || strings.HasPrefix(path, p+"/") {
			return true
		}
	}
	return len(o.Paths) == 0
}

// differ tells how files differ.
type differ struct {
	*comparison
	o    DiffOptions
	left int // bytes that patches may still have
}

// file tells how one file differs.
func (d *differ) file(c Change) (FileDiff, error) {
	out := FileDiff{Change: c}
	path := strings.TrimPrefix(c.Path, "/")
	var sides [2]*shownFile
	for i, v := range []view{d.from, d.to} {
		f, err := v.find(path)
		if err != nil {
			return out, err
		}
		sides[i] = f
	}
	before, after := sides[0], sides[1]
	out.Before, out.After = stateAt(before), stateAt(after)
	var err error
	if out.TargetBefore, err = targetOf(before, path); err != nil {
		return out, err
	}
	if out.TargetAfter, err = targetOf(after, path); err != nil {
		return out, err
	}
	if before != nil && after != nil {
		if err := d.attributes(&out, path, *before, *after); err != nil {
			return out, err
		}
	}
	if d.o.Patches {
		err = d.patch(&out, path, before, after)
	}
	return out, err
}

func targetOf(f *shownFile, path string) (string, error) {
	if f == nil || !f.info.IsSymlink() {
		return "", nil
	}
	dirPath, name := fd.Split(path)
	dir, err := dirIn(f.root, dirPath)
	if err != nil {
		return "", err
	}
	defer dir.Close()
	return fd.Readlink(dir, name)
}

func (d *differ) attributes(out *FileDiff, path string, before, after shownFile) error {
	var both [2]fd.Attr
	for i, f := range []shownFile{before, after} {
		dirPath, name := fd.Split(path)
		dir, err := dirIn(f.root, dirPath)
		if err != nil {
			return err
		}
		both[i], err = fd.AttrOf(dir, name, f.info, ownMark)
		_ = dir.Close()
		if err != nil {
			return err
		}
	}
	for _, name := range differences(both[0], both[1]) {
		if name != "owner" && name != "mode" {
			out.Attributes = append(out.Attributes, name)
		}
	}
	return nil
}

// patch compares the contents of regular files; where one side has none, with nothing.
func (d *differ) patch(out *FileDiff, path string, before, after *shownFile) error {
	regular := func(f *shownFile) bool { return f != nil && f.info.IsRegular() }
	if !regular(before) && !regular(after) {
		return nil
	}
	if regular(before) && regular(after) {
		if equal, err := sameData(*before, *after, path); equal || err != nil {
			return err
		}
	}
	if d.left <= 0 {
		out.LeftOut = LeftLimit
		return nil
	}
	var texts [2][]byte
	for i, f := range []*shownFile{before, after} {
		if !regular(f) {
			continue
		}
		if f.info.Size > maxText {
			out.LeftOut = LeftLarge
			return nil
		}
		text, ok, err := readText(f, path)
		if err != nil {
			return err
		}
		if !ok {
			out.LeftOut = LeftBinary
			return nil
		}
		texts[i] = text
	}
	patch := unified(texts[0], texts[1])
	if d.left -= len(patch); d.left < 0 {
		d.left, out.LeftOut = 0, LeftLimit
		return nil
	}
	out.Patch = string(patch)
	for line := range bytes.Lines(patch) {
		switch line[0] {
		case '+':
			out.Added++
		case '-':
			out.Removed++
		}
	}
	return nil
}

// unified returns the hunks of a unified diff.
func unified(before, after []byte) []byte {
	patch := diff.Diff("a", before, "b", after)
	for range 3 { // what the library says of the names
		_, patch, _ = bytes.Cut(patch, []byte("\n"))
	}
	return patch
}
