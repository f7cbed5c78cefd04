package sandbox

import (
	"context"
	"slices"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/journal"
)

// executed records that a sandbox's process executed something itself, and returns the event as a reader gets it.
func (s *server) executed(id, process string, argv ...string) journal.Event {
	s.w.t.Helper()
	err := s.RecordCalls([]CallEvent{{
		Sandbox: id, Time: time.Now(), Kind: isolation.CallExec, Call: "execve", Process: process, PID: 7, Command: "sh",
		Target: argv[0], Argv: argv,
	}}, "at 1")
	if err != nil {
		s.w.t.Fatal(err)
	}
	if at, err := s.CallsPosition(context.Background()); err != nil || at != "at 1" {
		s.w.t.Errorf("%q, %v", at, err)
	}
	return s.lastOf(id, journal.CallExec)
}

// TestExecutedArgumentsComeAlong: what was executed comes with its event, as far as a sandbox's record holds content.
func TestExecutedArgumentsComeAlong(t *testing.T) {
	s := newWorld(t).serve()
	for level, want := range map[Recording]bool{RecordHashes: false, RecordContent: true, RecordAll: true} {
		e := s.executed(s.create(alice, Spec{Record: level}).ID, "prc_1", "/bin/echo", "deep")
		came := slices.ContainsFunc(e.Bodies, func(b journal.Body) bool {
			return b.By == journal.Kernel && b.Name == "argv" && string(b.Data) == `["/bin/echo","deep"]`
		})
		if came != want {
			t.Errorf("%s: %+v", level, e.Bodies)
		}
		if _, err := s.body(e, "kernel.argv"); (err == nil) != want || err != nil && !errs.Is(err, errs.NotFound) {
			t.Errorf("%s: %v", level, err)
		}
	}
}

// TestExecutedArgumentsAreRedactedAlone: they are erased with their event, and the process in which they were seen
// keeps its own.
func TestExecutedArgumentsAreRedactedAlone(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{})
	p := s.exec(sb.ID, "echo", "out").Process
	e := s.executed(sb.ID, p.ID, "/bin/echo", "hunter2")
	if _, err := s.Redact(t.Context(), alice, sb.ID, journal.Redaction{Event: e.Seq}); err != nil {
		t.Fatal(err)
	}
	if b, err := s.body(e, "kernel.argv"); !errs.Is(err, errs.NotFound) {
		t.Errorf("%q, %v", b, err)
	}
	if got, err := s.GetProcess(t.Context(), alice, sb.ID, p.ID); err != nil || !slices.Equal(got.Argv, []string{"echo", "out"}) {
		t.Errorf("%v, %v", got.Argv, err)
	}
}

// VULNERABILITY: a sandbox whose calls are observed gets out of sight in a child.
// ATTACK: a child with an isolation that observes nothing.
// VERIFIES: it is refused. The twin's parent is not observed, and may have that child.
func TestChildrenStayInSight(t *testing.T) {
	s := newWorld(t).serve()
	for on, want := range map[bool]errs.Kind{true: errs.PermissionDenied, false: 0} {
		parent := s.create(alice, Spec{})
		b := s.find(parent.ID)
		b.mu.Lock()
		b.sb.Spec.Calls = &Calls{Attempts: on, OnAttempt: map[bool]Reaction{true: ReactKill}[on]}
		b.mu.Unlock()
		c, err := s.callsFor(Principal{ID: alice.ID, Sandbox: parent.ID}, Spec{Isolation: parent.Spec.Isolation})
		if (err != nil) != (want != 0) || err != nil && !errs.Is(err, want) || err == nil && c.Any() {
			t.Errorf("parent observed: %v; its child: %v, %v", on, c, err)
		}
	}
}
