package rootfs

import (
	"cmp"
	"context"
	"maps"
	"os"
	"slices"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/linux/fd"
)

// comparison finds the differences between what two stacks of layers show. Layers at the bottom that both
// have are looked at only where one of the two hides or changes what they show.
type comparison struct {
	prefix   string // of the paths in the answer
	anyOwner bool
	// source is a workspace's folder on the host, whose owners are the host's and can't be compared; nil: none.
	source *os.File
	mounts map[string]bool // directories that were made only to mount something on
	// touched says what may differ in the topmost layers; nil: everything.
	touched *touched

	ctx      context.Context //nolint:containedctx // of the one run
	from, to view
	common   int // layers at the bottom of both
	// above are both sides' levels of the directory that is looked at; nil: not known.
	above [2]*level
	// first says that nothing counts after the first change, but that nothing may be left out before it.
	first   bool
	changes []Change
	limit   int // of listed; 0: maxChanges
	bytes   int // of paths; 0: maxChangePaths
	names   int // what names may take; 0: maxNamesHeld
	listed  int // how many there are, also of earlier parts of one answer
	paths   int // bytes of their paths
	held    int // what the names of directories take that are at hand
}

// run compares the layers in the directories from with those in to, the topmost first.
func (c *comparison) run(ctx context.Context, from, to []string) ([]Change, error) {
	c.ctx = ctx
	for i, side := range []*view{&c.from, &c.to} {
		for _, dir := range [][]string{from, to}[i] {
			root, err := fd.OpenRoot(dir)
			if err != nil {
				return nil, err
			}
			defer root.Close()
			*side = append(*side, root)
		}
	}
	for c.common < min(len(from), len(to)) && from[len(from)-1-c.common] == to[len(to)-1-c.common] {
		c.common++
	}
	return c.all()
}

// all finds all differences. Preconditions: from, to and common are set.
func (c *comparison) all() ([]Change, error) {
	if err := c.directory(""); err != nil {
		return nil, err
	}
	slices.SortFunc(c.changes, func(a, b Change) int { return cmp.Compare(a.Path, b.Path) })
	return c.changes, nil
}

// directory compares what is in a directory that both sides have.
func (c *comparison) directory(path string) error {
	names, here, err := c.candidates(path)
	if err != nil {
		return err
	}
	return c.each(path, here, names)
}

// each compares the names in a directory, whose levels are here.
func (c *comparison) each(path string, here [2]*level, names map[string]bool) error {
	release, err := c.hold(names)
	if err != nil {
		return err
	}
	defer release()
	above := c.above
	c.above = here
	defer func() { c.above = above }()
	for name := range names {
		if err := c.ctx.Err(); err != nil {
			return err
		}
		if err := c.entry(below(path, name)); err != nil {
			return err
		}
	}
	return nil
}

// hold counts names that are at hand until they are released.
func (c *comparison) hold(names map[string]bool) (release func(), err error) {
	n := held(names)
	if c.held+n > c.mostNames() {
		return nil, tooManyNames(c.mostNames())
	}
	c.held += n
	return func() { c.held -= n }, nil
}

func (c *comparison) mostNames() int { return cmp.Or(c.names, maxNamesHeld) }

// candidates returns the names in a directory that may differ, and the directory's levels.
func (c *comparison) candidates(path string) (names map[string]bool, here [2]*level, err error) {
	for i, v := range []view{c.from, c.to} {
		if here[i], err = v.level(c.above[i], path); err != nil {
			return nil, here, err
		}
	}
	inFrom, inTo := here[0].which, here[1].which
	alike := slices.Equal(inFrom, inTo)
	// Where both reach the layers that they share, what these show is the same on both sides.
	if own, others := len(c.from)-c.common, len(c.to)-c.common; len(inFrom) > own && len(inTo) > others {
		inFrom, inTo = inFrom[:own], inTo[:others]
	}
	names = map[string]bool{}
	if below, ok, err := c.onlyBelow(path, alike); ok || err != nil {
		maps.Copy(names, below)
		return names, here, err
	}
	if err := c.from.names(path, inFrom, names, c.mostNames()); err != nil {
		return nil, here, err
	}
	return names, here, c.to.names(path, inTo, names, c.mostNames())
}

// differs reports whether anything differs at path or below it. Preconditions: c.first is set.
func (c *comparison) differs(path string) (bool, error) {
	c.changes = nil
	err := c.entry(path)
	return len(c.changes) > 0, err
}

// entry compares one path.
func (c *comparison) entry(path string) error {
	if c.first && len(c.changes) > 0 {
		return nil
	}
	if len(c.prefix)+len(path) >= pathMax {
		if c.first {
			return errs.New(errs.ResourceExhausted, "%.40s… lies deeper than can be compared (%d bytes)", path, pathMax)
		}
		// Paths of a chain of directories add up to the square of its length: one of 2,500, which takes
		// 10 KB of disk, took 2.3 GB of the server.
		return nil
	}
	if most := cmp.Or(c.bytes, maxChangePaths); c.listed > c.most() || c.paths > most {
		return errs.New(errs.ResourceExhausted, "more files differ than can be listed (%d, with %d MiB of paths)",
			c.most(), most>>20).WithHint("look inside the sandbox, or copy the directories you need")
	}
	before, err := c.from.findIn(c.above[0], path)
	if err != nil {
		return err
	}
	after, err := c.to.findIn(c.above[1], path)
	if err != nil {
		return err
	}
	switch {
	case before == nil && after == nil:
		return nil
	case after == nil:
		if !c.onlyMounted(path, before.info) {
			c.add("removed", path, before.info)
		}
		return nil
	case before == nil:
		if !c.onlyMounted(path, after.info) {
			c.add("added", path, after.info)
		}
		return c.fresh(path, after.info)
	case before.info.IsDir() != after.info.IsDir():
		c.add("modified", path, after.info)
		return c.fresh(path, after.info)
	}
	if before.root != after.root && !c.shared(before, after) && !c.untouched(before, after) {
		foreign := c.source != nil && (before.root == c.source || after.root == c.source)
		equal, err := same(c.ctx, *before, *after, path, c.anyOwner || foreign)
		if err != nil {
			return err
		}
		if !equal {
			c.add("modified", path, after.info)
		}
	}
	if after.info.IsDir() {
		return c.directory(path)
	}
	return nil
}

func (c *comparison) most() int { return cmp.Or(c.limit, maxChanges) }

// shared reports whether both are one file of a layer that both sides have, each opened it for itself.
func (c *comparison) shared(a, b *shownFile) bool {
	i, j := slices.Index(c.from, a.root), slices.Index(c.to, b.root)
	return len(c.from)-i <= c.common && len(c.from)-i == len(c.to)-j
}

// onlyMounted reports whether a directory was made only to mount something on. What is in it is looked at,
// though the sandbox can only see what is mounted there.
func (c *comparison) onlyMounted(path string, i fd.Info) bool { return i.IsDir() && c.mounts[path] }

// fresh adds everything in a directory that is new.
func (c *comparison) fresh(path string, i fd.Info) error {
	if !i.IsDir() {
		return nil
	}
	here, err := c.to.level(c.above[1], path)
	if err != nil {
		return err
	}
	names := map[string]bool{}
	if err := c.to.names(path, here.which, names, c.mostNames()); err != nil {
		return err
	}
	hidden := c.from
	c.from = nil // nothing of it shows below what is new
	defer func() { c.from = hidden }()
	return c.each(path, [2]*level{nil, here}, names)
}

func (c *comparison) add(op, path string, i fd.Info) {
	change := Change{Op: op, Path: c.prefix + path, Type: typeName(i), Mode: i.Perm()}
	c.listed++
	c.paths += len(change.Path)
	if i.IsRegular() || i.IsSymlink() {
		change.Size = i.Size
	}
	c.changes = append(c.changes, change)
}
