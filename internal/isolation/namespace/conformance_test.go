package namespace

import (
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/conformance"
	"casemate.dev/internal/isolation/walls"
)

func TestConformance(t *testing.T) {
	conformance.Run(t, func(t *testing.T) conformance.Harness {
		h := newHost(t, withKeeper)
		return conformance.Harness{
			Backend: h.backend(),
			Reopen: func(t *testing.T) isolation.Backend {
				h := *h
				h.t = t
				return h.backend()
			},
			Spec: func(t *testing.T, p isolation.Profile) isolation.Spec {
				return observed(conformance.Spec(t, p), isolation.Calls{Attempts: true, OnAttempt: isolation.ReactRecord})
			},
			Kill: func(t *testing.T, i isolation.Instance) {
				if err := unix.Kill(recordOf(t, i).PID, unix.SIGKILL); err != nil {
					t.Fatal(err)
				}
			},
			Leftovers: func(*testing.T) []string {
				return slices.DeleteFunc(h.leftovers(), func(what string) bool {
					return strings.HasPrefix(what, "file keeper.") // the backend's, not an instance's
				})
			},
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
