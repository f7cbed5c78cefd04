package gvisor_test

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/id"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/conformance"
	"casemate.dev/internal/isolation/gvisor"
	"casemate.dev/internal/isolation/keeper"
	"casemate.dev/internal/isolation/namespace"
	"casemate.dev/internal/testenv"
)

// patience bounds waiting for what comes of itself.
const patience = 2 * time.Minute

// observedHost is a host whose sandboxes can be observed.
func observedHost(t *testing.T) *host {
	t.Helper()
	h := newHost(t)
	h.cfg.Keeper = "/proc/self/exe"
	return h
}

// TestObservedCalls runs what every backend promises of observed system calls.
func TestObservedCalls(t *testing.T) {
	conformance.RunCalls(t, func(t *testing.T) conformance.Observed {
		h := observedHost(t)
		b := h.backend()
		return conformance.Observed{
			Backend: b, Keeper: h.keeper, RunDir: h.cfg.RunDir, Afterwards: true,
			Reopen: func(t *testing.T) (isolation.Backend, *keeper.Keeper) {
				h := *h
				h.t = t
				b := h.backend()
				return b, h.keeper
			},
		}
	})
}

// observed starts a sandbox whose calls are observed.
func observed(t *testing.T, b isolation.Backend, c isolation.Calls) *box {
	t.Helper()
	spec := conformance.Spec(t, isolation.Locked)
	spec.Calls = c
	x := started(t, b, spec)
	return x
}

// VULNERABILITY: a flood of calls hides the one that tells of an attempt.
// ATTACK: files are opened, and mounts attempted, as fast as can be by many threads; between them another attempt is made.
// VERIFIES: all are counted, none is lost, and the attempt is told of. TWIN: watch's TestTraceGaps shows what a loss looks like.
func TestFloodHidesNothing(t *testing.T) {
	h := observedHost(t)
	b := h.backend()
	var s conformance.Seen
	s.Follow(t, h.keeper, "")
	const threads, each = 16, 250
	flood := fmt.Sprintf(`exec python3 -c 'import ctypes, threading
l = ctypes.CDLL(None)
def go(i):
    for n in range(%d):
        if i %% 2: l.open(b"/tmp/nothing", 0)
        else: l.syscall(%d, 0, 0, 0, 0, 0)
        if i == 2 and n == %d: l.syscall(%d, 0, 0, 0)
t = [threading.Thread(target=go, args=(i,)) for i in range(%d)]
for x in t: x.start()
for x in t: x.join()
print("done")'`, each, unix.SYS_MOUNT, each/2, unix.SYS_BPF, threads)
	x := observed(t, b, isolation.Calls{Attempts: true, Open: true})
	if got := x.run("sh", "-c", flood); got != "done" {
		t.Fatalf("%q", got)
	}
	s.Await(t, "the attempt", func(e isolation.CallEvent) bool { return e.Kind == isolation.CallAttempt && e.Call == "bpf" })
	testenv.Eventually(t, patience, "every opened file and mount", func() bool {
		opens, mounts := 0, 0
		for _, e := range s.All() {
			switch {
			case e.Kind == isolation.CallGap:
				t.Fatalf("something was lost: %+v", e)
			case e.Kind == isolation.CallOpen && (e.Target == "/tmp/nothing" || e.Target == ""):
				opens += max(e.Count, 1)
			case e.Call == "mount":
				mounts += max(e.Count, 1)
			}
		}
		return opens >= threads/2*each && mounts == threads/2*each
	})
}

// VULNERABILITY: a keeper that does not keep up holds a sandbox up for ever, or what it does is lost and nobody knows.
// ATTACK: the keeper stands still while a program opens files until the connection is full.
// VERIFIES: the program goes on, and a gap tells how many were lost. TWIN: TestFloodHidesNothing, where none is.
func TestKeeperStandsStill(t *testing.T) {
	h := observedHost(t)
	b := h.backend()
	var s conformance.Seen
	s.Follow(t, h.keeper, "")
	x := observed(t, b, isolation.Calls{Open: true})
	pid := conformance.KeeperPID(t, h.cfg.RunDir)
	if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	goOn := func() { _ = unix.Kill(pid, unix.SIGCONT) }
	t.Cleanup(goOn)
	// Two in a row that take as long as the kernel tries to tell were not told of.
	if got := x.run("python3", "-c", `import ctypes, time
l = ctypes.CDLL(None)
slow = 0
while slow < 2:
    at = time.monotonic()
    l.open(b"/tmp/nothing", 0)
    slow = slow + 1 if time.monotonic() - at > 2.5 else 0
print("went on")`); got != "went on" {
		t.Fatalf("%q", got)
	}
	goOn()
	x.run("cat", "/tmp/nothing") // the kernel tells of losses with the next call
	e := s.Await(t, "a gap", func(e isolation.CallEvent) bool { return e.Sandbox == x.inst.ID() && e.Kind == isolation.CallGap })
	if e.Count < 2 || e.Lost {
		t.Errorf("%+v", e)
	}
	x.run("cat", "/tmp/well")
	s.Await(t, "what comes after it", func(e isolation.CallEvent) bool { return e.Target == "/tmp/well" })
}

// VULNERABILITY: what was restored from an image runs unobserved.
// ATTACK: an attempt and an execution in a sandbox restored from an image, of which one process tries from before the image on.
// VERIFIES: all are told of, and what the server asked for is not. TWIN: restored without being observed, nothing is told.
func TestRestoredIsObserved(t *testing.T) {
	h := observedHost(t)
	b := h.backend()
	var s conformance.Seen
	s.Follow(t, h.keeper, "")
	spec := conformance.Spec(t, isolation.Standard)
	first := started(t, b, spec)
	first.start("tries", "python3", "-u", "-c", fmt.Sprintf(`import ctypes, time
l = ctypes.CDLL(None)
print("up")
while True:
    l.syscall(%d, 0, 0, 0)
    time.sleep(0.1)`, unix.SYS_BPF))
	first.until("tries", "up\n")
	dir := t.TempDir()
	if _, err := first.inst.Checkpoint(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	for _, calls := range []isolation.Calls{{Attempts: true, Exec: true}, {}} {
		again := spec
		again.ID, again.Calls = id.Sandbox(), calls
		again.Root.Upper, again.Root.Work = conformance.Writable(t)
		restored, err := b.Restore(t.Context(), again, dir)
		if err != nil {
			t.Fatal(err)
		}
		x := newBox(t, restored)
		claim := &guestwire.Claim{Sandbox: again.ID, Hostname: "again"}
		if err := x.guest.Restored(t.Context(), guestwire.Restored{Claim: claim}); err != nil {
			t.Fatal(err)
		}
		x.run("sh", "-c", "/usr/bin/env true; mount -t tmpfs none /mnt; true")
		mine := func(e isolation.CallEvent) bool { return e.Sandbox == again.ID }
		if !calls.Any() {
			if e, ok := s.Find(mine); ok {
				t.Errorf("twin: seen: %+v", e)
			}
			continue
		}
		s.Await(t, "the attempt that goes on", func(e isolation.CallEvent) bool { return mine(e) && e.Call == "bpf" })
		s.Await(t, "the attempt", func(e isolation.CallEvent) bool { return mine(e) && e.Call == "mount" })
		s.Await(t, "the execution", func(e isolation.CallEvent) bool { return mine(e) && e.Target == "/usr/bin/env" })
		if e, ok := s.Find(func(e isolation.CallEvent) bool {
			return mine(e) && slices.Equal(e.Argv[:min(2, len(e.Argv))], []string{"sh", "-c"})
		}); ok {
			t.Errorf("what the server asked for is told of: %+v", e)
		}
	}
}

// elsewhere gives runsc a session that it can't make.
type elsewhere struct{ isolation.Backend }

func (e elsewhere) Start(ctx context.Context, s isolation.Spec) (isolation.Instance, error) {
	for name, text := range s.Runtime.Files {
		s.Runtime.Files[name] = bytes.ReplaceAll(text, []byte("syscall/sysno/"), []byte("syscall/number/"))
	}
	return e.Backend.Start(ctx, s)
}

// VULNERABILITY: runsc starts a sandbox whose session it could not make as if nothing were, and says so in its log alone.
// ATTACK: a runsc that does not know what it is to tell of.
// VERIFIES: the start fails, and leaves nothing. TWIN: unobserved it starts.
func TestUntoldIsNotStarted(t *testing.T) {
	h := observedHost(t)
	cells, err := namespace.New(h.cfg)
	if err != nil {
		t.Fatal(err)
	}
	b := gvisor.New(gvisor.Config{Cells: elsewhere{cells}, Program: testenv.Runsc(t)})
	t.Cleanup(func() { _ = b.Close() })
	for _, c := range []isolation.Calls{{Attempts: true}, {}} {
		spec := conformance.Spec(t, isolation.Locked)
		spec.Calls = c
		inst, err := b.Start(t.Context(), spec)
		if err == nil {
			newBox(t, inst)
		}
		if c.Any() != (err != nil) || err != nil && !errs.Is(err, errs.Unsupported) {
			t.Errorf("observing %+v: %v", c, err)
		}
		if left := h.leftovers(); err != nil && len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	}
}
