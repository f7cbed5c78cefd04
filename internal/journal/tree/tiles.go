package tree

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/mod/sumdb/tlog"
)

// tilePath is where a tile lies; width is tileWidth for a full one. tlog's paths name the height, those of
// tlog-tiles don't.
func (t *Tree) tilePath(level int, n int64, width int) string {
	path := tlog.Tile{H: tileHeight, L: level, N: n, W: width}.Path()
	return filepath.Join(t.cfg.Dir, "tile", filepath.FromSlash(strings.TrimPrefix(path, fmt.Sprintf("tile/%d/", tileHeight))))
}

// readTile reads the first width hashes of a tile.
func (t *Tree) readTile(level int, n int64, width int) ([]byte, error) {
	b, err := os.ReadFile(t.tilePath(level, n, width))
	if errors.Is(err, os.ErrNotExist) && width < tileWidth {
		b, err = os.ReadFile(t.tilePath(level, n, tileWidth))
	}
	if err != nil {
		return nil, fmt.Errorf("read tile: %w", err)
	}
	want := width * tlog.HashSize
	if len(b) < want {
		return nil, fmt.Errorf("read tile %d/%d: it holds %d bytes, not %d", level, n, len(b), want)
	}
	return b[:want:want], nil
}

// reader is a tlog.TileReader over the files and what is not in files yet.
type reader struct{ t *Tree }

var _ tlog.TileReader = reader{}

// Height implements tlog.TileReader.
func (reader) Height() int { return tileHeight }

// SaveTiles implements tlog.TileReader.
func (reader) SaveTiles([]tlog.Tile, [][]byte) {}

// ReadTiles implements tlog.TileReader. The caller verifies what it gets against a root.
func (r reader) ReadTiles(tiles []tlog.Tile) ([][]byte, error) {
	out := make([][]byte, len(tiles))
	for i, want := range tiles {
		b, err := r.t.tileBytes(want)
		if err != nil {
			return nil, err
		}
		out[i] = b
	}
	return out, nil
}

func (t *Tree) tileBytes(want tlog.Tile) ([]byte, error) {
	t.mu.Lock()
	b := t.unsavedLocked(want)
	t.mu.Unlock()
	if b != nil {
		return b, nil
	}
	b, err := t.readTile(want.L, want.N, want.W)
	if err == nil {
		return b, nil
	}
	return t.tileOfLeaves(want)
}

// unsavedLocked returns a copy of a tile that is in memory, nil where it is not.
func (t *Tree) unsavedLocked(want tlog.Tile) []byte {
	size := want.W * tlog.HashSize
	if e := t.edges[want.L]; e.n == want.N && len(e.hashes) >= size {
		return append([]byte(nil), e.hashes[:size]...)
	}
	for _, f := range t.full {
		if f.level == want.L && f.n == want.N {
			return append([]byte(nil), f.hashes[:size]...)
		}
	}
	return nil
}

// tileOfLeaves makes a tile that is missing or torn of the leaves again.
func (t *Tree) tileOfLeaves(want tlog.Tile) ([]byte, error) {
	each := int64(1) << (want.L * tileHeight) // leaves below one hash
	from := want.N * tileWidth * each
	part := &Tree{}
	var out []byte
	end, err := scan(t.leaves, from, from+int64(want.W)*each, func(_ int64, r Record) bool {
		part.addLocked(r.Hash)
		part.full = nil
		if part.size == each {
			h := part.rootLocked()
			out = append(out, h[:]...)
			part = &Tree{}
		}
		return true
	})
	if err != nil {
		return nil, fmt.Errorf("read leaves: %w", err)
	}
	if len(out) != want.W*tlog.HashSize {
		return nil, errChanged("entry %d is damaged", end)
	}
	return out, nil
}
