package tree

import (
	"fmt"

	"golang.org/x/mod/sumdb/tlog"
)

// View is the log as one checkpoint shows it. It stays the same however the log grows.
type View struct {
	// Checkpoint is the signed note.
	Checkpoint []byte
	// Head is what it says.
	Head Head

	t      *Tree
	hashes tlog.HashReader
}

// View returns the log as it is now.
func (t *Tree) View() (*View, error) {
	c, err := t.checkpoint()
	if err != nil {
		return nil, err
	}
	return &View{
		Checkpoint: c.note, Head: Head{Origin: t.Origin(), Size: c.size, Root: c.root}, t: t,
		hashes: tlog.TileHashReader(tlog.Tree{N: c.size, Hash: c.root}, reader{t}),
	}, nil
}

// Prove proves that the leaf at index is in the log. The hashes are checked against the root before they
// are used, so that a damaged tile is told of and never passed on.
func (v *View) Prove(index int64) ([]tlog.Hash, error) {
	if index < 0 || index >= v.Head.Size {
		return nil, fmt.Errorf("prove leaf %d: the log has %d", index, v.Head.Size)
	}
	p, err := tlog.ProveRecord(v.Head.Size, index, v.hashes)
	if err != nil {
		return nil, fmt.Errorf("prove leaf %d: %w", index, err)
	}
	return p, nil
}

// ProvePrefix proves that the log began with the one of that size.
func (v *View) ProvePrefix(size int64) ([]tlog.Hash, error) {
	if size < 1 || size > v.Head.Size {
		return nil, fmt.Errorf("prove the first %d leaves: the log has %d", size, v.Head.Size)
	}
	p, err := tlog.ProveTree(v.Head.Size, size, v.hashes)
	if err != nil {
		return nil, fmt.Errorf("prove the first %d leaves: %w", size, err)
	}
	return p, nil
}

// Records calls f with each leaf from from on, in order, until f returns false.
func (v *View) Records(from int64, f func(index int64, r Record) bool) error {
	v.t.mu.Lock()
	err := v.t.writeLocked()
	v.t.mu.Unlock()
	if err != nil {
		return err
	}
	end, err := scan(v.t.leaves, from, v.Head.Size, f)
	if err != nil {
		return fmt.Errorf("read leaves: %w", err)
	}
	if end < v.Head.Size {
		return errChanged("entry %d is damaged", end)
	}
	return nil
}

// CheckPrefix reports, as an error, where proof does not show that the log of head began with that of old.
func CheckPrefix(head, old Head, proof []tlog.Hash) error {
	switch {
	case old.Size > head.Size:
		return fmt.Errorf("it covers %d entries, and the log has %d", old.Size, head.Size)
	case old.Size == 0, old.Size == head.Size && old.Root == head.Root:
		return nil
	}
	return tlog.CheckTree(proof, head.Size, head.Root, old.Size, old.Root)
}
