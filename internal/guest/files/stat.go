package files

import (
	"path"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
)

// stat answers file.stat.
func (s *server) stat(job Job, r guestwire.PathRequest) (guestwire.FileInfo, error) {
	p, err := absolute(job, r.Asker, r.Path)
	if err != nil {
		return guestwire.FileInfo{}, err
	}
	return s.describe(p, r.Follow, r)
}

// describe returns what a path names, with what the request wants to know beyond that.
func (s *server) describe(p string, follow bool, r guestwire.PathRequest) (guestwire.FileInfo, error) {
	fd, st, err := lookAt(p, follow)
	if err != nil {
		return guestwire.FileInfo{}, fault(err, "look at", p)
	}
	defer unix.Close(fd)
	link := ""
	if st.Mode&unix.S_IFMT == unix.S_IFLNK {
		link, _ = readLink(fd, "") // an open link is read by the empty name (readlinkat(2))
	}
	info := s.info(path.Clean(p), &st, link)
	return info, more(&info, r, unix.AT_FDCWD, p, fd)
}

// describeAt is describe for a name in an open directory.
func (s *server) describeAt(dir int, name, p string, r guestwire.PathRequest) (guestwire.FileInfo, error) {
	var st unix.Stat_t
	if err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return guestwire.FileInfo{}, fault(err, "look at", p)
	}
	link := ""
	if st.Mode&unix.S_IFMT == unix.S_IFLNK {
		link, _ = readLink(dir, name)
	}
	info := s.info(path.Clean(p), &st, link)
	return info, more(&info, r, dir, name, -1)
}

func (s *server) info(p string, st *unix.Stat_t, link string) guestwire.FileInfo {
	owner, group := s.book.Names(st.Uid, st.Gid)
	return guestwire.FileInfo{
		Path: guestwire.Escape(p), Name: guestwire.Escape(path.Base(p)), Type: typeOf(st.Mode),
		Size: st.Size, Mode: st.Mode & 0o7777, UID: int(st.Uid), GID: int(st.Gid),
		Owner: guestwire.Escape(owner), Group: guestwire.Escape(group),
		MTime: unix.TimespecToNsec(st.Mtim), Target: guestwire.Escape(link),
	}
}

func typeOf(mode uint32) guestwire.FileType {
	switch mode & unix.S_IFMT {
	case unix.S_IFREG:
		return guestwire.TypeFile
	case unix.S_IFDIR:
		return guestwire.TypeDir
	case unix.S_IFLNK:
		return guestwire.TypeSymlink
	}
	return guestwire.TypeOther
}

// chmod answers file.chmod.
func (s *server) chmod(job Job, r guestwire.ChmodRequest) (guestwire.FileInfo, error) {
	p, err := absolute(job, r.Asker, r.Path)
	if err != nil {
		return guestwire.FileInfo{}, err
	}
	fd, st, err := lookAt(p, r.Follow)
	if err != nil {
		return guestwire.FileInfo{}, fault(err, "look at", p)
	}
	defer unix.Close(fd)
	// The owner first: changing it clears setuid and setgid (chown(2)).
	if r.UID >= 0 || r.GID >= 0 {
		if err := unix.Fchownat(fd, "", max(r.UID, -1), max(r.GID, -1), unix.AT_EMPTY_PATH); err != nil {
			return guestwire.FileInfo{}, fault(err, "change the owner of", p)
		}
	}
	if r.Mode != nil {
		if st.Mode&unix.S_IFMT == unix.S_IFLNK {
			return guestwire.FileInfo{}, errs.New(errs.InvalidArgument, "a symbolic link has no mode: %s", guestwire.Escape(p))
		}
		// fchmod(2) takes no descriptor that was opened only to look.
		if err := unix.Fchmodat(unix.AT_FDCWD, selfName(fd), *r.Mode&0o7777, 0); err != nil {
			return guestwire.FileInfo{}, fault(err, "change the mode of", p)
		}
	}
	return s.describe(p, r.Follow, r.PathRequest)
}
