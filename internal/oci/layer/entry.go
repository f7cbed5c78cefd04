package layer

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"syscall"

	"casemate.dev/internal/linux/fd"
)

// The names by which an archive says that something is removed (image-spec, layer.md, Whiteouts).
const (
	whiteoutPrefix = ".wh."
	opaqueRest     = ".wh..opq" // what follows the prefix in .wh..wh..opq
	privateRest    = ".wh."     // what follows it in names that AUFS kept for itself
)

// whiteout removes name, in the directory that the names before it lead to, of the layers below.
func (u *unpacker) whiteout(way []string, name string) error {
	switch {
	case name == opaqueRest:
		// The last name is any: it is the directory before it that counts.
		if _, _, err := u.tree.parent(append(way, "x"), true); err != nil {
			return err
		}
		u.opaque[u.tree.path] = true
		return nil
	case strings.HasPrefix(name, privateRest):
		return nil
	case name == "", name == ".", name == "..":
		return refuse("the layer holds a whiteout of %q", name)
	}
	parent, path, err := u.tree.parent(append(way, name), true)
	if err == nil {
		err = reserved(path, tar.TypeChar)
	}
	if err != nil {
		return err
	}
	i, err := fd.Lstat(parent, name)
	switch {
	case err == nil && i.IsDir(): // removed, and made anew by this layer
		u.opaque[path] = true
		return nil
	case err == nil: // what this layer has hides what lies below anyway
		return nil
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	u.whiteouts[path] = true
	return fd.Whiteout(parent, name)
}

// file makes a regular file.
func (u *unpacker) file(h *tar.Header, in io.Reader, parent *os.File, name string) error {
	if h.Size < 0 || h.Size > u.lim.Bytes-u.result.Bytes {
		return errBytes(u.lim)
	}
	u.result.Bytes += h.Size
	out, err := fd.Create(parent, name, 0o600)
	if err != nil {
		return err
	}
	err = u.fill(out, in, h.Size)
	if err == nil {
		err = u.attributes(h, parent, name, out)
	}
	return errors.Join(err, out.Close())
}

// fill writes size bytes of in to out. Blocks of zeros become holes, as in the file that was archived.
func (u *unpacker) fill(out *os.File, in io.Reader, size int64) error {
	buf := u.buf
	for at := int64(0); at < size; {
		n, err := io.ReadFull(in, buf[:min(size-at, int64(len(buf)))])
		if err != nil {
			return fmt.Errorf("contents: %w", noEOF(err))
		}
		if !zeros(buf[:n]) {
			if _, err := out.WriteAt(buf[:n], at); err != nil {
				return err
			}
		}
		at += int64(n)
	}
	if size == 0 {
		return nil
	}
	return out.Truncate(size)
}

// noEOF keeps an end that comes too early from being taken for the archive's.
func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// holeFrom is the smallest hole that is worth one: a block of most file systems.
const holeFrom = 4096

// zeros reports whether a block holds nothing but zeros, and is large enough to be left out.
func zeros(b []byte) bool {
	if len(b) < holeFrom {
		return false
	}
	return b[0] == 0 && bytes.Equal(b[1:], b[:len(b)-1])
}

// attributes gives name in dir the owner, mode, attributes and time of an entry; f is it, open, or nil where
// it is neither a file nor a directory. The order counts: a change of owner takes setuid bits and
// capabilities away.
func (u *unpacker) attributes(h *tar.Header, dir *os.File, name string, f *os.File) error {
	uid, gid, mode := h.Uid, h.Gid, uint32(h.Mode)&0o7777
	if uid < 0 || gid < 0 {
		return refuse("the layer holds a file with a negative owner")
	}
	if uid > maxID || gid > maxID {
		u.result.Nobodies++
		if uid > maxID {
			uid, mode = nobody, mode&^syscall.S_ISUID
		}
		if gid > maxID {
			gid, mode = nobody, mode&^syscall.S_ISGID
		}
	}
	if err := fd.Own(dir, name, uint32(uid), uint32(gid)); err != nil {
		return err
	}
	if h.Typeflag != tar.TypeSymlink {
		if err := fd.Chmod(dir, name, mode); err != nil {
			return err
		}
	}
	if h.Typeflag == tar.TypeFifo && hasXattrs(h) {
		fifo, err := fd.OpenFifo(dir, name)
		if err != nil {
			return err
		}
		defer fifo.Close()
		f = fifo
	}
	if err := u.xattrs(h, f); err != nil {
		return err
	}
	if h.Typeflag == tar.TypeDir {
		return nil // at the end
	}
	t := timesOf(h)
	return fd.SetModified(dir, name, fd.Time(t.sec, t.nsec))
}

// xattrPrefix marks extended attributes among the records of an entry (star(1), and every container tool).
const xattrPrefix = "SCHILY.xattr."

// The lists of access of a file, and of a directory for what is made in it (acl(5)).
const (
	accessList  = "system.posix_acl_access"
	defaultList = "system.posix_acl_default"
)

// keptXattr reports whether an attribute means something in a sandbox, and is harmless. What overlayfs keeps for
// itself would show other files' contents, or hide some; trusted and security attributes are the host's. Lists of
// access hold ids, which are inside-ids where they lie.
func keptXattr(name string) bool {
	switch name {
	case "security.capability", accessList, defaultList:
		return true
	}
	if rest, ok := strings.CutPrefix(name, "user.overlay."); ok {
		// What a program inside calls user.overlay.x lies as user.overlay.overlay.x, which overlayfs does not obey
		// (Linux 6.7, Documentation/filesystems/overlayfs.rst, Nesting overlayfs mounts).
		return strings.HasPrefix(rest, "overlay.")
	}
	return strings.HasPrefix(name, "user.")
}

// hasXattrs reports whether an entry has attributes at all.
func hasXattrs(h *tar.Header) bool {
	for key := range h.PAXRecords {
		if strings.HasPrefix(key, xattrPrefix) {
			return true
		}
	}
	return false
}

func (u *unpacker) xattrs(h *tar.Header, f *os.File) error {
	if f == nil {
		return nil
	}
	if h.Typeflag == tar.TypeDir { // it may have been described before
		if err := clearXattrs(f); err != nil {
			return err
		}
	}
	for key, value := range h.PAXRecords {
		attr, ok := strings.CutPrefix(key, xattrPrefix)
		if !ok {
			continue
		}
		if !keptXattr(attr) || h.Typeflag == tar.TypeFifo && strings.HasPrefix(attr, "user.") { // no pipe has these (xattr(7))
			u.result.Attributes++
			continue
		}
		if attr == defaultList && h.Typeflag == tar.TypeDir { // at the end
			continue
		}
		if err := setXattr(f, attr, []byte(value)); err != nil {
			return err
		}
	}
	return nil
}

func setXattr(f *os.File, attr string, value []byte) error {
	err := fd.SetOpenXattr(f, attr, value)
	for _, e := range []error{syscall.EINVAL, syscall.E2BIG, syscall.ERANGE, syscall.EACCES} {
		if errors.Is(err, e) {
			return refuse("the layer holds an attribute %q that the kernel does not take", short(attr))
		}
	}
	return err
}

func clearXattrs(f *os.File) error {
	names, err := fd.OpenXattrs(f)
	if err != nil {
		return err
	}
	for _, attr := range names {
		if keptXattr(attr) {
			if err := fd.RemoveOpenXattr(f, attr); err != nil {
				return err
			}
		}
	}
	return nil
}
