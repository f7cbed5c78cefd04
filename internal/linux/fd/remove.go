package fd

import (
	"crypto/rand"
	"errors"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// batch is how many names are read at once: a directory may hold millions.
const batch = 1024

// RemoveAll removes name in dir with everything below it. However deep the tree is, it takes two
// descriptors: directories found in the tree are moved to its top before they are emptied. Nobody else
// may be changing the tree. What is not there is removed.
func RemoveAll(dir *os.File, name string) error {
	err := unlink(dir, name)
	if err == nil || !errors.Is(err, unix.EISDIR) {
		return err
	}
	top, err := OpenDir(dir, name)
	if err != nil {
		return err
	}
	defer top.Close()
	for {
		// One round removes or moves up what lies in the directories that are at the top now.
		names, err := readNames(top)
		if err != nil {
			return err
		}
		if len(names) == 0 {
			return removeDir(dir, name)
		}
		for _, n := range names {
			if err := flatten(top, n); err != nil {
				return err
			}
		}
	}
}

// flatten removes name, an entry of top, after moving the directories in it up to top.
func flatten(top *os.File, name string) error {
	err := unlink(top, name)
	if err == nil || !errors.Is(err, unix.EISDIR) {
		return err
	}
	d, err := OpenDir(top, name)
	if err != nil {
		return err
	}
	defer d.Close()
	for {
		names, err := readNames(d)
		if err != nil {
			return err
		}
		if len(names) == 0 {
			return removeDir(top, name)
		}
		for _, n := range names {
			err := unlink(d, n)
			if errors.Is(err, unix.EISDIR) {
				if err = removeDir(d, n); errors.Is(err, unix.ENOTEMPTY) {
					err = os.NewSyscallError("renameat", unix.Renameat(int(d.Fd()), n, int(top.Fd()), rand.Text()))
				}
			}
			if err != nil {
				return err
			}
		}
	}
}

// readNames returns some of the names that are in dir now.
func readNames(dir *os.File) ([]string, error) {
	if _, err := dir.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	names, err := dir.Readdirnames(batch)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return names, err
}

// unlink removes what is no directory; a directory gives EISDIR.
func unlink(dir *os.File, name string) error {
	err := unix.Unlinkat(int(dir.Fd()), name, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return &os.PathError{Op: "unlink", Path: name, Err: err}
	}
	return nil
}

func removeDir(dir *os.File, name string) error {
	if err := unix.Unlinkat(int(dir.Fd()), name, unix.AT_REMOVEDIR); err != nil {
		return &os.PathError{Op: "rmdir", Path: name, Err: err}
	}
	return nil
}
