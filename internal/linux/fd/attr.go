package fd

import (
	"bytes"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Attr is what a file has beside its contents and its time.
type Attr struct {
	UID, GID uint32
	Mode     uint32 // permissions, with setuid, setgid and sticky
	Xattrs   map[string][]byte
}

// Equal reports whether both are the same.
func (a Attr) Equal(b Attr) bool {
	if a.UID != b.UID || a.GID != b.GID || a.Mode != b.Mode || len(a.Xattrs) != len(b.Xattrs) {
		return false
	}
	for name, v := range a.Xattrs {
		if w, ok := b.Xattrs[name]; !ok || !bytes.Equal(v, w) {
			return false
		}
	}
	return true
}

// AttrOf returns the attributes of name in dir, which i is about, but for those that skip names.
func AttrOf(dir *os.File, name string, i Info, skip func(attr string) bool) (Attr, error) {
	a := Attr{UID: i.UID, GID: i.GID, Mode: i.Perm(), Xattrs: map[string][]byte{}}
	names, err := Xattrs(dir, name)
	if err != nil {
		return a, err
	}
	for _, x := range names {
		if skip(x) {
			continue
		}
		v, ok, err := XattrBytes(dir, name, x)
		if err != nil {
			return a, err
		}
		if ok {
			a.Xattrs[x] = v
		}
	}
	return a, nil
}

// SetAttr gives what the target has at a path, "" for its root, the attributes a, and takes away others but
// those that the copier skips. Its time stays.
func (c *Copier) SetAttr(path string, a Attr) error {
	dir, name := c.to, "."
	if path != "" {
		dirPath, last := Split(path)
		parent, err := c.in(dirPath)
		if err != nil {
			return err
		}
		dir, name = parent, last
	}
	i, err := lstatAt(int(dir.Fd()), name)
	if err != nil {
		return err
	}
	have, err := AttrOf(dir, name, i, c.skips)
	if err != nil {
		return err
	}
	if err := setAttr(dir, name, i, have, a); err != nil {
		return fmt.Errorf("set attributes of %q: %w", path, err)
	}
	return setTime(int(dir.Fd()), name, i.Modified)
}

func (c *Copier) skips(attr string) bool { return c.skip != nil && c.skip(attr) }

// setAttr keeps to the order in which nothing takes away what was set before: a change of owner takes setuid
// bits and capabilities.
func setAttr(dir *os.File, name string, i Info, have, want Attr) error {
	at := int(dir.Fd())
	if err := unix.Fchownat(at, name, int(want.UID), int(want.GID), unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return os.NewSyscallError("fchownat", err)
	}
	if !i.IsSymlink() {
		if err := unix.Fchmodat(at, name, want.Mode, 0); err != nil {
			return os.NewSyscallError("fchmodat", err)
		}
	}
	for x := range have.Xattrs {
		if _, ok := want.Xattrs[x]; ok {
			continue
		}
		if err := RemoveXattr(dir, name, x); err != nil && !isErrno(err, unix.ENODATA) {
			return err
		}
	}
	for x, v := range want.Xattrs {
		if err := SetXattr(dir, name, x, v); err != nil {
			return err
		}
	}
	return nil
}

// Mkdir makes a directory at a path of the target, unless there is one.
func (c *Copier) Mkdir(path string) error {
	dirPath, name := Split(path)
	dir, err := c.in(dirPath)
	if err != nil {
		return err
	}
	err = unix.Mkdirat(int(dir.Fd()), name, 0o700)
	if isErrno(err, unix.EEXIST) {
		if i, err := lstatAt(int(dir.Fd()), name); err != nil || i.IsDir() {
			return err
		}
	}
	return os.NewSyscallError("mkdirat", err)
}

// Whiteout puts overlayfs's mark for a removed file at a path of the target, where there must be nothing.
func (c *Copier) Whiteout(path string) error {
	dirPath, name := Split(path)
	dir, err := c.in(dirPath)
	if err != nil {
		return err
	}
	return os.NewSyscallError("mknodat", unix.Mknodat(int(dir.Fd()), name, unix.S_IFCHR, 0))
}

// Write makes a regular file at a path of the target, where there must be nothing.
func (c *Copier) Write(path string, data []byte) error {
	dirPath, name := Split(path)
	dir, err := c.in(dirPath)
	if err != nil {
		return err
	}
	fd, err := unix.Openat(int(dir.Fd()), name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return os.NewSyscallError("openat", err)
	}
	f := os.NewFile(uintptr(fd), name)
	_, err = f.Write(data)
	return errors.Join(err, f.Close())
}
