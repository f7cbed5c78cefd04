package fd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Copier writes files of one tree into another one, exactly: types, owners, modes, times, attributes,
// holes and hard links. It shares blocks where the file system can. The target belongs to the caller and
// nobody changes it meanwhile; names in it may be anybody's.
type Copier struct {
	to *os.File
	// parent is the directory of the target that was written to last: a walk stays in it for a while.
	parent     *os.File
	parentPath string
	// links is where the first name of an inode with several lies in the target.
	links map[inode]string
	skip  func(attr string) bool
}

type inode struct{ dev, ino uint64 }

// NewCopier returns a copier into to, which stays the caller's.
func NewCopier(to *os.File) *Copier { return &Copier{to: to, links: map[inode]string{}} }

// Skip leaves out the attributes that skip names, of all that is copied from here on.
func (c *Copier) Skip(skip func(attr string) bool) { c.skip = skip }

// Close closes what the copier itself has opened.
func (c *Copier) Close() { c.leave() }

func (c *Copier) leave() {
	if c.parent != nil {
		_ = c.parent.Close()
		c.parent = nil
	}
}

// NewLinks forgets the hard links of the source so far: the next one is another tree.
func (c *Copier) NewLinks() { c.links = map[inode]string{} }

// CopyTree copies everything below from into to, an empty directory, and the attributes of from itself.
func CopyTree(ctx context.Context, from, to *os.File) error {
	c := NewCopier(to)
	defer c.Close()
	// Times of a directory change while it is filled, so they come last.
	var dirs []timed
	err := Walk(ctx, from, func(e Entry) error {
		if e.Info.IsDir() {
			dirs = append(dirs, timed{e.Path, e.Info.Modified})
		}
		return c.Copy(e)
	})
	if err != nil {
		return err
	}
	for _, d := range dirs {
		if err := c.Touch(d.path, d.at); err != nil {
			return err
		}
	}
	return c.CopyRoot(from, nil)
}

type timed struct {
	path string
	at   unix.Timespec
}

// in opens the target's directory at path, "" for its root. It stays the copier's.
func (c *Copier) in(path string) (*os.File, error) {
	if c.parent != nil && c.parentPath == path {
		return c.parent, nil
	}
	c.leave()
	var err error
	if path == "" {
		c.parent, err = OpenDir(c.to, ".")
	} else {
		c.parent, err = OpenDir(c.to, path)
	}
	c.parentPath = path
	return c.parent, err
}

// Split divides a path below a root into the directory, "" for the root, and the name.
func Split(path string) (dir, name string) {
	if cut := strings.LastIndexByte(path, '/'); cut >= 0 {
		return path[:cut], path[cut+1:]
	}
	return "", path
}

// Copy writes one entry of a walk to the same path of the target, whose directory must be there and
// hold nothing of that name. Of a directory it makes the directory alone.
func (c *Copier) Copy(e Entry) error {
	dirPath, name := Split(e.Path)
	dir, err := c.in(dirPath)
	if err != nil {
		return err
	}
	i := e.Info
	if i.Links > 1 && !i.IsDir() {
		key := inode{i.Dev, i.Ino}
		if first, ok := c.links[key]; ok {
			return c.link(first, dir, name)
		}
		c.links[key] = e.Path
	}
	if err := create(e, dir, name); err != nil {
		return fmt.Errorf("copy %q: %w", e.Path, err)
	}
	if err := attributes(e.Dir, e.Name, i, dir, name, c.skip); err != nil {
		return fmt.Errorf("copy attributes of %q: %w", e.Path, err)
	}
	return nil
}

func (c *Copier) link(first string, dir *os.File, name string) error {
	fromPath, fromName := Split(first)
	from := dir
	if fromPath != c.parentPath {
		var err error
		if fromPath == "" {
			fromPath = "."
		}
		if from, err = OpenDir(c.to, fromPath); err != nil {
			return err
		}
		defer from.Close()
	}
	return Link(from, fromName, dir, name)
}

// create makes name in dir with the type and the contents of an entry.
func create(e Entry, dir *os.File, name string) error {
	switch e.Info.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return Mkdir(dir, name, 0o700)
	case unix.S_IFLNK:
		target, err := Readlink(e.Dir, e.Name)
		if err != nil {
			return err
		}
		return Symlink(target, dir, name)
	case unix.S_IFREG:
		return copyFile(e, dir, name)
	case unix.S_IFIFO, unix.S_IFSOCK:
		return made("mknodat", name, unix.Mknodat(int(dir.Fd()), name, e.Info.Mode&unix.S_IFMT|0o600, 0))
	}
	if e.Info.IsWhiteout() {
		return Whiteout(dir, name)
	}
	// No sandbox can make one, so whatever it is, it is not passed on.
	return fmt.Errorf("a device can't be copied (mode %o)", e.Info.Mode)
}

func copyFile(e Entry, dir *os.File, name string) error {
	in, err := OpenFile(e.Dir, e.Name)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := Create(dir, name, 0o600)
	if err != nil {
		return err
	}
	err = copyContent(in, out, e.Info.Size)
	return errors.Join(err, out.Close())
}

// copyContent shares the blocks where that can be, and else copies what is not a hole.
func copyContent(in, out *os.File, size int64) error {
	if size == 0 {
		return nil
	}
	err := unix.IoctlFileClone(int(out.Fd()), int(in.Fd()))
	switch {
	case err == nil:
		return nil
	case !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EXDEV) && !errors.Is(err, unix.ENOTTY) && !errors.Is(err, unix.EINVAL):
		return os.NewSyscallError("FICLONE", err)
	}
	for at := int64(0); at < size; {
		data, err := unix.Seek(int(in.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) { // a hole up to the end
			break
		}
		if err != nil {
			return os.NewSyscallError("lseek SEEK_DATA", err)
		}
		hole, err := unix.Seek(int(in.Fd()), data, unix.SEEK_HOLE)
		if err != nil {
			return os.NewSyscallError("lseek SEEK_HOLE", err)
		}
		part := io.NewSectionReader(in, data, hole-data)
		if _, err := io.Copy(io.NewOffsetWriter(out, data), part); err != nil {
			return err
		}
		at = hole
	}
	return out.Truncate(size)
}

// attributes gives name in dir the owner, mode, attributes and time of a source. The order counts: a
// change of owner takes setuid bits and capabilities away.
func attributes(from *os.File, fromName string, i Info, dir *os.File, name string, skip func(string) bool) error {
	if err := Own(dir, name, i.UID, i.GID); err != nil {
		return err
	}
	if !i.IsSymlink() {
		// Of a name, not of an open file: opening a FIFO waits. It is no link, and nobody else is here.
		if err := Chmod(dir, name, i.Perm()); err != nil {
			return err
		}
	}
	if err := copyXattrs(from, fromName, dir, name, skip); err != nil {
		return err
	}
	return SetModified(dir, name, i.Modified)
}

// The lists of access (acl(5)). What is made in a directory that has a default one gets both from it.
const (
	accessList  = "system.posix_acl_access"
	defaultList = "system.posix_acl_default"
)

// dropInherited takes away the lists of access that name got from its directory and that its source, whose
// attributes are names, does not have.
func dropInherited(dir *os.File, name string, names []string) error {
	for _, list := range []string{accessList, defaultList} {
		if slices.Contains(names, list) {
			continue
		}
		err := RemoveXattr(dir, name, list)
		if err != nil && !errors.Is(err, unix.ENODATA) && !errors.Is(err, unix.EOPNOTSUPP) {
			return err
		}
	}
	return nil
}

func setTime(at int, name string, t unix.Timespec) error {
	return os.NewSyscallError("utimensat", unix.UtimesNanoAt(at, name, []unix.Timespec{t, t}, unix.AT_SYMLINK_NOFOLLOW))
}

func copyXattrs(from *os.File, fromName string, dir *os.File, name string, skip func(string) bool) error {
	names, err := Xattrs(from, fromName)
	if err != nil {
		return err
	}
	if err := dropInherited(dir, name, names); err != nil {
		return err
	}
	for _, x := range names {
		if skip != nil && skip(x) {
			continue
		}
		v, ok, err := XattrBytes(from, fromName, x)
		if err != nil {
			return err
		}
		if !ok {
			continue
		}
		if err := SetXattr(dir, name, x, v); err != nil {
			return err
		}
	}
	return nil
}

// CopyRoot gives the target's root the owner, mode, attributes and time of from, but for the attributes
// that skip names, if it is not nil.
func (c *Copier) CopyRoot(from *os.File, skip func(attr string) bool) error {
	i, err := Stat(from)
	if err != nil {
		return err
	}
	return attributes(from, ".", i, c.to, ".", skip)
}

// Merge gives a directory that is in the target already the owner, mode and attributes of an entry. The
// target's attributes that keep names are left as they are where the entry has none such.
func (c *Copier) Merge(e Entry, keep func(attr string) bool) error {
	dirPath, name := Split(e.Path)
	dir, err := c.in(dirPath)
	if err != nil {
		return err
	}
	names, err := Xattrs(dir, name)
	if err != nil {
		return err
	}
	for _, x := range names {
		if keep(x) {
			continue
		}
		if err := RemoveXattr(dir, name, x); err != nil {
			return err
		}
	}
	return attributes(e.Dir, e.Name, e.Info, dir, name, nil)
}

// Touch sets the time of a directory in the target.
func (c *Copier) Touch(path string, at unix.Timespec) error {
	dirPath, name := Split(path)
	dir, err := c.in(dirPath)
	if err != nil {
		return err
	}
	return setTime(int(dir.Fd()), name, at)
}

// Lstat returns what the target has at a path; errors match fs.ErrNotExist.
func (c *Copier) Lstat(path string) (Info, error) {
	dirPath, name := Split(path)
	dir, err := c.in(dirPath)
	if Missing(err) {
		return Info{}, &fs.PathError{Op: "lstat", Path: path, Err: fs.ErrNotExist}
	}
	if err != nil {
		return Info{}, err
	}
	return lstatAt(int(dir.Fd()), name)
}

// Remove removes what the target has at a path, with everything below it.
func (c *Copier) Remove(path string) error {
	dirPath, name := Split(path)
	dir, err := c.in(dirPath)
	if err != nil {
		return err
	}
	return RemoveAll(dir, name)
}

// Mark sets an attribute of what the target has at a path.
func (c *Copier) Mark(path, attr, value string) error {
	dirPath, name := Split(path)
	dir, err := c.in(dirPath)
	if err != nil {
		return err
	}
	return SetXattr(dir, name, attr, []byte(value))
}
