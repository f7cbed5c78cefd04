package network

import (
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"casemate.dev/client"
	"casemate.dev/internal/server"
	"casemate.dev/internal/testenv"
	"casemate.dev/internal/testenv/world"
)

// What a transfer of known sizes moved each way.
const (
	uploaded   = 3_000_017
	downloaded = 1_000_033
)

// TestTransferIsMetered counts a transfer on both its ends, and wants the bill to say the same to the byte; that processor
// time and memory are on it, too, and that what was refused is not.
func TestTransferIsMetered(t *testing.T) {
	for _, isolation := range []string{"namespace", "gvisor"} {
		t.Run(isolation, func(t *testing.T) {
			p := newPlaceIn(t, world.New(t), func(c *server.Config) { c.Runsc = testenv.Runsc(t) })
			var got atomic.Int64
			p.w.Serve(world.Web+":7000", func(c net.Conn) {
				n, _ := io.Copy(io.Discard, io.LimitReader(c, uploaded))
				got.Add(n)
				_, _ = c.Write(make([]byte, downloaded))
			})
			s, err := p.Sandboxes.Create(t.Context(), &client.CreateRequest{
				Isolation: isolation, Network: &client.NetworkRules{Rules: []string{"allow " + world.Web + ":7000"}},
			})
			if err != nil {
				t.Fatal(err)
			}
			p.expect(s, fmt.Sprintf(`python3 -c "
import socket
s=socket.create_connection(('%s',7000))
s.sendall(b'x'*%d)
n=0
while True:
  b=s.recv(1<<16)
  if not b: break
  n+=len(b)
print(n)
try: socket.create_connection(('%s',7000))
except OSError: print('refused')
"`, world.Web, uploaded, world.Other), fmt.Sprintf("%d\nrefused", downloaded))
			if got.Load() != uploaded {
				t.Errorf("%d bytes arrived, want %d", got.Load(), uploaded)
			}
			var u *client.MeteredUsage
			testenv.Eventually(t, time.Minute, "the connection's end is on the bill", func() bool {
				u = p.usage(s.GetId())
				return u.GetReceivedBytes() > 0 && u.GetOpenConnections() == 0
			})
			if u.GetSentBytes() != uploaded || u.GetReceivedBytes() != downloaded {
				t.Errorf("the bill has %d bytes sent, %d received; want %d, %d", u.GetSentBytes(), u.GetReceivedBytes(), uploaded, downloaded)
			}
			if _, err := p.Sandboxes.Delete(t.Context(), s.GetId()); err != nil {
				t.Fatal(err)
			}
			last := p.usage(s.GetId())
			if !last.GetEnded() || last.GetSentBytes() != uploaded || last.GetReceivedBytes() != downloaded || last.GetProcesses() != 1 || last.GetOpen() != 0 {
				t.Errorf("after the end: %v", last)
			}
			if last.GetCpuUs() <= 0 || last.GetMemoryByteSeconds() <= 0 || last.GetExecutionUs() <= 0 || last.GetExecutionUs() > last.GetRunningUs() {
				t.Errorf("after the end: %v", last)
			}
		})
	}
}

// usage is the bill of one sandbox.
func (p *place) usage(sandbox string) *client.MeteredUsage {
	p.t.Helper()
	all, _, err := p.Meter.List(p.t.Context(), &client.UsageRequest{Sandbox: sandbox})
	if err != nil || len(all) != 1 {
		p.t.Fatalf("usage: %v, %v", all, err)
	}
	return all[0]
}
