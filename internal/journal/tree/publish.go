package tree

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/mod/sumdb/tlog"

	"casemate.dev/internal/durable"
	"casemate.dev/internal/errs"
)

// run flushes and publishes what is appended.
func (t *Tree) run() {
	publish := time.NewTimer(t.cfg.PublishEvery)
	defer publish.Stop()
	waits := true // the timer runs
	for {
		if !waits && t.behind() {
			publish.Reset(t.cfg.PublishEvery)
			waits = true
		}
		select {
		case <-t.kick:
			if !t.pause(t.cfg.SyncEvery) {
				return
			}
			if err := t.sync(); err != nil {
				t.cfg.Log.Error("cannot flush the journal's log", "error", err)
			}
		case <-publish.C:
			waits = false
			if err := t.publish(); err != nil {
				t.cfg.Log.Error("cannot publish the journal's checkpoint", "error", err)
			}
		case <-t.stopped:
			return
		}
	}
}

// pause waits; false when the tree is closed meanwhile.
func (t *Tree) pause(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-t.stopped:
		return false
	}
}

// behind reports whether there are leaves that are not published.
func (t *Tree) behind() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.size > t.done.size && t.err == nil
}

// sync flushes the leaves to disk.
func (t *Tree) sync() error {
	t.mu.Lock()
	err := t.writeLocked()
	upTo := t.written
	clean := t.synced == upTo
	t.mu.Unlock()
	if err != nil || clean {
		return err
	}
	if err := syscall.Fdatasync(int(t.leaves.Fd())); err != nil {
		// The kernel may have dropped the pages and would call the next flush a success (fsync(2)).
		err = errs.Wrap(os.NewSyscallError("fdatasync", err), errs.Unavailable, "cannot write the journal's log: the server's disk fails")
		t.mu.Lock()
		t.err = err
		t.mu.Unlock()
		return err
	}
	t.mu.Lock()
	t.synced = max(t.synced, upTo)
	t.mu.Unlock()
	return nil
}

// Sync returns once every leaf appended before is on disk.
func (t *Tree) Sync() error { return t.sync() }

// publish puts tiles and the checkpoint into files, in that order: a checkpoint there has its tiles.
func (t *Tree) publish() error {
	t.publishing.Lock()
	defer t.publishing.Unlock()
	t.mu.Lock()
	before, now := t.done, t.size
	t.mu.Unlock()
	if now == before.size {
		return nil
	}
	head, err := t.checkpoint()
	if err != nil {
		return err
	}
	if err := t.sync(); err != nil { // never a checkpoint on disk that is ahead of its leaves
		return err
	}
	tiles, full := t.tilesOf(head.size)
	for _, one := range tiles {
		if err := t.saveTile(one); err != nil {
			return err
		}
	}
	if err := durable.Replace(filepath.Join(t.cfg.Dir, checkpointName), head.note); err != nil {
		return fmt.Errorf("write checkpoint: %w", err)
	}
	t.mu.Lock()
	t.full = append([]tile(nil), t.full[full:]...)
	t.done = head.published
	t.mu.Unlock()
	t.dropPartial(before.size, head.size)
	return nil
}

// tilesOf returns the tiles of a tree of that size which are not in files yet, and how many of t.full are among them.
// Meanwhile the tree may have grown: a tile that holds leaves beyond size is never whole among them, since those leaves
// may be lost with the machine's power, and others come in their place.
func (t *Tree) tilesOf(size int64) (tiles []tile, full int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for full < len(t.full) && t.full[full].end() <= size {
		full++
	}
	tiles = append(tiles, t.full[:full]...)
	for level := range levels {
		count := size >> (level * tileHeight)
		if width := int(count % tileWidth); width > 0 {
			n := count / tileWidth
			tiles = append(tiles, tile{level: level, n: n, hashes: t.unsavedLocked(tlog.Tile{H: tileHeight, L: level, N: n, W: width})})
		}
	}
	return tiles, full
}

// end is the size from which on a tree has a tile whole.
func (t tile) end() int64 { return (t.n + 1) << ((t.level + 1) * tileHeight) }

// saveTile writes one tile, unless it lies there.
func (t *Tree) saveTile(one tile) error {
	path := t.tilePath(one.level, one.n, len(one.hashes)/tlog.HashSize)
	if info, err := os.Stat(path); err == nil && info.Size() == int64(len(one.hashes)) {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fmt.Errorf("make tile directory: %w", err)
	}
	if err := durable.Replace(path, one.hashes); err != nil {
		return fmt.Errorf("write tile: %w", err)
	}
	return nil
}

// dropPartial removes the partial tiles of an older size, which newer ones have replaced.
func (t *Tree) dropPartial(old, now int64) {
	for level := range levels {
		was, is := old>>(level*tileHeight), now>>(level*tileHeight)
		if width := int(was % tileWidth); width > 0 && was != is {
			path := t.tilePath(level, was/tileWidth, width)
			_ = os.Remove(path) // one that stays costs a little space
			if was/tileWidth != is/tileWidth {
				_ = os.RemoveAll(filepath.Dir(path)) // with what a killed server left
			}
		}
	}
}
