package files

import (
	"errors"
	"io/fs"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guest/resolve"
	"casemate.dev/internal/guestwire"
)

const (
	// maxEntries bounds what one list sends, and how many names are held at once.
	maxEntries = 200_000
	// maxListDepth bounds the levels of one list; each keeps a descriptor.
	maxListDepth = 128
)

// lister walks a directory for one list.
type lister struct {
	s     *server
	c     *guestwire.Conn
	r     guestwire.PathRequest
	depth int
	sent  int
	names int
}

// list answers file.list: the entries of each directory in order of their names, and below each
// directory, its own before the next one.
func (s *server) list(c *guestwire.Conn, job Job, r guestwire.ListRequest) error {
	p, err := absolute(job, r.Asker, r.Path)
	if err != nil {
		return err
	}
	if r.Depth > maxListDepth {
		return errs.New(errs.InvalidArgument, "depth is at most %d", maxListDepth)
	}
	flags := unix.O_RDONLY | unix.O_DIRECTORY
	if !r.Follow {
		flags |= unix.O_NOFOLLOW
	}
	fd, err := resolve.Open(unix.AT_FDCWD, p, flags, 0)
	if err != nil {
		return fault(err, "list", p)
	}
	l := lister{s: s, c: c, r: r.PathRequest, depth: max(r.Depth, 1)}
	if err := l.walk(fd, p, 1); err != nil {
		return err
	}
	return c.End(nil)
}

// walk sends what is in a directory, which it closes. Its own depth is bounded by maxListDepth.
func (l *lister) walk(fd int, p string, level int) error {
	dir := os.NewFile(uintptr(fd), p)
	defer dir.Close()
	names, err := dir.Readdirnames(maxEntries + 1 - l.names)
	if len(names) > maxEntries-l.names {
		return errs.New(errs.ResourceExhausted, "more than %d entries below %s", maxEntries, guestwire.Escape(p)).
			WithHint("list a smaller directory, or less deep")
	}
	if err != nil && len(names) == 0 && !isEnd(err) {
		return fault(err, "list", p)
	}
	l.names += len(names)
	slices.Sort(names)
	base := strings.TrimRight(p, "/") + "/"
	for _, name := range names {
		info, err := l.s.describeAt(fd, name, base+name, l.r)
		if err != nil {
			if isNotExist(err) {
				continue // gone meanwhile
			}
			return err
		}
		if l.sent++; l.sent > maxEntries {
			return errs.New(errs.ResourceExhausted, "more than %d entries", maxEntries)
		}
		if err := l.c.Event(info); err != nil {
			return err
		}
		if info.Type != guestwire.TypeDir || level >= l.depth {
			continue
		}
		if err := l.enter(fd, name, base+name, level+1); err != nil {
			return err
		}
	}
	l.names -= len(names)
	return nil
}

// enter walks a directory below. One that the user may not read is shown, but not what is in it.
func (l *lister) enter(at int, name, p string, level int) error {
	fd, err := resolve.Open(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		if isNotExist(err) || errors.Is(err, fs.ErrPermission) {
			return nil
		}
		return fault(err, "list", p)
	}
	return l.walk(fd, p, level)
}
