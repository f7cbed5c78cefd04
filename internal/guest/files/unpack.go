package files

import (
	"bufio"
	"errors"
	"io"
	"os"
	"path"
	"strings"
	"time"

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
	if err := makeParents(strings.TrimRight(dest, "/")+"/x", job.Owner); err != nil {
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
	dirs  []dirTime
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
		return u.dress(u.top, ".", e)
	}
	if !clean(e.Path) {
		return errs.New(errs.InvalidArgument, "an entry's path is not clean: %s", guestwire.Escape(e.Path))
	}
	dir, name := path.Split(e.Path)
	at, err := u.enter(strings.TrimSuffix(dir, "/"))
	if err != nil {
		return fault(err, "unpack", u.shown(e.Path))
	}
	switch {
	case e.Hard != "":
		err = u.hardLink(at, name, e.Hard)
	case e.Type == guestwire.TypeDir:
		err = u.makeDir(at, name)
	case e.Type == guestwire.TypeSymlink:
		if err = discard(at, name); err == nil {
			err = unix.Symlinkat(e.Target, at, name)
		}
	case e.Type == guestwire.TypeFile:
		return u.file(at, name, e)
	default:
		return errs.New(errs.InvalidArgument, "%s is neither a file, a directory nor a symbolic link", guestwire.Escape(e.Path))
	}
	if err == nil && e.Hard == "" {
		err = u.dress(at, name, e)
	}
	if err != nil {
		return fault(err, "unpack", u.shown(e.Path))
	}
	return nil
}

func (u *unpacking) shown(p string) string { return strings.TrimRight(u.dest, "/") + "/" + p }

// clean reports whether a path names something below the top, and nothing else.
func clean(p string) bool {
	return p != "" && p[0] != '/' && path.Clean(p) == p && p != ".." && !strings.HasPrefix(p, "../")
}

// enter opens the directory of an entry, and makes what is missing on the way. A symbolic link to a directory
// is followed, as on the way of any path inside.
func (u *unpacking) enter(dir string) (int, error) {
	if u.parent >= 0 && dir == u.parentPath {
		return u.parent, nil
	}
	u.close()
	u.parent = -1
	at, err := unix.FcntlInt(uintptr(u.top), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	for name := range strings.SplitSeq(dir, "/") {
		if name == "" {
			continue
		}
		next, err := enter(at, name, u.given())
		_ = unix.Close(at)
		if err != nil {
			return -1, err
		}
		at = next
	}
	u.parent, u.parentPath = at, dir
	return at, nil
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

func (u *unpacking) makeDir(at int, name string) error {
	err := unix.Mkdirat(at, name, 0o700)
	if err != unix.EEXIST {
		return err
	}
	fd, err := resolve.Open(at, name, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// discard removes what is in the way of a new file; a directory stays, and the caller fails.
func discard(at int, name string) error {
	if err := unix.Unlinkat(at, name, 0); err != nil && err != unix.ENOENT {
		return err
	}
	return nil
}

func (u *unpacking) hardLink(at int, name, to string) error {
	if !clean(to) {
		return unix.EINVAL
	}
	// Through the top, so that no link on the way leads out of the tree.
	from, err := resolve.Open(u.top, to, unix.O_PATH|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer unix.Close(from)
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
	if err := u.dress(at, name, e); err != nil {
		return fault(err, "unpack", shown)
	}
	return nil
}

// dress gives a new file its owner, mode, attributes and time, in an order in which none undoes another.
func (u *unpacking) dress(at int, name string, e guestwire.Entry) error {
	uid, gid := e.UID, e.GID
	if u.uid != nil {
		uid = *u.uid
	}
	if u.gid != nil {
		gid = *u.gid
	}
	if u.privileged {
		if err := unix.Fchownat(at, name, int(uid), int(gid), unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return err
		}
	}
	if e.Type != guestwire.TypeSymlink {
		if err := unix.Fchmodat(at, name, e.Mode&0o7777, 0); err != nil {
			return err
		}
		for attr, value := range e.Attrs {
			if err := unix.Setxattr(selfName(at)+"/"+name, attr, value, 0); err != nil {
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
	return setTime(at, name, e.MTime)
}

func setTime(at int, name string, ns int64) error {
	t := unix.NsecToTimespec(time.Unix(0, ns).UnixNano())
	return unix.UtimesNanoAt(at, name, []unix.Timespec{t, t}, unix.AT_SYMLINK_NOFOLLOW)
}

// touchDirs sets the times of directories, the innermost first.
func (u *unpacking) touchDirs() error {
	for i := len(u.dirs) - 1; i >= 0; i-- {
		d := u.dirs[i]
		if err := setTime(u.top, d.path, d.at); err != nil {
			return fault(err, "set the time of", u.shown(d.path))
		}
	}
	return nil
}
