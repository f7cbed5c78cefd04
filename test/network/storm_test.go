package network

import (
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"casemate.dev/client"
	"casemate.dev/internal/testenv"
)

// stormScript begins 10,000 connections that nobody answers, in processes each of which may have enough files open, and
// begins those anew that ended, until it is told to stop.
const stormScript = `exec python3 - <<'E'
import errno, os, socket, time
def storm(first, n):
    socks = {}
    begun = 0
    while not os.path.exists('/tmp/stop'):
        for i in range(n):
            s = socks.get(i)
            if s is None:
                s = socks[i] = socket.socket()
                s.setblocking(False)
                if s.connect_ex(('93.184.215.77', 1 + first + i)) == errno.EINPROGRESS: begun += 1
            elif s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR): # refused, or given up
                s.close()
                socks[i] = None
        if begun >= n: open('/tmp/begun.%d' % first, 'w').write(str(begun))
        time.sleep(.05)
    os._exit(0)
for k in range(4):
    if os.fork() == 0: storm(k * 2500, 2500)
for k in range(4): os.wait()
E`

// askScript asks a server over new connections, one after the other, and prints the times in milliseconds.
const askScript = `python3 - <<'E'
import http.client, json, time
times = []
for i in range(150):
    t = time.perf_counter()
    c = http.client.HTTPConnection('allowed.test', timeout=60)
    c.request('GET', '/storm')
    assert c.getresponse().read() == b'hello from allowed.test'
    c.close()
    times.append((time.perf_counter() - t) * 1000)
times.sort()
print(json.dumps([times[75], times[-2]]))
E`

// stalled is, in milliseconds, what a request would take at the least that waits behind a dial that nobody answers.
const stalled = 5000

// 10,000 half-open connections of one sandbox leave another's requests alone, and the gateway small: the sandbox runs into
// its limit on connections that are not established, which the end of its process tells.
func TestHalfOpenStorm(t *testing.T) {
	p := newPlace(t)
	p.web("allowed.test")
	good, bad := p.create("allow allowed.test"), p.create("allow 93.184.215.77:*")
	ask := func() (out [2]float64) {
		text, _ := p.sh(good, askScript)
		if err := json.Unmarshal([]byte(text), &out); err != nil {
			t.Fatalf("%v: %s", err, text)
		}
		return out
	}
	quiet := ask()
	files, memory := p.gatewaySize()
	storm, err := p.Processes.Start(t.Context(), bad.GetId(), &client.ProcessSpec{Argv: []string{"bash", "-c", stormScript}})
	if err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 2*time.Minute, "10,000 are begun", func() bool {
		out, _ := p.sh(bad, `ls /tmp/begun.* 2>/dev/null | wc -l`)
		return strings.TrimSpace(out) == "4"
	})
	busy := ask()
	openFiles, used := p.gatewaySize()
	t.Logf("a request, p50 and p99: %.2f ms quiet, %.2f ms in the storm; the gateway has %d files more open, and %d KB more", quiet, busy, openFiles-files, (used-memory)>>10)
	if busy[0] > stalled {
		t.Errorf("the other sandbox's requests take %.0f ms", busy[0])
	}
	if openFiles-files > 1024 || used-memory > 64<<20 {
		t.Errorf("the gateway has %d files more open, and %d KB more", openFiles-files, (used-memory)>>10)
	}
	p.sh(bad, `touch /tmp/stop`)
	var end *client.Process
	testenv.Eventually(t, 2*time.Minute, "the storm ends", func() bool {
		end, err = p.Processes.Get(t.Context(), bad.GetId(), storm.GetId())
		return err == nil && end.GetEnd() != ""
	})
	if len(end.GetRefused()) == 0 || !strings.Contains(end.GetRefused()[0].GetReason(), "limit pending") {
		t.Errorf("its end says %v", end.GetRefused())
	}
}

// gatewaySize returns how many files the gateway has open, and the memory that it has to itself.
func (p *place) gatewaySize() (files int, bytes int64) {
	p.t.Helper()
	pid := p.gatewayPID()
	list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		p.t.Fatal(err)
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		p.t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		if v, ok := strings.CutPrefix(line, "RssAnon:"); ok {
			kb, _ := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(v), "kB")), 10, 64)
			return len(list), kb << 10
		}
	}
	p.t.Fatal("no RssAnon")
	return 0, 0
}
