package sandbox

import (
	"context"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/testenv"
)

func timed(t *testing.T) (*server, *fakeClock) {
	w := newWorld(t)
	c := newFakeClock()
	w.clock = c
	return w.serve(), c
}

func (s *server) endReason(id string) EndReason {
	s.w.t.Helper()
	sb, err := s.Get(context.Background(), admin, id)
	if err != nil {
		s.w.t.Fatal(err)
	}
	return sb.EndReason
}

func (s *server) stops(id string, why EndReason) {
	s.w.t.Helper()
	testenv.Eventually(s.w.t, soon, "the end of "+id, func() bool { return s.state(id) == Stopped })
	if got := s.endReason(id); got != why {
		s.w.t.Errorf("it ended because of %s, want %s", got, why)
	}
}

func TestLifetime(t *testing.T) {
	s, c := timed(t)
	short := s.create(alice, Spec{Lifetime: time.Minute})
	paused := s.create(alice, Spec{Lifetime: time.Minute})
	none := s.create(alice, Spec{Lifetime: -1})
	if _, err := s.Pause(t.Context(), alice, paused.ID); err != nil {
		t.Fatal(err)
	}
	c.advance(time.Minute - time.Nanosecond)
	if s.state(short.ID) != Running {
		t.Error("it ended early")
	}
	c.advance(time.Nanosecond)
	s.stops(short.ID, EndLifetime)
	s.stops(paused.ID, EndLifetime)
	c.advance(100 * 365 * 24 * time.Hour)
	if s.state(none.ID) != Running || !none.ExpiresAt.IsZero() {
		t.Error("a sandbox without a lifetime ended")
	}
}

func TestLifetimeCountsFromAnUpdate(t *testing.T) {
	s, c := timed(t)
	sb := s.create(alice, Spec{Lifetime: time.Minute})
	c.advance(50 * time.Second)
	life := time.Minute
	if _, err := s.Update(t.Context(), alice, sb.ID, Update{Lifetime: &life}); err != nil {
		t.Fatal(err)
	}
	c.advance(50 * time.Second)
	if s.state(sb.ID) != Running {
		t.Error("the old timer still counted")
	}
	none := time.Duration(-1)
	if _, err := s.Update(t.Context(), alice, sb.ID, Update{Lifetime: &none}); err != nil {
		t.Fatal(err)
	}
	c.advance(time.Hour)
	if s.state(sb.ID) != Running {
		t.Error("a lifetime that was taken away still counted")
	}
	if _, err := s.Update(t.Context(), alice, sb.ID, Update{Lifetime: &life}); err != nil {
		t.Fatal(err)
	}
	c.advance(time.Minute)
	s.stops(sb.ID, EndLifetime)
}

// TestRenewalAgainstExpiry lets both happen at the same moment. After it the sandbox either lives
// and has a timer, or it is gone and the renewal was refused.
func TestRenewalAgainstExpiry(t *testing.T) {
	s, c := timed(t)
	renewed, refused := 0, 0
	for round := range 500 {
		sb := s.create(alice, Spec{Lifetime: time.Minute})
		c.advance(59 * time.Second)
		renew := func() error {
			life := time.Minute
			_, err := s.Update(context.Background(), alice, sb.ID, Update{Lifetime: &life})
			return err
		}
		// A goroutine that was just made runs late: each gets to be that one.
		var err error
		other := make(chan struct{})
		if round%2 == 0 {
			go func() { err = renew(); close(other) }()
			c.advance(time.Second)
		} else {
			go func() { c.advance(time.Second); close(other) }()
			err = renew()
		}
		testenv.Receive(t, "the other one ends", other)
		if err == nil {
			renewed++
			if st := s.state(sb.ID); st != Running {
				t.Fatalf("the renewal was acknowledged, and the sandbox is %s", st)
			}
			if c.pending() == 0 {
				t.Fatal("it lives without a timer")
			}
			c.advance(time.Minute)
		} else {
			refused++
			wantKind(t, "renewal", err, errs.FailedPrecondition)
		}
		s.stops(sb.ID, EndLifetime)
	}
	t.Logf("%d renewed, %d refused", renewed, refused)
}

func TestIdle(t *testing.T) {
	s, c := timed(t)
	ctx := t.Context()
	spec := Spec{Lifetime: -1, Idle: time.Minute}

	unused := s.create(alice, spec)
	c.advance(time.Minute)
	s.stops(unused.ID, EndIdle)

	// Each of these is activity, and starts the minute anew.
	sb := s.create(alice, spec)
	f, err := s.Files(ctx, alice, sb.ID)
	if err != nil {
		t.Fatal(err)
	}
	pr := s.start(sb.ID, ProcessSpec{Argv: []string{"sleep", "600"}, Stdin: true})
	for name, act := range map[string]func() error{
		"start":  func() error { s.start(sb.ID, ProcessSpec{Argv: []string{"true"}}); return nil },
		"input":  func() error { _, err := s.Input(ctx, alice, sb.ID, pr.ID, -1, []byte("x"), false); return err },
		"output": func() error { _, err := s.Output(ctx, alice, sb.ID, pr.ID, OutputOptions{}, &gather{}); return err },
		"signal": func() error { return s.Signal(ctx, alice, sb.ID, pr.ID, 18, false) },
		"file":   func() error { _, err := f.Stat(ctx, PathRequest{Path: "/"}); return err },
		"update": func() error { _, err := s.Update(ctx, alice, sb.ID, Update{}); return err },
		"pause and resume": func() error {
			if _, err := s.Pause(ctx, alice, sb.ID); err != nil {
				return err
			}
			c.advance(time.Hour) // a paused sandbox does not idle
			_, err := s.Resume(ctx, alice, sb.ID)
			return err
		},
	} {
		c.advance(29 * time.Second)
		if err := act(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		c.advance(30 * time.Second)
		if st := s.state(sb.ID); st != Running {
			t.Fatalf("after %s it is %s", name, st)
		}
	}
	// Looking is not, and neither is a process that runs.
	for range 4 {
		c.advance(20 * time.Second)
		if s.state(sb.ID) == Stopped {
			break
		}
		_, _ = s.GetProcess(ctx, alice, sb.ID, pr.ID)
		_, _ = s.Usage(ctx, alice, sb.ID)
		_, _ = s.Events(ctx, alice, sb.ID, 0, 0)
	}
	s.stops(sb.ID, EndIdle)
}

func TestFollowerKeepsItFromIdling(t *testing.T) {
	s, c := timed(t)
	sb := s.create(alice, Spec{Lifetime: -1, Idle: time.Minute})
	ctx, cancel := context.WithCancel(t.Context())
	started, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		_, _ = s.Run(ctx, alice, sb.ID, ProcessSpec{Argv: []string{"sleep", "600"}}, RunOptions{}, &notifying{gather: &gather{}, started: started})
	}()
	testenv.Receive(t, "the process starts", started)
	for range 5 {
		c.advance(time.Minute)
		if st := s.state(sb.ID); st != Running {
			t.Fatalf("it is %s while somebody follows", st)
		}
	}
	cancel()
	testenv.Receive(t, "the follower ends", done)
	c.advance(59 * time.Second)
	if st := s.state(sb.ID); st != Running {
		t.Fatalf("it is %s before its minute was over", st)
	}
	c.advance(time.Minute)
	s.stops(sb.ID, EndIdle)
}

func TestTimersAreGoneWithTheirSandbox(t *testing.T) {
	s, c := timed(t)
	before := c.pending()
	sb := s.create(alice, Spec{Lifetime: time.Minute, Idle: time.Second})
	if c.pending() != before+2 {
		t.Errorf("%d timers", c.pending()-before)
	}
	if _, err := s.Delete(t.Context(), alice, sb.ID); err != nil {
		t.Fatal(err)
	}
	if c.pending() != before {
		t.Errorf("%d timers left over", c.pending()-before)
	}
}
