// Package resolve opens paths inside a sandbox without following anything that leads out of what a
// path can name: no magic links (/proc/self/fd/7, /proc/1/root, /proc/self/exe), through which
// CVE-2024-21626 and its kin reached the host.
//
// What belongs here: openat2(2) with the rules that hold for every path in the guest. What does not:
// what is done with the file.
package resolve

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// Open opens path with openat2, never through a magic link. A symbolic link is followed, also as the
// last element unless flags hold O_NOFOLLOW. The descriptor is closed on exec. A FIFO or a device
// does not block the open (O_NONBLOCK) and no terminal becomes ours (O_NOCTTY).
func Open(dir int, path string, flags int, mode uint32) (int, error) {
	return open(dir, path, flags, mode, unix.RESOLVE_NO_MAGICLINKS)
}

func open(dir int, path string, flags int, mode uint32, rules uint64) (int, error) {
	flags |= unix.O_CLOEXEC
	if flags&unix.O_PATH == 0 {
		flags |= unix.O_NONBLOCK | unix.O_NOCTTY
	}
	how := unix.OpenHow{Flags: uint64(flags), Resolve: rules}
	if flags&(unix.O_CREAT|unix.O_TMPFILE) != 0 {
		how.Mode = uint64(mode)
	}
	for {
		fd, err := unix.Openat2(dir, path, &how)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return -1, &os.PathError{Op: "open", Path: path, Err: err}
		}
		return fd, nil
	}
}

// IsMagic reports whether err may come from a magic link on the way: openat2 says ELOOP for that as
// for too many symbolic links.
func IsMagic(err error) bool { return errors.Is(err, unix.ELOOP) }

// ReadConfig reads a small regular file such as /etc/passwd of a file system that the sandbox's code
// may have prepared: it crosses no mount, so that it never reads procfs or a device, and it refuses
// what is not a regular file or is longer than limit.
func ReadConfig(path string, limit int64) ([]byte, unix.Stat_t, error) {
	fd, err := open(unix.AT_FDCWD, path, unix.O_RDONLY, 0, unix.RESOLVE_NO_MAGICLINKS|unix.RESOLVE_NO_XDEV)
	if err != nil {
		return nil, unix.Stat_t{}, err
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, st, os.NewSyscallError("fstat", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, st, fmt.Errorf("%s is not a regular file", path)
	}
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = fmt.Errorf("%s is longer than %d bytes", path, limit)
	}
	return b, st, err
}
