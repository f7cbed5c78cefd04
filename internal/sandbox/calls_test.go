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
		c, err := s.callsFor(t.Context(), Principal{ID: alice.ID, Sandbox: parent.ID}, Spec{Isolation: parent.Spec.Isolation}, "")
		if (err != nil) != (want != 0) || err != nil && !errs.Is(err, want) || err == nil && c.Any() {
			t.Errorf("parent observed: %v; its child: %v, %v", on, c, err)
		}
	}
}

// observing makes the fake backend one that can observe calls.
type observing struct{ isolation.Backend }

func (observing) Observes() isolation.Calls {
	return isolation.Calls{Attempts: true, Exec: true, Connect: true, Open: true}
}
func (observing) EndedBy(context.Context, string) string { return "" }

// What a create does not say of system calls, its template says, else its profile, else the server; whoever is no
// administrator can only ask for more.
func TestCallDefaults(t *testing.T) {
	w := newWorld(t)
	w.shape = func(c *Config) {
		for name, b := range c.Backends {
			c.Backends[name] = observing{b}
		}
	}
	s := w.serve()
	ctx := t.Context()
	for _, c := range []struct {
		by   Principal
		d    CallDefault
		want errs.Kind
	}{
		{alice, CallDefault{Profile: Locked, Calls: &Calls{}}, errs.PermissionDenied},
		{admin, CallDefault{Calls: &Calls{}}, errs.InvalidArgument},
		{admin, CallDefault{Template: "host", Profile: Locked, Calls: &Calls{}}, errs.InvalidArgument},
		{admin, CallDefault{Profile: "open", Calls: &Calls{}}, errs.InvalidArgument},
		{admin, CallDefault{Template: "nothing", Calls: &Calls{}}, errs.NotFound},
		{admin, CallDefault{Profile: Locked, Calls: &Calls{Exec: true, OnAttempt: ReactKill}}, errs.InvalidArgument},
		{admin, CallDefault{Profile: Locked, Calls: &Calls{Attempts: true, OnAttempt: "shout"}}, errs.InvalidArgument},
	} {
		if err := s.SetCallDefault(ctx, c.by, c.d); !errs.Is(err, c.want) {
			t.Errorf("%+v: got %v, want %v", c.d, err, c.want)
		}
	}
	of := func(p Principal, spec Spec) Calls {
		t.Helper()
		sb := s.create(p, spec)
		if sb.Spec.Calls == nil {
			return Calls{}
		}
		return *sb.Spec.Calls
	}
	if got := of(alice, Spec{}); got.Any() {
		t.Errorf("the server's default: %+v", got)
	}
	strict := Calls{Attempts: true, Exec: true, OnAttempt: ReactPause}
	set := func(d CallDefault) {
		t.Helper()
		if err := s.SetCallDefault(ctx, admin, d); err != nil {
			t.Fatal(err)
		}
	}
	set(CallDefault{Profile: Locked, Calls: &strict})
	if got := of(alice, Spec{}); got != strict {
		t.Errorf("the profile's: %+v", got)
	}
	if got := of(alice, Spec{Calls: &Calls{Open: true}}); got != (Calls{Attempts: true, Exec: true, Open: true, OnAttempt: ReactPause}) {
		t.Errorf("less asked for: %+v", got)
	}
	if got := of(admin, Spec{Calls: &Calls{}}); got != (Calls{}) {
		t.Errorf("an administrator asks for nothing: %+v", got)
	}
	set(CallDefault{Template: "host", Calls: &Calls{}})
	if got := of(alice, Spec{}); got.Any() {
		t.Errorf("the template's: %+v", got)
	}
	s.stop(false)
	s = w.serve() // another server on the same data
	list, err := s.CallDefaults(ctx)
	if err != nil || len(list) != 3 || list[0].Template != "host" || list[1].Profile != Locked || *list[1].Calls != strict {
		t.Errorf("after a restart: %+v, %v", list, err)
	}
	set(CallDefault{Template: "host"})
	set(CallDefault{Profile: Locked})
	if list, err := s.CallDefaults(ctx); err != nil || len(list) != 1 {
		t.Errorf("taken away: %+v, %v", list, err)
	}
}
