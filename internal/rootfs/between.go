package rootfs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/linux/btrfs"
	"casemate.dev/internal/linux/fd"
)

// What became of a file between two points.
const (
	Created  = "created"
	Modified = "modified" // What tells in which respect
	Deleted  = "deleted"  // of a directory: with all that is still in it
	Renamed  = "renamed"  // the same file has another name; What tells in which respect it differs besides
)

// In which respect a file differs.
const (
	WhatContents   = "contents" // or a link's target, a device's number
	WhatMode       = "mode"
	WhatOwner      = "owner"
	WhatAttributes = "attributes" // extended ones
	WhatType       = "type"
)

// FileChange is one file that differs between two points. What lies in a renamed directory and moved along is no change.
type FileChange struct {
	Op   string
	Path string // absolute inside, byte for byte
	From string // of a renamed one: its path before
	Type string // as in Change; of a deleted one, what it was
	Size int64
	What []string
	// Sum is the SHA-256 in hex of what a regular file holds at the later point, as far as SumLimits asks for it; where it
	// asks for it and there is none, NotSummed says why.
	Sum       string
	NotSummed string
}

// Between tells which files of a sandbox differ between two points of it, also in workspaces. p is its plan. That a
// file was renamed is seen of files of the writable layer, by their inodes; one that is stored below it, in a template,
// a commit or a workspace's folder, is stored anew when it moves, and counts as renamed where the new one has the same
// contents and nothing else that went had. It reads only what changed, and hashes contents as far as sums says. Sorted by
// path within each file system. Kinds: ResourceExhausted (more changed than is held at once).
func (s *Store) Between(ctx context.Context, id string, p Plan, from, to Point, sums SumLimits) ([]FileChange, error) {
	defer s.hold(State{ID: id, Plan: p})()
	select {
	case s.comparing <- struct{}{}:
		defer func() { <-s.comparing }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	b := between{ctx: ctx, limits: sums, differ: differ{roots: map[string]*os.File{}}}
	defer b.close()
	var sides [2]sideDirs
	for i, point := range []Point{from, to} {
		var err error
		if sides[i], err = s.planDirs(id, p, s.pointPath(point)); err != nil {
			return nil, err
		}
		if b.tops[i], err = fd.OpenRoot(s.pointPath(point)); err != nil {
			return nil, err
		}
		b.roots[s.pointPath(point)] = b.tops[i]
	}
	var err error
	b.known, err = findTouched(ctx, b.tops[0], b.tops[1])
	if errors.Is(err, errTouched) {
		return nil, errs.New(errs.ResourceExhausted, "more files changed than are looked at (%d)", maxTouched)
	}
	if err != nil {
		return nil, fmt.Errorf("find what changed in %s: %w", id, err)
	}
	if len(b.known.inodes) == 0 {
		return nil, nil
	}
	parts := diffParts(sides[0], sides[1])
	parts[0].mounts = mountPoints(p)
	for _, part := range parts {
		if err := b.part(part, s.pointPath(to)); err != nil {
			return nil, fmt.Errorf("compare %s of %s: %w", part.target, id, err)
		}
	}
	b.sum()
	return b.out, nil
}

// Bounds of comparisons between points, which the server makes unasked: how many files may differ, how many bytes their
// paths may have, what names of directories may take that are at hand, and how many sandboxes are compared at the same time.
const (
	maxBetween      = 50_000
	maxBetweenPaths = 8 << 20
	maxBetweenNames = 24 << 20
	maxComparing    = 4
)

// between finds out how files differ between two points.
type between struct {
	differ
	ctx   context.Context //nolint:containedctx // of the one run
	tops  [2]*os.File     // the points' subvolumes
	known *touched
	at    string // the part's place in the layer
	// moved tells, of a directory that was renamed, its path before; taken are all paths that were.
	moved map[string]string
	taken map[string]bool
	out   []FileChange
	// limits bound the hashes, and sums are the files that are to have one.
	limits SumLimits
	sums   []summed
}

// part adds what differs in one file system.
func (b *between) part(p diffPart, top string) error {
	if err := b.begin(b.ctx, p); err != nil {
		return err
	}
	b.at = strings.TrimPrefix(p.to[0], top+"/")
	b.touched, b.limit, b.bytes, b.names = b.known.of(b.at), maxBetween, maxBetweenPaths, maxBetweenNames
	b.moved, b.taken = map[string]string{}, map[string]bool{}
	changes, err := b.all()
	if err != nil {
		return err
	}
	first := len(b.out)
	if err := b.top(p.target); err != nil {
		return err
	}
	var gone []Change
	for _, c := range changes {
		path := strings.TrimPrefix(c.Path, b.prefix)
		switch c.Op {
		case "removed":
			gone = append(gone, c)
			continue
		case "added":
			err = b.added(path, c)
		default:
			err = b.modified(path, c)
		}
		if err != nil {
			return err
		}
	}
	if err := b.stored(first, gone); err != nil {
		return err
	}
	for _, c := range gone {
		if !b.taken[strings.TrimPrefix(c.Path, b.prefix)] {
			b.add(FileChange{Op: Deleted, Path: c.Path, Type: c.Type, Size: c.Size})
		}
	}
	for to, from := range b.moved {
		if err := b.left(from, to); err != nil {
			return err
		}
	}
	slices.SortFunc(b.out[first:], func(x, y FileChange) int { return strings.Compare(x.Path, y.Path) })
	return b.toSum(first)
}

func (b *between) add(c FileChange) { b.out = append(b.out, c) }

// top compares the directory itself that a part's file system begins with.
func (b *between) top(target string) error {
	var both [2]shownFile
	for i, root := range []*os.File{b.from[0], b.to[0]} {
		info, err := fd.Stat(root)
		if err != nil {
			return err
		}
		both[i] = shownFile{info: info, root: root}
	}
	what, err := b.respects("", &both[0], "", &both[1])
	if len(what) > 0 {
		b.add(FileChange{Op: Modified, Path: target, Type: "dir", What: what})
	}
	return err
}

// added tells of a path that had nothing before: what lies there is new, or lay elsewhere.
func (b *between) added(path string, c Change) error {
	after, err := b.to.find(path)
	if err != nil || after == nil {
		return err
	}
	from, before, err := b.origin(path, after)
	if err != nil {
		return err
	}
	if before == nil {
		b.add(FileChange{Op: Created, Path: c.Path, Type: c.Type, Size: c.Size})
		return nil
	}
	return b.renamed(path, from, before, after, c)
}

// renamed tells of a file that was at from before, unless all that happened is that its directory was renamed.
func (b *between) renamed(path, from string, before, after *shownFile, c Change) error {
	b.taken[from] = true
	if after.info.IsDir() {
		b.moved[path] = from
	}
	what, err := b.respects(from, before, path, after)
	if err != nil {
		return err
	}
	dir, name := fd.Split(path)
	fromDir, fromName := fd.Split(from)
	was, along := b.moved[dir]
	switch {
	case !along || was != fromDir || name != fromName:
		b.add(FileChange{Op: Renamed, Path: c.Path, From: b.prefix + from, Type: c.Type, Size: c.Size, What: what})
	case len(what) > 0:
		b.add(FileChange{Op: Modified, Path: c.Path, Type: c.Type, Size: c.Size, What: what})
	}
	return nil
}

// modified tells of a path that had something before.
func (b *between) modified(path string, c Change) error {
	before, err := b.from.find(path)
	if err != nil {
		return err
	}
	after, err := b.to.find(path)
	if err != nil || before == nil || after == nil {
		return err
	}
	if before.info.Ino != after.info.Ino {
		from, origin, err := b.origin(path, after)
		if err != nil {
			return err
		}
		if origin != nil {
			return b.renamed(path, from, origin, after, c)
		}
	}
	what, err := b.respects(path, before, path, after)
	if len(what) > 0 {
		b.add(FileChange{Op: Modified, Path: c.Path, Type: c.Type, Size: c.Size, What: what})
	}
	return err
}

// origin returns where the file that is at path now was before, if it was elsewhere and is not there any more.
func (b *between) origin(path string, after *shownFile) (string, *shownFile, error) {
	if after.root != b.to[0] {
		return "", nil, nil
	}
	from, err := b.pathIn(b.tops[0], after.info.Ino)
	if err != nil || from == "" || from == path {
		return "", nil, err
	}
	before, err := b.from.find(from)
	if err != nil || before == nil || before.root != b.from[0] || before.info.Ino != after.info.Ino || typeName(before.info) != typeName(after.info) {
		return "", nil, err
	}
	still, err := b.to.find(from)
	if err != nil || still != nil && still.root == b.to[0] && still.info.Ino == after.info.Ino {
		return "", nil, err
	}
	return from, before, nil
}

// pathIn returns the path of an inode in this part of a point; "" where it is in none.
func (b *between) pathIn(top *os.File, ino uint64) (string, error) {
	path, err := btrfs.PathOf(top, ino)
	rest, ok := strings.CutPrefix(path, b.at+"/")
	if !ok || err != nil {
		return "", err
	}
	return rest, nil
}

// left tells what a directory that was renamed held before and what is neither there nor elsewhere any more.
func (b *between) left(from, to string) error {
	was, err := b.from.level(nil, from)
	if err != nil {
		return err
	}
	now, err := b.to.level(nil, to)
	if err != nil {
		return err
	}
	names := map[string]bool{}
	if err := b.from.names(from, was.which, names, b.mostNames()); err != nil {
		return err
	}
	for name := range names {
		if err := b.ctx.Err(); err != nil {
			return err
		}
		at := below(from, name)
		before, err := b.from.findIn(was, at)
		if err != nil {
			return err
		}
		if before == nil || b.taken[at] {
			continue
		}
		after, err := b.to.findIn(now, below(to, name))
		if err != nil {
			return err
		}
		if after != nil && after.root == b.to[0] && before.root == b.from[0] && after.info.Ino == before.info.Ino {
			continue
		}
		b.add(FileChange{Op: Deleted, Path: b.prefix + at, Type: typeName(before.info), Size: sizeOf(before.info)})
	}
	return nil
}

func sizeOf(i fd.Info) int64 {
	if i.IsRegular() || i.IsSymlink() {
		return i.Size
	}
	return 0
}

// Bounds of the search for files that were stored anew: how many of those that were created and of those that went
// are compared, and how long they may be.
const (
	maxStored     = 100
	maxStoredSize = 16 << 20
)

// stored finds files that lay below the writable layer and were renamed: they are stored anew, as equal ones.
func (b *between) stored(first int, gone []Change) error {
	var from []*shownFile
	var paths []string
	for _, c := range gone {
		path := strings.TrimPrefix(c.Path, b.prefix)
		f, err := b.from.find(path)
		if err != nil {
			return err
		}
		if f != nil && f.root != b.from[0] && f.info.IsRegular() && f.info.Size > 0 && f.info.Size <= maxStoredSize && !b.taken[path] {
			from, paths = append(from, f), append(paths, path)
		}
	}
	if len(from) == 0 || len(from) > maxStored {
		return nil
	}
	tries := 0
	for i := range b.out[first:] {
		c := &b.out[first+i]
		if c.Op != Created || c.Type != "file" {
			continue
		}
		if tries++; tries > maxStored {
			return nil
		}
		path := strings.TrimPrefix(c.Path, b.prefix)
		after, err := b.to.find(path)
		if err != nil {
			return err
		}
		k, err := b.twin(from, paths, path, after)
		if err != nil {
			return err
		}
		if k >= 0 {
			c.Op, c.From = Renamed, b.prefix+paths[k]
			b.taken[paths[k]], from[k] = true, nil
		}
	}
	return nil
}

// twin returns which one of the files that went is equal to a new one; -1: none, or several.
func (b *between) twin(from []*shownFile, paths []string, path string, after *shownFile) (int, error) {
	found := -1
	for k, f := range from {
		if f == nil || after == nil || f.info.Size != after.info.Size {
			continue
		}
		what, err := b.respects(paths[k], f, path, after)
		if err != nil {
			return -1, err
		}
		if len(what) > 0 {
			continue
		}
		if found >= 0 {
			return -1, nil
		}
		found = k
	}
	return found, nil
}

// respects tells in which respect two files differ, at whatever paths they lie.
func (b *between) respects(pathA string, x *shownFile, pathB string, y *shownFile) (what []string, err error) {
	if typeName(x.info) != typeName(y.info) || x.info.Mode&^0o7777 != y.info.Mode&^0o7777 {
		return []string{WhatType}, nil
	}
	left, leftName, err := dirOf(x.root, pathA)
	if err != nil {
		return nil, err
	}
	defer left.Close()
	right, rightName, err := dirOf(y.root, pathB)
	if err != nil {
		return nil, err
	}
	defer right.Close()
	var equal bool
	switch {
	case x.info.IsDir():
		equal = true
	case x.info.IsRegular() && x.info.Size != y.info.Size:
	case x.info.IsRegular():
		if equal, err = sameContent(b.ctx, left, leftName, right, rightName); err != nil {
			return nil, err
		}
	case x.info.IsSymlink():
		s, err := fd.Readlink(left, leftName)
		if err != nil {
			return nil, err
		}
		t, err := fd.Readlink(right, rightName)
		if err != nil {
			return nil, err
		}
		equal = s == t
	default:
		equal = x.info.Rdev == y.info.Rdev
	}
	if !equal {
		what = append(what, WhatContents)
	}
	a, err := fd.AttrOf(left, leftName, x.info, ownMark)
	if err != nil {
		return nil, err
	}
	o, err := fd.AttrOf(right, rightName, y.info, ownMark)
	if err != nil {
		return nil, err
	}
	if a.Mode != o.Mode {
		what = append(what, WhatMode)
	}
	foreign := b.source != nil && (x.root == b.source || y.root == b.source) // whose owners are the host's
	if (a.UID != o.UID || a.GID != o.GID) && !foreign {
		what = append(what, WhatOwner)
	}
	a.Mode, a.UID, a.GID = o.Mode, o.UID, o.GID
	if !a.Equal(o) {
		what = append(what, WhatAttributes)
	}
	return what, nil
}

// dirOf opens the directory that holds a path, and returns its name in it.
func dirOf(root *os.File, path string) (dir *os.File, name string, err error) {
	dirPath, name := fd.Split(path)
	if name == "" {
		name = "."
	}
	dir, err = dirIn(root, dirPath)
	return dir, name, err
}
