package launch

import (
	"errors"
	"fmt"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

// inRoot resolves as if the descriptor were "/", follows no link of any kind, and so ends where the
// path says or fails (openat2(2)). CVE-2025-31133, -52565 and -52881 and CVE-2026-41579 each followed
// a link that an image had put in the place of a mount target.
const inRoot = unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS

// open opens name below dir, which stands for "/".
func open(dir int, name string, flags int, resolve uint64) (int, error) {
	how := unix.OpenHow{Flags: uint64(flags | unix.O_CLOEXEC), Resolve: inRoot | resolve}
	for {
		fd, err := unix.Openat2(dir, name, &how)
		switch {
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN):
			continue // a rename on the way; nothing else runs in here yet, so this ends
		case errors.Is(err, unix.ELOOP):
			return -1, &os.PathError{Op: "resolve", Path: name, Err: errors.New("a symbolic link is in the place of a directory")}
		case err != nil:
			return -1, &os.PathError{Op: "resolve", Path: name, Err: err}
		}
		return fd, nil
	}
}

// target opens the place in the root that something is mounted on, as a path only, and makes it if
// it is missing. It must be of the same kind as what is mounted: a directory unless single.
func target(root int, name string, single bool, resolve uint64) (int, error) {
	if !strings.HasPrefix(name, "/") || path.Clean(name) != name || name == "/" {
		return -1, fmt.Errorf("mount target %q is not a clean absolute path below /", name)
	}
	kind := unix.O_DIRECTORY
	if single {
		kind = 0
	}
	fd, err := open(root, name, unix.O_PATH|kind, resolve)
	if err == nil || !errors.Is(err, unix.ENOENT) {
		return fd, err
	}
	if err := create(root, name, single, resolve); err != nil {
		return -1, err
	}
	return open(root, name, unix.O_PATH|kind, resolve)
}

// create makes name and the directories above it, one element at a time, each in a directory that
// was resolved as in open.
func create(root int, name string, single bool, resolve uint64) error {
	elements := strings.Split(name[1:], "/")
	for i, element := range elements {
		parent, err := open(root, "/"+strings.Join(elements[:i], "/"), unix.O_PATH|unix.O_DIRECTORY, resolve)
		if err != nil {
			return err
		}
		if single && i == len(elements)-1 {
			var fd int
			if fd, err = unix.Openat(parent, element, unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o644); err == nil {
				unix.Close(fd)
			}
		} else {
			err = unix.Mkdirat(parent, element, 0o755)
		}
		unix.Close(parent)
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return &os.PathError{Op: "make mount target", Path: "/" + strings.Join(elements[:i+1], "/"), Err: err}
		}
	}
	return nil
}
