package files

import (
	"os"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guest/resolve"
	"casemate.dev/internal/guestwire"
)

// maxLinks is how many symbolic links a path may lead through, as in the kernel.
const maxLinks = 40

// absolute returns the path of a request as bytes: "~" expanded, and relative to the request's base.
func absolute(job Job, a guestwire.Asker, text string) (string, error) {
	p, ok := guestwire.Unescape(text)
	if !ok || p == "" {
		return "", errs.New(errs.InvalidArgument, "the path is empty or holds a NUL")
	}
	base, ok := guestwire.Unescape(a.Dir)
	if !ok {
		return "", errs.New(errs.InvalidArgument, "the base directory holds a NUL")
	}
	switch {
	case p == "~" || strings.HasPrefix(p, "~/"):
		return job.Home + p[1:], nil
	case p[0] == '/':
		return p, nil
	case base == "":
		base = job.Home
	case base == "~" || strings.HasPrefix(base, "~/"):
		base = job.Home + base[1:]
	case base[0] != '/':
		return "", errs.New(errs.InvalidArgument, "the base directory is not absolute: %s", text)
	}
	return base + "/" + p, nil
}

// place is a name in an open directory: what the calls that change names need, so that the directory
// can't be exchanged between looking and acting.
type place struct {
	dir  int
	name string
	path string // for messages and answers
}

func (p *place) close() { _ = unix.Close(p.dir) }

// parentOf opens the directory that holds the last element of a path.
func parentOf(p string) (*place, error) { return parentAt(unix.AT_FDCWD, p, p) }

func parentAt(dir int, p, shown string) (*place, error) {
	trimmed := strings.TrimRight(p, "/")
	if trimmed == "" {
		return nil, errs.New(errs.FailedPrecondition, "the root directory can't be changed")
	}
	parent, name := path.Split(trimmed)
	if name == "." || name == ".." {
		return nil, errs.New(errs.InvalidArgument, "the path ends in %q: %s", name, guestwire.Escape(shown))
	}
	if parent == "" {
		parent = "."
	}
	fd, err := resolve.Open(dir, parent, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, fault(err, "reach", shown)
	}
	return &place{dir: fd, name: name, path: shown}, nil
}

// target returns the place of a path, behind the symbolic links that its last element leads through
// if follow is set. It need not exist.
func target(p string, follow bool) (*place, error) {
	at, err := parentOf(p)
	if err != nil || !follow {
		return at, err
	}
	for range maxLinks {
		link, err := readLink(at.dir, at.name)
		if err != nil || link == "" {
			return at, nil //nolint:nilerr // no link, or nothing there: whoever acts on it gets the error
		}
		// What a magic link holds is only a description of where it leads; here it leads nowhere.
		fd, err := resolve.Open(at.dir, at.name, unix.O_PATH, 0)
		if resolve.IsMagic(err) {
			at.close()
			return nil, fault(err, "follow", p)
		}
		if err == nil {
			_ = unix.Close(fd)
		}
		next, err := parentAt(at.dir, link, p)
		at.close()
		if err != nil {
			return nil, err
		}
		at = next
	}
	at.close()
	return nil, errs.New(errs.InvalidArgument, "too many symbolic links: %s", guestwire.Escape(p))
}

// readLink returns what a symbolic link holds, "" for anything else.
func readLink(dir int, name string) (string, error) {
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(dir, name, buf)
	if err == unix.EINVAL {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	return string(buf[:n]), nil
}

// lookAt opens a path only to look: no permission on the file itself is needed, and nothing notices.
func lookAt(p string, follow bool) (int, unix.Stat_t, error) {
	flags := unix.O_PATH
	if !follow {
		flags |= unix.O_NOFOLLOW
	}
	var st unix.Stat_t
	fd, err := resolve.Open(unix.AT_FDCWD, p, flags, 0)
	if err != nil {
		return -1, st, err
	}
	if err := unix.Fstat(fd, &st); err != nil {
		_ = unix.Close(fd)
		return -1, st, os.NewSyscallError("fstat", err)
	}
	return fd, st, nil
}

// again opens for use what lookAt has found. The name is the worker's own descriptor, so this is the
// same file, whatever happened to its path.
func again(fd, flags int) (*os.File, error) {
	name := selfName(fd)
	f, err := os.OpenFile(name, flags|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return f, nil
}

func selfName(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }

// openRegular opens a regular file, and nothing else.
func openRegular(p string, follow bool, flags int, verb string) (*os.File, unix.Stat_t, error) {
	fd, st, err := lookAt(p, follow)
	if err != nil {
		return nil, st, fault(err, verb, p)
	}
	defer unix.Close(fd)
	if err := wantRegular(st.Mode, p); err != nil {
		return nil, st, err
	}
	f, err := again(fd, flags)
	if err != nil {
		return nil, st, fault(err, verb, p)
	}
	return f, st, nil
}

func wantRegular(mode uint32, p string) error {
	text := guestwire.Escape(p)
	switch mode & unix.S_IFMT {
	case unix.S_IFREG:
		return nil
	case unix.S_IFDIR:
		return errs.New(errs.InvalidArgument, "is a directory: %s", text)
	case unix.S_IFLNK:
		return errs.New(errs.InvalidArgument, "is a symbolic link: %s", text)
	}
	return errs.New(errs.InvalidArgument, "is not a regular file: %s", text)
}
