package rootfs

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"strings"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/linux/btrfs"
	"casemate.dev/internal/linux/fd"
)

// view is what some layers show together, as overlayfs would: the topmost first.
type view []*os.File

// shownFile is a file as a view shows it, and the layer that it is from.
type shownFile struct {
	info fd.Info
	root *os.File
}

// level is what the layers of a view have at a directory. Who goes down a tree hands it on from directory to directory: to
// find out anew what stands above each file of a deep tree takes as many steps as the cube of its depth.
type level struct {
	// which tells of the layers from the top whether they have a part in the directory; those below one that hides
	// the rest are not in it.
	which []bool
	// hides says that the last of these is such a one.
	hides bool
}

// covers is covers for what lies in a directory of this level, in the layer of a number.
func (l *level) covers(layer int) bool { return l.hides && layer == len(l.which)-1 }

// find returns what a view shows at path; nil where that is nothing.
func (v view) find(path string) (*shownFile, error) { return v.findIn(nil, path) }

// findIn is find for who knows the level of the directory that path is in; nil: nobody does.
func (v view) findIn(above *level, path string) (*shownFile, error) {
	for n, root := range v {
		if above == nil || above.which[n] {
			i, err := fd.Lstat(root, path)
			switch {
			case err == nil:
				gone, err := whiteout(root, path, i)
				if gone || err != nil {
					return nil, err
				}
				return &shownFile{info: i, root: root}, nil
			case !fd.Missing(err):
				return nil, err
			}
		}
		covered, err := coversIn(above, n, root, path)
		if covered || err != nil {
			return nil, err
		}
	}
	return nil, nil
}

// whiteout reports whether a file is overlayfs's mark for a removed one, also in the form that is an empty
// file with an attribute (Linux 6.7).
func whiteout(root *os.File, path string, i fd.Info) (bool, error) {
	if i.IsWhiteout() {
		return true, nil
	}
	if !i.IsRegular() || i.Size != 0 {
		return false, nil
	}
	dirPath, name := fd.Split(path)
	dir, err := dirIn(root, dirPath)
	if err != nil {
		return false, err
	}
	defer dir.Close()
	_, ok, err := fd.Xattr(dir, name, "user.overlay.whiteout")
	return ok, err
}

// dirIn is fd.OpenDir, where "" is the root itself.
func dirIn(root *os.File, path string) (*os.File, error) {
	if path == "" {
		path = "."
	}
	return fd.OpenDir(root, path)
}

// level returns what the layers have at the directory path; above is as in findIn.
func (v view) level(above *level, path string) (*level, error) {
	l := &level{}
	for n, root := range v {
		has, hides := false, false
		if above == nil || above.which[n] {
			var err error
			if has, hides, err = partIn(root, path); err != nil {
				return nil, err
			}
		}
		if !hides {
			var err error
			if hides, err = coversIn(above, n, root, path); err != nil {
				return nil, err
			}
		}
		l.which = append(l.which, has)
		if hides {
			l.hides = true
			break
		}
	}
	return l, nil
}

// partIn reports whether a layer has a directory at path, and whether what it has there hides what lies below it.
func partIn(root *os.File, path string) (has, hides bool, err error) {
	dir, err := dirIn(root, path)
	if err == nil {
		defer dir.Close()
		opaque, err := opaqueDir(dir)
		return true, opaque && path != "", err
	}
	if !fd.Missing(err) {
		return false, false, err
	}
	if _, err := fd.Lstat(root, path); !fd.Missing(err) {
		return false, err == nil, err // a file, or a whiteout
	}
	return false, false, nil
}

// coversIn is covers for who may know the level above.
func coversIn(above *level, layer int, root *os.File, path string) (bool, error) {
	if above != nil {
		return above.covers(layer), nil
	}
	return covers(root, path)
}

// covers reports whether a layer hides what the layers below it have at path, though it has nothing
// there itself: some directory above is opaque, removed, or a file.
func covers(root *os.File, path string) (bool, error) {
	at := root
	defer func() {
		if at != root {
			_ = at.Close()
		}
	}()
	for {
		name, rest, more := strings.Cut(path, "/")
		if !more {
			return false, nil
		}
		has, hides, err := partIn(at, name)
		if !has || hides || err != nil {
			return hides, err // or nothing of this layer from here on
		}
		next, err := fd.OpenDir(at, name)
		if err != nil {
			return false, err
		}
		if at != root {
			_ = at.Close()
		}
		at, path = next, rest
	}
}

// isOpaque reports whether a directory hides what lies below it.
func isOpaque(root *os.File, path string) (bool, error) {
	dir, err := fd.OpenDir(root, path)
	if err != nil {
		return false, err
	}
	defer dir.Close()
	return opaqueDir(dir)
}

// opaqueDir is isOpaque for an open directory. Which attribute says so depends on how the overlay was mounted.
func opaqueDir(dir *os.File) (bool, error) {
	for _, name := range []string{"user.overlay.opaque", "trusted.overlay.opaque"} {
		if v, ok, err := fd.Xattr(dir, ".", name); err != nil {
			return false, err
		} else if ok && v == "y" {
			return true, nil
		}
	}
	return false, nil
}

// Bounds of the names of directories: whoever wrote them chose how many, and how long.
const (
	maxNames = 1 << 20 // of one
	// maxNamesHeld bounds what names take that are at hand at the same time: of one directory, and in a comparison of all
	// from there up. Each counts its bytes and nameCost more.
	maxNamesHeld = 96 << 20
	nameCost     = 48
	// namesAtOnce is how many are read at once.
	namesAtOnce = 4096
)

func tooManyNames(most int) error {
	return errs.New(errs.ResourceExhausted, "a directory holds more files than can be compared (%d, with %d MiB of names)", maxNames, most>>20).
		WithHint("look inside the sandbox")
}

// held returns what names take.
func held(names map[string]bool) int {
	n := 0
	for name := range names {
		n += len(name) + nameCost
	}
	return n
}

// names adds the names that those of the layers, from the top, which have a part in a directory have there. All together
// may take most.
func (v view) names(path string, which []bool, into map[string]bool, most int) error {
	have := held(into)
	for i, has := range which {
		if !has {
			continue
		}
		dir, err := dirIn(v[i], path)
		if err != nil {
			return err
		}
		for err == nil {
			var some []string
			some, err = dir.Readdirnames(namesAtOnce)
			for _, name := range some {
				if !into[name] {
					into[name] = true
					have += len(name) + nameCost
				}
			}
			if len(into) > maxNames || have > most {
				err = tooManyNames(most)
			}
		}
		_ = dir.Close()
		if !errors.Is(err, io.EOF) {
			return err
		}
	}
	return nil
}

// same reports whether two files are equal. Overlayfs copies a file up when it is opened for writing or
// touched, so most of what lies in an upper directory may be equal. Times are not compared: nothing depends on
// them, and a program can set them.
func same(ctx context.Context, a, b shownFile, path string, anyOwner bool) (bool, error) {
	x, y := a.info, b.info
	if x.Mode != y.Mode || !anyOwner && (x.UID != y.UID || x.GID != y.GID) {
		return false, nil
	}
	return inBoth(a, b, path, func(left, right *os.File, name string) (bool, error) {
		if equal, err := sameXattrs(left, right, name); !equal || err != nil {
			return false, err
		}
		return sameDataIn(ctx, a, b, left, right, name)
	})
}

// inBoth calls compare with the two directories that hold a path, and its name in them.
func inBoth(a, b shownFile, path string, compare func(left, right *os.File, name string) (bool, error)) (bool, error) {
	dirPath, name := fd.Split(path)
	left, err := dirIn(a.root, dirPath)
	if err != nil {
		return false, err
	}
	defer left.Close()
	right, err := dirIn(b.root, dirPath)
	if err != nil {
		return false, err
	}
	defer right.Close()
	return compare(left, right, name)
}

// sameData reports whether two files of one type that are no directories hold the same: contents, target or
// device number.
func sameData(ctx context.Context, a, b shownFile, path string) (bool, error) {
	return inBoth(a, b, path, func(left, right *os.File, name string) (bool, error) {
		return sameDataIn(ctx, a, b, left, right, name)
	})
}

func sameDataIn(ctx context.Context, a, b shownFile, left, right *os.File, name string) (bool, error) {
	switch {
	case a.info.IsRegular():
		if a.info.Size != b.info.Size {
			return false, nil
		}
		return sameContent(ctx, left, name, right, name)
	case a.info.IsSymlink():
		s, err := fd.Readlink(left, name)
		if err != nil {
			return false, err
		}
		t, err := fd.Readlink(right, name)
		return s == t, err
	}
	return a.info.Rdev == b.info.Rdev, nil
}

// ownMark reports whether an attribute of a file in a layer is overlayfs's own. What a program in a sandbox
// gives the same name is escaped by the kernel (Linux 6.7), and is the file's.
func ownMark(name string) bool {
	for _, prefix := range [...]string{"user.overlay.", "trusted.overlay."} {
		if rest, ok := strings.CutPrefix(name, prefix); ok {
			return !strings.HasPrefix(rest, "overlay.")
		}
	}
	return false
}

// sameXattrs compares attributes, but for those that overlayfs keeps for itself.
func sameXattrs(left, right *os.File, name string) (bool, error) {
	values := map[string][]byte{}
	for i, dir := range []*os.File{left, right} {
		all, err := fd.Xattrs(dir, name)
		if err != nil {
			return false, err
		}
		seen := 0
		for _, x := range all {
			if ownMark(x) {
				continue
			}
			v, _, err := fd.XattrBytes(dir, name, x)
			if err != nil {
				return false, err
			}
			old, ok := values[x]
			if seen++; i == 0 {
				values[x] = v
			} else if !ok || !bytes.Equal(old, v) {
				return false, nil
			}
		}
		if i == 1 && seen != len(values) {
			return false, nil
		}
	}
	return true, nil
}

// sameContent compares byte by byte, unless both have the same blocks: equal size and times prove nothing.
func sameContent(ctx context.Context, left *os.File, leftName string, right *os.File, rightName string) (bool, error) {
	a, err := fd.OpenFile(left, leftName)
	if err != nil {
		return false, err
	}
	defer a.Close()
	b, err := fd.OpenFile(right, rightName)
	if err != nil {
		return false, err
	}
	defer b.Close()
	if shared, err := btrfs.SameBlocks(a, b); shared && err == nil {
		return true, nil
	}
	var bufA, bufB [64 << 10]byte
	for {
		if err := ctx.Err(); err != nil {
			return false, err
		}
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
