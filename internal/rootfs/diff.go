package rootfs

import (
	"bytes"
	"context"
	"os"
	"slices"
	"strings"

	"github.com/rogpeppe/go-internal/diff"

	"casemate.dev/internal/errs"
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
	// Part is "/" for the root file system alone, or a workspace's path for that one; "": all of them.
	Part string
}

// Diff is Compare with what changed in each file, also in workspaces. What a workspace shows of its host folder is
// that folder's as it is now; owners in it can't be compared, and are told as the default user. A workspace that
// only one side has is compared with its folder. Sorted by path, workspaces behind the root file system.
// Kinds: NotFound (no such layer or workspace), ResourceExhausted (too many changes to hold at once).
func (s *Store) Diff(ctx context.Context, from, to State, o DiffOptions) ([]FileDiff, error) {
	defer s.hold(from, to)()
	var sides [2]sideDirs
	for i, state := range []State{from, to} {
		d, drop, err := s.dirsOf(state)
		if err != nil {
			return nil, err
		}
		defer drop()
		sides[i] = d
	}
	d := differ{o: o, left: maxPatches, roots: map[string]*os.File{}}
	defer d.close()
	parts := diffParts(sides[0], sides[1])
	if o.Part != "" {
		parts = slices.DeleteFunc(parts, func(p diffPart) bool { return p.target != o.Part })
		if len(parts) == 0 {
			return nil, errs.New(errs.NotFound, "no workspace at %s", o.Part)
		}
	}
	for _, p := range parts {
		if err := d.part(ctx, p); err != nil {
			return nil, err
		}
	}
	return d.out, ctx.Err()
}

// diffPart is a file system that two states have: the root, or a workspace.
type diffPart struct {
	target   string
	from, to []string // its layers, the topmost first
	source   string   // a workspace's folder on the host
	mounts   map[string]bool
}

// diffParts returns the file systems of two states, the root first.
func diffParts(from, to sideDirs) []diffPart {
	root := diffPart{target: "/", from: from.root, to: to.root}
	var spaces []Workspace
	parts := []diffPart{root}
	for _, side := range []sideDirs{to, from} {
		for _, w := range side.spaces {
			if slices.ContainsFunc(spaces, func(o Workspace) bool { return o.Target == w.target }) {
				continue
			}
			spaces = append(spaces, Workspace{Target: w.target})
			p := diffPart{target: w.target, source: w.dirs[len(w.dirs)-1]}
			p.from, p.to = []string{p.source}, []string{p.source}
			if f := from.space(w.target); f != nil {
				p.from = f.dirs
			}
			if t := to.space(w.target); t != nil {
				p.to = t.dirs
			}
			parts = append(parts, p)
		}
	}
	parts[0].mounts = mountPoints(Plan{Workspaces: spaces})
	slices.SortFunc(parts[1:], func(a, b diffPart) int { return strings.Compare(a.target, b.target) })
	return parts
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
	o     DiffOptions
	roots map[string]*os.File // every layer's directory, opened once
	left  int                 // bytes that patches may still have
	out   []FileDiff
}

func (d *differ) close() {
	for _, f := range d.roots {
		_ = f.Close()
	}
}

// part adds what differs in one file system.
func (d *differ) part(ctx context.Context, p diffPart) error {
	if err := d.begin(ctx, p); err != nil {
		return err
	}
	changes, err := d.all()
	if err != nil {
		return err
	}
	for _, c := range changes {
		if !d.o.holds(c.Path) {
			continue
		}
		f, err := d.file(c)
		if err != nil {
			return err
		}
		d.out = append(d.out, f)
	}
	return nil
}

// begin makes the comparison of one file system.
func (d *differ) begin(ctx context.Context, p diffPart) error {
	var sides [2]view
	for i, dirs := range [][]string{p.from, p.to} {
		if last := len(dirs) - 1; p.source != "" && !isFolder(dirs[last]) { // the folder is gone: only what was committed is left
			dirs = dirs[:last]
		}
		var err error
		if sides[i], err = openView(d.roots, dirs); err != nil {
			return err
		}
	}
	earlier := d.comparison
	d.comparison = newPair(ctx, sides[0], sides[1])
	if earlier != nil { // the bounds hold for all of them together
		d.listed, d.paths = earlier.listed, earlier.paths
	}
	d.first, d.prefix, d.mounts = false, strings.TrimSuffix(p.target, "/")+"/", p.mounts
	d.source = d.roots[p.source]
	return nil
}

func isFolder(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.IsDir()
}

// file tells how one file differs.
func (d *differ) file(c Change) (FileDiff, error) {
	out := FileDiff{Change: c}
	path := strings.TrimPrefix(c.Path, d.prefix)
	var sides [2]*shownFile
	for i, v := range []view{d.from, d.to} {
		f, err := v.find(path)
		if err != nil {
			return out, err
		}
		sides[i] = f
	}
	before, after := sides[0], sides[1]
	out.Before, out.After = d.stateAt(before), d.stateAt(after)
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

// stateAt is stateAt with the owner that the files of a host folder have inside.
func (d *differ) stateAt(f *shownFile) *FileState {
	s := stateAt(f)
	if s != nil && d.source != nil && f.root == d.source {
		s.UID, s.GID = defaultUID, defaultUID
	}
	return s
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
		if equal, err := sameData(d.ctx, *before, *after, path); equal || err != nil {
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
