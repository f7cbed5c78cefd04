package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"testing"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/testenv"
)

// together runs each of the calls over and over, side by side, until stop is closed, and returns a function that waits
// for all of them. A call that the sandbox's state forbids is no fault.
func together(t *testing.T, stop <-chan struct{}, calls map[string]func(context.Context) error) (wait func()) {
	t.Helper()
	var all sync.WaitGroup
	for name, call := range calls {
		all.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				err := call(t.Context())
				if kind := errs.KindOf(err); err != nil && kind != errs.FailedPrecondition && kind != errs.Unavailable {
					t.Errorf("%s: %v (%v)", name, err, kind)
					return
				}
			}
		})
	}
	return all.Wait
}

// runs checks that each run of code that began is recorded to have ended, once and afterwards.
func (s *server) runs(id string) {
	s.w.t.Helper()
	events, err := s.Events(context.Background(), admin, id, 0, 100_000)
	if err != nil {
		s.w.t.Fatal(err)
	}
	open := map[string]bool{}
	for _, e := range events {
		var f runEndFacts
		if e.Type != journal.RunStarted && e.Type != journal.RunEnded {
			continue
		}
		if err := json.Unmarshal(e.Facts[journal.Server], &f); err != nil {
			s.w.t.Fatal(err)
		}
		if began := e.Type == journal.RunStarted; open[f.Run] == began {
			s.w.t.Errorf("%s of run %s, whose start counts as recorded: %v", e.Type, f.Run, open[f.Run])
		}
		open[f.Run] = e.Type == journal.RunStarted
	}
	for run, still := range open {
		if still {
			s.w.t.Errorf("no end of run %s", run)
		}
	}
}

// TestManyHands does everything to one sandbox at once, its end as well. What it finds beside what it asks for is for
// the race detector: state that somebody reads or changes without its lock.
func TestManyHands(t *testing.T) {
	s := newWorld(t).serve()
	for range 3 {
		sb := s.create(admin, Spec{FileChanges: FileChangesFull, Contexts: []CodeContextSpec{{ID: "python"}, {ID: "bad", Language: "none"}}})
		b := s.find(sb.ID)
		stop, labels := make(chan struct{}), map[string]string{"a": "b"}
		begun := make(chan struct{}, 1000)
		wait := together(t, stop, map[string]func(context.Context) error{
			"start": func(ctx context.Context) error {
				_, err := s.StartProcess(ctx, admin, sb.ID, ProcessSpec{Argv: []string{"true"}}, "")
				return err
			},
			"run": func(ctx context.Context) error {
				_, err := s.Execute(ctx, admin, sb.ID, ProcessSpec{Argv: []string{"echo", "x"}}, RunOptions{})
				return err
			},
			"code": func(ctx context.Context) error {
				_, err := s.ExecuteCode(ctx, admin, sb.ID, CodeSpec{Code: "1+1"}, "")
				return err
			},
			"label": func(ctx context.Context) error {
				_, err := s.Update(ctx, admin, sb.ID, Update{Labels: &labels})
				return err
			},
			"look": func(ctx context.Context) error {
				_, _ = s.Get(ctx, admin, sb.ID)
				_, err := s.ListProcesses(ctx, admin, sb.ID)
				return err
			},
			"pause": func(ctx context.Context) error {
				if _, err := s.Pause(ctx, admin, sb.ID); err != nil {
					return err
				}
				_, err := s.Resume(ctx, admin, sb.ID)
				return err
			},
			"sleep": func(ctx context.Context) error {
				if _, err := s.PauseFiles(ctx, admin, sb.ID); err != nil {
					return err
				}
				_, err := s.Resume(ctx, admin, sb.ID)
				select {
				case begun <- struct{}{}:
				default:
				}
				return err
			},
		})
		for range 2 {
			testenv.Receive(t, "the sandbox slept and woke", begun)
		}
		if _, err := s.Delete(t.Context(), admin, sb.ID); err != nil {
			t.Fatal(err)
		}
		close(stop)
		wait()
		s.history(sb.ID)
		s.runs(sb.ID)
		b.changes.mu.Lock()
		if n := len(b.changes.alive); n > 0 {
			t.Errorf("%d processes and runs of a sandbox that has ended count as alive", n)
		}
		b.changes.mu.Unlock()
	}
}

// TestRunMeetsASleep has a run begin in a context whose sandbox has slept and woken meanwhile, with another of that id.
func TestRunMeetsASleep(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(admin, Spec{})
	code := func() error {
		_, err := s.ExecuteCode(t.Context(), admin, sb.ID, CodeSpec{Code: "1+1"}, "")
		return err
	}
	if err := code(); err != nil {
		t.Fatal(err)
	}
	c, err := s.context(t.Context(), s.find(sb.ID), "python")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.PauseFiles(t.Context(), admin, sb.ID); err != nil {
		t.Fatal(err)
	}
	var transition *TransitionError
	if _, _, err := c.enterRun(admin, "early"); !errors.As(err, &transition) {
		t.Errorf("while it sleeps: %v", err)
	}
	if _, err := s.Resume(t.Context(), admin, sb.ID); err != nil {
		t.Fatal(err)
	}
	if _, _, err := c.enterRun(admin, "late"); !errs.Is(err, errs.Unavailable) {
		t.Errorf("after it woke: %v", err)
	}
	if err := code(); err != nil {
		t.Error(err)
	}
}
