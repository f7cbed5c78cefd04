package rootfs

import (
	"context"
	"errors"
	"os"

	"casemate.dev/internal/linux/btrfs"
	"casemate.dev/internal/linux/fd"
)

// maxTouched bounds the inodes that one comparison of two points knows of.
const maxTouched = 100_000

// touched says which inodes of a writable layer were changed between two snapshots of it, so that a comparison need
// not look at others.
type touched struct {
	inodes map[uint64]bool
	// below tells, for a directory of the layer, the names that lead to one of them; nil: nobody knows all of
	// their names, so that everything is looked at.
	below map[string]map[string]bool
	// paths are the bytes of these names' paths.
	paths int
	// at is the part of the layer, "upper" or "ws0/upper", that a comparison is about.
	at string
}

// errTouched says that more was changed than is kept in memory.
var errTouched = errors.New("too many files were changed")

// findTouched reads what was changed between two snapshots.
func findTouched(ctx context.Context, from, to *os.File) (*touched, error) {
	t := &touched{inodes: map[uint64]bool{}, below: map[string]map[string]bool{}}
	err := btrfs.Touched(from, to, func(i btrfs.Inode) error {
		if len(t.inodes) >= maxTouched {
			return errTouched
		}
		t.inodes[i.Number] = true
		return t.lead(ctx, to, i)
	})
	return t, err
}

// lead notes the way to an inode. One without a name has none, and one with several has more than can be told.
// Overlayfs gives one whiteout many names; the directory of a new one was changed as well.
func (t *touched) lead(ctx context.Context, to *os.File, i btrfs.Inode) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if t.below == nil || i.Links == 0 || i.Whiteout() {
		return nil
	}
	path, err := btrfs.PathOf(to, i.Number)
	if err != nil {
		return err
	}
	t.paths += len(path)
	if i.Links > 1 || path == "" && !i.Top() || t.paths > maxBetweenPaths {
		t.below = nil
		return nil
	}
	for path != "" {
		dir, name := fd.Split(path)
		names := t.below[dir]
		if names == nil {
			names = map[string]bool{}
			t.below[dir] = names
		} else if names[name] {
			break
		}
		names[name] = true
		path = dir
	}
	return nil
}

// of returns what is known of one part of the layer.
func (t *touched) of(at string) *touched {
	part := *t
	part.at = at
	return &part
}

// untouched reports whether both are one inode of the topmost layers that nobody has touched.
func (c *comparison) untouched(a, b *shownFile) bool {
	return c.touched != nil && a.root == c.from[0] && b.root == c.to[0] && a.info.Ino == b.info.Ino && !c.touched.inodes[a.info.Ino]
}

// onlyBelow returns the names in a directory below which something was touched, where nothing else in it can differ:
// the same layers show it on both sides, and nobody has touched it itself.
func (c *comparison) onlyBelow(path string, alike bool) (names map[string]bool, ok bool, err error) {
	if c.touched == nil || c.touched.below == nil || !alike {
		return nil, false, nil
	}
	var both [2]fd.Info
	for i, root := range []*os.File{c.from[0], c.to[0]} {
		dir, err := dirIn(root, path)
		if fd.Missing(err) {
			return nil, false, nil
		}
		if err != nil {
			return nil, false, err
		}
		both[i], err = fd.Stat(dir)
		_ = dir.Close()
		if err != nil {
			return nil, false, err
		}
	}
	if both[0].Ino != both[1].Ino || c.touched.inodes[both[0].Ino] {
		return nil, false, nil
	}
	at := c.touched.at
	if path != "" {
		at += "/" + path
	}
	return c.touched.below[at], true, nil
}
