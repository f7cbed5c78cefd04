package namespace

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/conformance"
	"casemate.dev/internal/isolation/keeper"
	"casemate.dev/internal/testenv"
)

// withKeeper makes this test's own program the keeper.
func withKeeper(c *Config) { c.Keeper = "/proc/self/exe" }

// TestObservedCalls runs what every backend promises of observed system calls.
func TestObservedCalls(t *testing.T) {
	conformance.RunCalls(t, func(t *testing.T) conformance.Observed {
		h := newHost(t, withKeeper)
		b := h.backend()
		return conformance.Observed{
			Backend: b, Keeper: b.Keeper(), RunDir: h.cfg.RunDir,
			Reopen: func(*testing.T) (isolation.Backend, *keeper.Keeper) {
				b := h.backend()
				return b, b.Keeper()
			},
		}
	})
}

func observed(spec isolation.Spec, c isolation.Calls) isolation.Spec {
	spec.Calls = c
	return spec
}

// VULNERABILITY: answering costs the host more than asking costs the sandbox.
// ATTACK: several threads that are refused as fast as they can, with signals that interrupt their waiting.
// VERIFIES: answers are bounded, repeats counted, and the sandbox, its neighbour and the keeper go on. The twin is the same
// loop unobserved, which makes far more calls.
func TestStormOfAttempts(t *testing.T) {
	b := newHost(t, withKeeper).backend()
	var s conformance.Seen
	s.Follow(t, b.Keeper(), "")
	const storm = `import ctypes, threading, time, signal, os
l = ctypes.CDLL(None)
n = [0] * 8
def ask(i):
    while time.time() < end:
        l.syscall(165, 0, 0, 0, 0, 0); n[i] += 1
signal.signal(signal.SIGALRM, lambda *a: None)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
end = time.time() + 3
t = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
for x in t: x.start()
for x in t: x.join()
print(sum(n))`
	x := start(t, b, observed(conformance.Spec(t, isolation.Locked), isolation.Calls{Attempts: true, Exec: true}))
	near := start(t, b, observed(conformance.Spec(t, isolation.Locked), isolation.Calls{Attempts: true, Exec: true}))
	twin := start(t, b, conformance.Spec(t, isolation.Locked))
	before := cpuOf(t, b)
	done := make(chan string, 1)
	go func() {
		defer close(done) // also where it fails
		done <- x.sh("exec python3 -c '" + storm + "'")
	}()
	s.Await(t, "the storm", func(e isolation.CallEvent) bool { return e.Sandbox == x.inst.ID() && e.Call == "mount" })
	wants(t, "the same sandbox, meanwhile", x.sh("/usr/bin/env echo here"), "here")
	wants(t, "its neighbour, meanwhile", near.sh("mount -t tmpfs x /mnt 2>/dev/null; /usr/bin/env echo here"), "here")
	made := number(t, testenv.Receive(t, "the storm ends", done))
	// A burst, and a hundred a second for as long as the storm lasts; on a busy machine, that may be longer than it says,
	// and few of its threads may have their turn.
	if made < 20 || made > 5000 {
		t.Errorf("%d calls were answered", made)
	}
	if spent := cpuOf(t, b) - before; spent > 1500*time.Millisecond {
		t.Errorf("the keeper spent %s", spent)
	}
	s.Await(t, "repeats", func(e isolation.CallEvent) bool { return e.Sandbox == x.inst.ID() && e.Call == "mount" && e.Count > 10 })
	if free := number(t, twin.sh("exec python3 -c '"+storm+"'")); free < 4*made {
		t.Errorf("twin: %d calls unobserved, %d observed", free, made)
	}
}

func number(t *testing.T, text string) int {
	t.Helper()
	var n int
	if _, err := fmt.Sscan(text, &n); err != nil {
		t.Fatalf("%q is no number", text)
	}
	return n
}

// cpuOf returns the processor time that the keeper has used.
func cpuOf(t *testing.T, b *Backend) time.Duration {
	t.Helper()
	text, err := os.ReadFile(procFile(conformance.KeeperPID(t, b.cfg.RunDir), "schedstat"))
	if err != nil {
		t.Fatal(err)
	}
	return time.Duration(number(t, string(text)))
}

// VULNERABILITY: the keeper, which could let refused calls through, is in reach; or it is privileged itself.
// ATTACK: a listener in the guest; a second one; the keeper's process, seen from inside and from outside.
// VERIFIES: no process of the sandbox, the guest included, has a listener; the keeper has no capability and no network.
func TestKeeperIsOutOfReach(t *testing.T) {
	b := newHost(t, withKeeper).backend()
	x := start(t, b, observed(conformance.Spec(t, isolation.Standard), isolation.Calls{Attempts: true}))
	pids, err := x.inst.group.Pids()
	if err != nil {
		t.Fatal(err)
	}
	pid := conformance.KeeperPID(t, b.cfg.RunDir)
	for _, p := range append(pids, x.inst.proc.PID()) {
		if n := listeners(t, p); n != 0 {
			t.Errorf("process %d of the sandbox holds %d listeners", p, n)
		}
	}
	// Twin: the search finds what there is.
	if n := listeners(t, pid); n != 1 {
		t.Errorf("the keeper holds %d listeners", n)
	}
	status, err := os.ReadFile(procFile(pid, "status"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"CapPrm:\t0000000000000000", "CapEff:\t0000000000000000", "CapBnd", "NoNewPrivs:\t1", "Seccomp:\t2"} {
		if !strings.Contains(string(status), want) {
			t.Errorf("the keeper's status lacks %q:\n%s", want, status)
		}
	}
	own, _ := os.Readlink("/proc/self/ns/net")
	if its, err := os.Readlink(procFile(pid, "ns/net")); err != nil || its == own {
		t.Errorf("the keeper's network namespace is %s, %v", its, err)
	}
	if got := x.shAs("root", fmt.Sprintf("kill -9 %d 2>&1; ls /proc | grep -cx %d", pid, pid)); !strings.HasSuffix(got, "0") {
		t.Errorf("from inside, the keeper is %q", got)
	}
	if err := syscall.Kill(pid, 0); err != nil {
		t.Errorf("the keeper: %v", err)
	}
}

// listeners counts the descriptors of filters' listeners in a process.
func listeners(t *testing.T, pid int) int {
	t.Helper()
	fds, err := os.ReadDir(procFile(pid, "fd"))
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, f := range fds {
		if link, _ := os.Readlink(procFile(pid, "fd/"+f.Name())); strings.HasPrefix(link, "anon_inode:seccomp") {
			n++
		}
	}
	return n
}
