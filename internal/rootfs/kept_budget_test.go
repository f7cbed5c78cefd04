package rootfs

import (
	"testing"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/id"
	"casemate.dev/internal/testenv"
)

// A sandbox's limit counts its own layer, not what it was started from.
func TestLimitCountsTheOwnLayer(t *testing.T) {
	every(t, func(t *testing.T, s *Store) {
		box, p := plan(t, s, Request{DiskBytes: 32 << 20})
		must(t, write(t, p.Upper+"/big", 24<<20))
		l := commit(t, s, box, p)
		for range 2 {
			_, q := plan(t, s, Request{Layer: l.ID, DiskBytes: 32 << 20})
			if err := write(t, q.Upper+"/big2", 24<<20); err != nil {
				t.Errorf("24 MB of 32, on a commit of 24: %v", err)
			}
			if err := write(t, q.Upper+"/more", 24<<20); !full(err) {
				t.Errorf("48 MB of 32: %v", err)
			}
		}
		if err := write(t, p.Upper+"/more", 24<<20); !full(err) { // nor does the commit give its sandbox more
			t.Errorf("48 MB of 32, after a commit: %v", err)
		}
	})
}

// room returns what was given and what is pinned, which together never exceed the store.
func (d *btrfsDisk) room(t *testing.T) (given, pinned int64) {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, g := range d.layers {
		given += g.given
	}
	if given+d.pinned > d.capacity {
		t.Errorf("%d MB given and %d MB pinned of %d", given>>20, d.pinned>>20, d.capacity>>20)
	}
	return given, d.pinned
}

// Commits hold at most half of the store, are refused beyond that with their kind, and make room again when
// they are removed. What sandboxes were given stays backed all the while.
func TestCommitsAreBounded(t *testing.T) {
	testenv.NoLeaks(t)
	s := open(t, Config{Mechanism: byBtrfs})
	d := s.disk.(*btrfsDisk)
	box, p := plan(t, s, Request{DiskBytes: 128 << 20})
	var err error
	n := 0
	for ; err == nil && n < 50; n++ {
		must(t, write(t, p.Upper+"/f", 40<<20)) // anew each time, so that each commit pins as much more
		d.room(t)
		_, err = s.Commit(t.Context(), box, p, still, still)
	}
	if !errs.Is(err, errs.ResourceExhausted) || n < 4 {
		t.Fatalf("commit %d: %v", n, err)
	}
	_, before := d.room(t)
	// A sandbox still starts, and is given room.
	other := id.Sandbox()
	if _, err := s.Plan(t.Context(), Request{ID: other, Template: "host", DiskBytes: 64 << 20}); err != nil {
		t.Errorf("beside many commits: %v", err)
	}
	if _, err := s.Collect(t.Context(), nil, false); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, limit, "the room of removed commits is back", func() bool {
		_, now := d.room(t)
		return now < before/4
	})
	commit(t, s, box, p)
}

// A layer at rest keeps what it holds and no more, and gets its room back.
func TestRest(t *testing.T) {
	every(t, func(t *testing.T, s *Store) {
		box, p := plan(t, s, Request{DiskBytes: 64 << 20})
		must(t, write(t, p.Upper+"/f", 8<<20), s.Flush(box, true))
		must(t, s.Rest(box), s.Rest(box))
		if d, ok := s.disk.(*btrfsDisk); ok {
			if given, _ := d.room(t); given > 12<<20 {
				t.Errorf("a layer of 8 MB at rest holds %d MB", given>>20)
			}
		}
		must(t, s.Rouse(box), s.Rouse(box), write(t, p.Upper+"/g", 40<<20))
		if err := write(t, p.Upper+"/h", 40<<20); !full(err) {
			t.Errorf("88 MB of 64: %v", err)
		}
	})
}
