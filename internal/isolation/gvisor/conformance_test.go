package gvisor_test

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/conformance"
)

// nightly is set where the whole suite is to run: an instance takes a second to start on a busy machine.
const nightly = "CASEMATE_TEST_NIGHTLY"

func TestGvisorConformance(t *testing.T) {
	conformance.Run(t, func(t *testing.T) conformance.Harness {
		h := newHost(t)
		return conformance.Harness{
			Backend: h.backend(),
			Few:     os.Getenv(nightly) == "",
			Reopen: func(t *testing.T) isolation.Backend {
				h := *h
				h.t = t
				return h.backend()
			},
			Spec: conformance.Spec,
			Kill: func(t *testing.T, i isolation.Instance) {
				for _, p := range processes(t, i) {
					if p.Name == "runsc-sandbox" {
						if err := unix.Kill(p.PID, unix.SIGKILL); err != nil {
							t.Fatal(err)
						}
						return
					}
				}
				t.Fatal("no Sentry runs")
			},
			Leftovers:  func(*testing.T) []string { return h.leftovers() },
			EchoServer: conformance.EchoServer,
			Allocate:   conformance.Allocate,
			Lacks: map[conformance.Feature]string{
				conformance.AnswersFrozen: "the guest is a process of the kernel that stands still",
				conformance.FailClosed:    "no layer but the host's may be waived; that runsc may not is tested beside this suite",
				conformance.Kernel:        "processes are those of gVisor's kernel; what the host's shows of it is tested beside this suite",
			},
		}
	})
}

func processes(t *testing.T, i isolation.Instance) []isolation.HostProcess {
	t.Helper()
	all, err := i.(isolation.Cell).HostProcesses()
	if err != nil {
		t.Fatal(err)
	}
	return all
}
