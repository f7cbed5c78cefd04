// Package durable puts files under their names for good: whoever looks, also after a power loss, finds the
// old bytes or the new ones, and once a function here has returned without an error, the new ones.
//
// What belongs here: the order of write, flush, rename and flush of the directory (rename(2), fsync(2)).
// What is in the files, and who may write them, is their packages' affair.
package durable

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// suffix names the file that is being written beside the one that it becomes. One that a crash left behind
// is overwritten by the next write.
const suffix = ".new"

// Replace writes a file whole or not at all. It is a new file (0600) that only its owner ever could open,
// whatever stood under the name before: one of another mode, or a link. Two writers of one path must take turns.
func Replace(path string, data []byte) error {
	tmp := path + suffix
	if err := os.Remove(tmp); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return errors.Join(err, os.Remove(tmp))
	}
	return Rename(tmp, path)
}

// Rename gives a file or directory, whose contents are on disk, a name in the same file system that holds
// after a power loss as well.
func Rename(from, to string) error {
	if err := os.Rename(from, to); err != nil {
		return err
	}
	return SyncDir(filepath.Dir(to))
}

// SyncDir flushes the names in a directory: a new file is only there after a power loss if that was done.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("flush directory: %w", err)
	}
	return errors.Join(d.Sync(), d.Close())
}
