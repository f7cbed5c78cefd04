package files

import (
	"path"
	"strings"

	"golang.org/x/sys/unix"

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
		if err := makeParents(p, job.Owner); err != nil {
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
		if err == nil {
			err = job.Owner.take(at.dir, at.name)
		}
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
	return s.describe(p, r.Parents, r.PathRequest)
}

// take gives what was just made to its owner; without one it belongs to who made it.
func (o *Owner) take(dir int, name string) error {
	if o == nil {
		return nil
	}
	return unix.Fchownat(dir, name, int(o.UID), int(o.GID), unix.AT_SYMLINK_NOFOLLOW)
}

// makeParents makes the directories above a path, with what they have by default. They belong to the
// user who asks.
func makeParents(p string, owner *Owner) error {
	dir := path.Dir(strings.TrimRight(p, "/"))
	at, err := resolve.Open(unix.AT_FDCWD, "/", unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return fault(err, "make", p)
	}
	for name := range strings.SplitSeq(dir, "/") {
		if name == "" || name == "." {
			continue
		}
		next, err := enter(at, name, owner)
		_ = unix.Close(at)
		if err != nil {
			return fault(err, "make", p)
		}
		at = next
	}
	return unix.Close(at)
}

// enter opens a directory, which it makes if it is not there.
func enter(at int, name string, owner *Owner) (int, error) {
	fd, err := resolve.Open(at, name, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err == nil || !isNotExist(err) {
		return fd, err
	}
	switch err := unix.Mkdirat(at, name, defaultDirMode); {
	case err == unix.EEXIST:
		return resolve.Open(at, name, unix.O_PATH|unix.O_DIRECTORY, 0)
	case err != nil:
		return -1, err
	}
	// By its descriptor: who may rename here could put something else under the name meanwhile.
	if fd, err = resolve.Open(at, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0); err != nil || owner == nil {
		return fd, err
	}
	if err := unix.Fchownat(fd, "", int(owner.UID), int(owner.GID), unix.AT_EMPTY_PATH); err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
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
	return s.describe(to, false, r.PathRequest)
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
	err = unlink(at.dir, at.name, false)
	if r.Recursive && (err == unix.ENOTEMPTY || err == unix.EEXIST) {
		err = removeTree(at)
	}
	if err != nil {
		return none, fault(err, "remove", p)
	}
	return none, nil
}
