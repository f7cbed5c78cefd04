package rootfs

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"syscall"

	"casemate.dev/internal/durable"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/linux/fd"
)

// copies keeps committed layers as plain trees on the data directory's own file system, for mechanisms
// without snapshots. Blocks are shared where that file system can.
type copies struct{}

// flush has nothing to do before a copy, which reads what is in memory. With all it writes out everything.
func (copies) flush(path string, all bool) error {
	if !all {
		return nil
	}
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	defer dir.Close()
	return fd.SyncFS(dir)
}

// rest has nothing to give back: limits reserve no room.
func (copies) rest(string) error { return nil }

func (copies) rouse(string) error { return nil }

// copyReserve is what committing leaves free at least of the data directory's file system.
const copyReserve = 1 << 30

// keep copies files, the directory that holds a layer's files.
func (copies) keep(ctx context.Context, files, dst string, fixed func()) (int64, error) {
	size, err := keptSize(ctx, files)
	if err != nil {
		return 0, err
	}
	free, err := FreeBytes(filepath.Dir(dst))
	if err != nil {
		return 0, err
	}
	if size > free-copyReserve {
		return 0, errs.New(errs.ResourceExhausted, "there is no room to keep %d MB of files: %d MB are free", size>>20, free>>20).
			WithHint("delete commits that are not needed, then: casemate gc")
	}
	tmp := dst + halfSuffix
	if err := copyKept(ctx, files, tmp, fixed); err != nil {
		return 0, errors.Join(err, copies{}.dropKept(tmp))
	}
	return size, durable.Rename(tmp, dst)
}

// FreeBytes returns how many bytes are free on the file system of dir.
func FreeBytes(dir string) (int64, error) {
	_, free, err := space(dir)
	return free, err
}

// halfSuffix marks a layer that is being copied.
const halfSuffix = ".half"

// unchanged can't be told of a copy.
func (copies) unchanged(string, string) bool { return false }

func (copies) begin(dst string) error { return os.Mkdir(dst, 0o700) }

func (copies) grow(ctx context.Context, path, dst string) error {
	return copyKept(ctx, path, dst, func() {})
}

func (copies) annex(path string, bytes, limit int64) (func(), error) {
	size, err := keptSize(context.Background(), path)
	if err == nil && size+bytes > limit {
		err = noRoom(syscall.EDQUOT)
	}
	return func() {}, err
}

func copyKept(ctx context.Context, from, dst string, copied func()) error {
	if err := os.Mkdir(dst, 0o700); err != nil {
		return err
	}
	src, err := fd.OpenRoot(from)
	if err != nil {
		return err
	}
	defer src.Close()
	to, err := fd.OpenRoot(dst)
	if err != nil {
		return err
	}
	defer to.Close()
	if err := fd.CopyTree(ctx, src, to); err != nil {
		return err
	}
	copied()
	return fd.SyncFS(to)
}

func (copies) dropKept(path string) error {
	parent, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer parent.Close()
	return fd.RemoveAll(parent, filepath.Base(path))
}

func (copies) frees(path string) (int64, error) { return keptSize(context.Background(), path) }

// keptSize sums the sizes of the regular files in a tree that nobody changes.
func keptSize(ctx context.Context, path string) (int64, error) {
	root, err := fd.OpenRoot(path)
	if err != nil {
		return 0, err
	}
	defer root.Close()
	var size int64
	err = fd.Walk(ctx, root, func(e fd.Entry) error {
		if e.Info.IsRegular() {
			size += e.Info.Allocated
		}
		return nil
	})
	return size, err
}
