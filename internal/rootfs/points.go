package rootfs

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"casemate.dev/internal/errs"
)

// A point is what a sandbox's writable layer, its workspaces included, held at one moment: a snapshot in points/. One
// of each sandbox is kept, and named in a note beside it, so that a later server goes on from there: what is compared
// with the files afterwards is what they were, whoever was killed meanwhile.

// Point is a moment of a sandbox's files, which Between compares with a later one.
type Point struct {
	// Event is the counter of the sandbox's event that tells of this state; the caller's word.
	Event uint64    `json:"event"`
	Made  time.Time `json:"made"`
	// Name is that of the snapshot, in points/.
	Name string `json:"name"`
}

func (s *Store) pointPath(p Point) string   { return filepath.Join(s.area("points"), p.Name) }
func (s *Store) pointNote(id string) string { return filepath.Join(s.area("points"), id+".json") }

// HasPoints returns an error where points of sandboxes can't be made. Kinds: Unsupported.
func (s *Store) HasPoints() error {
	if s.disk.mechanism() == byBtrfs {
		return nil
	}
	return errs.New(errs.Unsupported, "the files of sandboxes lie where no snapshots can be made (%s)", s.disk.mechanism()).
		WithHint("install btrfs-progs and use a new data directory")
}

// MakePoint makes a point of what a sandbox's files are now. It holds nobody up: whoever writes goes on, and a
// snapshot holds all that was written before it. KeepPoint keeps it; else DropPoint must remove it.
// Kinds: NotFound (no such sandbox), ResourceExhausted (no room to keep it), Unsupported.
func (s *Store) MakePoint(ctx context.Context, id string) (Point, error) {
	if !validID(id) {
		return Point{}, errs.New(errs.InvalidArgument, "%q is no sandbox id", id)
	}
	if err := s.HasPoints(); err != nil {
		return Point{}, err
	}
	p := Point{Made: time.Now().UTC(), Name: id + "-" + rand.Text()}
	_, err := s.disk.keep(ctx, s.live(id), s.pointPath(p), func() {})
	if notThere(err) {
		return Point{}, errs.Wrap(err, errs.NotFound, "sandbox %s has no files any more", id)
	}
	if err != nil {
		return Point{}, fmt.Errorf("make a point of %s: %w", id, err)
	}
	return p, nil
}

// KeepPoint makes a point the one that is kept of a sandbox, and removes the one before. Killed on the way, the
// server leaves one of the two.
func (s *Store) KeepPoint(id string, p Point) error {
	before, err := s.PointOf(id)
	if err != nil {
		return err
	}
	data, err := json.Marshal(p)
	if err != nil {
		return err
	}
	// Not synced: after a power loss the sandbox is gone, and its points with it.
	note := s.pointNote(id)
	if err := os.WriteFile(note+".new", data, 0o600); err != nil {
		return err
	}
	if err := os.Rename(note+".new", note); err != nil {
		return err
	}
	if before.Name != "" && before.Name != p.Name {
		return s.DropPoint(before)
	}
	return nil
}

// PointOf returns the point that is kept of a sandbox; its Name is "" where there is none.
func (s *Store) PointOf(id string) (Point, error) {
	var p Point
	data, err := os.ReadFile(s.pointNote(id))
	if notThere(err) {
		return p, nil
	}
	if err != nil {
		return p, err
	}
	return p, json.Unmarshal(data, &p)
}

// DropPoint removes a point that was made.
func (s *Store) DropPoint(p Point) error { return ignoreMissing(s.disk.dropKept(s.pointPath(p))) }

// DropPoints removes what is kept of a sandbox. Idempotent.
func (s *Store) DropPoints(id string) error {
	p, err := s.PointOf(id)
	if err != nil || p.Name == "" {
		return err
	}
	return errors.Join(os.Remove(s.pointNote(id)), s.DropPoint(p))
}

// AtPoint reports whether it is certain that a sandbox's files are those of a point.
func (s *Store) AtPoint(id string, p Point) bool {
	return p.Name != "" && validID(id) && s.disk.unchanged(s.live(id), s.pointPath(p))
}

// recoverPoints removes points that nobody kept, as a killed server leaves them.
func (s *Store) recoverPoints() error {
	entries, err := os.ReadDir(s.area("points"))
	if err != nil {
		return err
	}
	kept := map[string]bool{}
	for _, e := range entries {
		id, isNote := strings.CutSuffix(e.Name(), ".json")
		if !isNote {
			continue
		}
		p, err := s.PointOf(id)
		if err == nil && p.Name != "" && isFolder(s.pointPath(p)) && isFolder(s.live(id)) {
			kept[p.Name], kept[e.Name()] = true, true
		}
	}
	for _, e := range entries {
		path := filepath.Join(s.area("points"), e.Name())
		switch {
		case kept[e.Name()]:
			continue
		case e.IsDir():
			err = s.disk.dropKept(path)
		default:
			err = os.Remove(path)
		}
		if err != nil {
			return fmt.Errorf("remove a point that nobody kept: %w", err)
		}
	}
	return nil
}
