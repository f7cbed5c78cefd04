package launch

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/cleanup"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/linux/mount"
)

// enterStage makes an empty tmpfs the root and working directory, leaves the host's, and returns it as
// a path descriptor. It needs no place on the host: it is mounted over the root itself, which then goes.
func enterStage() (int, error) {
	m, err := mount.New("tmpfs", mount.NoSuid|mount.NoDev|mount.NoExec, mount.Option{Key: "mode", Value: "700"})
	if err != nil {
		return -1, err
	}
	defer func() { _ = m.Close() }()
	slash, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: "/", Err: err}
	}
	defer unix.Close(slash)
	if err := mount.Attach(m, slash); err != nil {
		return -1, fmt.Errorf("mount staging area: %w", err)
	}
	if err := pivot(int(m.Fd())); err != nil {
		return -1, fmt.Errorf("enter staging area: %w", err)
	}
	fd, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: "/", Err: err}
	}
	return fd, nil
}

// place attaches the passed mount at index i to a new directory of the staging area.
func (s *setup) place(i int, name string) error {
	f, err := s.file(i)
	if err != nil {
		return err
	}
	if err := unix.Mkdir(name, 0o700); err != nil {
		return &os.PathError{Op: "mkdir", Path: name, Err: err}
	}
	fd, err := unix.Open(name, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: name, Err: err}
	}
	defer unix.Close(fd)
	return mount.Attach(f, fd)
}

// mountOverlay mounts an overlay at a new directory of the staging area and returns its root as a
// path descriptor. prefix keeps the names of its layers apart from those of other overlays.
//
// It is mounted in here, by this user namespace's root: mounted outside, where the mounter's ids have
// no place in the layers' id map, it comes up read-only. Hence userxattr: the trusted.* attributes
// that overlayfs uses otherwise are out of reach in a user namespace (overlayfs.rst).
func (s *setup) mountOverlay(o guestwire.Overlay, at, prefix string, nosuid bool) (int, error) {
	lowers := make([]string, len(o.Lowers))
	for i, file := range o.Lowers {
		lowers[i] = strings.Replace(prefix, "u", "l", 1) + strconv.Itoa(i)
		if err := s.place(file, lowers[i]); err != nil {
			return -1, fmt.Errorf("layer %d: %w", i, err)
		}
	}
	flags := uintptr(unix.MS_NODEV)
	if nosuid {
		flags |= unix.MS_NOSUID
	}
	options := "userxattr,lowerdir=" + strings.Join(lowers, ":")
	if o.Upper == guestwire.NoUpper {
		flags |= unix.MS_RDONLY
		// A read-only overlay wants two layers; this one is empty.
		if err := unix.Mkdir(prefix, 0o755); err != nil {
			return -1, &os.PathError{Op: "mkdir", Path: prefix, Err: err}
		}
		options += ":" + prefix
	} else {
		if err := s.place(o.Upper, prefix); err != nil {
			return -1, fmt.Errorf("writable layer: %w", err)
		}
		options += ",upperdir=" + prefix + "/" + o.UpperDir + ",workdir=" + prefix + "/" + o.WorkDir
	}
	if err := unix.Mkdir(at, 0o700); err != nil {
		return -1, &os.PathError{Op: "mkdir", Path: at, Err: err}
	}
	if err := unix.Mount("overlay", at, "overlay", flags, options); err != nil {
		return -1, fmt.Errorf("mount overlay: %w", err)
	}
	fd, err := unix.Open(at, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: at, Err: err}
	}
	// On a full file system, or where the work directory can't be prepared, overlayfs mounts
	// read-only and reports success (HARDENING 11).
	got, err := mount.Flags(fd)
	if err == nil && got&unix.ST_RDONLY != 0 && o.Upper != guestwire.NoUpper {
		err = errors.New("the overlay came up read-only: its file system is full, or its owner has no id inside")
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// mount does one step of building the root.
func (s *setup) mount(root, i int, m guestwire.Mount) error {
	at, err := target(root, m.Target, m.Single, 0)
	if err != nil {
		return err
	}
	defer unix.Close(at)
	if m.Overlay == nil && m.File == guestwire.Prepared {
		f, err := cloneEmpty()
		if err != nil {
			return err
		}
		defer func() { _ = f.Close() }()
		return mount.Attach(f, at)
	}
	if m.Overlay == nil {
		f, err := s.file(m.File)
		if err != nil {
			return err
		}
		return mount.Attach(f, at)
	}
	name := strconv.Itoa(i)
	fd, err := s.mountOverlay(*m.Overlay, "w"+name, "u"+name+"-", true)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	// The merged directory takes its owner from the writable layer, which is new and root's.
	if m.Overlay.Upper != guestwire.NoUpper {
		if err := give(fd, m); err != nil {
			return err
		}
	}
	if s.ahead != nil { // nothing can be moved out of the staging area then, whose mounts show elsewhere (mount_namespaces(7))
		m, err := mount.CloneAt(fd, "", false)
		if err != nil {
			return err
		}
		defer func() { _ = m.Close() }()
		return mount.Attach(m, at)
	}
	return unix.MoveMount(fd, "", at, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
}

// showFile makes a file in the staging area and mounts it, read-only, in the place of one in the root. It is
// root's in here, who has no way to write to it either.
func (s *setup) showFile(root int, staged string, f guestwire.LaunchFile) error {
	content, err := s.file(f.File)
	if err != nil {
		return err
	}
	if err := copyTo(staged, content); err != nil {
		return err
	}
	m, err := mount.Clone(staged, false)
	if err != nil {
		return err
	}
	defer func() { _ = m.Close() }()
	if err := mount.SetAttr(m, mount.Change{Set: safe | mount.ReadOnly}); err != nil {
		return err
	}
	at, err := target(root, f.Target, true, 0)
	if err != nil {
		return err
	}
	defer unix.Close(at)
	return mount.Attach(m, at)
}

// maxShown bounds a file that is shown.
const maxShown = 16 << 20

// copyTo makes a file with the content of another, which is read at a position, since it may be shared.
func copyTo(path string, content *os.File) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o444)
	if err != nil {
		return err
	}
	n, err := io.Copy(f, io.NewSectionReader(content, 0, maxShown+1))
	if err == nil && n > maxShown {
		err = fmt.Errorf("it is longer than %d bytes", maxShown)
	}
	return errors.Join(err, f.Close())
}

// give sets owner and mode of an overlay's root directory.
func give(fd int, m guestwire.Mount) error {
	if err := unix.Fchownat(fd, "", int(m.UID), int(m.GID), unix.AT_EMPTY_PATH); err != nil {
		return os.NewSyscallError("chown", err)
	}
	// A path descriptor can't be changed itself, but what it stands for can (open(2), O_PATH).
	if err := unix.Chmod("/proc/self/fd/"+strconv.Itoa(fd), m.Mode&0o7777); err != nil {
		return os.NewSyscallError("chmod", err)
	}
	return nil
}

// pivot makes root "/" and working directory, and detaches what was "/" before.
func pivot(root int) error {
	detach, err := pivotOnly(root)
	if err != nil {
		return err
	}
	return detach()
}

// pivotOnly makes root "/" and leaves what was "/" before out of the reach of absolute paths. What it
// returns detaches that and must be called once, before anything but this program runs: until then
// the working directory is in there. Detaching mostly waits for other processors (namespace_unlock in
// fs/namespace.c), so it may be called on another goroutine while this one goes on with absolute paths.
func pivotOnly(root int) (detach func() error, err error) {
	old, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: "/", Err: err}
	}
	undo := cleanup.New(func() { _ = unix.Close(old) })
	defer undo.Run()
	if err := unix.Fchdir(root); err != nil {
		return nil, os.NewSyscallError("fchdir", err)
	}
	// Both the same directory: the old root then lies over the new one, and no place in the new root
	// is needed to put it (pivot_root(2)).
	if err := unix.PivotRoot(".", "."); err != nil {
		return nil, os.NewSyscallError("pivot_root", err)
	}
	if err := unix.Fchdir(old); err != nil {
		return nil, os.NewSyscallError("fchdir", err)
	}
	undo.Release()
	return func() error {
		defer unix.Close(old)
		// Detached, since it is busy: old is open in it. Everything below goes as well.
		if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
			return fmt.Errorf("detach the former root: %w", err)
		}
		return os.NewSyscallError("chdir", unix.Chdir("/"))
	}, nil
}
