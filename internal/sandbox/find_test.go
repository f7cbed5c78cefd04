package sandbox

import (
	"strings"
	"testing"

	"casemate.dev/internal/errs"
)

func TestFindProcess(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{})
	old := s.start(sb.ID, ProcessSpec{Argv: []string{"true"}, Tag: "job"})
	if _, err := s.WaitProcess(t.Context(), alice, sb.ID, old.ID); err != nil {
		t.Fatal(err)
	}
	find := func(pid int, tag string) string {
		t.Helper()
		p, err := s.FindProcess(t.Context(), alice, sb.ID, pid, tag)
		if err != nil {
			t.Fatalf("pid %d, tag %q: %v", pid, tag, err)
		}
		return p.ID
	}
	if got := find(old.PID, ""); got != old.ID {
		t.Errorf("an ended process by its pid: %s", got)
	}
	if got := find(0, "job"); got != old.ID {
		t.Errorf("an ended process by its tag: %s", got)
	}
	runs := s.start(sb.ID, ProcessSpec{Argv: []string{"sleep", "60"}, Tag: "job"})
	other := s.start(sb.ID, ProcessSpec{Argv: []string{"true"}, Tag: "job"})
	if _, err := s.WaitProcess(t.Context(), alice, sb.ID, other.ID); err != nil {
		t.Fatal(err)
	}
	if got := find(0, "job"); got != runs.ID {
		t.Errorf("the one that runs comes first: %s", got)
	}
	all, err := s.RunningProcesses(t.Context(), alice, sb.ID)
	if err != nil || len(all) != 1 || all[0].ID != runs.ID || all[0].Tag != "job" {
		t.Errorf("running: %+v, %v", all, err)
	}
	for _, none := range []struct {
		pid int
		tag string
	}{{999999, ""}, {0, "none"}, {0, ""}} {
		if _, err := s.FindProcess(t.Context(), alice, sb.ID, none.pid, none.tag); !errs.Is(err, errs.NotFound) {
			t.Errorf("%+v: %v", none, err)
		}
	}
	if _, err := s.FindProcess(t.Context(), bob, sb.ID, runs.PID, ""); !errs.Is(err, errs.NotFound) {
		t.Errorf("another principal: %v", err)
	}
	_, err = s.StartProcess(t.Context(), alice, sb.ID, ProcessSpec{Argv: []string{"true"}, Tag: strings.Repeat("x", maxTag+1)}, "")
	if !errs.Is(err, errs.InvalidArgument) {
		t.Errorf("a long tag: %v", err)
	}
}
