package watch

import (
	"context"
	"fmt"
	"testing"
	"time"

	"casemate.dev/internal/isolation"
)

// newNoted returns a keeper and a box that take notes only. It counts as due already, so that no timer tends it beside the
// test, which has a clock of its own.
func newNoted() (*process, *box) {
	return &process{events: newEvents()}, &box{
		id: "sandbox", distinct: newBucket(distinctRate, distinctBurst), due: time.Now().Add(-time.Hour),
	}
}

// all takes the events that are there, and lets the keeper forget them.
func (k *process) all(t *testing.T) []isolation.CallEvent {
	t.Helper()
	var out []isolation.CallEvent
	for last := uint64(0); ; {
		ctx, cancel := context.WithCancel(t.Context())
		cancel() // what is there comes all the same
		ev, err := k.events.after(ctx, last)
		if err != nil {
			return out
		}
		out, last = append(out, ev.Events...), ev.Last
	}
}

func attempt(target string) isolation.CallEvent {
	return isolation.CallEvent{Sandbox: "sandbox", Kind: isolation.CallAttempt, Call: "mount", Target: target, Errno: "EPERM"}
}

// TestRepeatsAreCounted tells the first of equal calls at once, and later how many more there were.
func TestRepeatsAreCounted(t *testing.T) {
	k, b := newNoted()
	now := time.Now()
	for range 1000 {
		k.note(b, attempt("/mnt"), now)
	}
	if got := k.all(t); len(got) != 1 || got[0].Count != 0 {
		t.Fatalf("at once: %+v", got)
	}
	if due := b.notes.flush(now.Add(firstWindow/2), false, k.events.add); due <= 0 || due > firstWindow {
		t.Errorf("the next is due in %s", due)
	}
	b.notes.flush(now.Add(firstWindow), false, k.events.add)
	if got := k.all(t); len(got) != 1 || got[0].Count != 999 {
		t.Fatalf("later: %+v", got)
	}
	b.notes.flush(now.Add(time.Hour), false, k.events.add)
	if len(b.notes.seen) != 0 || b.notes.told[isolation.CallAttempt] != 0 {
		t.Errorf("what is over is remembered: %+v", b.notes)
	}
}

// VULNERABILITY: attempts may be recorded of every sandbox, so one program fills the journal's disk.
// ATTACK: for ten minutes, as many attempts as are answered, each unlike all before it.
// VERIFIES: few are told of one by one, and none is missing in the counts. The twin makes executions, which only who
// asks gets, and which are told of one by one.
func TestUnlikeAttemptsAreBounded(t *testing.T) {
	const long, rate = 600, attemptRate
	told := func(kind isolation.CallKind, seconds int) (events, calls int) {
		k, b := newNoted()
		now := time.Now()
		for s := range seconds {
			for i := range rate {
				e := attempt(fmt.Sprint(s, ".", i))
				e.Kind = kind
				k.note(b, e, now)
			}
			now = now.Add(time.Second)
			b.notes.flush(now, false, k.events.add)
			for _, e := range k.all(t) {
				events, calls = events+1, calls+max(e.Count, 1)
			}
		}
		b.notes.flush(now, true, k.events.add)
		for _, e := range k.all(t) {
			events, calls = events+1, calls+max(e.Count, 1)
		}
		return events, calls
	}
	events, calls := told(isolation.CallAttempt, long)
	if most := distinctBurst + long*distinctRate + long/30 + 10; events > most {
		t.Errorf("%d events, more than %d", events, most)
	}
	if calls != long*rate {
		t.Errorf("%d attempts of %d are told of", calls, long*rate)
	}
	if events, _ := told(isolation.CallExec, 60); events != 60*rate {
		t.Errorf("twin: %d executions of %d are told of", events, 60*rate)
	}
}

// TestWhatWaitsIsBounded keeps what a server that is away can take later, and says how much more there was.
func TestWhatWaitsIsBounded(t *testing.T) {
	v := newEvents()
	for range keepPerBox + 7 {
		v.add(isolation.CallEvent{Sandbox: "loud"})
	}
	v.add(isolation.CallEvent{Sandbox: "quiet"})
	k := &process{events: v}
	got := k.all(t)
	if len(got) != keepPerBox+2 {
		t.Fatalf("%d events are kept", len(got))
	}
	var gap, quiet int
	for _, e := range got {
		if e.Kind == isolation.CallGap && e.Sandbox == "loud" {
			gap = e.Count
		}
		if e.Sandbox == "quiet" {
			quiet++
		}
	}
	if gap != 7 || quiet != 1 {
		t.Errorf("%d are said to be missing, and the other sandbox has %d", gap, quiet)
	}
}
