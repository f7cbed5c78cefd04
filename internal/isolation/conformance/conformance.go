// Package conformance is the suite that every isolation backend passes.
//
// What belongs here: what package isolation promises, tried through isolation.Backend and the
// guest's protocol alone. What does not: how a backend keeps its promises; that is tested beside it,
// and by the attack battery.
//
// A backend's test is a few lines:
//
//	func TestConformance(t *testing.T) {
//		conformance.Run(t, func(t *testing.T) conformance.Harness { … })
//	}
//
// A case that needs what a backend can't have is not skipped in silence: the Harness declares the
// feature as lacking, with the reason, and Run logs every case that was left out for it.
package conformance

import (
	"slices"
	"strings"
	"testing"

	"casemate.dev/internal/isolation"
)

// Feature is something that a backend may be unable to have.
type Feature string

// The features.
const (
	// Kernel: processes are the host's own, with /proc, sessions and uids.
	Kernel Feature = "kernel"
	// FailClosed: Harness.Lacking can make a backend that misses a required layer.
	FailClosed Feature = "fail closed"
	// Standard: profile standard, with root inside.
	Standard Feature = "profile standard"
	// OpenFiles: the limit on open files holds.
	OpenFiles Feature = "open files"
	// Proc: processes inside see each other in /proc.
	Proc Feature = "/proc"
	// AnswersFrozen: the guest answers while the instance is frozen.
	AnswersFrozen Feature = "answers while frozen"
	// CPUTime: Usage counts what processes burnt.
	CPUTime Feature = "cpu time"
)

// Harness is one backend as the suite sees it.
type Harness struct {
	Backend isolation.Backend
	// Reopen returns another value of the same backend over the same host, as a restarted server
	// makes it.
	Reopen func(t *testing.T) isolation.Backend
	// Spec returns a spec with an id and a root of its own, which go with the test. The limits are
	// the suite's to change.
	Spec func(t *testing.T, p isolation.Profile) isolation.Spec
	// Kill makes the instance's guest die, from outside the backend.
	Kill func(t *testing.T, i isolation.Instance)
	// Leftovers lists what is on the host of the backend's instances, one line each.
	Leftovers func(t *testing.T) []string
	// Lacking returns a backend that lacks a layer which p requires, and the layer's name.
	Lacking func(t *testing.T, p isolation.Profile) (isolation.Backend, string)
	// EchoServer is a command that listens on a TCP port inside, prints a line, and sends back what
	// it gets.
	EchoServer func(port int) []string
	// Allocate is a command that takes that many bytes of memory and then ends with status 0.
	Allocate func(bytes int64) []string
	// Few runs only the cases that tell most about a backend whose instances are slow to start. The others are for a
	// run of their own, at night.
	Few bool
	// Lacks declares the features that the backend can't have, each with the reason.
	Lacks map[Feature]string
}

// suite runs the cases of one backend.
type suite struct {
	open func(t *testing.T) Harness
}

// testCase is one promise.
type testCase struct {
	name  string
	needs []Feature
	run   func(t *testing.T, h Harness)
}

// Run runs the suite; open makes a fresh Harness for each case and cleans up through t.
func Run(t *testing.T, open func(t *testing.T) Harness) {
	s := suite{open: open}
	var left []string
	few := false
	t.Run("harness", func(t *testing.T) { few = s.open(t).Few })
	for _, c := range slices.Concat(lifecycleCases(), processCases(), treeCases(), outputCases(), inputCases(), fileCases(), portCases(), limitCases(), restartCases()) {
		if few && !slices.Contains(fewCases(), c.name) {
			continue
		}
		if reason := s.lacks(t, c); reason != "" {
			left = append(left, c.name+" ("+reason+")")
			continue
		}
		t.Run(c.name, func(t *testing.T) { c.run(t, s.open(t)) })
	}
	if len(left) > 0 {
		t.Logf("declared as lacking and not run:\n  %s", strings.Join(left, "\n  "))
	}
}

// fewCases are those of Harness.Few.
func fewCases() []string {
	return []string{
		"start and claim", "applied", "canceled start", "destroy while busy", "kill takes the whole tree", "kill takes daemons", "frozen time",
		"terminal", "write and read", "process limit", "adopt", "adopt while frozen", "sweep",
	}
}

func (s suite) lacks(t *testing.T, c testCase) string {
	if len(c.needs) == 0 {
		return ""
	}
	var reason string
	t.Run("declares "+c.name, func(t *testing.T) {
		h := s.open(t)
		for _, f := range c.needs {
			why, lacking := h.Lacks[f]
			if lacking && why == "" {
				t.Errorf("the harness declares %q as lacking without a reason", f)
			}
			if lacking {
				reason = string(f) + ": " + why
			}
		}
	})
	return reason
}
