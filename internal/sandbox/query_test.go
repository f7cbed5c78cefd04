package sandbox

import (
	"slices"
	"testing"

	"casemate.dev/internal/testenv"
)

// TestListAgreesWithGet: a state that Get has told of is one by which List finds the sandbox, however early.
func TestListAgreesWithGet(t *testing.T) {
	s := newWorld(t).serve()
	for range 10 {
		sb := s.create(alice, Spec{})
		gone := make(chan error, 1)
		go func() {
			_, err := s.Delete(t.Context(), alice, sb.ID)
			gone <- err
		}()
		for now := sb; now.State != Stopped; { // without a pause, to see the very moment
			var err error
			if now, err = s.Get(t.Context(), alice, sb.ID); err != nil {
				t.Fatal(err)
			}
		}
		list, _, err := s.List(t.Context(), alice, Query{States: []State{Stopped}})
		if err != nil || !slices.ContainsFunc(list, func(o Sandbox) bool { return o.ID == sb.ID }) {
			t.Errorf("List does not have it: %d others, %v", len(list), err)
		}
		if err := testenv.Receive(t, "the delete ends", gone); err != nil {
			t.Fatal(err)
		}
	}
}
