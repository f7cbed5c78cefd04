package files

import (
	"bufio"
	"errors"
	"io"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guest/resolve"
	"casemate.dev/internal/guestwire"
)

// unpack answers file.unpack.
func (s *server) unpack(c *guestwire.Conn, job Job, r guestwire.UnpackRequest) error {
	dest, err := absolute(job, r.Asker, r.Path)
	if err != nil {
		return err
	}
	u := unpacking{in: bufio.NewReaderSize(&frames{c: c}, 64<<10), dest: dest, privileged: os.Geteuid() == 0, parent: -1}
	defer u.close()
	if err := u.owner(s, r.Owner); err != nil {
		return err
	}
	owner := job.Owner
	if u.uid != nil || u.gid != nil {
		owner = u.given()
	}
	if err := makeParents(strings.TrimRight(dest, "/")+"/x", owner); err != nil {
		return err
	}
	if u.top, err = resolve.Open(unix.AT_FDCWD, dest, unix.O_PATH|unix.O_DIRECTORY, 0); err != nil {
		return fault(err, "unpack into", dest)
	}
	defer unix.Close(u.top)
	for {
		e, err := guestwire.ReadEntry(u.in)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if err := u.entry(e); err != nil {
			return err
		}
		u.reply.Entries++
		u.reply.Bytes += e.Size
	}
	if err := u.touchDirs(); err != nil {
		return err
	}
	return c.Reply(u.reply)
}

// frames reads what the caller sends as one stream.
type frames struct {
	c    *guestwire.Conn
	left []byte
	end  bool
}

// Read implements io.Reader.
func (f *frames) Read(p []byte) (int, error) {
	for len(f.left) == 0 {
		if f.end {
			return 0, io.EOF
		}
		frame, err := f.c.ReadFrame()
		if err != nil {
			return 0, err
		}
		switch frame.Kind {
		case guestwire.FrameData:
			f.left = frame.Payload
		case guestwire.FrameEnd:
			f.end = true
		default:
			return 0, errs.New(errs.InvalidArgument, "frame of kind %d in an upload", frame.Kind)
		}
	}
	n := copy(p, f.left)
	f.left = f.left[n:]
	return n, nil
}

// unpacking is one tree on its way to the disk.
type unpacking struct {
	in   *bufio.Reader
	dest string
	top  int
	// privileged says that files may be given to others.
	privileged bool
	uid, gid   *uint32 // of everything; nil: as the entries say
	// parent is the open directory of the last entry, and parentPath its path.
	parent     int
	parentPath string
	// dirs are the directories whose times are set at the end, when nothing changes them any more.
	dirs []dirTime
	// links are the symbolic links that the tree made.
	links map[inode]bool
	reply guestwire.UnpackReply
}

type dirTime struct {
	path string
	at   int64
}

func (u *unpacking) close() {
	if u.parent >= 0 {
		_ = unix.Close(u.parent)
	}
}

// owner finds out to whom everything is to belong.
func (u *unpacking) owner(s *server, text string) error {
	if text == "" {
		return nil
	}
	user, group, hasGroup := strings.Cut(text, ":")
	if user != "" {
		who, err := s.book.Lookup(user)
		if err != nil {
			return err
		}
		u.uid, u.gid = &who.UID, &who.GID
	}
	if hasGroup && group != "" {
		gid, err := s.book.Group(group)
		if err != nil {
			return err
		}
		u.gid = &gid
	}
	return nil
}

// entry makes one file.
func (u *unpacking) entry(e guestwire.Entry) error {
	if e.Path == "." {
		if e.Type != guestwire.TypeDir {
			return errs.New(errs.InvalidArgument, "the top of a tree is a %s, and no directory", e.Type)
		}
		return u.dress(u.top, e)
	}
	if !clean(e.Path) {
		return errs.New(errs.InvalidArgument, "an entry's path is not clean: %s", guestwire.Escape(e.Path))
	}
	dir, name := path.Split(e.Path)
	at, err := u.enter(strings.TrimSuffix(dir, "/"))
	if err != nil {
		return u.failed(err, e.Path)
	}
	switch {
	case e.Hard != "":
		err = u.hardLink(at, name, e.Hard)
	case e.Type == guestwire.TypeDir:
		err = u.makeDir(at, name, e)
	case e.Type == guestwire.TypeSymlink:
		err = u.symlink(at, name, e)
	case e.Type == guestwire.TypeFile:
		return u.file(at, name, e)
	default:
		return errs.New(errs.InvalidArgument, "%s is neither a file, a directory nor a symbolic link", guestwire.Escape(e.Path))
	}
	if err != nil {
		return u.failed(err, e.Path)
	}
	return nil
}

// errThrough says that an entry goes through a symbolic link that an entry before it made: only a tree that
// wants to lead out of itself has one.
var errThrough = errors.New("the way leads through a symbolic link of the tree itself")

// failed says which entry can't be made.
func (u *unpacking) failed(err error, entry string) error {
	if errors.Is(err, errThrough) {
		return errs.New(errs.InvalidArgument, "%s: %v", guestwire.Escape(entry), err)
	}
	return fault(err, "unpack", u.shown(entry))
}

func (u *unpacking) shown(p string) string { return strings.TrimRight(u.dest, "/") + "/" + p }

// clean reports whether a path names something below the top, and nothing else.
func clean(p string) bool {
	return p != "" && p[0] != '/' && path.Clean(p) == p && p != ".." && !strings.HasPrefix(p, "../")
}

// enter opens the directory of an entry, and makes what is missing on the way. A symbolic link to a directory
// that was there before is followed, as on the way of any path inside.
func (u *unpacking) enter(dir string) (int, error) {
	if u.parent >= 0 && dir == u.parentPath {
		return u.parent, nil
	}
	u.close()
	u.parent = -1
	at, err := u.descend(dir, func(at int, name string) (int, error) { return enter(at, name, u.given()) })
	if err != nil {
		return -1, err
	}
	u.parent, u.parentPath = at, dir
	return at, nil
}

// descend opens a directory below the top by opening each on the way. The caller closes it.
func (u *unpacking) descend(dir string, open func(at int, name string) (int, error)) (int, error) {
	at, err := unix.FcntlInt(uintptr(u.top), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	for name := range strings.SplitSeq(dir, "/") {
		if name == "" {
			continue
		}
		err := u.refuseOwnLink(at, name)
		next := -1
		if err == nil {
			next, err = open(at, name)
		}
		_ = unix.Close(at)
		if err != nil {
			return -1, err
		}
		at = next
	}
	return at, nil
}

// inode names a file whatever its path is.
type inode struct{ dev, ino uint64 }

func inodeOf(st *unix.Stat_t) inode { return inode{dev: uint64(st.Dev), ino: st.Ino} }

// refuseOwnLink fails where a name is a symbolic link that this tree made.
func (u *unpacking) refuseOwnLink(at int, name string) error {
	if len(u.links) == 0 {
		return nil
	}
	var st unix.Stat_t
	err := unix.Fstatat(at, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	if err == nil && st.Mode&unix.S_IFMT == unix.S_IFLNK && u.links[inodeOf(&st)] {
		return errThrough
	}
	return nil
}

// given is to whom belongs what no entry names.
func (u *unpacking) given() *Owner {
	if u.uid == nil && u.gid == nil || !u.privileged {
		return nil
	}
	var o Owner
	if u.uid != nil {
		o.UID = *u.uid
	}
	if u.gid != nil {
		o.GID = *u.gid
	}
	return &o
}

// makeDir makes a directory, or takes one that is there. What a link of before leads to stays as it is.
func (u *unpacking) makeDir(at int, name string, e guestwire.Entry) error {
	if err := unix.Mkdirat(at, name, 0o700); err != nil && err != unix.EEXIST {
		return err
	}
	if err := u.refuseOwnLink(at, name); err != nil {
		return err
	}
	fd, st, err := look(at, name)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return u.dress(fd, e)
	case unix.S_IFLNK:
		to, err := resolve.Open(at, name, unix.O_PATH|unix.O_DIRECTORY, 0)
		if err != nil {
			return err
		}
		return unix.Close(to)
	}
	return unix.ENOTDIR
}

// symlink makes a symbolic link, and remembers it: nothing of this tree goes through it.
func (u *unpacking) symlink(at int, name string, e guestwire.Entry) error {
	if err := discard(at, name); err != nil {
		return err
	}
	if err := unix.Symlinkat(e.Target, at, name); err != nil {
		return err
	}
	fd, st, err := look(at, name)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if st.Mode&unix.S_IFMT != unix.S_IFLNK {
		return unix.EEXIST // somebody inside put something else there
	}
	if u.links == nil {
		u.links = map[inode]bool{}
	}
	u.links[inodeOf(&st)] = true
	return u.dress(fd, e)
}

// look opens what a name is, itself also where it is a link, and says what it is.
func look(at int, name string) (fd int, st unix.Stat_t, err error) {
	fd, err = resolve.Open(at, name, unix.O_PATH|unix.O_NOFOLLOW, 0)
	if err != nil {
		return -1, st, err
	}
	if err := unix.Fstat(fd, &st); err != nil {
		return -1, st, errors.Join(err, unix.Close(fd))
	}
	return fd, st, nil
}

// discard removes what is in the way of a new file; a directory stays, and the caller fails.
func discard(at int, name string) error {
	if err := unix.Unlinkat(at, name, 0); err != nil && err != unix.ENOENT {
		return err
	}
	return nil
}

// hardLink gives a file of the tree another name.
func (u *unpacking) hardLink(at int, name, to string) error {
	if !clean(to) {
		return errs.New(errs.InvalidArgument, "a hard link's path is not clean: %s", guestwire.Escape(to))
	}
	dir, last := path.Split(to)
	there, err := u.descend(strings.TrimSuffix(dir, "/"), func(at int, name string) (int, error) {
		return resolve.Open(at, name, unix.O_PATH|unix.O_DIRECTORY, 0)
	})
	if err != nil {
		return err
	}
	defer unix.Close(there)
	from, err := resolve.Open(there, last, unix.O_PATH|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer unix.Close(from)
	var st unix.Stat_t
	if err := unix.Fstat(from, &st); err != nil {
		return err
	}
	if err := wantRegular(st.Mode, u.shown(to)); err != nil {
		return err
	}
	if err := discard(at, name); err != nil {
		return err
	}
	return unix.Linkat(unix.AT_FDCWD, selfName(from), at, name, unix.AT_SYMLINK_FOLLOW)
}

// file writes a regular file and its content.
func (u *unpacking) file(at int, name string, e guestwire.Entry) error {
	shown := u.shown(e.Path)
	if err := discard(at, name); err != nil {
		return fault(err, "replace", shown)
	}
	fd, err := unix.Openat(at, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return fault(err, "unpack", shown)
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	if n, err := io.CopyN(f, u.in, e.Size); err != nil {
		if n < e.Size && errors.Is(err, io.EOF) {
			return wrongSize(shown, e.Size)
		}
		return fault(err, "write", shown)
	}
	if err := u.dress(fd, e); err != nil {
		return fault(err, "unpack", shown)
	}
	return nil
}

// dress gives a new file its owner, mode, attributes and time, in an order in which none undoes another. It
// is told by its descriptor: who may rename in the directory could put another file under its name meanwhile.
func (u *unpacking) dress(fd int, e guestwire.Entry) error {
	uid, gid := e.UID, e.GID
	if u.uid != nil {
		uid = *u.uid
	}
	if u.gid != nil {
		gid = *u.gid
	}
	if u.privileged {
		if err := unix.Fchownat(fd, "", int(uid), int(gid), unix.AT_EMPTY_PATH); err != nil {
			return err
		}
	}
	if e.Type != guestwire.TypeSymlink {
		if err := unix.Fchmodat(unix.AT_FDCWD, selfName(fd), e.Mode&0o7777, 0); err != nil {
			return err
		}
		for attr, value := range e.Attrs {
			if err := unix.Setxattr(selfName(fd), attr, value, 0); err != nil {
				return err
			}
		}
	}
	if e.MTime == 0 {
		return nil
	}
	if e.Type == guestwire.TypeDir {
		u.dirs = append(u.dirs, dirTime{path: e.Path, at: e.MTime})
		return nil
	}
	return setTime(fd, "", e.MTime, unix.AT_EMPTY_PATH)
}

func setTime(at int, name string, ns int64, flags int) error {
	t := unix.NsecToTimespec(ns)
	return unix.UtimesNanoAt(at, name, []unix.Timespec{t, t}, flags)
}

// touchDirs sets the times of directories, the innermost first.
func (u *unpacking) touchDirs() error {
	for i := len(u.dirs) - 1; i >= 0; i-- {
		d := u.dirs[i]
		if err := setTime(u.top, d.path, d.at, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return fault(err, "set the time of", u.shown(d.path))
		}
	}
	return nil
}
