package rootfs

import (
	"context"
	"io"
	"io/fs"
	"path"
	"slices"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/linux/fd"
)

// Tree is what a committed layer shows together with all that it lies on, to be read on the host. No path is
// resolved through a symbolic link, and nothing but regular files and directories is opened. Its methods are
// for one goroutine. While it is open, none of these layers is removed.
type Tree struct {
	view    view
	release func()
}

// File is one file of a Tree.
type File struct {
	Path string // relative to the root, clean; "" is the root
	Type string // "file", "dir", "symlink" or "other", as in Change
	Mode uint32 // permissions, with setuid, setgid and sticky
	// UID and GID are those inside.
	UID, GID uint32
	Size     int64
	Target   string // of a symbolic link
	Modified time.Time
	// Links is how many names it has, and Inode the same for each of them, in one layer.
	Links uint64
	Inode [2]uint64
}

// Tree opens the files of a committed layer. NotFound: there is none of that id.
func (s *Store) Tree(layer string) (*Tree, error) {
	release := s.hold(State{Layer: layer})
	dirs, _, err := s.layersOf(State{Layer: layer})
	var t *Tree
	if err == nil {
		t, err = OpenTree(dirs)
	}
	if err != nil {
		release()
		return nil, err
	}
	t.release = release
	return t, nil
}

// OpenTree opens what directories show that lie on each other, the topmost first. Nobody changes them meanwhile.
func OpenTree(dirs []string) (*Tree, error) {
	t := &Tree{release: func() {}}
	for _, dir := range dirs {
		root, err := fd.OpenRoot(dir)
		if err != nil {
			t.Close()
			return nil, err
		}
		t.view = append(t.view, root)
	}
	return t, nil
}

// Close lets go of the layers.
func (t *Tree) Close() {
	for _, root := range t.view {
		_ = root.Close()
	}
	t.release()
}

// Lstat describes what the tree shows at a path. The error matches fs.ErrNotExist where that is nothing.
func (t *Tree) Lstat(p string) (File, error) {
	f, err := t.find(p)
	if err != nil {
		return File{}, err
	}
	return t.describe(p, f)
}

func (t *Tree) find(p string) (*shownFile, error) {
	if p == "" {
		i, err := fd.Stat(t.view[0])
		return &shownFile{info: i, root: t.view[0]}, err
	}
	f, err := t.view.find(p)
	if err == nil && f == nil {
		err = &fs.PathError{Op: "lstat", Path: p, Err: fs.ErrNotExist}
	}
	return f, err
}

func (t *Tree) describe(p string, f *shownFile) (File, error) {
	i := f.info
	out := File{
		Path: p, Type: typeName(i), Mode: i.Perm(), UID: i.UID, GID: i.GID, Links: i.Links, Inode: [2]uint64{i.Dev, i.Ino},
		Modified: time.Unix(i.Modified.Sec, i.Modified.Nsec),
	}
	if i.IsRegular() {
		out.Size = i.Size
	}
	if !i.IsSymlink() {
		return out, nil
	}
	dirPath, name := fd.Split(p)
	dir, err := dirIn(f.root, dirPath)
	if err != nil {
		return out, err
	}
	defer dir.Close()
	out.Target, err = fd.Readlink(dir, name)
	return out, err
}

// Attrs returns the extended attributes of a file, without those that overlayfs keeps for itself.
func (t *Tree) Attrs(p string) (map[string][]byte, error) {
	f, err := t.find(p)
	if err != nil {
		return nil, err
	}
	dirPath, name := fd.Split(p)
	if p == "" {
		name = "."
	}
	dir, err := dirIn(f.root, dirPath)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := fd.Xattrs(dir, name)
	if err != nil {
		return nil, err
	}
	var out map[string][]byte
	for _, attr := range names {
		if overlayXattr(attr) {
			continue
		}
		v, ok, err := fd.XattrBytes(dir, name, attr)
		if err != nil {
			return nil, err
		}
		if !ok {
			continue
		}
		if out == nil {
			out = map[string][]byte{}
		}
		out[attr] = v
	}
	return out, nil
}

// Names lists a directory, in order.
func (t *Tree) Names(p string) ([]string, error) {
	here, err := t.view.level(nil, p)
	if err != nil {
		return nil, err
	}
	all := map[string]bool{}
	if err := t.view.names(p, here.which, all, maxNamesHeld); err != nil {
		return nil, err
	}
	out := make([]string, 0, len(all))
	for name := range all {
		f, err := t.view.findIn(here, path.Join(p, name))
		if err != nil {
			return nil, err
		}
		if f != nil {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out, nil
}

// Open opens a regular file.
func (t *Tree) Open(p string) (io.ReadCloser, error) {
	f, err := t.find(p)
	if err != nil {
		return nil, err
	}
	if !f.info.IsRegular() {
		return nil, errs.New(errs.InvalidArgument, "%s is no regular file", p)
	}
	return fd.OpenFile(f.root, p)
}

// ReadFile returns a regular file that is at most limit bytes long.
func (t *Tree) ReadFile(p string, limit int64) ([]byte, error) {
	in, err := t.Open(p)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	data, err := io.ReadAll(io.LimitReader(in, limit+1))
	if err == nil && int64(len(data)) > limit {
		err = errs.New(errs.ResourceExhausted, "%s is longer than %d bytes", p, limit)
	}
	return data, err
}

// Walk calls visit for everything below a directory, each directory before what lies in it, in the order of
// names. A visit that returns fs.SkipDir leaves out what lies in the directory.
func (t *Tree) Walk(ctx context.Context, dir string, visit func(File) error) error {
	names, err := t.Names(dir)
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := ctx.Err(); err != nil {
			return err
		}
		p := path.Join(dir, name)
		if len(p) >= pathMax {
			continue // nothing inside can name it either
		}
		f, err := t.Lstat(p)
		if err != nil {
			return err
		}
		err = visit(f)
		switch {
		case err == fs.SkipDir: //nolint:errorlint // as in fs.WalkDir: it is returned as it is
			continue
		case err != nil:
			return err
		case f.Type == "dir":
			if err := t.Walk(ctx, p, visit); err != nil {
				return err
			}
		}
	}
	return nil
}
