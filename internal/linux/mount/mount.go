package mount

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Attr is what a mount may not do, as in mount_setattr(2).
type Attr uint64

// The attributes.
const (
	ReadOnly    Attr = unix.MOUNT_ATTR_RDONLY
	NoSuid      Attr = unix.MOUNT_ATTR_NOSUID
	NoDev       Attr = unix.MOUNT_ATTR_NODEV
	NoExec      Attr = unix.MOUNT_ATTR_NOEXEC
	NoSymFollow Attr = unix.MOUNT_ATTR_NOSYMFOLLOW
)

// Clone returns a detached copy of the mount below path, rooted there: its ".." ends at its root.
// With recursive it carries the mounts below, too. The copy goes when its descriptor is closed.
func Clone(path string, recursive bool) (*os.File, error) {
	return cloneAt(unix.AT_FDCWD, path, path, flags(recursive))
}

// CloneFile is Clone for an open file or directory.
func CloneFile(f *os.File, recursive bool) (*os.File, error) {
	return CloneAt(int(f.Fd()), f.Name(), recursive)
}

// CloneAt is Clone for an open descriptor; name is for errors only.
func CloneAt(fd int, name string, recursive bool) (*os.File, error) {
	return cloneAt(fd, "", name, unix.AT_EMPTY_PATH|flags(recursive))
}

func flags(recursive bool) uint {
	if recursive {
		return unix.AT_RECURSIVE
	}
	return 0
}

func cloneAt(dirfd int, path, name string, flags uint) (*os.File, error) {
	fd, err := retry(func() (int, error) {
		return unix.OpenTree(dirfd, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW|flags)
	})
	if err != nil {
		return nil, &os.PathError{Op: "open_tree", Path: name, Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}

// Change is what SetAttr does to a mount.
type Change struct {
	Set   Attr
	Clear Attr
	// UserNS, where not nil, maps the mount's ids through that user namespace (an idmapped mount):
	// what is stored as the namespace's inside-id shows as its outside-id.
	UserNS *os.File
	// Recursive does it to every mount below as well.
	Recursive bool
}

// SetAttr changes a mount, and cuts it off from propagation: a copy of a shared mount is shared with
// it, and what is mounted below the one would show below the other (mount_namespaces(7)). Ids can be
// mapped only while the mount is detached, and once.
func SetAttr(m *os.File, c Change) error {
	attr := unix.MountAttr{Attr_set: uint64(c.Set), Attr_clr: uint64(c.Clear), Propagation: unix.MS_PRIVATE}
	if c.UserNS != nil {
		attr.Attr_set |= unix.MOUNT_ATTR_IDMAP
		attr.Userns_fd = uint64(c.UserNS.Fd())
	}
	how := uint(unix.AT_EMPTY_PATH)
	if c.Recursive {
		how |= unix.AT_RECURSIVE
	}
	if err := unix.MountSetattr(int(m.Fd()), "", how, &attr); err != nil {
		return &os.PathError{Op: "mount_setattr", Path: m.Name(), Err: err}
	}
	return nil
}

// Attach puts a detached mount over what target, an open descriptor, refers to. Both are descriptors,
// so that nothing is resolved between the check of a target and its use.
func Attach(m *os.File, target int) error {
	if err := unix.MoveMount(int(m.Fd()), "", target, "",
		unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH); err != nil {
		return &os.PathError{Op: "move_mount", Path: m.Name(), Err: err}
	}
	return nil
}

// Option is one parameter of a new file system; an empty Value makes it a flag.
type Option struct{ Key, Value string }

// New makes a file system of the given type and returns it as a detached mount with attributes set.
func New(fstype string, set Attr, options ...Option) (*os.File, error) {
	fs, err := unix.Fsopen(fstype, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, &os.PathError{Op: "fsopen", Path: fstype, Err: err}
	}
	defer unix.Close(fs)
	// What /proc/mounts shows first; "none" otherwise.
	options = append([]Option{{Key: "source", Value: fstype}}, options...)
	for _, o := range options {
		if o.Value == "" {
			err = unix.FsconfigSetFlag(fs, o.Key)
		} else {
			err = unix.FsconfigSetString(fs, o.Key, o.Value)
		}
		if err != nil {
			return nil, &os.PathError{Op: "fsconfig " + o.Key, Path: fstype, Err: withLog(fs, err)}
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return nil, &os.PathError{Op: "fsconfig create", Path: fstype, Err: withLog(fs, err)}
	}
	m, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, int(set))
	if err != nil {
		return nil, &os.PathError{Op: "fsmount", Path: fstype, Err: withLog(fs, err)}
	}
	return os.NewFile(uintptr(m), fstype), nil
}

// withLog adds what the kernel wrote about a failure into the context's message queue (fsopen(2)).
func withLog(fs int, err error) error {
	buf := make([]byte, 512)
	n, readErr := unix.Read(fs, buf)
	if readErr != nil || n <= 2 {
		return err
	}
	return fmt.Errorf("%w (%s)", err, trim(buf[:n]))
}

// trim cuts a message's class ("e ", "w ", "i ") and its line end off.
func trim(b []byte) string {
	s := string(b)
	if len(s) > 2 && s[1] == ' ' {
		s = s[2:]
	}
	for len(s) > 0 && s[len(s)-1] == '\n' {
		s = s[:len(s)-1]
	}
	return s
}

// Flags returns the ST_ flags of the mount that an open descriptor lies on (statfs(2)).
func Flags(fd int) (int64, error) {
	var st unix.Statfs_t
	for {
		err := unix.Fstatfs(fd, &st)
		if err == nil {
			return st.Flags, nil
		}
		if !errors.Is(err, unix.EINTR) {
			return 0, os.NewSyscallError("fstatfs", err)
		}
	}
}

func retry(call func() (int, error)) (int, error) {
	for {
		fd, err := call()
		if !errors.Is(err, unix.EINTR) {
			return fd, err
		}
	}
}
