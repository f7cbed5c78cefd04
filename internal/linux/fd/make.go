package fd

import (
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// The functions below make one thing each: name, a single name, in dir. What has the name already is never
// written to, and nothing is followed.

// Mkdir makes a directory.
func Mkdir(dir *os.File, name string, perm uint32) error {
	return made("mkdirat", name, unix.Mkdirat(int(dir.Fd()), name, perm))
}

// Create makes a regular file and opens it for writing.
func Create(dir *os.File, name string, perm uint32) (*os.File, error) {
	n, err := unix.Openat(int(dir.Fd()), name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, perm)
	if err != nil {
		return nil, made("create", name, err)
	}
	return os.NewFile(uintptr(n), name), nil
}

// Symlink makes a symbolic link to target, whatever that is.
func Symlink(target string, dir *os.File, name string) error {
	return made("symlinkat", name, unix.Symlinkat(target, int(dir.Fd()), name))
}

// Link gives the file oldName in old another name; a symbolic link itself, not what it leads to.
func Link(old *os.File, oldName string, dir *os.File, name string) error {
	return made("linkat", name, unix.Linkat(int(old.Fd()), oldName, int(dir.Fd()), name, 0))
}

// Fifo makes a named pipe.
func Fifo(dir *os.File, name string) error {
	return made("mknodat", name, unix.Mknodat(int(dir.Fd()), name, unix.S_IFIFO|0o600, 0))
}

// Whiteout makes overlayfs's mark for a removed file, for which no right is needed (Linux 5.8).
func Whiteout(dir *os.File, name string) error {
	return made("mknodat", name, unix.Mknodat(int(dir.Fd()), name, unix.S_IFCHR, 0))
}

// Own sets the owner and the group. It takes away setuid bits and capabilities.
func Own(dir *os.File, name string, uid, gid uint32) error {
	return made("fchownat", name, unix.Fchownat(int(dir.Fd()), name, int(uid), int(gid), unix.AT_SYMLINK_NOFOLLOW))
}

// Chmod sets the permission bits, with setuid, setgid and sticky. It must not be a symbolic link: they have
// no mode, and one would be followed.
func Chmod(dir *os.File, name string, perm uint32) error {
	return made("fchmodat", name, unix.Fchmodat(int(dir.Fd()), name, perm, 0))
}

// OpenFifo opens a FIFO for its attributes, without waiting for anybody at its other end.
func OpenFifo(dir *os.File, name string) (*os.File, error) {
	at, err := unix.Openat(int(dir.Fd()), name, unix.O_RDWR|unix.O_NONBLOCK|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, made("openat", name, err)
	}
	return os.NewFile(uintptr(at), name), nil
}

// SetModified sets the time of the last change of the contents, and of the last access.
func SetModified(dir *os.File, name string, at unix.Timespec) error {
	return setTime(int(dir.Fd()), name, at)
}

// Time is a time as the kernel takes it.
func Time(sec, nsec int64) unix.Timespec { return unix.Timespec{Sec: sec, Nsec: nsec} }

// SetOpenXattr sets an extended attribute of an open file. Where there is no /proc, SetXattr can't be used.
func SetOpenXattr(f *os.File, attr string, value []byte) error {
	return made("fsetxattr "+attr, f.Name(), unix.Fsetxattr(int(f.Fd()), attr, value, 0))
}

// OpenXattrs lists the extended attributes of an open file.
func OpenXattrs(f *os.File) ([]string, error) {
	buf := make([]byte, 64<<10) // XATTR_LIST_MAX, limits.h
	n, err := unix.Flistxattr(int(f.Fd()), buf)
	if err != nil {
		return nil, made("flistxattr", f.Name(), err)
	}
	return splitXattrs(buf[:n]), nil
}

// RemoveOpenXattr removes an extended attribute of an open file.
func RemoveOpenXattr(f *os.File, attr string) error {
	return made("fremovexattr "+attr, f.Name(), unix.Fremovexattr(int(f.Fd()), attr))
}

func made(op, name string, err error) error {
	if err == nil {
		return nil
	}
	return &fs.PathError{Op: op, Path: name, Err: err}
}
