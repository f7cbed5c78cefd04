package sandbox

import (
	"context"
	"sync"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation/fake"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/testenv"
)

func TestOneKeyMakesOneSandbox(t *testing.T) {
	s := newWorld(t).serve()
	ctx := t.Context()
	s.backend.SetFaults(fake.Faults{StartDelay: 20 * time.Millisecond})
	create := func(p Principal, key string, spec Spec) (Sandbox, error) {
		return s.Create(ctx, p, spec, CreateOptions{IdempotencyKey: key})
	}
	spec := Spec{Labels: map[string]string{"a": "1", "b": "2"}}
	var mu sync.Mutex
	ids := map[string]bool{}
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			sb, err := create(alice, "k", spec)
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			ids[sb.ID] = true
		})
	}
	wg.Wait()
	if len(ids) != 1 || s.backend.Starts() != 1 {
		t.Errorf("%d sandboxes, %d starts", len(ids), s.backend.Starts())
	}
	_, err := create(alice, "k", Spec{Labels: map[string]string{"a": "2"}})
	wantKind(t, "another body", err, errs.Conflict)
	if sb, err := create(bob, "k", spec); err != nil || ids[sb.ID] {
		t.Errorf("another principal's: %s, %v", sb.ID, err)
	}
	// The same sandbox, as it is by now.
	for id := range ids {
		if _, err := s.Delete(ctx, alice, id); err != nil {
			t.Fatal(err)
		}
		if sb, err := create(alice, "k", spec); err != nil || sb.ID != id || sb.State != Stopped {
			t.Errorf("repeated after delete: %+v, %v", sb, err)
		}
	}
	_, err = create(alice, "bad\nkey", spec)
	wantKind(t, "a bad key", err, errs.InvalidArgument)
}

func TestKeyOfAFailedCreateWorksAgain(t *testing.T) {
	s := newWorld(t).serve()
	s.backend.SetFaults(fake.Faults{FailAt: fake.StepClone})
	create := func() (Sandbox, error) {
		return s.Create(t.Context(), alice, Spec{}, CreateOptions{IdempotencyKey: "k"})
	}
	if _, err := create(); err == nil {
		t.Fatal("it did not fail")
	}
	s.backend.SetFaults(fake.Faults{})
	sb, err := create()
	if err != nil || sb.State != Running {
		t.Fatalf("%+v, %v", sb, err)
	}
	if again, err := create(); err != nil || again.ID != sb.ID {
		t.Errorf("%s, %v, want %s", again.ID, err, sb.ID)
	}
}

// TestCallerThatDiesAndAsksAgain: E12 of the battery.
func TestCallerThatDiesAndAsksAgain(t *testing.T) {
	s := newWorld(t).serve()
	release := make(chan struct{})
	s.backend.SetFaults(fake.Faults{StartHeld: release})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := s.Create(ctx, alice, Spec{}, CreateOptions{IdempotencyKey: "k"})
		done <- err
	}()
	testenv.Eventually(t, soon, "the start", func() bool { return s.backend.Starts() == 1 })
	cancel()
	wantKind(t, "the first call", testenv.Receive(t, "the first call ends", done), errs.Canceled)
	close(release)
	sb, err := s.Create(t.Context(), alice, Spec{}, CreateOptions{IdempotencyKey: "k"})
	if err != nil || sb.State != Running || s.backend.Starts() != 1 {
		t.Errorf("%+v, %v, %d starts", sb, err, s.backend.Starts())
	}
}

func TestKeysSurviveARestartAndEndAfterADay(t *testing.T) {
	w := newWorld(t)
	c := newFakeClock()
	w.clock = c
	s := w.serve()
	create := func() Sandbox {
		t.Helper()
		sb, err := s.Create(t.Context(), alice, Spec{Lifetime: -1}, CreateOptions{IdempotencyKey: "k"})
		if err != nil {
			t.Fatal(err)
		}
		return sb
	}
	first := create()
	s = s.crash()
	if again := create(); again.ID != first.ID {
		t.Errorf("%s after a crash, want %s", again.ID, first.ID)
	}
	c.advance(24*time.Hour - time.Second)
	if again := create(); again.ID != first.ID {
		t.Errorf("%s within the day, want %s", again.ID, first.ID)
	}
	c.advance(time.Second)
	if again := create(); again.ID == first.ID {
		t.Error("the key is kept for more than a day")
	}
	c.advance(25 * time.Hour)
	if _, ok, err := s.db.GetAnswered(t.Context(), alice.ID, "sandbox", "k"); ok || err != nil {
		t.Errorf("an old key is still stored: %v, %v", ok, err)
	}
}

func TestOneKeyStartsOneProcess(t *testing.T) {
	s := newWorld(t).serve()
	ctx := t.Context()
	sb := s.create(alice, Spec{})
	var wg sync.WaitGroup
	var mu sync.Mutex
	ids := map[string]bool{}
	for i := range 30 {
		wg.Go(func() {
			var id string
			var err error
			spec := ProcessSpec{Argv: []string{"echo", "once"}}
			if i%2 == 0 {
				var p Process
				p, err = s.StartProcess(ctx, alice, sb.ID, spec, "start")
				id = p.ID
			} else {
				spec.Timeout = time.Minute
				var r Result
				r, err = s.Execute(ctx, alice, sb.ID, spec, RunOptions{IdempotencyKey: "execute"})
				id = r.Process.ID
				if string(r.Stdout) != "once\n" || r.Process.End != EndExited {
					t.Errorf("%+v %q", r.Process, r.Stdout)
				}
			}
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			ids[id] = true
		})
	}
	wg.Wait()
	if len(ids) != 2 {
		t.Errorf("%d processes", len(ids))
	}
	_, err := s.StartProcess(ctx, alice, sb.ID, ProcessSpec{Argv: []string{"echo", "twice"}}, "start")
	wantKind(t, "another body", err, errs.Conflict)
	_, err = s.StartProcess(ctx, alice, sb.ID, ProcessSpec{Argv: []string{"no-such-program"}}, "fails")
	wantKind(t, "a start that fails", err, errs.NotFound)
	if p, err := s.StartProcess(ctx, alice, sb.ID, ProcessSpec{Argv: []string{"true"}}, "fails"); err != nil || p.ID == "" {
		t.Errorf("the key of a start that failed: %v", err)
	}
	started := 0
	for _, typ := range s.history(sb.ID) {
		if typ == journal.ProcessStarted {
			started++
		}
	}
	if started != 3 {
		t.Errorf("%d processes are recorded", started)
	}
	r, err := s.Execute(ctx, alice, sb.ID, ProcessSpec{Argv: []string{"cat"}}, RunOptions{IdempotencyKey: "in", Input: []byte("fed\n")})
	if err != nil || string(r.Stdout) != "fed\n" {
		t.Errorf("input with a key: %q, %v", r.Stdout, err)
	}
	_, err = s.Execute(ctx, alice, sb.ID, ProcessSpec{Argv: []string{"cat"}}, RunOptions{IdempotencyKey: "in", Input: []byte("other\n")})
	wantKind(t, "other input", err, errs.Conflict)
}
