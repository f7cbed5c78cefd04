package sandbox

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal"
)

func (s *server) sleeps(id string) Sandbox {
	s.w.t.Helper()
	sb, err := s.PauseFiles(context.Background(), admin, id)
	if err != nil {
		s.w.t.Fatal(err)
	}
	return sb
}

func (s *server) wakes(id string) Sandbox {
	s.w.t.Helper()
	sb, err := s.Resume(context.Background(), admin, id)
	if err != nil {
		s.w.t.Fatal(err)
	}
	return sb
}

func TestPauseFiles(t *testing.T) {
	w := newWorld(t)
	s := w.serve()
	sb := s.create(admin, Spec{Name: "web", Env: map[string]string{"A": "1"}})
	p := s.start(sb.ID, ProcessSpec{Argv: []string{"sleep", "60"}})
	got := s.sleeps(sb.ID)
	if got.State != Paused || !got.FilesOnly || len(w.host.Instances()) != 0 {
		t.Fatalf("%+v, instances %v", got, w.host.Instances())
	}
	if again := s.sleeps(sb.ID); !again.FilesOnly {
		t.Errorf("a second time: %+v", again)
	}
	if end := s.wait(sb.ID, p.ID).End; end != EndSandboxStopped {
		t.Errorf("its process ended with %s", end)
	}
	for what, err := range map[string]error{
		"execute": second(s.Execute(t.Context(), admin, sb.ID, ProcessSpec{Argv: []string{"true"}}, RunOptions{})),
		"stat":    second(s.DialPort(t.Context(), admin, sb.ID, 80)),
	} {
		if !errs.Is(err, errs.FailedPrecondition) {
			t.Errorf("%s: %v", what, err)
		}
	}
	for what, err := range map[string]error{
		"usage":     second(s.Usage(t.Context(), admin, sb.ID)),
		"ports":     second(s.Ports(t.Context(), admin, sb.ID)),
		"processes": second(s.ListProcesses(t.Context(), admin, sb.ID)),
		"commit":    second(s.MakeCommit(t.Context(), admin, sb.ID, CommitOptions{})),
		"update":    second(s.Update(t.Context(), admin, sb.ID, Update{Limits: &Limits{Pids: 99}})),
	} {
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	if got = s.wakes(sb.ID); got.State != Running || got.FilesOnly || got.ID != sb.ID || got.Spec.Name != "web" || got.Applied.Limits.Pids != 99 {
		t.Errorf("awake: %+v", got)
	}
	if out := string(s.exec(sb.ID, "env").Stdout); !strings.Contains(out, "A=1\n") {
		t.Errorf("environment %q", out)
	}
	types := s.types(sb.ID)
	if !slices.Contains(types, journal.SandboxPaused) || !slices.Contains(types, journal.SandboxResumed) {
		t.Errorf("events %v", types)
	}
	if _, err := s.Delete(t.Context(), admin, sb.ID); err != nil {
		t.Fatal(err)
	}
}

// A pause with memory can still become one without.
func TestPauseFilesOfAPaused(t *testing.T) {
	w := newWorld(t)
	s := w.serve()
	sb := s.create(admin, Spec{})
	if _, err := s.Pause(t.Context(), admin, sb.ID); err != nil {
		t.Fatal(err)
	}
	if got := s.sleeps(sb.ID); !got.FilesOnly || len(w.host.Instances()) != 0 {
		t.Errorf("%+v", got)
	}
	if _, err := s.Delete(t.Context(), admin, sb.ID); err != nil {
		t.Fatal(err)
	}
	if got := w.roots.writable(); len(got) != 0 {
		t.Errorf("files are left: %v", got)
	}
}

// A server that is killed while a sandbox sleeps leaves it asleep; one that dies while it is awake again,
// awake.
func TestPauseFilesSurvivesACrash(t *testing.T) {
	w := newWorld(t)
	s := w.serve()
	sb := s.create(admin, Spec{Env: map[string]string{"A": "1"}})
	s.sleeps(sb.ID)
	s = s.crash()
	got, err := s.Get(t.Context(), admin, sb.ID)
	if err != nil || got.State != Paused || !got.FilesOnly {
		t.Fatalf("%+v, %v", got, err)
	}
	if !slices.Equal(s.report.Adopted, []string{sb.ID}) {
		t.Errorf("%+v", s.report)
	}
	s.wakes(sb.ID)
	if out := string(s.exec(sb.ID, "env").Stdout); !strings.Contains(out, "A=1\n") {
		t.Errorf("environment %q", out)
	}
	s = s.crash()
	if got, err := s.Get(t.Context(), admin, sb.ID); err != nil || got.State != Running || got.FilesOnly {
		t.Errorf("%+v, %v", got, err)
	}
	s.exec(sb.ID, "echo")
}

// As much environment as a sandbox may have comes back from its guest.
func TestPauseFilesKeepsALargeEnvironment(t *testing.T) {
	s := newWorld(t).serve()
	env := map[string]string{}
	for i := range 4 {
		env[fmt.Sprint("A", i)] = strings.Repeat("x", maxText/4-8)
	}
	sb := s.create(admin, Spec{Env: env})
	s.sleeps(sb.ID)
	s.wakes(sb.ID)
	if out := s.exec(sb.ID, "env").Stdout; bytes.Count(out, []byte("x")) < maxText-100 {
		t.Errorf("%d bytes of the environment are left", len(out))
	}
}

func TestPauseFilesAtTheEnd(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(admin, Spec{PauseAtEnd: true, PauseFilesOnly: true, Lifetime: time.Second})
	deadline := time.After(time.Minute)
	for {
		got, err := s.Get(t.Context(), admin, sb.ID)
		if err != nil {
			t.Fatal(err)
		}
		if got.FilesOnly {
			break
		}
		select {
		case <-deadline:
			t.Fatalf("%+v", got)
		case <-time.After(10 * time.Millisecond):
		}
	}
	if got := s.wakes(sb.ID); got.ExpiresAt.IsZero() {
		t.Errorf("its lifetime did not begin anew: %+v", got)
	}
}

func TestCheckout(t *testing.T) {
	w := newWorld(t)
	s := w.serve()
	sb := s.create(admin, Spec{Env: map[string]string{"A": "1"}})
	c := s.commit(sb.ID, CommitOptions{})
	got, saved, err := s.Checkout(t.Context(), admin, sb.ID, c.ID, CheckoutOptions{})
	if err != nil || got.State != Running || got.Head != c.ID || saved.Parent != c.ID || !saved.Automatic {
		t.Fatalf("%+v, %+v, %v", got, saved, err)
	}
	if w.roots.Below(sb.ID) != c.layer {
		t.Errorf("it stands on %q", w.roots.Below(sb.ID))
	}
	if out := string(s.exec(sb.ID, "env").Stdout); !strings.Contains(out, "A=1\n") {
		t.Errorf("environment %q", out)
	}
	s.sleeps(sb.ID)
	got, saved, err = s.Checkout(t.Context(), admin, sb.ID, saved.ID, CheckoutOptions{Discard: true})
	if err != nil || got.State != Paused || !got.FilesOnly || saved.ID != "" {
		t.Errorf("of one that sleeps: %+v, %+v, %v", got, saved, err)
	}
	if _, _, err := s.Checkout(t.Context(), admin, sb.ID, "none", CheckoutOptions{}); !errs.Is(err, errs.NotFound) {
		t.Error(err)
	}
	other := s.commit(s.create(admin, Spec{Template: "base"}).ID, CommitOptions{})
	if _, _, err := s.Checkout(t.Context(), admin, sb.ID, other.ID, CheckoutOptions{}); !errs.Is(err, errs.FailedPrecondition) {
		t.Errorf("of another template: %v", err)
	}
}

// Killed after a checkout was recorded and before it was done, the next server does it.
func TestCheckoutSurvivesACrash(t *testing.T) {
	w := newWorld(t)
	s := w.serve()
	sb := s.create(admin, Spec{Env: map[string]string{"A": "1"}})
	c := s.commit(sb.ID, CommitOptions{})
	b := s.find(sb.ID)
	if err := b.acquire(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := s.sleep(t.Context(), "", b, c.ID, nil); err != nil {
		t.Fatal(err)
	}
	b.release()
	s = s.crash()
	got, err := s.Get(t.Context(), admin, sb.ID)
	if err != nil || got.Head != c.ID || w.roots.Below(sb.ID) != c.layer {
		t.Fatalf("%+v on %q, %v", got, w.roots.Below(sb.ID), err)
	}
	if got := s.wakes(sb.ID); got.State != Running {
		t.Errorf("%+v", got)
	}
}
