package namespace

import (
	"testing"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/conformance"
	"casemate.dev/internal/isolation/walls"
)

func TestConformance(t *testing.T) {
	conformance.Run(t, func(t *testing.T) conformance.Harness {
		h := newHost(t)
		return conformance.Harness{
			Backend: h.backend(),
			Reopen: func(t *testing.T) isolation.Backend {
				h := *h
				h.t = t
				return h.backend()
			},
			Spec: conformance.Spec,
			Kill: func(t *testing.T, i isolation.Instance) {
				if err := unix.Kill(recordOf(t, i).PID, unix.SIGKILL); err != nil {
					t.Fatal(err)
				}
			},
			Leftovers: func(*testing.T) []string { return h.leftovers() },
			Lacking: func(*testing.T, isolation.Profile) (isolation.Backend, string) {
				b := h.backend()
				b.abi = walls.MinLandlockABI - 1
				return b, walls.LayerLandlock
			},
			EchoServer: conformance.EchoServer,
			Allocate:   conformance.Allocate,
		}
	})
}
