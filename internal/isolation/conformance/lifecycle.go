package conformance

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/testenv"
)

func lifecycleCases() []testCase {
	return []testCase{
		{name: "capabilities", run: testCapabilities},
		{name: "start and claim", run: testStartAndClaim},
		{name: "applied", run: testApplied},
		{name: "own ids", needs: []Feature{Kernel}, run: testOwnIDs},
		{name: "own namespaces", needs: []Feature{Kernel}, run: testOwnNamespaces},
		{name: "nothing is inherited", needs: []Feature{Kernel}, run: testNothingInherited},
		{name: "fails closed", needs: []Feature{FailClosed}, run: testFailsClosed},
		{name: "canceled start", run: testCanceledStart},
		{name: "twenty at once", run: testTwentyAtOnce},
		{name: "destroy", run: testDestroy},
		{name: "destroy while busy", run: testDestroyBusy},
		{name: "dies by itself", run: testDiesByItself},
	}
}

func testCapabilities(t *testing.T, h Harness) {
	first := h.Backend.Capabilities(limited(t))
	if len(first) == 0 {
		t.Error("the backend names no capability")
	}
	for _, c := range first {
		if c.Name == "" || !c.OK && c.Detail == "" {
			t.Errorf("capability %+v tells too little: a name, and why not where it is missing", c)
		}
		if !c.OK && c.Required && c.Remedy == "" {
			t.Errorf("capability %s is required and missing, and no remedy is named", c.Name)
		}
	}
	if again := h.Backend.Capabilities(limited(t)); !slices.Equal(first, again) {
		t.Errorf("a second call answers differently:\n%+v\n%+v", first, again)
	}
	if h.Backend.Name() == "" {
		t.Error("the backend has no name")
	}
}

func testStartAndClaim(t *testing.T, h Harness) {
	spec := h.Spec(t, isolation.Locked)
	b := startOnly(t, h.Backend, spec)
	if b.inst.ID() != spec.ID {
		t.Errorf("id: got %s, want %s", b.inst.ID(), spec.ID)
	}
	if s, err := b.client.Status(limited(t)); err != nil || s.Claimed || s.Version != guestwire.Version {
		t.Errorf("status before the claim: %+v, %v", s, err)
	}
	b.claim(guestwire.Claim{Sandbox: spec.ID, Hostname: "web-1"})
	if s, err := b.client.Status(limited(t)); err != nil || !s.Claimed {
		t.Errorf("status after the claim: %+v, %v", s, err)
	}
	b.prints("hostname", "web-1\n")
	wantKind(t, "second claim", b.client.Claim(limited(t), guestwire.Claim{Sandbox: spec.ID, Hostname: "web-2"}), errs.FailedPrecondition)
	b.prints("hostname", "web-1\n")
	if r := b.inst.Record(); !json.Valid(r) || string(r) != string(b.inst.Record()) {
		t.Errorf("the record is no stable JSON: %s", r)
	}
}

func testApplied(t *testing.T, h Harness) {
	b := startBox(t, h)
	a := b.inst.Applied()
	if a.Backend != h.Backend.Name() || a.Profile != isolation.Locked {
		t.Errorf("applied says %s, %s", a.Backend, a.Profile)
	}
	if a.HostUID == 0 || a.UIDCount == 0 {
		t.Errorf("applied names the ids %d+%d: a range of its own never begins with root", a.HostUID, a.UIDCount)
	}
	if a.Limits.MemoryBytes == 0 || a.Limits.Pids == 0 || a.Disk == "" || a.Network == "" {
		t.Errorf("applied is not complete: %+v", a)
	}
	if len(a.Missing) > 0 {
		t.Errorf("layers are missing that nobody allowed to be missing: %v", a.Missing)
	}
	if other := startBox(t, h).inst.Applied(); other.HostUID < a.HostUID+a.UIDCount && a.HostUID < other.HostUID+other.UIDCount {
		t.Errorf("two instances share ids: %d+%d and %d+%d", a.HostUID, a.UIDCount, other.HostUID, other.UIDCount)
	}
}

// hostPID finds a process of the sandbox on the host by a marker in its arguments.
func hostPID(t *testing.T, marker string) string {
	t.Helper()
	pid := ""
	testenv.Eventually(t, patience, "the process shows on the host", func() bool {
		entries, _ := os.ReadDir("/proc")
		for _, e := range entries {
			line, err := os.ReadFile("/proc/" + e.Name() + "/cmdline")
			if err == nil && strings.HasPrefix(string(line), "sleep\x00"+marker+"\x00") {
				pid = e.Name()
				return true
			}
		}
		return false
	})
	return pid
}

// marker is a number of seconds that no other test sleeps.
func marker(t *testing.T) string {
	return fmt.Sprintf("%d.%d", 100000+os.Getpid(), time.Now().UnixNano()%1e9)
}

// testOwnIDs looks from the host: what a sandbox reads in its own uid_map proves nothing.
func testOwnIDs(t *testing.T, h Harness) {
	b := startBox(t, h)
	m := marker(t)
	b.start(guestwire.StartProcess{Argv: []string{"sleep", m}})
	pid := hostPID(t, m)
	status, err := os.ReadFile("/proc/" + pid + "/status")
	if err != nil {
		t.Fatal(err)
	}
	a := b.inst.Applied()
	for line := range strings.Lines(string(status)) {
		key, rest, _ := strings.Cut(line, ":")
		if key != "Uid" && key != "Gid" {
			continue
		}
		for _, f := range strings.Fields(rest) {
			var n uint32
			if _, err := fmt.Sscan(f, &n); err != nil || n < a.HostUID || n >= a.HostUID+a.UIDCount {
				t.Errorf("%s of a process is %s on the host, outside %d+%d", key, f, a.HostUID, a.UIDCount)
			}
		}
	}
}

func testOwnNamespaces(t *testing.T, h Harness) {
	b := startBox(t, h)
	m := marker(t)
	b.start(guestwire.StartProcess{Argv: []string{"sleep", m}})
	pid := hostPID(t, m)
	for _, ns := range []string{"user", "mnt", "pid", "net", "ipc", "uts", "cgroup"} {
		mine, err := os.Readlink("/proc/self/ns/" + ns)
		if err != nil {
			t.Fatal(err)
		}
		theirs, err := os.Readlink("/proc/" + pid + "/ns/" + ns)
		if err != nil {
			t.Fatal(err)
		}
		if mine == theirs {
			t.Errorf("the sandbox shares the %s namespace of the server", ns)
		}
		if !slices.Contains(b.inst.Applied().Namespaces, ns) {
			t.Errorf("applied does not name the %s namespace: %v", ns, b.inst.Applied().Namespaces)
		}
	}
}

func testNothingInherited(t *testing.T, h Harness) {
	t.Setenv("CASEMATE_CONFORMANCE_SECRET", "must stay outside")
	b := startBox(t, h)
	if out := b.runScript("env; cat /proc/1/environ").stdout.String(); strings.Contains(out, "must stay outside") {
		t.Errorf("the server's environment shows inside:\n%s", out)
	}
	out := b.runScript("ls -l /proc/self/fd").stdout.String()
	if n := strings.Count(out, "->"); n > 4 {
		t.Errorf("a process has more than its three streams and the directory it lists:\n%s", out)
	}
}

func testFailsClosed(t *testing.T, h Harness) {
	b, layer := h.Lacking(t, isolation.Locked)
	spec := h.Spec(t, isolation.Locked)
	_, err := b.Start(limited(t), spec)
	if !errs.Is(err, errs.Unsupported) {
		t.Fatalf("start without %s: got %v, want Unsupported", layer, err)
	}
	if text, hint := errs.PublicText(err); !strings.Contains(text, layer) || hint == "" {
		t.Errorf("the error does not name the layer and a remedy: %q, %q", text, hint)
	}
	spec.AllowMissing = []string{layer}
	i, err := b.Start(limited(t), spec)
	if err != nil {
		t.Fatalf("start where %s may be missing: %v", layer, err)
	}
	defer destroy(t, i)
	if !slices.Contains(i.Applied().Missing, layer) {
		t.Errorf("applied does not say that %s is missing: %v", layer, i.Applied().Missing)
	}
}

func testCanceledStart(t *testing.T, h Harness) {
	ctx, cancel := context.WithCancel(limited(t))
	cancel()
	if i, err := h.Backend.Start(ctx, h.Spec(t, isolation.Locked)); err == nil {
		destroy(t, i)
		t.Error("a start whose context had ended went on")
	}
	if left := h.Leftovers(t); len(left) > 0 {
		t.Errorf("it left behind: %v", left)
	}
}

func testTwentyAtOnce(t *testing.T, h Harness) {
	specs := make([]isolation.Spec, 20)
	for i := range specs {
		specs[i] = h.Spec(t, isolation.Locked)
	}
	var group sync.WaitGroup
	for i, spec := range specs {
		group.Go(func() {
			inst, err := h.Backend.Start(limited(t), spec)
			if err != nil {
				t.Errorf("start %d: %v", i, err)
				return
			}
			defer destroy(t, inst)
			b := &box{t: t, inst: inst, client: guestwire.NewClient(inst.Dial)}
			if err := b.client.Claim(limited(t), guestwire.Claim{Sandbox: spec.ID, Hostname: fmt.Sprintf("box-%d", i)}); err != nil {
				t.Errorf("claim %d: %v", i, err)
				return
			}
			c := guestwire.NewClient(inst.Dial)
			info, err := c.Start(limited(t), guestwire.StartProcess{ID: "prc_x", Argv: sh("hostname")}, nil)
			if err != nil {
				t.Errorf("run %d: %v", i, err)
				return
			}
			if info, err = c.Wait(limited(t), info.ID); err != nil || info.Code != 0 {
				t.Errorf("run %d: %+v, %v", i, info, err)
			}
		})
	}
	group.Wait()
	if left := h.Leftovers(t); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func testDestroy(t *testing.T, h Harness) {
	b := startBox(t, h)
	b.prints("echo here", "here\n")
	select {
	case <-b.inst.Done():
		t.Fatal("Done is closed while the instance runs")
	default:
	}
	destroy(t, b.inst)
	select {
	case <-b.inst.Done():
	case <-time.After(patience):
		t.Fatal("Done stays open after Destroy")
	}
	if e := b.inst.Exit(); e.Reason != "destroyed" {
		t.Errorf("exit: got %+v", e)
	}
	destroy(t, b.inst) // idempotent
	if _, err := b.client.Status(limited(t)); err == nil {
		t.Error("the guest of a destroyed instance answers")
	}
	if left := h.Leftovers(t); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func testDestroyBusy(t *testing.T, h Harness) {
	b := startBox(t, h)
	b.startScript(`trap "" TERM; sleep 1000 & setsid sleep 1000 & sleep 1000`)
	b.startScript(`while true; do echo busy; done`)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	waiting := make(chan error, 1)
	r := b.startScript("sleep 1000")
	go func() {
		_, err := b.client.Wait(ctx, r.id)
		waiting <- err
	}()
	destroy(t, b.inst)
	select {
	case err := <-waiting:
		if err == nil {
			t.Error("waiting for a process of a destroyed instance gave no error")
		}
	case <-time.After(patience):
		t.Error("a call to the destroyed instance hangs")
	}
	if left := h.Leftovers(t); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func testDiesByItself(t *testing.T, h Harness) {
	b := startBox(t, h)
	b.startScript("sleep 1000")
	h.Kill(t, b.inst)
	select {
	case <-b.inst.Done():
	case <-time.After(patience):
		t.Fatal("nobody noticed that the guest died")
	}
	if e := b.inst.Exit(); e.Reason != "guest_killed" && e.Reason != "guest_exited" {
		t.Errorf("exit: got %+v", e)
	}
	destroy(t, b.inst)
	if left := h.Leftovers(t); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}
