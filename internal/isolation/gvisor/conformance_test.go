package gvisor_test

import (
	"fmt"
	"os"
	"strconv"
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
			// Under a limit of 32 up to 50 lived that are forked and execute at once, 34 that only fork.
			PidsOver: 32,
			Reopen: func(t *testing.T) isolation.Backend {
				h := *h
				h.t = t
				return h.backend()
			},
			Spec: newSpec,
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
			EchoServer: func(port int) []string { return []string{"python3", "-u", "-c", fmt.Sprintf(echoServer, port)} },
			Allocate: func(n int64) []string {
				return []string{"python3", "-c", "b = bytearray(" + strconv.FormatInt(n, 10) + ")\nfor i in range(0, len(b), 4096): b[i] = 1"}
			},
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

const echoServer = `
import socket
s = socket.create_server(("127.0.0.1", %d))
print("listening")
while True:
    c, _ = s.accept()
    while d := c.recv(65536):
        c.sendall(d)
    c.close()
`
