package tree

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"casemate.dev/internal/errs"
)

// errChanged makes the error of a log whose files are not what was signed.
func errChanged(format string, args ...any) error {
	return errs.New(errs.FailedPrecondition, "the journal's log was changed: "+format, args...).
		WithHint("restore the directory \"journal\" of the data directory from a backup; moved away, a new log is begun, which no checkpoint that a client holds will fit")
}

// recover brings the tree to what the files hold.
func (t *Tree) recover() error {
	info, err := t.leaves.Stat()
	if err != nil {
		return fmt.Errorf("look at leaves: %w", err)
	}
	count := info.Size() / recordSize
	old, err := t.readCheckpoint()
	if err != nil {
		return err
	}
	if count < old.size {
		return errChanged("it holds %d entries, and the checkpoint beside it was made of %d", count, old.size)
	}
	if err := t.load(old); err != nil {
		return err
	}
	// Behind the checkpoint, a record that is damaged was being written when the machine stopped.
	end, err := scan(t.leaves, t.size, count, func(_ int64, r Record) bool {
		t.addLocked(r.Hash)
		return true
	})
	if err != nil {
		return fmt.Errorf("read leaves: %w", err)
	}
	if t.opened.Torn = info.Size() - end*recordSize; t.opened.Torn > 0 {
		if err := t.leaves.Truncate(end * recordSize); err != nil {
			return fmt.Errorf("cut off a torn leaf: %w", err)
		}
	}
	t.written, t.synced, t.opened.Size = t.size, old.size, t.size
	if !t.opened.Rebuilt { // else its tiles are to be published again
		t.done = old
	}
	return nil
}

// readCheckpoint reads and verifies the published checkpoint. One by another key is read, and told of.
func (t *Tree) readCheckpoint() (published, error) {
	text, err := os.ReadFile(filepath.Join(t.cfg.Dir, checkpointName))
	if errors.Is(err, os.ErrNotExist) {
		return published{}, nil
	}
	if err != nil {
		return published{}, fmt.Errorf("read checkpoint: %w", err)
	}
	head, err := ParseCheckpoint(text, t.cfg.Verifier)
	var unverified *note.UnverifiedNoteError
	if errors.As(err, &unverified) {
		t.opened.OtherKey = true
		head, err = parseText(unverified.Note.Text)
	}
	if err != nil {
		return published{}, errChanged("its checkpoint is not valid: %v", err)
	}
	return published{size: head.Size, root: head.Root}, nil
}

// load takes the tree up at a published checkpoint: from the tiles, or where they do not fit from the leaves.
func (t *Tree) load(p published) error {
	if p.size == 0 {
		return nil
	}
	if t.loadTiles(p.size) && t.rootLocked() == p.root {
		return nil
	}
	t.opened.Rebuilt = true
	t.size, t.stack, t.edges, t.full = 0, nil, [levels]edge{}, nil
	saving := os.RemoveAll(filepath.Join(t.cfg.Dir, "tile"))
	end, err := scan(t.leaves, 0, p.size, func(_ int64, r Record) bool {
		t.addLocked(r.Hash)
		for len(t.full) > 0 {
			saving = errors.Join(saving, t.saveTile(t.full[0]))
			t.full = t.full[1:]
		}
		return saving == nil
	})
	if err = errors.Join(err, saving); err != nil {
		return fmt.Errorf("make tiles of leaves: %w", err)
	}
	if end < p.size {
		return errChanged("entry %d is damaged", end)
	}
	if t.rootLocked() != p.root {
		return errChanged("its first %d entries are not those that were signed", p.size)
	}
	return nil
}

// loadTiles reads the newest tiles of a tree of that size. It reports whether they were there.
func (t *Tree) loadTiles(size int64) bool {
	for level := levels - 1; level >= 0; level-- {
		count := size >> (level * tileHeight)
		e := &t.edges[level]
		e.n = count / tileWidth
		width := int(count % tileWidth)
		if width > 0 {
			var err error
			if e.hashes, err = t.readTile(level, e.n, width); err != nil {
				return false
			}
		}
		// The perfect subtrees that lie in this tile, the biggest first.
		for rest := e.hashes; len(rest) > 0; {
			n := tlog.HashSize << floorLog2(len(rest)/tlog.HashSize)
			t.stack = append(t.stack, perfect(rest[:n]))
			rest = rest[n:]
		}
	}
	t.size = size
	return true
}

func floorLog2(n int) int {
	k := 0
	for n > 1 {
		n >>= 1
		k++
	}
	return k
}

// perfect is the root over a power of two of hashes.
func perfect(hashes []byte) tlog.Hash {
	if len(hashes) == tlog.HashSize {
		return tlog.Hash(hashes)
	}
	half := len(hashes) / 2
	return tlog.NodeHash(perfect(hashes[:half]), perfect(hashes[half:]))
}
