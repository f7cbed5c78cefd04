package files

import (
	"errors"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
)

func isNotExist(err error) bool { return errors.Is(err, fs.ErrNotExist) }

// carry moves a file to another file system: a copy, then the removal of the original.
func carry(src, dst *place, overwrite bool) error {
	var st unix.Stat_t
	if err := unix.Fstatat(src.dir, src.name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fault(err, "move", src.path)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return errs.New(errs.FailedPrecondition, "cannot move %s: it and %s are on different file systems, and only files move between them",
			guestwire.Escape(src.path), guestwire.Escape(dst.path)).WithHint("run mv or cp in the sandbox")
	}
	fd, err := unix.Openat(src.dir, src.name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return fault(err, "read", src.path)
	}
	in := os.NewFile(uintptr(fd), src.name)
	defer in.Close()
	tmp, err := newTemporary(dst)
	if err != nil {
		return err
	}
	defer tmp.discard()
	if _, err := io.Copy(tmp.file, in); err != nil {
		return fault(err, "move", dst.path)
	}
	if err := tmp.resemble(&st); err != nil {
		return fault(err, "move", dst.path)
	}
	flags := uint(unix.RENAME_NOREPLACE)
	if overwrite {
		flags = 0
	}
	if err := unix.Renameat2(dst.dir, tmp.name, dst.dir, dst.name, flags); err != nil {
		return fault(err, "move", dst.path)
	}
	tmp.name = ""
	if err := unix.Unlinkat(src.dir, src.name, 0); err != nil {
		return fault(err, "remove", src.path)
	}
	return nil
}

// resemble gives the file the owner, mode and time of another.
func (t *temporary) resemble(st *unix.Stat_t) error {
	mode := st.Mode & 0o7777
	if err := t.own(st); err != nil {
		mode &^= 0o6000
	}
	fd := int(t.file.Fd())
	if err := unix.Fchmod(fd, mode); err != nil {
		return err
	}
	return unix.UtimesNanoAt(unix.AT_FDCWD, selfName(fd), []unix.Timespec{st.Atim, st.Mtim}, 0)
}

func isEnd(err error) bool { return errors.Is(err, io.EOF) }
