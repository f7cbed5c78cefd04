package rootfs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"casemate.dev/internal/errs"
)

// msNoSymFollow is MS_NOSYMFOLLOW (linux/mount.h), which package syscall lacks.
const msNoSymFollow = 0x100

// layerFlags is what layers are mounted with. A setuid file, a device or a symlink that a sandbox made
// means nothing on the host; inside, the overlay's own flags count.
const layerFlags = syscall.MS_NOSUID | syscall.MS_NODEV | syscall.MS_NOEXEC | syscall.MS_NOATIME | msNoSymFollow

// tmpfsDisk gives each layer a file system of its own in memory. What is in it is lost with the
// machine, and a restarted server no longer sees the files of a sandbox that goes on.
type tmpfsDisk struct {
	copies
	dir string
}

func openTmpfs(dir string) (disk, error) {
	d := tmpfsDisk{dir: filepath.Join(dir, "layers")}
	if err := os.MkdirAll(d.dir, 0o700); err != nil {
		return nil, err
	}
	return d, d.probe()
}

// probe tells whether an overlay can keep its marks here: without user attributes, which tmpfs has since
// Linux 6.6, a directory that was removed and made again would not be empty.
func (d tmpfsDisk) probe() error {
	path := filepath.Join(d.dir, "probe")
	l, err := d.create(path)
	if err != nil {
		return err
	}
	l.close()
	err = syscall.Setxattr(d.files(path), "user.overlay.probe", []byte("y"), 0)
	if err != nil {
		err = errs.Wrap(err, errs.Unsupported, "this kernel's tmpfs can't hold layers (Linux 6.6 or newer can)")
	}
	return errors.Join(err, d.remove(path))
}

func (d tmpfsDisk) mechanism() string    { return byTmpfs }
func (d tmpfsDisk) root() string         { return d.dir }
func (d tmpfsDisk) adopt(string) error   { return nil }
func (d tmpfsDisk) moved(string, string) {}

// files is one level below the layer's directory: what has a mount on it can't be renamed.
func (d tmpfsDisk) files(path string) string { return path + "/m" }

// seen returns an error where a layer's file system is not mounted here. It was mounted by a server that has ended, in a mount
// namespace that went with it, and its sandbox alone still holds it: what lies at its place here is an empty directory, which
// must not be taken for the sandbox's files.
func (d tmpfsDisk) seen(path string) error {
	var files, above syscall.Stat_t
	if err := syscall.Stat(d.files(path), &files); err != nil {
		return err
	}
	if err := syscall.Stat(path, &above); err != nil {
		return err
	}
	if files.Dev == above.Dev {
		return errs.New(errs.FailedPrecondition, "the sandbox's files lie in memory, where the server sees them no more since it was restarted").
			WithHint("the sandbox goes on: casemate cp copies out of it; to keep files on disk, install btrfs-progs and use a new data directory")
	}
	return nil
}

func (d tmpfsDisk) create(path string) (*layer, error) {
	if err := os.MkdirAll(d.files(path), 0o700); err != nil {
		return nil, err
	}
	if err := syscall.Mount("layer", d.files(path), "tmpfs", layerFlags, "mode=0700,size=1m,nr_inodes=64"); err != nil {
		_ = os.RemoveAll(path)
		return nil, fmt.Errorf("mount tmpfs: %w", err)
	}
	dir, err := os.Open(d.files(path))
	if err != nil {
		return nil, errors.Join(err, d.remove(path))
	}
	return &layer{path: path, dir: dir}, nil
}

// inodesPerMiB is the limit on files where none is asked for: each costs kernel memory that no byte
// limit counts.
const inodesPerMiB = 64

func (d tmpfsDisk) limit(l *layer, bytes, inodes int64) (DiskLimit, error) {
	if inodes <= 0 {
		inodes = max(4096, (bytes>>20)*inodesPerMiB)
	}
	return DiskLimit{Mechanism: byTmpfs, Bytes: bytes, Inodes: inodes}, resize(d.files(l.path), bytes, inodes)
}

// resize changes the limits of a mounted tmpfs; bytes are rounded down to pages.
func resize(path string, bytes, inodes int64) error {
	options := fmt.Sprintf("size=%d,nr_inodes=%d", max(4096, bytes&^4095), inodes)
	if err := syscall.Mount("", path, "", syscall.MS_REMOUNT|layerFlags, options); err != nil {
		return fmt.Errorf("resize tmpfs: %w", err)
	}
	return nil
}

func (d tmpfsDisk) remove(path string) error {
	if err := unmount(d.files(path)); err != nil {
		return err
	}
	return os.RemoveAll(path)
}

func (d tmpfsDisk) used(path string) (int64, error) {
	if err := d.seen(path); err != nil {
		return 0, err
	}
	var st syscall.Statfs_t
	if err := syscall.Statfs(d.files(path), &st); err != nil {
		return 0, err
	}
	return int64(st.Blocks-st.Bfree) * st.Bsize, nil
}

func (d tmpfsDisk) lend(path string) (func() error, error) {
	if err := d.seen(path); err != nil {
		return nil, err
	}
	var st syscall.Statfs_t
	if err := syscall.Statfs(d.files(path), &st); err != nil {
		return nil, err
	}
	bytes, inodes := int64(st.Blocks)*st.Bsize, int64(st.Files)
	return func() error { return resize(d.files(path), bytes, inodes) }, resize(d.files(path), bytes+lendBytes, inodes+4096)
}

// keep copies the files of a live layer, or of one that was grown, which has no file system of its own.
func (d tmpfsDisk) keep(ctx context.Context, path, dst string, fixed func()) (int64, error) {
	if filepath.Dir(path) == filepath.Join(d.dir, "live") {
		if err := d.seen(path); err != nil {
			return 0, err
		}
		path = d.files(path)
	}
	return d.copies.keep(ctx, path, dst, fixed)
}

func (d tmpfsDisk) snapshot(path string) (string, func() error, error) {
	return path, func() error { return nil }, d.seen(path)
}

// close leaves mounts to the end of the server's mount namespace: a restarted store in the same one,
// as in tests, finds them again.
func (d tmpfsDisk) close() error {
	var all []error
	for _, area := range []string{"spare", "trash"} {
		entries, err := os.ReadDir(filepath.Join(d.dir, area))
		if err != nil && !notThere(err) {
			all = append(all, err)
		}
		for _, e := range entries {
			all = append(all, d.remove(filepath.Join(d.dir, area, e.Name())))
		}
	}
	return errors.Join(all...)
}
