package fd

import (
	"errors"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Before Linux 6.13 no call takes a directory and a name, so the name is reached through the directory's
// descriptor in /proc; the last part is never followed.
func at(dir *os.File, name string) string {
	return "/proc/self/fd/" + strconv.Itoa(int(dir.Fd())) + "/" + name
}

// Xattrs lists the extended attributes of name in dir.
func Xattrs(dir *os.File, name string) ([]string, error) {
	for size := 1024; ; size *= 4 {
		buf := make([]byte, size)
		n, err := unix.Llistxattr(at(dir, name), buf)
		switch {
		case errors.Is(err, unix.ERANGE):
		case errors.Is(err, unix.EOPNOTSUPP):
			return nil, nil
		case err != nil:
			return nil, &fs.PathError{Op: "listxattr", Path: name, Err: err}
		default:
			return splitXattrs(buf[:n]), nil
		}
	}
}

func splitXattrs(list []byte) []string {
	if len(list) == 0 {
		return nil
	}
	return strings.Split(strings.TrimSuffix(string(list), "\x00"), "\x00")
}

// Xattr returns an extended attribute of name in dir; ok is false where it has none such. Values above
// 256 bytes are an error.
func Xattr(dir *os.File, name, attr string) (value string, ok bool, err error) {
	var buf [256]byte
	n, err := unix.Lgetxattr(at(dir, name), attr, buf[:])
	switch {
	case errors.Is(err, unix.ENODATA), errors.Is(err, unix.EOPNOTSUPP):
		return "", false, nil
	case err != nil:
		return "", false, &fs.PathError{Op: "getxattr " + attr, Path: name, Err: err}
	}
	return string(buf[:n]), true, nil
}

// XattrBytes is Xattr for a value of any length: the kernel's bound is 64 KiB.
func XattrBytes(dir *os.File, name, attr string) (value []byte, ok bool, err error) {
	for size := 256; ; size *= 16 {
		buf := make([]byte, size)
		n, err := unix.Lgetxattr(at(dir, name), attr, buf)
		switch {
		case errors.Is(err, unix.ERANGE) && size <= 1<<16:
		case errors.Is(err, unix.ENODATA), errors.Is(err, unix.EOPNOTSUPP):
			return nil, false, nil
		case err != nil:
			return nil, false, &fs.PathError{Op: "getxattr " + attr, Path: name, Err: err}
		default:
			return buf[:n], true, nil
		}
	}
}

// SetXattr sets an extended attribute of name in dir.
func SetXattr(dir *os.File, name, attr string, value []byte) error {
	if err := unix.Lsetxattr(at(dir, name), attr, value, 0); err != nil {
		return &fs.PathError{Op: "setxattr " + attr, Path: name, Err: err}
	}
	return nil
}

// RemoveXattr removes an extended attribute of name in dir.
func RemoveXattr(dir *os.File, name, attr string) error {
	if err := unix.Lremovexattr(at(dir, name), attr); err != nil {
		return &fs.PathError{Op: "removexattr " + attr, Path: name, Err: err}
	}
	return nil
}
