package namespace

import (
	"fmt"
	"strconv"
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
			Spec: newSpec,
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
			EchoServer: func(port int) []string { return []string{"python3", "-u", "-c", fmt.Sprintf(echoServer, port)} },
			Allocate: func(n int64) []string {
				return []string{"python3", "-c", "b = bytearray(" + strconv.FormatInt(n, 10) + ")\nfor i in range(0, len(b), 4096): b[i] = 1"}
			},
		}
	})
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
