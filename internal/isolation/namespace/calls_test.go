package namespace

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/conformance"
	"casemate.dev/internal/testenv"
)

// withKeeper makes this test's own program the keeper.
func withKeeper(c *Config) { c.Keeper = "/proc/self/exe" }

// seen collects what a backend's keeper tells.
type seen struct {
	mu   sync.Mutex // guards the field below
	list []isolation.CallEvent
	at   string
}

// follow takes a backend's events until the test ends or stop is called.
func (s *seen) follow(t *testing.T, b *Backend, position string) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		b.Keeper().Follow(ctx, position, func(list []isolation.CallEvent, position string) error {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.list, s.at = append(s.list, list...), position
			return nil
		})
	}()
	stop = func() {
		cancel()
		<-done
	}
	t.Cleanup(stop)
	return stop
}

func (s *seen) find(match func(isolation.CallEvent) bool) (isolation.CallEvent, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.IndexFunc(s.list, match)
	if i < 0 {
		return isolation.CallEvent{}, false
	}
	return s.list[i], true
}

// awaitThat waits for an event.
func (s *seen) awaitThat(t *testing.T, what string, match func(isolation.CallEvent) bool) isolation.CallEvent {
	t.Helper()
	var e isolation.CallEvent
	testenv.Eventually(t, patience, "an event of "+what, func() bool {
		var ok bool
		e, ok = s.find(match)
		return ok
	})
	return e
}

func observed(spec isolation.Spec, c isolation.Calls) isolation.Spec {
	spec.Calls = c
	return spec
}

// attempts are programs that make one refused call each, and the call.
func attempts() map[string]string {
	const python = `python3 -c 'import ctypes,os; l=ctypes.CDLL(None,use_errno=True); r=l.syscall(%s); print(r, os.strerror(ctypes.get_errno()))'`
	sys := func(args string) string { return fmt.Sprintf(python, args) }
	return map[string]string{
		"mount":             "mount -t tmpfs none /mnt; true",
		"unshare":           "unshare -U true; true",
		"setns":             "nsenter -t 1 -m true; " + sys(fmt.Sprint(unix.SYS_SETNS, ",0,0")),
		"ptrace":            sys(fmt.Sprint(unix.SYS_PTRACE, ",16,1,0,0")),
		"bpf":               sys(fmt.Sprint(unix.SYS_BPF, ",0,0,0")),
		"keyctl":            sys(fmt.Sprint(unix.SYS_KEYCTL, ",0,0")),
		"init_module":       sys(fmt.Sprint(unix.SYS_INIT_MODULE, ",0,0,0")),
		"kexec_load":        sys(fmt.Sprint(unix.SYS_KEXEC_LOAD, ",0,0,0,0")),
		"open_by_handle_at": sys(fmt.Sprint(unix.SYS_OPEN_BY_HANDLE_AT, ",-1,0,0")),
		"userfaultfd":       sys(fmt.Sprint(unix.SYS_USERFAULTFD, ",0")),
		"io_uring_setup":    sys(fmt.Sprint(unix.SYS_IO_URING_SETUP, ",1,0")),
		"socket":            `python3 -c 'import socket; socket.socket(17, 3, 0)' 2>/dev/null; true`,
		"seccomp":           sys(fmt.Sprint(unix.SYS_SECCOMP, ",1,8,0")),
	}
}

// VULNERABILITY: what a sandbox tries against its walls is refused, and nobody hears of it.
// ATTACK: each of the telling calls, in both profiles.
// VERIFIES: each is refused, and seen from outside with who called; the twin, which observes nothing, refuses them alike.
func TestAttemptsAreSeen(t *testing.T) {
	h := newHost(t, withKeeper)
	b := h.backend()
	var s seen
	s.follow(t, b, "")
	for _, p := range profiles() {
		x := start(t, b, observed(conformance.Spec(t, p), isolation.Calls{Attempts: true}))
		twin := start(t, b, conformance.Spec(t, p))
		if got := x.inst.Applied().Calls; got["attempts"] != "recorded" || got["exec"] != "off" {
			t.Errorf("%s: applied calls are %v", p, got)
		}
		for call, script := range attempts() {
			got, want := x.sh(script), twin.sh(script)
			if got != want {
				t.Errorf("%s: %s: observed %q, not observed %q", p, call, got, want)
			}
			e := s.awaitThat(t, call, func(e isolation.CallEvent) bool { return e.Sandbox == x.inst.ID() && e.Call == call })
			if e.Kind != isolation.CallAttempt || e.Errno == "" || e.PID <= 1 || e.Command == "" || !strings.HasPrefix(e.Process, "prc_") {
				t.Errorf("%s: %s: %+v", p, call, e)
			}
		}
		if e, ok := s.find(func(e isolation.CallEvent) bool { return e.Call == "mount" && e.Sandbox == x.inst.ID() }); !ok || e.Target != "/mnt" || e.Args[1] != "tmpfs" {
			t.Errorf("%s: the mount's arguments are %+v", p, e)
		}
		if e, ok := s.find(func(e isolation.CallEvent) bool { return e.Sandbox == twin.inst.ID() }); ok {
			t.Errorf("%s: twin: seen: %+v", p, e)
		}
	}
}

// TestExecsAndConnectsAreSeen looks at what goes on: nothing fails for it, and what the server itself has asked for is not
// told of again.
func TestExecsAndConnectsAreSeen(t *testing.T) {
	b := newHost(t, withKeeper).backend()
	var s seen
	s.follow(t, b, "")
	for _, p := range profiles() {
		x := start(t, b, observed(conformance.Spec(t, p), isolation.Calls{Exec: true, Connect: true}))
		mine := func(e isolation.CallEvent) bool { return e.Sandbox == x.inst.ID() }
		wants(t, "echo", x.sh("/usr/bin/env echo one two"), "one two")
		e := s.awaitThat(t, "exec", func(e isolation.CallEvent) bool { return mine(e) && e.Target == "/usr/bin/env" })
		if e.Kind != isolation.CallExec || !slices.Equal(e.Argv, []string{"/usr/bin/env", "echo", "one", "two"}) || e.Command != "sh" {
			t.Errorf("%s: exec: %+v", p, e)
		}
		x.sh(`python3 -c 'import socket; socket.socket().connect(("127.0.0.1", 4711))'; python3 -c 'import socket; socket.socket(1).connect("/tmp/nobody")'`)
		s.awaitThat(t, "connect", func(e isolation.CallEvent) bool { return mine(e) && e.Target == "127.0.0.1:4711" })
		s.awaitThat(t, "connect", func(e isolation.CallEvent) bool { return mine(e) && e.Target == "unix:/tmp/nobody" })
		o := start(t, b, observed(conformance.Spec(t, p), isolation.Calls{Open: true}))
		wants(t, "cat", o.sh("echo deep >/tmp/well; cat /tmp/well"), "deep")
		s.awaitThat(t, "open", func(e isolation.CallEvent) bool {
			return e.Sandbox == o.inst.ID() && e.Target == "/tmp/well" && e.Command == "cat"
		})
		if e, ok := s.find(func(e isolation.CallEvent) bool {
			return mine(e) && e.Kind == isolation.CallExec && e.Target == "/usr/bin/sh"
		}); ok {
			t.Errorf("%s: what the server asked for is told of: %+v", p, e)
		}
	}
}

// VULNERABILITY: an attack that is refused a hundred times succeeds the next time.
// ATTACK: one attempt, with the reactions that end or hold the sandbox.
// VERIFIES: the first attempt does it, by the keeper alone. The twin, which only records, goes on.
func TestReactions(t *testing.T) {
	b := newHost(t, withKeeper).backend()
	var s seen
	s.follow(t, b, "")

	kill := start(t, b, observed(conformance.Spec(t, isolation.Standard), isolation.Calls{Attempts: true, OnAttempt: isolation.ReactKill}))
	_, _ = kill.tryRun("root", "mount", "-t", "tmpfs", "none", "/mnt")
	testenv.Receive(t, "the attempt ends the sandbox", kill.inst.Done())
	if e := kill.inst.Exit(); e.Reason != "attempt" || !strings.HasPrefix(e.Detail, "mount /mnt") {
		t.Errorf("exit is %+v", e)
	}

	pause := start(t, b, observed(conformance.Spec(t, isolation.Locked), isolation.Calls{Attempts: true, OnAttempt: isolation.ReactPause}))
	scope, err := pause.inst.NewScope(limited(t), "prc_mounts")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = scope.Close() }()
	_, err = pause.client.Start(limited(t), guestwire.StartProcess{
		ID: "prc_mounts", Argv: []string{"sh", "-c", "mount -t tmpfs none /mnt; echo went on"}, Scope: scope.Layout(),
	}, scope.Files())
	if err != nil {
		t.Fatal(err)
	}
	e := s.awaitThat(t, "the attempt that pauses", func(e isolation.CallEvent) bool { return e.Sandbox == pause.inst.ID() && e.Call == "mount" })
	if e.Reaction != isolation.ReactPause || e.Note != "" {
		t.Errorf("%+v", e)
	}
	if frozen, err := pause.inst.group.Frozen(); err != nil || !frozen {
		t.Errorf("frozen is %v, %v", frozen, err)
	}
	if err := pause.inst.Freeze(limited(t)); err != nil {
		t.Errorf("freeze what is being frozen: %v", err)
	}
	info, err := pause.client.Get(limited(t), "prc_mounts")
	if err != nil || info.End != guestwire.EndNone {
		t.Errorf("the process is %+v, %v", info, err)
	}
	if err := pause.inst.Release(limited(t)); err != nil {
		t.Error(err)
	}
	if err := pause.inst.Thaw(limited(t)); err != nil {
		t.Fatal(err)
	}
	if info, err = pause.client.Wait(limited(t), "prc_mounts"); err != nil || info.End != guestwire.EndExited {
		t.Errorf("thawed, it is %+v, %v", info, err)
	}

	twin := start(t, b, observed(conformance.Spec(t, isolation.Locked), isolation.Calls{Attempts: true, OnAttempt: isolation.ReactRecord}))
	wants(t, "twin", twin.sh("mount -t tmpfs none /mnt 2>/dev/null; echo went on"), "went on")
}

// VULNERABILITY: answering costs the host more than asking costs the sandbox.
// ATTACK: several threads that are refused as fast as they can, with signals that interrupt their waiting.
// VERIFIES: answers are bounded, repeats counted, and the sandbox, its neighbour and the keeper go on. The twin is the same
// loop unobserved, which makes far more calls.
func TestStormOfAttempts(t *testing.T) {
	b := newHost(t, withKeeper).backend()
	var s seen
	s.follow(t, b, "")
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
	s.awaitThat(t, "the storm", func(e isolation.CallEvent) bool { return e.Sandbox == x.inst.ID() && e.Call == "mount" })
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
	s.awaitThat(t, "repeats", func(e isolation.CallEvent) bool { return e.Sandbox == x.inst.ID() && e.Call == "mount" && e.Count > 10 })
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

// keeperPID returns the keeper's pid from its record.
func keeperPID(t *testing.T, b *Backend) int {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(b.cfg.RunDir, "keeper.json"))
	if err != nil {
		t.Fatal(err)
	}
	var r struct{ PID int }
	if err := json.Unmarshal(text, &r); err != nil || r.PID <= 1 {
		t.Fatalf("the record says %s: %v", text, err)
	}
	return r.PID
}

// cpuOf returns the processor time that the keeper has used.
func cpuOf(t *testing.T, b *Backend) time.Duration {
	t.Helper()
	text, err := os.ReadFile(procFile(keeperPID(t, b), "schedstat"))
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
	pid := keeperPID(t, b)
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

// VULNERABILITY: whoever ends the keeper is not watched any more, and nobody knows.
// ATTACK: the keeper is killed.
// VERIFIES: what it would have answered fails with ENOSYS, which is told of, and Applied says so; the next sandbox is
// watched again.
func TestKeeperIsKilled(t *testing.T) {
	b := newHost(t, withKeeper).backend()
	var s seen
	s.follow(t, b, "")
	x := start(t, b, observed(conformance.Spec(t, isolation.Locked), isolation.Calls{Attempts: true, Exec: true}))
	wants(t, "before", x.sh("/usr/bin/env echo here"), "here")
	pid := keeperPID(t, b)
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	e := s.awaitThat(t, "the gap", func(e isolation.CallEvent) bool { return e.Sandbox == x.inst.ID() && e.Kind == isolation.CallGap })
	if !strings.Contains(e.Note, "the keeper ended") {
		t.Errorf("%+v", e)
	}
	if got := x.inst.Applied().Calls; !strings.HasPrefix(got["exec"], "lost") || got["open"] != "off" {
		t.Errorf("applied: %v", got)
	}
	if got := x.sh("/usr/bin/env echo here"); !strings.Contains(strings.ToLower(got), unix.ENOSYS.Error()) {
		t.Errorf("an observed exec: %q", got)
	}
	if got := x.sh("echo still here"); got != "still here" { // the server's own
		t.Errorf("a process: %q", got)
	}
	next := start(t, b, observed(conformance.Spec(t, isolation.Locked), isolation.Calls{Attempts: true}))
	next.sh("mount -t tmpfs x /mnt")
	s.awaitThat(t, "an attempt after it", func(e isolation.CallEvent) bool { return e.Sandbox == next.inst.ID() && e.Call == "mount" })
}

// VULNERABILITY: what happens while no server runs is seen by nobody.
// ATTACK: attempts while the server is away.
// VERIFIES: the next server gets them, once each, and those that follow; one that had recorded some gets only the rest.
func TestKeeperOutlivesTheServer(t *testing.T) {
	h := newHost(t, withKeeper)
	first := h.backend()
	var s seen
	stop := s.follow(t, first, "")
	x := start(t, first, observed(conformance.Spec(t, isolation.Locked), isolation.Calls{Attempts: true, OnAttempt: isolation.ReactRecord}))
	x.sh("mount -t tmpfs one /one")
	s.awaitThat(t, "the first", func(e isolation.CallEvent) bool { return e.Target == "/one" })
	stop()
	x.sh("mount -t tmpfs two /two")
	record := x.inst.Record()
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	second := h.backend()
	if second.owner != first.owner {
		t.Errorf("the keeper's user was %d and is %d", first.owner, second.owner)
	}
	inst, err := second.Adopt(limited(t), record)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { destroy(t, inst) })
	again := &box{t: t, inst: inst.(*Instance), client: guestwire.NewClient(inst.Dial)}
	var later seen
	s.mu.Lock()
	position := s.at
	s.mu.Unlock()
	later.follow(t, second, position)
	again.sh("mount -t tmpfs three /three")
	later.awaitThat(t, "the third", func(e isolation.CallEvent) bool { return e.Target == "/three" })
	later.mu.Lock()
	defer later.mu.Unlock()
	if len(later.list) != 2 || later.list[0].Target != "/two" {
		t.Errorf("the second server got %+v", later.list)
	}
	if got := inst.Applied().Calls["attempts"]; got != "recorded" {
		t.Errorf("applied: %s", got)
	}
}
