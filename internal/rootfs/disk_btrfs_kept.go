package rootfs

import (
	"context"
	"os"
	"path/filepath"
	"syscall"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/linux/btrfs"
)

// Committed layers are read-only snapshots. Their blocks are shared with the layers that they were made
// of, whose owners may write all of theirs anew: so what committed layers hold is counted once more, as
// pinned, beside the limits of the writable ones.

// flushFrom is how much a layer must hold in memory to be flushed ahead of its snapshot; what is less, a
// snapshot writes out in milliseconds itself.
const flushFrom = 1 << 20

// flush makes a snapshot and drops it: that writes out the one subvolume's files, where a sync would wait
// for those of all sandboxes.
func (d *btrfsDisk) flush(path string, all bool) error {
	id, err := subvolumeID(path)
	if err != nil {
		return err
	}
	if !all && d.counters.Pending(id) < flushFrom {
		return nil
	}
	_, drop, err := d.snapshot(path)
	if err != nil {
		return err
	}
	return drop()
}

func subvolumeID(path string) (uint64, error) {
	dir, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer dir.Close()
	return btrfs.ID(dir)
}

func (d *btrfsDisk) keep(_ context.Context, path, dst string, fixed func()) (int64, error) {
	id, err := subvolumeID(path)
	if err != nil {
		return 0, err
	}
	// What it alone refers to is what the snapshot pins, in addition to what others do already.
	added, err := btrfs.Exclusive(d.rootDir, id)
	if err != nil {
		return 0, err
	}
	added += d.counters.Pending(id)
	if err := d.pin(added); err != nil {
		return 0, err
	}
	how := func(src, dir *os.File, name string) error {
		return btrfs.SnapshotFixed(d.rootDir, src, dir, name, fixed)
	}
	if err := copySubvolume(path, dst, how); err != nil {
		d.unpin(added)
		return 0, err
	}
	return added, nil
}

func (d *btrfsDisk) unchanged(path, kept string) bool {
	src, err := os.Open(path)
	if err != nil {
		return false // keep tells why
	}
	defer src.Close()
	snapshot, err := os.Open(kept)
	if err != nil {
		return false
	}
	defer snapshot.Close()
	same, err := btrfs.Shows(d.counters, snapshot, src)
	if err != nil {
		d.log.Debug("cannot tell whether a layer was changed", "error", err)
	}
	return same && err == nil
}

func (d *btrfsDisk) begin(dst string) error {
	parent, err := os.Open(filepath.Dir(dst))
	if err != nil {
		return err
	}
	defer parent.Close()
	if err := btrfs.CreateSubvolume(parent, filepath.Base(dst)); err != nil {
		return err
	}
	return os.Chmod(dst, 0o700)
}

func (d *btrfsDisk) grow(_ context.Context, path, dst string) error {
	return copySubvolume(path, dst, btrfs.Clone)
}

func (d *btrfsDisk) annex(path string, bytes, limit int64) (func(), error) {
	id, err := subvolumeID(path)
	if err != nil {
		return nil, err
	}
	if err := d.pin(bytes); err != nil {
		return nil, err
	}
	if err := btrfs.LimitID(d.rootDir, id, max(limit, 1)); err != nil {
		d.unpin(bytes)
		return nil, err
	}
	return func() { d.unpin(bytes) }, nil
}

func copySubvolume(path, dst string, how func(src, dir *os.File, name string) error) error {
	src, err := os.Open(path)
	if err != nil {
		return err
	}
	defer src.Close()
	parent, err := os.Open(filepath.Dir(dst))
	if err != nil {
		return err
	}
	defer parent.Close()
	return how(src, parent, filepath.Base(dst))
}

// pinnedShare is the part of the store, one in so many, that committed layers may hold: sandboxes must
// still be able to start.
const pinnedShare = 2

// pin takes room for what a snapshot holds, or refuses it.
func (d *btrfsDisk) pin(bytes int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.pinned += bytes
	if d.overLocked() {
		d.evenLocked() // takes back what layers were given and don't use
	}
	if d.overLocked() || d.pinned > d.capacity/pinnedShare {
		d.pinned -= bytes
		return errs.New(errs.ResourceExhausted, "the store has no room for more commits").
			WithHint("delete commits that are not needed, then: casemate gc; a larger store needs a new data directory: casemate serve --store-size")
	}
	d.changed = true
	return nil
}

func (d *btrfsDisk) unpin(bytes int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.pinned = max(0, d.pinned-bytes)
}

// overLocked reports whether more was given than there is.
func (d *btrfsDisk) overLocked() bool {
	sum := d.pinned
	for _, g := range d.layers {
		sum += g.given
	}
	for _, bytes := range d.gone {
		sum += bytes
	}
	return sum > d.capacity
}

// dropKept deletes a snapshot. What that frees shows once the kernel has done it.
func (d *btrfsDisk) dropKept(path string) error {
	if err := d.remove(path); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.recount = true
	return nil
}

func (d *btrfsDisk) frees(path string) (int64, error) {
	id, err := subvolumeID(path)
	if err != nil {
		return 0, err
	}
	return btrfs.Exclusive(d.rootDir, id)
}

// recountLocked finds out anew what committed layers pin: what is used, less what belongs to one writable
// layer alone. It waits until deleted layers are gone, which would count as pinned.
func (d *btrfsDisk) recountLocked() {
	if !d.recount || len(d.gone) > 0 {
		return
	}
	var st syscall.Statfs_t
	if err := syscall.Statfs(d.dir, &st); err != nil {
		d.log.Warn("measure the store", "error", err)
		return
	}
	pinned := int64(st.Blocks-st.Bfree) * st.Bsize
	for _, g := range d.layers {
		if own, err := btrfs.Exclusive(d.rootDir, g.id); err == nil {
			pinned -= own + d.counters.Pending(g.id)
		}
	}
	if entries, err := os.ReadDir(filepath.Join(d.dir, "commits")); err == nil && len(entries) == 0 {
		pinned = 0 // what is left is the file system's own
	}
	d.pinned, d.recount = max(0, pinned), false
}
