package conformance

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

	"golang.org/x/sys/unix"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/keeper"
	"casemate.dev/internal/isolation/keeper/watch"
	"casemate.dev/internal/testenv"
)

// Observed is a backend whose sandboxes' system calls are observed, as RunCalls sees it.
type Observed struct {
	Backend isolation.Backend
	// Keeper is the backend's, and RunDir where its record is.
	Keeper *keeper.Keeper
	RunDir string
	// Reopen returns another value of the same backend over the same host, as a restarted server makes it.
	Reopen func(t *testing.T) (isolation.Backend, *keeper.Keeper)
	// Afterwards says that calls are told of by a kernel of the sandbox's own, once it has answered them: what an attempt's
	// pointers point to and whose scope the caller is in stays unsaid, and where the keeper ends, calls go on.
	Afterwards bool
}

// Main is a TestMain that makes the tests' own program a keeper where it is started as one, as by a backend whose keeper is
// /proc/self/exe.
func Main(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == keeper.Verb {
		if err := watch.Main(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// RunCalls runs what every backend promises of observed system calls; open makes a fresh Observed for each case and cleans
// up through t.
func RunCalls(t *testing.T, open func(t *testing.T) Observed) {
	for _, c := range []struct {
		name string
		run  func(t *testing.T, o Observed)
	}{
		{"attempts", testAttempts},
		{"what goes on", testGoesOn},
		{"reactions", testReactions},
		{"the keeper is killed", testKeeperKilled},
		{"the keeper outlives the server", testKeeperOutlives},
	} {
		t.Run(c.name, func(t *testing.T) { c.run(t, open(t)) })
	}
}

// Seen collects what a keeper tells. Methods are safe for concurrent use.
type Seen struct {
	mu   sync.Mutex // guards the fields below
	list []isolation.CallEvent
	at   string
}

// Follow takes a keeper's events from a position on, until the test ends or stop is called.
func (s *Seen) Follow(t *testing.T, k *keeper.Keeper, position string) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		k.Follow(ctx, position, func(list []isolation.CallEvent, position string) error {
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

// All returns what was told so far.
func (s *Seen) All() []isolation.CallEvent {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.list)
}

// Position returns where the events end.
func (s *Seen) Position() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.at
}

// Find returns the first event that fits.
func (s *Seen) Find(match func(isolation.CallEvent) bool) (isolation.CallEvent, bool) {
	list := s.All()
	i := slices.IndexFunc(list, match)
	if i < 0 {
		return isolation.CallEvent{}, false
	}
	return list[i], true
}

// Await waits for an event.
func (s *Seen) Await(t *testing.T, what string, match func(isolation.CallEvent) bool) isolation.CallEvent {
	t.Helper()
	var e isolation.CallEvent
	testenv.Eventually(t, patience, "an event of "+what, func() bool {
		var ok bool
		e, ok = s.Find(match)
		return ok
	})
	return e
}

// KeeperPID returns the pid that a keeper's record names.
func KeeperPID(t *testing.T, runDir string) int {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(runDir, "keeper.json"))
	if err != nil {
		t.Fatal(err)
	}
	var r struct{ PID int }
	if err := json.Unmarshal(text, &r); err != nil || r.PID <= 1 {
		t.Fatalf("the record says %s: %v", text, err)
	}
	return r.PID
}

// attempts are programs that make one telling call each, and the call.
func attempts() map[string]string {
	const python = `python3 -c 'import ctypes,os; l=ctypes.CDLL(None,use_errno=True); r=l.syscall(%s); print(r, os.strerror(ctypes.get_errno()))'`
	sys := func(args string) string { return fmt.Sprintf(python, args) }
	return map[string]string{
		"mount":             "mount -t tmpfs none /mnt",
		"unshare":           "unshare -U true",
		"setns":             "nsenter -t 1 -m true; " + sys(fmt.Sprint(unix.SYS_SETNS, ",0,0")),
		"ptrace":            sys(fmt.Sprint(unix.SYS_PTRACE, ",16,1,0,0")),
		"bpf":               sys(fmt.Sprint(unix.SYS_BPF, ",0,0,0")),
		"keyctl":            sys(fmt.Sprint(unix.SYS_KEYCTL, ",0,0")),
		"init_module":       sys(fmt.Sprint(unix.SYS_INIT_MODULE, ",0,0,0")),
		"kexec_load":        sys(fmt.Sprint(unix.SYS_KEXEC_LOAD, ",0,0,0,0")),
		"open_by_handle_at": sys(fmt.Sprint(unix.SYS_OPEN_BY_HANDLE_AT, ",-1,0,0")),
		"userfaultfd":       sys(fmt.Sprint(unix.SYS_USERFAULTFD, ",0")),
		"io_uring_setup":    sys(fmt.Sprint(unix.SYS_IO_URING_SETUP, ",1,0")),
		"socket":            `python3 -c 'import socket; socket.socket(17, 3, 0)'`,
		"seccomp":           sys(fmt.Sprint(unix.SYS_SECCOMP, ",1,8,0")),
	}
}

// observe starts a sandbox of which c is observed.
func (o Observed) observe(t *testing.T, p isolation.Profile, c isolation.Calls) *box {
	t.Helper()
	spec := Spec(t, p)
	spec.Calls = c
	b := startOnly(t, o.Backend, spec)
	b.claim(guestwire.Claim{Sandbox: spec.ID, Hostname: "box"})
	return b
}

// says runs a script and returns all that it prints.
func (b *box) says(script string) string {
	b.t.Helper()
	return strings.TrimSpace(b.runScript(script).all.String())
}

// of matches a call of a sandbox.
func of(b *box, call string) func(isolation.CallEvent) bool {
	return func(e isolation.CallEvent) bool { return e.Sandbox == b.inst.ID() && e.Call == call }
}

// VULNERABILITY: what a sandbox tries against its walls, or against a kernel of its own, is refused, and nobody hears of it.
// ATTACK: each of the telling calls, in both profiles.
// VERIFIES: each is seen from outside, with who called and what was answered. TWIN: unobserved, each is answered alike, and
// nothing is told of it.
func testAttempts(t *testing.T, o Observed) {
	var s Seen
	s.Follow(t, o.Keeper, "")
	for _, p := range []isolation.Profile{isolation.Locked, isolation.Standard} {
		x, twin := o.observe(t, p, isolation.Calls{Attempts: true}), o.observe(t, p, isolation.Calls{})
		if got := x.inst.Applied().Calls; !strings.HasPrefix(got["attempts"], "recorded") || got["exec"] != "off" {
			t.Errorf("%s: applied calls are %v", p, got)
		}
		for call, script := range attempts() {
			if got, want := x.says(script), twin.says(script); got != want {
				t.Errorf("%s: %s: observed %q, not observed %q", p, call, got, want)
			}
			e := s.Await(t, call, of(x, call))
			answered := e.Errno != "" || o.Afterwards && e.Note != "" // its own kernel may allow it
			whose := o.Afterwards || strings.HasPrefix(e.Process, "prc_")
			if e.Kind != isolation.CallAttempt || !answered || e.PID <= 1 || e.Command == "" || !whose {
				t.Errorf("%s: %s: %+v", p, call, e)
			}
		}
		if e, ok := s.Find(of(x, "mount")); !o.Afterwards && (!ok || e.Target != "/mnt" || e.Args[1] != "tmpfs") {
			t.Errorf("%s: the mount's arguments are %+v", p, e)
		}
		for _, e := range s.All() {
			if e.Sandbox == twin.inst.ID() || e.Kind != isolation.CallAttempt || e.Command == "guest" {
				t.Errorf("%s: seen: %+v", p, e)
			}
		}
	}
}

// testGoesOn looks at what is let through: nothing fails for it, and what the server itself has asked for is not told of
// again.
func testGoesOn(t *testing.T, o Observed) {
	var s Seen
	s.Follow(t, o.Keeper, "")
	for _, p := range []isolation.Profile{isolation.Locked, isolation.Standard} {
		x := o.observe(t, p, isolation.Calls{Exec: true, Connect: true, Open: true})
		mine := func(target, by string) func(isolation.CallEvent) bool {
			return func(e isolation.CallEvent) bool {
				return e.Sandbox == x.inst.ID() && e.Target == target && (by == "" || e.Command == by)
			}
		}
		x.prints("/usr/bin/env echo one two", "one two\n")
		e := s.Await(t, "exec", mine("/usr/bin/env", ""))
		if e.Kind != isolation.CallExec || !slices.Equal(e.Argv, []string{"/usr/bin/env", "echo", "one", "two"}) || e.Command != "sh" || e.PID <= 1 {
			t.Errorf("%s: exec: %+v", p, e)
		}
		x.says(`python3 -c 'import socket; socket.socket().connect(("127.0.0.1", 4711))'; python3 -c 'import socket; socket.socket(1).connect("/tmp/nobody")'`)
		s.Await(t, "connect", mine("127.0.0.1:4711", "python3"))
		s.Await(t, "connect", mine("unix:/tmp/nobody", "python3"))
		x.prints("echo deep >/tmp/well; cat /tmp/well", "deep\n")
		if e := s.Await(t, "open", mine("/tmp/well", "cat")); e.Kind != isolation.CallOpen {
			t.Errorf("%s: open: %+v", p, e)
		}
		for _, e := range s.All() {
			if e.Kind == isolation.CallExec && slices.Equal(e.Argv[:min(2, len(e.Argv))], []string{"sh", "-c"}) || e.Kind == isolation.CallAttempt {
				t.Errorf("%s: it is told of: %+v", p, e)
			}
		}
	}
}

// VULNERABILITY: an attack that is refused a hundred times succeeds the next time.
// ATTACK: one attempt, with the reaction that ends the sandbox, and with the one that holds it.
// VERIFIES: the first attempt ends it, by the keeper alone, or asks for the hold. TWIN: what is only recorded goes on.
func testReactions(t *testing.T, o Observed) {
	var s Seen
	s.Follow(t, o.Keeper, "")
	kill := o.observe(t, isolation.Standard, isolation.Calls{Attempts: true, OnAttempt: isolation.ReactKill})
	_, _ = kill.tryStart(guestwire.StartProcess{User: "root", Argv: []string{"mount", "-t", "tmpfs", "none", "/mnt"}}) // it may end before it answers
	testenv.Receive(t, "the attempt ends the sandbox", kill.inst.Done())
	if e := kill.inst.Exit(); e.Reason != "attempt" || !strings.HasPrefix(e.Detail, "mount ") {
		t.Errorf("exit is %+v", e)
	}

	pause := o.observe(t, isolation.Locked, isolation.Calls{Attempts: true, OnAttempt: isolation.ReactPause})
	holder, ok := pause.inst.(isolation.Holder)
	if !ok {
		t.Fatalf("a %T can't be held", pause.inst)
	}
	if holder.Held(limited(t)) {
		t.Error("it is held before it attempts anything")
	}
	mounts := pause.startScript("mount -t tmpfs none /mnt; true")
	if e := s.Await(t, "the attempt that pauses", of(pause, "mount")); e.Reaction != isolation.ReactPause || e.Note != "" {
		t.Errorf("%+v", e)
	}
	if !holder.Held(limited(t)) {
		t.Error("it is not held")
	}
	if err := holder.Release(limited(t)); err != nil || holder.Held(limited(t)) {
		t.Errorf("released: %v, held %v", err, holder.Held(limited(t)))
	}
	if err := pause.inst.Thaw(limited(t)); err != nil {
		t.Fatal(err)
	}
	ended(t, "released, what attempted it", mounts.wait(), guestwire.EndExited, 0, 0)

	twin := o.observe(t, isolation.Locked, isolation.Calls{Attempts: true, OnAttempt: isolation.ReactRecord})
	twin.prints("mount -t tmpfs none /mnt 2>/dev/null; echo went on", "went on\n")
}

// VULNERABILITY: whoever ends the keeper is not watched any more, and nobody knows.
// ATTACK: the keeper is killed.
// VERIFIES: a gap is told of, Applied says that the calls are lost, and the next sandbox is watched again. TWIN: before, they
// are recorded.
func testKeeperKilled(t *testing.T, o Observed) {
	var s Seen
	s.Follow(t, o.Keeper, "")
	x := o.observe(t, isolation.Locked, isolation.Calls{Attempts: true, Exec: true})
	x.prints("/usr/bin/env echo here", "here\n")
	if got := x.inst.Applied().Calls; !strings.HasPrefix(got["exec"], "recorded") || got["open"] != "off" {
		t.Errorf("twin: applied: %v", got)
	}
	if err := syscall.Kill(KeeperPID(t, o.RunDir), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	e := s.Await(t, "the gap", func(e isolation.CallEvent) bool { return e.Sandbox == x.inst.ID() && e.Kind == isolation.CallGap })
	if !strings.Contains(e.Note, "the keeper ended") || !e.Lost {
		t.Errorf("%+v", e)
	}
	if got := x.inst.Applied().Calls; !strings.HasPrefix(got["exec"], "lost") || got["open"] != "off" {
		t.Errorf("applied: %v", got)
	}
	want := strings.ToLower(unix.ENOSYS.Error()) // what is observed fails closed
	if o.Afterwards {
		want = "here"
	}
	if got := x.says("/usr/bin/env echo here 2>&1"); !strings.Contains(strings.ToLower(got), want) {
		t.Errorf("an observed exec: %q", got)
	}
	x.prints("echo still here", "still here\n") // the server's own
	next := o.observe(t, isolation.Locked, isolation.Calls{Attempts: true})
	next.says(attempts()["bpf"])
	s.Await(t, "an attempt after it", of(next, "bpf"))
}

// VULNERABILITY: what happens while no server runs is seen by nobody.
// ATTACK: attempts while the server is away.
// VERIFIES: the next server gets them, once each, and those that follow. TWIN: what one had recorded does not come again.
func testKeeperOutlives(t *testing.T, o Observed) {
	var s Seen
	stop := s.Follow(t, o.Keeper, "")
	x := o.observe(t, isolation.Locked, isolation.Calls{Attempts: true, OnAttempt: isolation.ReactRecord})
	x.says(attempts()["bpf"])
	s.Await(t, "the first", of(x, "bpf"))
	stop()
	x.says(attempts()["keyctl"])
	record, user := x.inst.Record(), o.Keeper.UID()
	if err := o.Backend.Close(); err != nil {
		t.Fatal(err)
	}
	second, k := o.Reopen(t)
	if k.UID() != user {
		t.Errorf("the keeper's user was %d and is %d", user, k.UID())
	}
	inst, err := second.Adopt(limited(t), record)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { destroy(t, inst) })
	again := &box{t: t, inst: inst, client: guestwire.NewClient(inst.Dial)}
	var later Seen
	later.Follow(t, k, s.Position())
	again.says(attempts()["userfaultfd"])
	later.Await(t, "the third", of(again, "userfaultfd"))
	if list := later.All(); len(list) != 2 || list[0].Call != "keyctl" {
		t.Errorf("the second server got %+v", list)
	}
	if got := inst.Applied().Calls["attempts"]; !strings.HasPrefix(got, "recorded") {
		t.Errorf("applied: %s", got)
	}
}
