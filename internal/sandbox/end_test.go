package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation/fake"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/testenv"
)

func TestCreateThatFailsLeavesNothing(t *testing.T) {
	s := newWorld(t).serve()
	ctx := t.Context()
	for i, step := range []fake.Step{fake.StepRange, fake.StepRoot, fake.StepClone, fake.StepGuest} {
		s.backend.SetFaults(fake.Faults{FailAt: step})
		id := fmt.Sprintf("failing%013d", i)
		_, err := s.Create(ctx, alice, Spec{}, CreateOptions{ID: id})
		wantKind(t, string(step), err, errs.Internal)
		sb, err := s.Get(ctx, alice, id)
		if err != nil || sb.State != Stopped || sb.EndReason != EndStartFailed || !strings.Contains(sb.EndDetail, string(step)) {
			t.Errorf("%s: %+v, %v", step, sb, err)
		}
		if got := s.history(id); !slices.Equal(got, []journal.Type{journal.SandboxCreated, journal.SandboxEnded}) {
			t.Errorf("%s: history %v", step, got)
		}
	}
	s.backend.SetFaults(fake.Faults{})
	s.w.roots.fail = errs.New(errs.ResourceExhausted, "the disk is full")
	_, err := s.Create(ctx, alice, Spec{}, CreateOptions{})
	wantKind(t, "no room", err, errs.ResourceExhausted)
	s.w.roots.fail = nil
	if left := s.w.host.Instances(); len(left) != 0 || len(s.w.roots.writable()) != 0 || len(s.boxes()) != 0 {
		t.Errorf("left over: %v, %v, %d boxes", left, s.w.roots.writable(), len(s.boxes()))
	}
	s.create(alice, Spec{}) // and it works again
}

func TestCreateGoesWithItsCaller(t *testing.T) {
	s := newWorld(t).serve()
	s.backend.SetFaults(fake.Faults{StartDelay: time.Minute})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := s.Create(ctx, alice, Spec{}, CreateOptions{ID: "goesaway000000000000"})
		done <- err
	}()
	testenv.Eventually(t, soon, "the start", func() bool { return s.backend.Starts() == 1 })
	cancel()
	wantKind(t, "create", testenv.Receive(t, "the create ends", done), errs.Canceled)
	if s.state("goesaway000000000000") != Stopped || len(s.w.roots.writable()) != 0 {
		t.Error("it was not taken back")
	}
}

func TestDeleteWhileStarting(t *testing.T) {
	s := newWorld(t).serve()
	s.backend.SetFaults(fake.Faults{StartDelay: time.Minute})
	const id = "deletedwhilestarting"
	done := make(chan error, 1)
	go func() {
		_, err := s.Create(context.Background(), alice, Spec{}, CreateOptions{ID: id})
		done <- err
	}()
	testenv.Eventually(t, soon, "the start", func() bool { return s.backend.Starts() == 1 })
	sb, err := s.Delete(t.Context(), alice, id)
	if err != nil || sb.State != Stopped || sb.EndReason != EndDeleted {
		t.Errorf("delete: %+v, %v", sb, err)
	}
	wantKind(t, "create", testenv.Receive(t, "the create ends", done), errs.FailedPrecondition)
	s.history(id)
}

func TestStartTimeoutNamesItself(t *testing.T) {
	w := newWorld(t)
	w.shape = func(c *Config) { c.Defaults.Start = 20 * time.Millisecond }
	s := w.serve()
	s.backend.SetFaults(fake.Faults{StartDelay: time.Minute})
	_, err := s.Create(t.Context(), alice, Spec{}, CreateOptions{})
	wantKind(t, "create", err, errs.DeadlineExceeded)
	if text, _ := errs.PublicText(err); !strings.Contains(text, "start timeout") {
		t.Errorf("text %q", text)
	}
}

func TestDestroyIsTriedAgain(t *testing.T) {
	w := newWorld(t)
	c := newFakeClock()
	w.clock = c
	w.shape = func(c *Config) { c.Defaults.Stop = 50 * time.Millisecond }
	s := w.serve()
	sb := s.create(alice, Spec{})
	s.backend.SetFaults(fake.Faults{FailDestroy: errors.New("device or resource busy")})
	_, err := s.Delete(t.Context(), alice, sb.ID)
	wantKind(t, "delete", err, errs.DeadlineExceeded)
	if st := s.state(sb.ID); st != Stopping {
		t.Errorf("a sandbox that could not be destroyed is %s", st)
	}
	s.backend.SetFaults(fake.Faults{})
	testenv.Eventually(t, soon, "its end", func() bool { c.advance(time.Minute); return s.state(sb.ID) == Stopped })
	s.history(sb.ID)
}

func TestGuestThatDiesEndsItsSandbox(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{})
	pr := s.start(sb.ID, ProcessSpec{Argv: []string{"sleep", "60"}})
	s.w.host.Kill(sb.ID)
	testenv.Eventually(t, soon, "its end", func() bool { return s.state(sb.ID) == Stopped })
	got, err := s.Get(t.Context(), alice, sb.ID)
	if err != nil || got.EndReason != EndGuestDied || got.EndDetail != "guest_killed: signal 9" {
		t.Errorf("%+v, %v", got, err)
	}
	if p, err := s.GetProcess(t.Context(), alice, sb.ID, pr.ID); err != nil || p.End != EndSandboxStopped {
		t.Errorf("its process: %+v, %v", p, err)
	}
	s.history(sb.ID)
	_, err = s.StartProcess(t.Context(), alice, sb.ID, ProcessSpec{Argv: []string{"true"}}, "")
	wantKind(t, "a start in a stopped sandbox", err, errs.FailedPrecondition)
	var te *TransitionError
	if !errors.As(err, &te) || te.From != Stopped {
		t.Errorf("no transition error: %v", err)
	}
}

// TestHammer lets many callers do everything at once, and looks whether anything is left.
func TestHammer(t *testing.T) {
	w := newWorld(t)
	w.shape = func(c *Config) { c.Defaults.Execution = 100 * time.Millisecond } // some are paused meanwhile
	s := w.serve()
	ctx := t.Context()
	var wg sync.WaitGroup
	ids := make(chan string, 1000)
	for c := range 8 {
		wg.Go(func() {
			p := []Principal{alice, bob}[c%2]
			for range 6 {
				sb, err := s.Create(ctx, p, Spec{}, CreateOptions{})
				if err != nil {
					t.Error(err)
					return
				}
				ids <- sb.ID
				var inner sync.WaitGroup
				for _, act := range []func(){
					func() { _, _ = s.Execute(ctx, p, sb.ID, ProcessSpec{Argv: []string{"echo", "x"}}, RunOptions{}) },
					func() { _, _ = s.StartProcess(ctx, p, sb.ID, ProcessSpec{Argv: []string{"sleep", "60"}}, "") },
					func() { _, _ = s.StartProcess(ctx, p, sb.ID, ProcessSpec{ID: "one", Argv: []string{"true"}}, "") },
					func() { _, _ = s.StartProcess(ctx, p, sb.ID, ProcessSpec{ID: "one", Argv: []string{"true"}}, "") },
					func() { _, _ = s.Pause(ctx, p, sb.ID) },
					func() { _, _ = s.Resume(ctx, p, sb.ID) },
					func() { d := time.Minute; _, _ = s.Update(ctx, p, sb.ID, Update{Idle: &d, Limits: &Limits{Pids: 99}}) },
					func() { _, _, _ = s.List(ctx, p, Query{}) },
					func() { s.w.host.Kill(sb.ID) },
				}[:c+2] {
					inner.Go(act)
				}
				if c%3 == 0 {
					inner.Wait()
				}
				if _, err := s.Delete(ctx, p, sb.ID); err != nil {
					t.Error(err)
				}
				inner.Wait()
			}
		})
	}
	wg.Wait()
	close(ids)
	for id := range ids {
		if st := s.state(id); st != Stopped {
			t.Errorf("sandbox %s is %s", id, st)
		}
		s.history(id)
	}
	if left := s.w.host.Instances(); len(left) != 0 || len(s.w.roots.writable()) != 0 || len(s.boxes()) != 0 {
		t.Errorf("left over: %v, %v, %d boxes", left, s.w.roots.writable(), len(s.boxes()))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.owned) != 0 {
		t.Errorf("counts left over: %v", s.owned)
	}
}
