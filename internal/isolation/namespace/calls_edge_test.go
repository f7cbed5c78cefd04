package namespace

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/conformance"
	"casemate.dev/internal/testenv"
)

// begin starts a script that nobody waits for.
func (x *box) begin(id, script string) {
	x.t.Helper()
	scope, err := x.inst.NewScope(limited(x.t), id)
	if err != nil {
		x.t.Fatal(err)
	}
	x.t.Cleanup(func() { _ = scope.Close() })
	_, err = x.client.Start(limited(x.t), guestwire.StartProcess{ID: id, Argv: []string{"sh", "-c", script}, Scope: scope.Layout()}, scope.Files())
	if err != nil {
		x.t.Fatal(err)
	}
}

func (x *box) frozen() bool {
	x.t.Helper()
	frozen, err := x.inst.group.Frozen()
	if err != nil {
		x.t.Fatal(err)
	}
	return frozen
}

// VULNERABILITY: a sandbox that is held for an attempt goes on when the server thaws it for a reason of its own.
// ATTACK: an attempt while the server freezes and thaws, as every commit does.
// VERIFIES: it stays frozen until somebody releases it. The twin was released, and the same Thaw lets it go on.
func TestThawKeepsTheHold(t *testing.T) {
	b := newHost(t, withKeeper).backend()
	var s conformance.Seen
	s.Follow(t, b.Keeper(), "")
	x := start(t, b, observed(conformance.Spec(t, isolation.Locked), isolation.Calls{Attempts: true, OnAttempt: isolation.ReactPause}))
	x.begin("prc_mounts", "mount -t tmpfs none /mnt; true")
	s.Await(t, "the attempt that pauses", func(e isolation.CallEvent) bool { return e.Call == "mount" && e.Reaction == isolation.ReactPause })
	for range 3 {
		if err := x.inst.Freeze(limited(t)); err != nil {
			t.Fatal(err)
		}
		if err := x.inst.Thaw(limited(t)); err != nil {
			t.Fatal(err)
		}
		if !x.frozen() || !x.inst.Held(limited(t)) {
			t.Fatalf("after Freeze and Thaw: frozen is %v, held %v", x.frozen(), x.inst.Held(limited(t)))
		}
	}
	if err := x.inst.Release(limited(t)); err != nil {
		t.Fatal(err)
	}
	if err := x.inst.Thaw(limited(t)); err != nil {
		t.Fatal(err)
	}
	if x.frozen() {
		t.Error("twin: released and thawed, it is frozen")
	}
	if info, err := x.client.Wait(limited(t), "prc_mounts"); err != nil || info.End != guestwire.EndExited {
		t.Errorf("released, its process is %+v, %v", info, err)
	}
}

// VULNERABILITY: what ended a sandbox while no server ran is lost.
// ATTACK: an attempt that is to end the sandbox, between two servers.
// VERIFIES: the next server is told which attempt it was, and the event comes to it. The twin, which nothing ended, is
// adopted.
func TestKilledWhileNoServerRuns(t *testing.T) {
	h := newHost(t, withKeeper)
	first := h.backend()
	x := start(t, first, observed(conformance.Spec(t, isolation.Locked), isolation.Calls{Attempts: true, OnAttempt: isolation.ReactKill}))
	twin := start(t, first, observed(conformance.Spec(t, isolation.Locked), isolation.Calls{Attempts: true, OnAttempt: isolation.ReactKill}))
	x.begin("prc_mounts", "sleep 0.2; exec mount -t tmpfs none /mnt")
	record, other := x.inst.Record(), twin.inst.Record()
	// It is this process's child still, unlike a server's that is gone.
	defer func() { _, _ = unix.Wait4(recordOf(t, x.inst).PID, nil, 0, nil) }()
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	second := h.backend()
	var why string
	testenv.Eventually(t, patience, "a sandbox that an attempt ended", func() bool {
		why = second.EndedBy(limited(t), x.inst.ID())
		return why != ""
	})
	if !strings.HasPrefix(why, "mount /mnt") {
		t.Errorf("it was ended by %q", why)
	}
	testenv.Eventually(t, patience, "nothing left to adopt", func() bool {
		inst, err := second.Adopt(limited(t), record)
		if err == nil {
			destroy(t, inst)
		}
		return errs.Is(err, errs.NotFound)
	})
	var s conformance.Seen
	s.Follow(t, second.Keeper(), "")
	s.Await(t, "the attempt", func(e isolation.CallEvent) bool { return e.Sandbox == x.inst.ID() && e.Reaction == isolation.ReactKill })
	if why := second.EndedBy(limited(t), twin.inst.ID()); why != "" {
		t.Errorf("twin: ended by %q", why)
	}
	inst, err := second.Adopt(limited(t), other)
	if err != nil {
		t.Fatalf("twin: %v", err)
	}
	destroy(t, inst)
}

// VULNERABILITY: who waits for an answer can't be ended, or holds others up.
// ATTACK: many processes that are refused faster than they are answered, killed one by one and all at once.
// VERIFIES: each ends though its call waits, the sandbox can be destroyed, its neighbour's calls are answered meanwhile,
// and the keeper forgets it.
func TestEndsInAStorm(t *testing.T) {
	b := newHost(t, withKeeper).backend()
	c := isolation.Calls{Attempts: true, Exec: true}
	x := start(t, b, observed(conformance.Spec(t, isolation.Standard), c))
	near := start(t, b, observed(conformance.Spec(t, isolation.Standard), c))
	for _, id := range []string{"prc_a", "prc_b"} {
		x.begin(id, `exec python3 -c 'import ctypes, threading
l = ctypes.CDLL(None)
def ask():
    while True: l.syscall(165, 0, 0, 0, 0, 0)
for i in range(32): threading.Thread(target=ask).start()'`)
	}
	if err := x.client.Signal(limited(t), guestwire.SignalRequest{ID: "prc_a", Signal: 9, Tree: true}); err != nil {
		t.Fatal(err)
	}
	if info, err := x.client.Wait(limited(t), "prc_a"); err != nil || info.End == guestwire.EndNone {
		t.Errorf("a killed process is %+v, %v", info, err)
	}
	wants(t, "its neighbour", near.sh("mount -t tmpfs x /mnt 2>/dev/null; /usr/bin/env echo here"), "here")
	destroy(t, x.inst)
	testenv.Eventually(t, patience, "the keeper forgetting a sandbox that is gone", func() bool {
		s, err := b.keeper.State(limited(t), x.inst.ID())
		return err == nil && !s.Watched
	})
	wants(t, "its neighbour afterwards", near.sh("/usr/bin/env echo here"), "here")
}

// TestVforkedExecsAreCounted executes from several threads at once, whose children share their memory until they have
// executed: each execution goes on and is counted, once.
func TestVforkedExecsAreCounted(t *testing.T) {
	b := newHost(t, withKeeper).backend()
	var s conformance.Seen
	s.Follow(t, b.Keeper(), "")
	x := start(t, b, observed(conformance.Spec(t, isolation.Standard), isolation.Calls{Exec: true}))
	wants(t, "all of them", x.sh(`exec python3 -c 'import threading, subprocess
def go():
    for i in range(10): subprocess.run(["/usr/bin/true"], check=True, close_fds=False)
t = [threading.Thread(target=go) for i in range(8)]
for i in t: i.start()
for i in t: i.join()
print("done")'`), "done")
	testenv.Eventually(t, patience, "80 executions", func() bool {
		n := 0
		for _, e := range s.All() {
			if e.Kind == isolation.CallExec && e.Target == "/usr/bin/true" {
				n += max(e.Count, 1)
			}
		}
		if n > 80 {
			t.Fatalf("%d executions were counted", n)
		}
		return n == 80
	})
}
