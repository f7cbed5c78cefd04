package cgroup

import (
	"strconv"
	"strings"
	"testing"
)

// VULNERABILITY: version 1 charges socket buffers to nobody.
// ATTACK: connections over loopback that nobody reads, filled up.
// VERIFIES: what they hold of the host stays near the limit. The twin's limit has room for all.
func TestSocketBuffersAreLimited(t *testing.T) {
	h := open(t, Open)
	if h.Version() != 1 {
		return // version 2 counts them as memory, whose limit has its own test
	}
	const fill = `ip link set lo up 2>/dev/null; exec /usr/bin/python3 -c '
import socket
l = socket.create_server(("127.0.0.1", 0)); chunk = b"x" * 65536; total = 0; held = []
for _ in range(24):
    c = socket.create_connection(l.getsockname(), timeout=2); s, _ = l.accept(); c.setblocking(False); held += [c, s]
    try:
        while True: total += c.send(chunk)
    except OSError: pass
print(total)'`
	queued := func(limit int64) int64 {
		out, err := run(t, create(t, h, Limits{MemoryBytes: limit}), "prc_a", fill)
		n, nerr := strconv.ParseInt(strings.TrimSpace(out), 10, 64)
		if err != nil || nerr != nil {
			t.Fatalf("%q %v", out, err)
		}
		return n
	}
	if n := queued(64 << 20); n > 40<<20 {
		t.Errorf("%d MB of socket buffers beside a memory limit of 64 MB", n>>20)
	}
	if n := queued(1 << 30); n < 60<<20 {
		t.Errorf("twin: the attack queues only %d MB", n>>20)
	}
}
