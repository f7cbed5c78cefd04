// Package fd opens, inspects and walks files in trees that nobody vouches for.
//
// What belongs here: path resolution that stays below a directory, follows no link, crosses no mount
// and opens nothing but directories and regular files. What does not: what the files mean. A layer
// of a sandbox may hold a symlink to /etc/shadow, a FIFO that blocks its reader for ever, a directory
// 5,000 deep; nothing here minds.
package fd

import (
	"errors"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// resolve is how every path below a root is resolved (openat2(2)).
const resolve = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV

// maxChunk bounds what is resolved in one call: the kernel takes 4,095 bytes (PATH_MAX).
const maxChunk = 3500

// Info is what the kernel says about a file.
type Info struct {
	Mode     uint32 // type and permissions, as in stat(2)
	UID, GID uint32
	Size     int64
	Dev, Ino uint64
	Rdev     uint64
	Links    uint64
	// Allocated is how many bytes of the disk it takes.
	Allocated int64
	// Modified is when the contents changed, which programs may set; Changed is when anything did.
	Modified, Changed unix.Timespec
}

// IsDir reports whether it is a directory.
func (i Info) IsDir() bool { return i.Mode&unix.S_IFMT == unix.S_IFDIR }

// IsRegular reports whether it is a regular file.
func (i Info) IsRegular() bool { return i.Mode&unix.S_IFMT == unix.S_IFREG }

// IsSymlink reports whether it is a symbolic link.
func (i Info) IsSymlink() bool { return i.Mode&unix.S_IFMT == unix.S_IFLNK }

// IsWhiteout reports whether it is overlayfs's mark for a removed file: a character device 0/0.
func (i Info) IsWhiteout() bool { return i.Mode&unix.S_IFMT == unix.S_IFCHR && i.Rdev == 0 }

// IsDevice reports whether it is a device, a whiteout included.
func (i Info) IsDevice() bool {
	t := i.Mode & unix.S_IFMT
	return t == unix.S_IFCHR || t == unix.S_IFBLK
}

// IsSocket reports whether it is a socket.
func (i Info) IsSocket() bool { return i.Mode&unix.S_IFMT == unix.S_IFSOCK }

// Perm returns the permission bits, with setuid, setgid and sticky.
func (i Info) Perm() uint32 { return i.Mode & 0o7777 }

// SameFile reports whether both are one inode.
func (i Info) SameFile(o Info) bool { return i.Dev == o.Dev && i.Ino == o.Ino }

func info(st *unix.Stat_t) Info {
	return Info{
		Mode: st.Mode, UID: st.Uid, GID: st.Gid, Size: st.Size,
		Dev: uint64(st.Dev), Ino: st.Ino, Rdev: uint64(st.Rdev), Links: uint64(st.Nlink),
		Allocated: st.Blocks * 512, Modified: st.Mtim, Changed: st.Ctim,
	}
}

// OpenRoot opens a directory that later calls stay below. The path itself is the server's own and
// trusted; only its last part must not be a symlink.
func OpenRoot(path string) (*os.File, error) {
	return open(unix.AT_FDCWD, path, &unix.OpenHow{
		Flags: unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC,
	})
}

// OpenDir opens a directory below root. Errors match fs.ErrNotExist, or ELOOP and EXDEV where the path
// leads over a symlink or a mount.
func OpenDir(root *os.File, path string) (*os.File, error) {
	return below(root, path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW)
}

// OpenFile opens a regular file below root for reading. Anything else gives EINVAL and is not opened:
// opening a FIFO waits, a device acts.
func OpenFile(root *os.File, path string) (*os.File, error) {
	return openRegular(root, path, unix.O_RDONLY)
}

// EditFile is OpenFile for reading and writing.
func EditFile(root *os.File, path string) (*os.File, error) {
	return openRegular(root, path, unix.O_RDWR)
}

func openRegular(root *os.File, path string, flags uint64) (*os.File, error) {
	f, err := below(root, path, unix.O_PATH|unix.O_NOFOLLOW)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	i, err := Stat(f)
	if err != nil {
		return nil, err
	}
	if !i.IsRegular() {
		return nil, &fs.PathError{Op: "open", Path: path, Err: unix.EINVAL}
	}
	// Through the descriptor, so that it is the inode just looked at.
	return open(unix.AT_FDCWD, "/proc/self/fd/"+strconv.Itoa(int(f.Fd())), &unix.OpenHow{
		Flags: flags | unix.O_CLOEXEC | unix.O_NONBLOCK | unix.O_NOCTTY,
	})
}

// Stat returns what an open file is.
func Stat(f *os.File) (Info, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return Info{}, &fs.PathError{Op: "fstat", Path: f.Name(), Err: err}
	}
	return info(&st), nil
}

// Lstat returns what lies at path below root; a symlink at its end is what it is.
func Lstat(root *os.File, path string) (Info, error) {
	if !strings.Contains(path, "/") { // one name needs no openat2
		return lstatAt(int(root.Fd()), path)
	}
	f, err := below(root, path, unix.O_PATH|unix.O_NOFOLLOW)
	if err != nil {
		return Info{}, err
	}
	defer f.Close()
	return Stat(f)
}

// SetTime sets the time of name in dir, which is not followed, to so many seconds since 1970.
func SetTime(dir *os.File, name string, seconds int64) error {
	return setTime(int(dir.Fd()), name, unix.Timespec{Sec: seconds})
}

func lstatAt(dir int, name string) (Info, error) {
	var st unix.Stat_t
	if err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return Info{}, &fs.PathError{Op: "lstat", Path: name, Err: err}
	}
	return info(&st), nil
}

// Names lists what is in dir, in no order.
func Names(dir *os.File) ([]string, error) {
	d, err := OpenDir(dir, ".") // an offset of its own
	if err != nil {
		return nil, err
	}
	defer d.Close()
	return d.Readdirnames(-1)
}

// Readlink returns the target of a symlink name in dir.
func Readlink(dir *os.File, name string) (string, error) {
	for size := 256; ; size *= 4 {
		buf := make([]byte, size)
		n, err := unix.Readlinkat(int(dir.Fd()), name, buf)
		if err != nil {
			return "", &fs.PathError{Op: "readlink", Path: name, Err: err}
		}
		if n < size {
			return string(buf[:n]), nil
		}
	}
}

// below opens path below root in chunks that the kernel takes, so that no tree is too deep.
func below(root *os.File, path string, flags int) (*os.File, error) {
	at := root
	defer func() {
		if at != root {
			_ = at.Close()
		}
	}()
	for len(path) > maxChunk {
		cut := strings.LastIndexByte(path[:maxChunk], '/')
		if cut <= 0 {
			return nil, &fs.PathError{Op: "open", Path: path, Err: unix.ENAMETOOLONG}
		}
		next, err := open(int(at.Fd()), path[:cut], how(unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW))
		if err != nil {
			return nil, err
		}
		if at != root {
			_ = at.Close()
		}
		at, path = next, path[cut+1:]
	}
	return open(int(at.Fd()), path, how(flags))
}

func how(flags int) *unix.OpenHow {
	return &unix.OpenHow{Flags: uint64(flags | unix.O_CLOEXEC), Resolve: resolve}
}

// open retries what signals and, in a tree that changes, renames elsewhere interrupt (EAGAIN).
func open(at int, path string, h *unix.OpenHow) (*os.File, error) {
	for range 128 {
		n, err := unix.Openat2(at, path, h)
		switch {
		case err == nil:
			return os.NewFile(uintptr(n), path), nil
		case !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.EAGAIN):
			return nil, &fs.PathError{Op: "open", Path: path, Err: err}
		}
	}
	return nil, &fs.PathError{Op: "open", Path: path, Err: unix.EAGAIN}
}

func isErrno(err, errno error) bool { return err != nil && errors.Is(err, errno) }

// Missing reports whether an error says that a path leads nowhere below its root: a part is missing, is
// no directory or is a symlink, or a mount is in the way.
func Missing(err error) bool {
	for _, e := range [...]error{unix.ENOENT, unix.ENOTDIR, unix.ELOOP, unix.EXDEV} {
		if isErrno(err, e) {
			return true
		}
	}
	return false
}

// SyncFS writes out everything that the file system of an open file holds in memory.
func SyncFS(f *os.File) error { return os.NewSyscallError("syncfs", unix.Syncfs(int(f.Fd()))) }
