package files

import (
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guest/resolve"
	"casemate.dev/internal/guestwire"
)

// makeDir answers file.mkdir.
func (s *server) makeDir(job Job, r guestwire.MakeDirRequest) (guestwire.FileInfo, error) {
	var none guestwire.FileInfo
	p, err := absolute(job, r.Asker, r.Path)
	if err != nil {
		return none, err
	}
	mode := r.Mode & 0o7777
	if mode == 0 {
		mode = defaultDirMode
	}
	if r.Parents {
		if err := makeParents(p); err != nil {
			return none, err
		}
	}
	at, err := parentOf(p)
	if err != nil {
		return none, err
	}
	defer at.close()
	switch err := unix.Mkdirat(at.dir, at.name, mode); {
	case err == nil:
		// The umask has taken its part; what was asked for holds.
		err = unix.Fchmodat(at.dir, at.name, mode, 0)
		if err != nil {
			return none, fault(err, "make", p)
		}
	case err == unix.EEXIST && r.Parents:
		fd, err := resolve.Open(at.dir, at.name, unix.O_PATH|unix.O_DIRECTORY, 0)
		if err != nil {
			return none, fault(err, "make", p)
		}
		_ = unix.Close(fd)
	default:
		return none, fault(err, "make", p)
	}
	return s.describe(p, r.Parents)
}

// makeParents makes the directories above a path, with what they have by default. They belong to the
// user, who is the one that makes them.
func makeParents(p string) error {
	dir := path.Dir(strings.TrimRight(p, "/"))
	at, err := resolve.Open(unix.AT_FDCWD, "/", unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return fault(err, "make", p)
	}
	for name := range strings.SplitSeq(dir, "/") {
		if name == "" || name == "." {
			continue
		}
		next, err := enter(at, name)
		_ = unix.Close(at)
		if err != nil {
			return fault(err, "make", p)
		}
		at = next
	}
	return unix.Close(at)
}

// enter opens a directory, which it makes if it is not there.
func enter(at int, name string) (int, error) {
	fd, err := resolve.Open(at, name, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err == nil || !isNotExist(err) {
		return fd, err
	}
	if err := unix.Mkdirat(at, name, defaultDirMode); err != nil && err != unix.EEXIST {
		return -1, err
	}
	return resolve.Open(at, name, unix.O_PATH|unix.O_DIRECTORY, 0)
}

// move answers file.move.
func (s *server) move(job Job, r guestwire.MoveRequest) (guestwire.FileInfo, error) {
	var none guestwire.FileInfo
	from, err := absolute(job, r.Asker, r.Path)
	if err != nil {
		return none, err
	}
	to, err := absolute(job, r.Asker, r.To)
	if err != nil {
		return none, err
	}
	src, err := target(from, r.Follow)
	if err != nil {
		return none, err
	}
	defer src.close()
	dst, err := parentOf(to)
	if err != nil {
		return none, err
	}
	defer dst.close()
	flags := uint(unix.RENAME_NOREPLACE)
	if r.Overwrite {
		flags = 0
	}
	switch err := unix.Renameat2(src.dir, src.name, dst.dir, dst.name, flags); err {
	case nil:
	case unix.EXDEV:
		if err := carry(src, dst, r.Overwrite); err != nil {
			return none, err
		}
	case unix.EEXIST:
		return none, fault(err, "move", to)
	case unix.EISDIR, unix.ENOTDIR, unix.ENOTEMPTY:
		return none, fault(err, "replace", to)
	default:
		return none, fault(err, "move", from)
	}
	return s.describe(to, false)
}

// remove answers file.remove.
func (s *server) remove(job Job, r guestwire.RemoveRequest) (struct{}, error) {
	var none struct{}
	p, err := absolute(job, r.Asker, r.Path)
	if err != nil {
		return none, err
	}
	at, err := target(p, r.Follow)
	if err != nil {
		return none, err
	}
	defer at.close()
	err = unlink(at.dir, at.name)
	if r.Recursive && (err == unix.ENOTEMPTY || err == unix.EEXIST) {
		err = removeTree(at)
	}
	if err != nil {
		return none, fault(err, "remove", p)
	}
	return none, nil
}

// unlink removes a file or an empty directory.
func unlink(dir int, name string) error {
	err := unix.Unlinkat(dir, name, 0)
	if err != unix.EISDIR && err != unix.EPERM {
		return err
	}
	// POSIX has EPERM for a directory; it may also mean what it says.
	if again := unix.Unlinkat(dir, name, unix.AT_REMOVEDIR); again != unix.ENOTDIR {
		return again
	}
	return err
}

// step is a directory on the way down, to know it again on the way up.
type step struct {
	name     string
	dev, ino uint64
}

// removeTree removes a directory with all that is in it, links themselves and not what they lead to.
// It neither recurses nor keeps a descriptor for each level, so that no depth harms it: it climbs by
// "..", and makes sure that this is where it came from, since others may move directories meanwhile.
func removeTree(at *place) error {
	dir, err := openDir(at.dir, at.name)
	if err != nil {
		return err
	}
	defer func() { dir.close() }()
	way := []step{{name: at.name}}
	for {
		child, err := dir.removeEntries()
		if err != nil {
			return err
		}
		if child != "" {
			here := step{name: child, dev: dir.dev, ino: dir.ino}
			if err := dir.down(child); err != nil {
				return err
			}
			way = append(way, here)
			continue
		}
		last := way[len(way)-1]
		way = way[:len(way)-1]
		if len(way) == 0 {
			return unix.Unlinkat(at.dir, at.name, unix.AT_REMOVEDIR)
		}
		if err := dir.up(last); err != nil {
			return err
		}
		if err := unix.Unlinkat(dir.fd, last.name, unix.AT_REMOVEDIR); err != nil && err != unix.ENOENT {
			return err
		}
	}
}

// openedDir is a directory being emptied.
type openedDir struct {
	fd       int
	dev, ino uint64
}

func openDir(at int, name string) (*openedDir, error) {
	fd, err := resolve.Open(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return &openedDir{fd: fd, dev: st.Dev, ino: st.Ino}, nil
}

func (d *openedDir) close() { _ = unix.Close(d.fd) }

func (d *openedDir) down(name string) error {
	next, err := openDir(d.fd, name)
	if err != nil {
		return err
	}
	d.close()
	*d = *next
	return nil
}

func (d *openedDir) up(to step) error {
	next, err := openDir(d.fd, "..")
	if err != nil {
		return err
	}
	if next.dev != to.dev || next.ino != to.ino {
		next.close()
		return errs.New(errs.Conflict, "a directory was moved while it was being removed")
	}
	d.close()
	*d = *next
	return nil
}

// removeEntries removes what can be removed at once, and returns the first directory that holds
// something, "" when the directory is empty.
func (d *openedDir) removeEntries() (string, error) {
	buf := make([]byte, 8<<10)
	for {
		if _, err := unix.Seek(d.fd, 0, 0); err != nil {
			return "", err
		}
		full, seen, err := d.pass(buf)
		if err != nil || full != "" {
			return full, err
		}
		if seen == 0 {
			return "", nil
		}
		// What was removed may have moved the rest past the reading position: look again.
	}
}

// pass reads the directory once to its end, or to the first directory that holds something.
func (d *openedDir) pass(buf []byte) (full string, seen int, err error) {
	for {
		n, err := unix.ReadDirent(d.fd, buf)
		if err != nil || n == 0 {
			return "", seen, err
		}
		_, count, names := unix.ParseDirent(buf[:n], -1, nil)
		seen += count
		for _, name := range names {
			switch err := unlink(d.fd, name); err {
			case nil, unix.ENOENT:
			case unix.ENOTEMPTY, unix.EEXIST:
				return name, seen, nil
			default:
				return "", seen, err
			}
		}
	}
}
