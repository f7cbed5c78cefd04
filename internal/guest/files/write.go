package files

import (
	"encoding/hex"
	"os"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
)

const (
	defaultFileMode = 0o644
	defaultDirMode  = 0o755
)

// write answers file.write.
func (s *server) write(c *guestwire.Conn, job Job, r guestwire.WriteRequest) error {
	p, err := absolute(job, r.Asker, r.Path)
	if err != nil {
		return err
	}
	if r.Parents {
		if err := makeParents(p, job.Owner); err != nil {
			return err
		}
	}
	switch {
	case r.Append || r.Offset >= 0:
		err = patch(c, p, job.Owner, r)
	case r.InPlace:
		err = overwrite(c, p, job.Owner, r)
	default:
		err = replace(c, p, job.Owner, r)
	}
	if err != nil {
		return err
	}
	info, err := s.describe(p, r.Follow, r.PathRequest)
	if err != nil {
		return err
	}
	return c.Reply(info)
}

// fileMode returns the mode of a new file. Setuid and setgid are given by file.chmod only.
func fileMode(mode uint32) uint32 {
	if mode == 0 {
		return defaultFileMode
	}
	return mode & 0o1777
}

// patch writes into an existing file. For an append, a missing one is made.
func patch(c *guestwire.Conn, p string, owner *Owner, r guestwire.WriteRequest) error {
	flags := os.O_WRONLY
	if r.Append {
		flags |= os.O_APPEND
		if err := makeFile(p, owner, r); err != nil {
			return err
		}
	}
	f, _, err := openRegular(p, r.Follow, flags, "write")
	if err != nil {
		return err
	}
	defer f.Close()
	if !r.Append {
		if _, err := f.Seek(r.Offset, 0); err != nil {
			return fault(err, "write", p)
		}
	}
	if err := receive(c, f, r.Size, p); err != nil {
		return err
	}
	return setAttributes(f, p, r)
}

// overwrite empties a file, or makes it, and writes into it.
func overwrite(c *guestwire.Conn, p string, owner *Owner, r guestwire.WriteRequest) error {
	if err := makeFile(p, owner, r); err != nil {
		return err
	}
	f, st, err := openRegular(p, r.Follow, os.O_WRONLY, "write")
	if err != nil {
		return err
	}
	defer f.Close()
	// Not O_TRUNC: of a file that is empty, watchers would be told twice that it was written.
	if st.Size > 0 {
		if err := f.Truncate(0); err != nil {
			return fault(err, "write", p)
		}
	}
	if owner != nil && (st.Uid != owner.UID || st.Gid != owner.GID) {
		if err := f.Chown(int(owner.UID), int(owner.GID)); err != nil {
			return fault(err, "write", p)
		}
	}
	if err := receive(c, f, r.Size, p); err != nil {
		return err
	}
	return setAttributes(f, p, r)
}

// makeFile makes an empty file unless there is something already.
func makeFile(p string, owner *Owner, r guestwire.WriteRequest) error {
	at, err := target(p, r.Follow)
	if err != nil {
		return err
	}
	defer at.close()
	flags := unix.O_WRONLY | unix.O_CREAT | unix.O_EXCL | unix.O_CLOEXEC
	fd, err := unix.Openat(at.dir, at.name, flags, fileMode(r.Mode))
	if err == unix.EEXIST {
		return nil
	}
	if err != nil {
		return fault(err, "make", p)
	}
	defer unix.Close(fd)
	if owner == nil {
		return nil
	}
	if err := unix.Fchown(fd, int(owner.UID), int(owner.GID)); err != nil {
		return fault(err, "make", p)
	}
	return nil
}

// replace writes a whole file.
func replace(c *guestwire.Conn, p string, owner *Owner, r guestwire.WriteRequest) error {
	at, err := target(p, r.Follow)
	if err != nil {
		return err
	}
	defer at.close()
	old, err := replaceable(at)
	if err != nil {
		return err
	}
	tmp, err := newTemporary(at)
	if err != nil {
		return err
	}
	defer tmp.discard()
	if err := receive(c, tmp.file, r.Size, p); err != nil {
		return err
	}
	mode := fileMode(r.Mode)
	switch {
	case old == nil:
	case owner != nil:
		mode = old.Mode & 0o1777
	default:
		mode = old.Mode & 0o7777
		if err := tmp.own(old); err != nil {
			mode &^= 0o6000 // another owner's setuid is not ours to give
		}
	}
	if owner != nil {
		if err := tmp.file.Chown(int(owner.UID), int(owner.GID)); err != nil {
			return fault(err, "write", p)
		}
	}
	if err := tmp.file.Chmod(os.FileMode(mode & 0o777)); err != nil {
		return fault(err, "write", p)
	}
	if special := mode & 0o7000; special != 0 {
		if err := unix.Fchmod(int(tmp.file.Fd()), mode); err != nil {
			return fault(err, "write", p)
		}
	}
	if err := setAttributes(tmp.file, p, r); err != nil {
		return err
	}
	return tmp.place()
}

// replaceable returns the file that is there, nil if none, and an error where it must not be replaced.
func replaceable(at *place) (*unix.Stat_t, error) {
	var st unix.Stat_t
	err := unix.Fstatat(at.dir, at.name, &st, unix.AT_SYMLINK_NOFOLLOW)
	if err == unix.ENOENT {
		return nil, nil
	}
	if err != nil {
		return nil, fault(err, "write", at.path)
	}
	if err := wantRegular(st.Mode, at.path); err != nil {
		return nil, err
	}
	if err := unix.Faccessat2(at.dir, at.name, unix.W_OK, unix.AT_EACCESS|unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return nil, fault(err, "write", at.path)
	}
	return &st, nil
}

// temporary is a file on its way to a place.
type temporary struct {
	at   *place
	name string
	file *os.File
}

// temporaryPrefix begins the names of files that are being written.
const temporaryPrefix = ".casemate-"

func newTemporary(at *place) (*temporary, error) {
	name, err := temporaryName()
	if err != nil {
		return nil, err
	}
	fd, err := unix.Openat(at.dir, name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fault(err, "write", at.path)
	}
	return &temporary{at: at, name: name, file: os.NewFile(uintptr(fd), name)}, nil
}

// temporaryName asks the kernel for randomness: package crypto/rand links, and initializes at every
// start of a guest, more than the rest of it does.
func temporaryName() (string, error) {
	var b [16]byte
	if _, err := unix.Getrandom(b[:], 0); err != nil {
		return "", os.NewSyscallError("getrandom", err)
	}
	return temporaryPrefix + hex.EncodeToString(b[:]), nil
}

// own gives the file the owner of the one that it replaces.
func (t *temporary) own(old *unix.Stat_t) error {
	var st unix.Stat_t
	fd := int(t.file.Fd())
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Uid == old.Uid && st.Gid == old.Gid {
		return nil
	}
	return unix.Fchown(fd, int(old.Uid), int(old.Gid))
}

// place renames the file to where it belongs.
func (t *temporary) place() error {
	if err := unix.Renameat(t.at.dir, t.name, t.at.dir, t.at.name); err != nil {
		return fault(err, "write", t.at.path)
	}
	t.name = ""
	return nil
}

// discard closes the file, and removes it unless it was placed.
func (t *temporary) discard() {
	if t.name != "" {
		_ = unix.Unlinkat(t.at.dir, t.name, 0)
	}
	_ = t.file.Close()
}

// receive writes what the caller sends, and fails unless that is all of it.
func receive(c *guestwire.Conn, f *os.File, size int64, p string) error {
	var got int64
	for {
		frame, err := c.ReadFrame()
		if err != nil {
			return err // the caller has gone, or talks nonsense
		}
		switch frame.Kind {
		case guestwire.FrameData:
			got += int64(len(frame.Payload))
			if size >= 0 && got > size {
				return wrongSize(p, size)
			}
			if _, err := f.Write(frame.Payload); err != nil {
				return fault(err, "write", p)
			}
		case guestwire.FrameEnd:
			if size >= 0 && got != size {
				return wrongSize(p, size)
			}
			return nil
		default:
			return errs.New(errs.InvalidArgument, "frame of kind %d in an upload", frame.Kind)
		}
	}
}

func wrongSize(p string, size int64) error {
	return errs.New(errs.InvalidArgument, "the upload of %s is not the %d bytes that were announced", guestwire.Escape(p), size)
}
