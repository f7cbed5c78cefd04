package rootfs

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
)

// Freed is a layer that Collect removed, or would remove.
type Freed struct {
	Layer string
	// Bytes is what removing it gives back, as far as it can be told: blocks that it shares with others that
	// go as well are not counted.
	Bytes int64
}

// Collect removes every committed layer that is neither in keep nor a template's, nor below one that is, nor
// below a sandbox, nor is read by somebody. With dry it only tells. It waits for commits that are under way.
func (s *Store) Collect(ctx context.Context, keep map[string]bool, dry bool) ([]Freed, error) {
	s.kept.change.Lock()
	defer s.kept.change.Unlock()
	needed, err := s.needed(keep)
	if err != nil {
		return nil, err
	}
	s.kept.mu.Lock()
	all := slices.Sorted(maps.Keys(s.kept.layers))
	s.kept.mu.Unlock()
	var freed []Freed
	for _, id := range all {
		if needed[id] {
			continue
		}
		if err := ctx.Err(); err != nil {
			return freed, err
		}
		bytes, err := s.disk.frees(s.keptPath(id))
		if err != nil {
			return freed, fmt.Errorf("measure layer %s: %w", id, err)
		}
		if !dry {
			if err := s.forgetKept(id); err != nil {
				return freed, fmt.Errorf("remove layer %s: %w", id, err)
			}
		}
		freed = append(freed, Freed{Layer: id, Bytes: bytes})
	}
	if !dry && len(freed) > 0 {
		s.dropTemplates()
	}
	return freed, nil
}

// needed returns the layers that must stay.
func (s *Store) needed(keep map[string]bool) (map[string]bool, error) {
	uses, err := s.uses()
	if err != nil {
		return nil, err
	}
	keep = maps.Clone(keep)
	if keep == nil {
		keep = map[string]bool{}
	}
	for _, id := range s.storedLayers() {
		keep[id] = true
	}
	needed := map[string]bool{}
	s.kept.mu.Lock()
	defer s.kept.mu.Unlock()
	for id, l := range s.kept.layers {
		if keep[id] {
			for _, below := range l.stack() {
				needed[below] = true
			}
		}
	}
	for id := range s.kept.held {
		needed[id] = true
	}
	for _, u := range uses {
		for _, id := range u.layers {
			needed[id] = true
		}
	}
	return needed, nil
}

// forgetKept removes a layer: from its note on there is none, whenever the server is killed.
func (s *Store) forgetKept(id string) error {
	s.kept.mu.Lock()
	delete(s.kept.layers, id)
	s.kept.mu.Unlock()
	if err := os.Remove(s.keptNote(id)); err != nil && !notThere(err) {
		return err
	}
	err := s.disk.dropKept(s.keptPath(id))
	if notThere(err) {
		return nil
	}
	return err
}

// keptBases returns the templates' directories that committed layers stand on.
func (s *Store) keptBases() []string {
	s.kept.mu.Lock()
	defer s.kept.mu.Unlock()
	var all []string
	for _, l := range s.kept.layers {
		all = append(all, l.Base)
	}
	return all
}
