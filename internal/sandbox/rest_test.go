package sandbox

import (
	"context"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/testenv"
)

func (s *server) becomes(id string, want State) {
	s.w.t.Helper()
	testenv.Eventually(s.w.t, soon, id+" "+string(want), func() bool { return s.state(id) == want })
}

// TestPauseAtEnd: the end of the lifetime pauses; paused, no time runs; a resume begins it anew.
func TestPauseAtEnd(t *testing.T) {
	s, c := timed(t)
	sb := s.create(alice, Spec{Lifetime: time.Minute, PauseAtEnd: true})
	for range 2 {
		c.advance(time.Minute)
		s.becomes(sb.ID, Paused)
		c.advance(time.Hour)
		if s.state(sb.ID) != Paused {
			t.Fatal("a paused sandbox ran out of time")
		}
		again, err := s.Resume(t.Context(), alice, sb.ID)
		if err != nil {
			t.Fatal(err)
		}
		if left := again.ExpiresAt.Sub(again.LastActive); left != time.Minute {
			t.Errorf("a resume leaves %s", left)
		}
	}
}

// TestPauseAtEndFailsClosed: a sandbox that can't be paused at the end of its lifetime ends.
func TestPauseAtEndFailsClosed(t *testing.T) {
	w, c := newWorld(t), newFakeClock()
	w.clock = c
	w.shape = func(cfg *Config) { cfg.Backends["fake"] = stubbornBackend{cfg.Backends["fake"]} }
	s := w.serve()
	sb := s.create(alice, Spec{Lifetime: time.Minute, PauseAtEnd: true})
	c.advance(time.Minute)
	s.stops(sb.ID, EndLifetime)
}

func TestRestPaused(t *testing.T) {
	s, c := timed(t)
	sb := s.create(alice, Spec{Lifetime: time.Minute, RestPaused: true})
	if _, err := s.Pause(t.Context(), alice, sb.ID); err != nil {
		t.Fatal(err)
	}
	c.advance(time.Hour)
	life := 2 * time.Minute
	if u, err := s.Update(t.Context(), alice, sb.ID, Update{Lifetime: &life}); err != nil || !u.ExpiresAt.IsZero() {
		t.Fatalf("a paused sandbox ends at %v, %v", u.ExpiresAt, err)
	}
	if _, err := s.Resume(t.Context(), alice, sb.ID); err != nil {
		t.Fatal(err)
	}
	c.advance(2*time.Minute - 1)
	if s.state(sb.ID) != Running {
		t.Error("the new lifetime did not count")
	}
	c.advance(1)
	s.stops(sb.ID, EndLifetime)
}

func TestExtendNeverShortens(t *testing.T) {
	s, _ := timed(t)
	sb := s.create(alice, Spec{Lifetime: time.Minute})
	endless := s.create(alice, Spec{Lifetime: -1})
	extend := func(id string, d time.Duration) time.Time {
		t.Helper()
		got, err := s.Update(t.Context(), alice, id, Update{Lifetime: &d, Extend: true})
		if err != nil {
			t.Fatal(err)
		}
		return got.ExpiresAt
	}
	if got := extend(sb.ID, time.Second); !got.Equal(sb.ExpiresAt) {
		t.Errorf("shortened from %v to %v", sb.ExpiresAt, got)
	}
	if got := extend(sb.ID, time.Hour); !got.Equal(sb.StartedAt.Add(time.Hour)) {
		t.Errorf("extended to %v", got)
	}
	if got := extend(endless.ID, time.Hour); !got.IsZero() {
		t.Errorf("an endless one ends at %v", got)
	}
	if got := extend(sb.ID, -1); !got.IsZero() {
		t.Errorf("without an end: %v", got)
	}
}

// TestExtraIsKept: what an interface keeps with a sandbox survives a restart, and is a copy.
func TestExtraIsKept(t *testing.T) {
	w := newWorld(t)
	s := w.serve()
	sb := s.create(alice, Spec{Extra: map[string]string{"a": "1"}})
	sb.Spec.Extra["a"] = "changed"
	s = s.crash()
	got, err := s.Get(t.Context(), alice, sb.ID)
	if err != nil || got.Spec.Extra["a"] != "1" {
		t.Fatalf("%v, %v", got.Spec.Extra, err)
	}
	more := map[string]string{"b": "2"}
	if got, err = s.Update(t.Context(), alice, sb.ID, Update{Extra: &more}); err != nil || len(got.Spec.Extra) != 1 || got.Spec.Extra["b"] != "2" {
		t.Fatalf("%v, %v", got.Spec.Extra, err)
	}
	big := map[string]string{"b": string(make([]byte, maxExtra))}
	if _, err = s.Update(t.Context(), alice, sb.ID, Update{Extra: &big}); !errs.Is(err, errs.InvalidArgument) {
		t.Errorf("too much: %v", err)
	}
}

func TestWhileRunning(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{})
	open := func() context.Context {
		t.Helper()
		ctx, stop, err := s.WhileRunning(t.Context(), alice, sb.ID)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(stop)
		return ctx
	}
	if _, _, err := s.WhileRunning(t.Context(), bob, sb.ID); !errs.Is(err, errs.NotFound) {
		t.Errorf("another's: %v", err)
	}
	first := open()
	if _, err := s.Pause(t.Context(), alice, sb.ID); err != nil {
		t.Fatal(err)
	}
	testenv.Receive(t, "a pause ends what follows the sandbox", first.Done())
	if !errs.Is(context.Cause(first), errs.FailedPrecondition) {
		t.Errorf("cause %v", context.Cause(first))
	}
	if _, _, err := s.WhileRunning(t.Context(), alice, sb.ID); !errs.Is(err, errs.FailedPrecondition) {
		t.Errorf("paused: %v", err)
	}
	if got := s.Alive(); len(got) != 1 || got[0] != sb.ID {
		t.Errorf("alive: %v", got)
	}
	if _, err := s.Resume(t.Context(), alice, sb.ID); err != nil {
		t.Fatal(err)
	}
	second := open()
	if second.Err() != nil {
		t.Error("the context of a resumed sandbox is over")
	}
	if _, err := s.Delete(t.Context(), alice, sb.ID); err != nil {
		t.Fatal(err)
	}
	testenv.Receive(t, "a delete ends what follows the sandbox", second.Done())
	if len(s.Alive()) != 0 {
		t.Errorf("alive: %v", s.Alive())
	}
}

// stubbornBackend makes stubborn instances.
type stubbornBackend struct{ isolation.Backend }

// Start implements isolation.Backend.
func (b stubbornBackend) Start(ctx context.Context, spec isolation.Spec) (isolation.Instance, error) {
	inst, err := b.Backend.Start(ctx, spec)
	return stubborn{inst}, err
}

// stubborn is an instance that can't be frozen.
type stubborn struct{ isolation.Instance }

// Freeze implements isolation.Instance.
func (stubborn) Freeze(context.Context) error { return errs.New(errs.Internal, "no") }
