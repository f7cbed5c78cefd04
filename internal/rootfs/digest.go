package rootfs

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"io"
	"maps"
	"os"
	"slices"

	"casemate.dev/internal/linux/fd"
)

// Digest is what Digest returns of a commit's files.
type Digest struct {
	// Text is "sha256:" and 64 hexadecimal digits.
	Text string
	// Files and Bytes are how many files and what contents were read.
	Files, Bytes int64
}

// Digest reads all files that a sandbox starts with on a committed layer, and returns their digest. Two layers
// have the same one where they show the same: names, types, modes, owners, attributes, contents, targets, which
// names are one file. Times are not in it, nor how the files are spread over layers. Of workspaces it takes what
// was committed, not the folder of the host below it.
// Kinds: NotFound (no such layer).
func (s *Store) Digest(ctx context.Context, layer string) (Digest, error) {
	defer s.hold(State{Layer: layer})()
	d, drop, err := s.dirsOf(State{Layer: layer})
	if err != nil {
		return Digest{}, err
	}
	defer drop()
	g := newDigester(ctx)
	defer g.close()
	if err := g.part("/", d.root); err != nil {
		return Digest{}, fmt.Errorf("digest layer %s: %w", layer, err)
	}
	for _, w := range d.spaces {
		if err := g.part(w.target, w.dirs[:len(w.dirs)-1]); err != nil {
			return Digest{}, fmt.Errorf("digest workspace %s of layer %s: %w", w.target, layer, err)
		}
	}
	return g.digest(), nil
}

// TreeDigest is Digest of what directories show that lie on each other as layers, the lowest first, without sockets,
// which no image can hold. Where a commit has neither those nor workspaces, both are the same.
func (s *Store) TreeDigest(ctx context.Context, dirs []string) (Digest, error) {
	dirs = slices.Clone(dirs)
	slices.Reverse(dirs)
	g := newDigester(ctx)
	defer g.close()
	g.noSockets = true
	if err := g.part("/", dirs); err != nil {
		return Digest{}, fmt.Errorf("digest a tree: %w", err)
	}
	return g.digest(), nil
}

// digester adds up files.
type digester struct {
	ctx   context.Context //nolint:containedctx // of the one run
	sum   hash.Hash
	roots map[string]*os.File // every layer's directory, opened once
	links linkFinder
	parts int
	view  view
	// marks says that removals count, since what they remove is not read.
	marks bool
	// noSockets leaves sockets out.
	noSockets bool
	out       Digest
}

func newDigester(ctx context.Context) *digester {
	g := &digester{ctx: ctx, sum: sha256.New(), roots: map[string]*os.File{}}
	g.links = linkFinder{ctx: ctx, hold: func(string) error { return nil }}
	fmt.Fprintf(g.sum, "casemate tree 1\n")
	return g
}

func (g *digester) close() {
	for _, f := range g.roots {
		_ = f.Close()
	}
}

// digest returns the digest of all that was added.
func (g *digester) digest() Digest {
	g.out.Text = "sha256:" + hex.EncodeToString(g.sum.Sum(nil))
	return g.out
}

// part adds what layers show together, the topmost first. Lengths stand before names, so that no name can pass for
// something else.
func (g *digester) part(target string, dirs []string) error {
	fmt.Fprintf(g.sum, "part %d:%s\n", len(target), target)
	if len(dirs) == 0 {
		return nil
	}
	v, err := openView(g.roots, dirs)
	if err != nil {
		return err
	}
	g.view, g.marks = v, target != "/"
	g.parts++
	info, err := fd.Stat(v[0])
	if err != nil {
		return err
	}
	if err := g.file("", shownFile{info: info, root: v[0]}); err != nil {
		return err
	}
	return g.directory("", nil)
}

// directory adds what is in a directory; above is the level of the one that it is in.
func (g *digester) directory(path string, above *level) error {
	here, err := g.view.level(above, path)
	if err != nil {
		return err
	}
	names := map[string]bool{}
	if err := g.view.names(path, here.which, names, maxNamesHeld); err != nil {
		return err
	}
	if g.marks && path != "" {
		if err := g.opaque(path, here); err != nil {
			return err
		}
	}
	for _, name := range sortedNames(names) {
		if err := g.ctx.Err(); err != nil {
			return err
		}
		at := below(path, name)
		f, err := g.view.findIn(here, at)
		if err != nil {
			return err
		}
		if f == nil {
			if g.marks {
				fmt.Fprintf(g.sum, "gone %d:%s\n", len(at), at)
			}
			continue
		}
		if g.noSockets && f.info.IsSocket() {
			continue
		}
		if err := g.file(at, *f); err != nil {
			return err
		}
		if f.info.IsDir() {
			if err := g.directory(at, here); err != nil {
				return err
			}
		}
	}
	return nil
}

// opaque adds that a directory hides what lies below all layers.
func (g *digester) opaque(path string, here *level) error {
	last := len(here.which) - 1
	if !here.which[last] {
		return nil
	}
	is, err := isOpaque(g.view[last], path)
	if is {
		fmt.Fprintf(g.sum, "opaque %d:%s\n", len(path), path)
	}
	return err
}

// file adds one file.
func (g *digester) file(path string, f shownFile) error {
	g.out.Files++
	dirPath, name := fd.Split(path)
	dir, err := dirIn(f.root, dirPath)
	if err != nil {
		return err
	}
	defer dir.Close()
	if name == "" {
		name = "."
	}
	a, err := fd.AttrOf(dir, name, f.info, ownMark)
	if err != nil {
		return err
	}
	fmt.Fprintf(g.sum, "%s %o %d:%d %d:%s\n", typeName(f.info), f.info.Mode, a.UID, a.GID, len(path), path)
	for _, x := range slices.Sorted(maps.Keys(a.Xattrs)) {
		fmt.Fprintf(g.sum, "attribute %d:%s %d:%s\n", len(x), x, len(a.Xattrs[x]), a.Xattrs[x])
	}
	group, err := g.links.group(g.parts, g.view, &f, path)
	if err != nil {
		return err
	}
	if group != nil && group[0] != path {
		fmt.Fprintf(g.sum, "same as %d:%s\n", len(group[0]), group[0])
		return nil
	}
	switch {
	case f.info.IsRegular():
		return g.contents(dir, name)
	case f.info.IsSymlink():
		target, err := fd.Readlink(dir, name)
		fmt.Fprintf(g.sum, "to %d:%s\n", len(target), target)
		return err
	case f.info.IsDevice():
		fmt.Fprintf(g.sum, "device %d\n", f.info.Rdev)
	}
	return nil
}

func (g *digester) contents(dir *os.File, name string) error {
	file, err := fd.OpenFile(dir, name)
	if err != nil {
		return err
	}
	defer file.Close()
	sum := sha256.New()
	n, err := io.Copy(sum, file)
	g.out.Bytes += n
	fmt.Fprintf(g.sum, "contents %d %x\n", n, sum.Sum(nil))
	return err
}
