package sandbox

import (
	"testing"
	"time"

	"casemate.dev/internal/journal"
)

// TestGauge sums up memory between readings, loses nothing that is less than a byte-second, and counts nothing for a clock
// that was set back.
func TestGauge(t *testing.T) {
	at := time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)
	g := newGauge(at)
	take := func(what string, bytes, ms int64) {
		t.Helper()
		if b, over := g.take(); b != bytes || over != ms {
			t.Errorf("%s: %d byte-seconds in %d ms, want %d in %d", what, b, over, bytes, ms)
		}
	}
	g.add(at.Add(2*time.Second), 100) // the first one counts for what was before
	g.add(at.Add(4*time.Second), 200)
	take("two readings", 500, 4000)
	g.add(at.Add(4*time.Second+999*time.Millisecond), 200)
	take("a part of a second", 199, 999)
	g.add(at.Add(5*time.Second), 200)
	take("and what was left of it", 1, 1)
	g.add(at, 1<<40)
	take("a clock that was set back", 0, 0)
	g.add(at.Add(time.Second), 1<<40)
	take("and goes on", 1<<40, 1000)
}

// ATTACK: a reading that was made before a sandbox's end comes late. Nothing follows the end. Twin: while it runs the same
// reading is recorded.
func TestLateReadingsFollowNoEnd(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{})
	b := s.find(sb.ID)
	last := func() journal.Type {
		all := s.history(sb.ID)
		return all[len(all)-1]
	}
	late := Usage{CPU: time.Second, MemoryBytes: 1 << 20}
	s.metered(b, late, nil, meterLeave)
	if got := last(); got != journal.UsageMetered {
		t.Fatalf("while it runs the last event is %s", got)
	}
	if _, err := s.Delete(t.Context(), alice, sb.ID); err != nil {
		t.Fatal(err)
	}
	s.metered(b, late, nil, meterLeave)
	if got := last(); got != journal.SandboxEnded {
		t.Errorf("the last event is %s", got)
	}
}
