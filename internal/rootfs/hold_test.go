package rootfs

import (
	"testing"

	"casemate.dev/internal/errs"
)

// Who reads a layer, for however long, keeps that one and what it lies on, and keeps nobody waiting.
func TestReadingHoldsOnlyWhatIsRead(t *testing.T) {
	every(t, func(t *testing.T, s *Store) {
		box, p := plan(t, s, Request{})
		first := commit(t, s, box, p)
		above, q := plan(t, s, Request{Layer: first.ID})
		second := commit(t, s, above, q)
		must(t, s.Release(t.Context(), above))
		other := commit(t, s, box, p)

		tree, err := s.Tree(second.ID)
		must(t, err)
		stays := func(layer string) bool {
			_, err := s.Layer(layer)
			return err == nil
		}
		_, err = s.Collect(t.Context(), nil, false) // waits for all that holds change
		must(t, err)
		if !stays(first.ID) || !stays(second.ID) || stays(other.ID) {
			t.Errorf("there are: below %v, read %v, another %v; want true, true, false", stays(first.ID), stays(second.ID), stays(other.ID))
		}
		if _, err := tree.Names(""); err != nil {
			t.Errorf("read what is held: %v", err)
		}
		commit(t, s, box, p)
		tree.Close()
		_, err = s.Collect(t.Context(), nil, false)
		must(t, err)
		if stays(first.ID) || stays(second.ID) || len(s.kept.held) != 0 {
			t.Errorf("what nobody reads any more stays; %d are held", len(s.kept.held))
		}
		if _, err := s.Tree(second.ID); !errs.Is(err, errs.NotFound) || len(s.kept.held) != 0 {
			t.Errorf("open a layer that is gone: %v", err)
		}
		must(t, s.Release(t.Context(), box))
	})
}
