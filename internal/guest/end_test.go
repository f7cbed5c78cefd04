package guest_test

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/testenv"
)

func TestTimeout(t *testing.T) {
	r := newRunner(t, setup{})
	tests := []struct {
		name, script   string
		timeout, grace int64
	}{
		{"plain", "echo begun; sleep 300", 200, 0},
		{"ignores SIGTERM", "trap '' TERM; while :; do sleep 0.05; done", 200, 300},
		{"descendants", "sleep 301 & sleep 302 & wait", 200, 0},
		{"setsid", "setsid sleep 303 & setsid sh -c 'trap \"\" TERM; sleep 304; sleep 305' & sleep 306", 200, 0},
		{"stopped", "kill -STOP $$; sleep 307", 200, 300},
		{"orphans", "(setsid sh -c 'sleep 308 & sleep 309' &) ; sleep 310", 200, 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			res := r.run(guestwire.StartProcess{
				Argv: []string{"sh", "-c", tt.script}, TimeoutMS: tt.timeout, GraceMS: tt.grace,
			})
			if res.info.End != guestwire.EndTimedOut || res.info.Code != 0 {
				t.Errorf("%+v", res.info)
			}
			testenv.Eventually(t, 2*time.Second, "nothing survives", func() bool {
				return strings.TrimSpace(string(r.sh("pgrep -x sleep || true").out)) == ""
			})
		})
	}
}

func TestCancel(t *testing.T) {
	r := newRunner(t, setup{})
	p := guestwire.StartProcess{ID: "c", Argv: []string{"sh", "-c", "trap '' TERM; setsid sleep 311 & sleep 312; sleep 313"}}
	if _, err := r.Start(t.Context(), p, nil); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 5*time.Second, "both sleep", func() bool {
		return len(strings.Fields(string(r.sh("pgrep -x sleep || true").out))) == 2
	})
	if err := r.Signal(t.Context(), guestwire.SignalRequest{ID: "c", Signal: 9, Tree: true}); err != nil {
		t.Fatal(err)
	}
	info, err := r.Wait(t.Context(), "c")
	if err != nil || info.End != guestwire.EndCanceled || info.Leftover != 0 {
		t.Fatalf("%+v, %v", info, err)
	}
	r.wantOut("pgrep -x sleep || true", "")
	if err := r.Signal(t.Context(), guestwire.SignalRequest{ID: "c", Signal: 15}); !errs.Is(err, errs.FailedPrecondition) {
		t.Fatalf("signal after the end: %v", err)
	}
	if err := r.Signal(t.Context(), guestwire.SignalRequest{ID: "c", Signal: 77}); !errs.Is(err, errs.InvalidArgument) {
		t.Fatalf("signal 77: %v", err)
	}
}

// TestLeftover lets a child keep the pipe open: the caller is not held up, the child lives on and is
// counted, what it prints later is there, and it can be ended.
func TestLeftover(t *testing.T) {
	r := newRunner(t, setup{})
	res := r.run(guestwire.StartProcess{ID: "l", Argv: []string{
		"sh", "-c",
		"(while [ ! -e /tmp/go ]; do sleep 0.02; done; echo late; sleep 314) & echo early",
	}})
	if string(res.out) != "early\n" || res.info.Leftover == 0 || !res.info.Complete {
		t.Fatalf("%q, %+v", res.out, res.info)
	}
	r.sh("touch /tmp/go")
	testenv.Eventually(t, 5*time.Second, "late output is there", func() bool {
		s, err := r.Output(t.Context(), guestwire.OutputRequest{ID: "l", Offset: res.info.Bytes})
		if err != nil {
			t.Fatal(err)
		}
		late, err := collect(s)
		return err == nil && string(late.out) == "late\n"
	})
	if err := r.Signal(t.Context(), guestwire.SignalRequest{ID: "l", Signal: 9, Tree: true}); err != nil {
		t.Fatal(err)
	}
	info, err := r.Get(t.Context(), "l")
	if err != nil || info.Leftover != 0 || info.End != guestwire.EndExited || info.Code != 0 {
		t.Fatalf("%+v, %v", info, err)
	}
	// One that prints for ever holds nobody up either.
	res = r.sh("yes & sleep 0.1")
	if !res.info.Complete {
		t.Fatalf("%+v", res.info)
	}
	r.sh("pkill -x yes")
	// And leftovers that end by themselves are noticed.
	r.sh("mkfifo /tmp/gate")
	res = r.run(guestwire.StartProcess{ID: "brief", Argv: []string{"sh", "-c", "cat /tmp/gate >/dev/null 2>&1 &"}})
	if res.info.Leftover != 1 {
		t.Fatalf("%+v", res.info)
	}
	r.sh("echo >/tmp/gate")
	testenv.Eventually(t, 5*time.Second, "leftover is gone", func() bool {
		info, err := r.Get(t.Context(), "brief")
		return err == nil && info.Leftover == 0
	})
}

func TestReaper(t *testing.T) {
	r := newRunner(t, setup{})
	res := r.sh("i=0; while [ $i -lt 2000 ]; do (sleep 0.01 &) ; i=$((i+1)); done; echo made")
	if string(res.out) != "made\n" {
		t.Fatalf("%q %q", res.out, res.err)
	}
	testenv.Eventually(t, 10*time.Second, "no zombie and no sleep is left", func() bool {
		return strings.TrimSpace(string(r.sh("ps -eo stat,comm | grep -E '^Z|sleep' || true").out)) == ""
	})
}

// TestReaperKeepsUp ends processes before their start has returned, many at once.
func TestReaperKeepsUp(t *testing.T) {
	r := newRunner(t, setup{})
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 60 {
				id := fmt.Sprintf("k%d-%d", g, i)
				_, s, err := r.Run(t.Context(), guestwire.RunProcess{
					Start:  guestwire.StartProcess{ID: id, Argv: []string{"/usr/bin/true"}},
					Output: guestwire.OutputRequest{Follow: true},
				}, nil)
				if err != nil {
					t.Error(err)
					return
				}
				if res, err := collect(s); err != nil || res.info.End != guestwire.EndExited || res.info.Code != 0 {
					t.Errorf("%+v, %v", res.info, err)
				}
			}
		})
	}
	wg.Wait()
}

// TestGuestSurvives sends to PID 1 what root inside can send (HARDENING 3).
func TestGuestSurvives(t *testing.T) {
	r := newRunner(t, setup{})
	root := func(script string) result {
		return r.run(guestwire.StartProcess{Argv: []string{"bash", "-c", script}, User: "root", Dir: "/"})
	}
	root("for s in $(seq 1 64); do kill -$s 1 2>/dev/null; done; true")
	root("kill -STOP 1; kill -9 1; true")
	// si_code other than SI_USER makes Go's runtime take the signal for its own fault.
	res := root(`python3 -c '
import ctypes, signal
libc = ctypes.CDLL(None, use_errno=True)
for s in list(range(1, 65)):
    for _ in range(3):
        libc.sigqueue(1, s, 7)
print("sent")'`)
	if string(res.out) != "sent\n" {
		t.Fatalf("%q %q", res.out, res.err)
	}
	res = root(`python3 -c '
import fcntl, os, signal
for s in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGTERM):
    r, w = os.pipe()
    fcntl.fcntl(r, fcntl.F_SETOWN, 1)
    fcntl.fcntl(r, 10, int(s))  # F_SETSIG
    fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    os.write(w, b"x")
print("sent")'`)
	if string(res.out) != "sent\n" {
		t.Fatalf("%q %q", res.out, res.err)
	}
	root("kill -9 -1")
	r.wantOut("echo alive", "alive\n")
	if st, err := r.Status(t.Context()); err != nil || st.Version != guestwire.Version {
		t.Fatalf("%+v, %v", st, err)
	}
}

func TestListAndForget(t *testing.T) {
	r := newRunner(t, setup{})
	for _, id := range []string{"a", "b"} {
		r.run(guestwire.StartProcess{ID: id, Argv: []string{"echo", id}})
	}
	if _, err := r.Start(t.Context(), guestwire.StartProcess{ID: "c", Argv: []string{"sleep", "315"}}, nil); err != nil {
		t.Fatal(err)
	}
	list, err := r.List(t.Context())
	if err != nil || len(list) != 3 || list[0].ID != "a" || list[2].End != guestwire.EndNone {
		t.Fatalf("%+v, %v", list, err)
	}
	if err := r.Forget(t.Context(), "c"); !errs.Is(err, errs.FailedPrecondition) {
		t.Fatalf("forget a running one: %v", err)
	}
	if err := r.Forget(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Get(t.Context(), "a"); !errs.Is(err, errs.NotFound) {
		t.Fatalf("get a forgotten one: %v", err)
	}
}

// TestRetention starts more than are kept: the oldest go, descriptors and memory do not grow.
func TestRetention(t *testing.T) {
	r := newRunner(t, setup{})
	var before guestwire.Status
	for i := range guestwire.MaxKept + 100 {
		if _, err := r.Start(t.Context(), guestwire.StartProcess{ID: fmt.Sprint("r", i), Argv: []string{"/usr/bin/true"}}, nil); err != nil {
			t.Fatal(err)
		}
		if _, err := r.Wait(t.Context(), fmt.Sprint("r", i)); err != nil {
			t.Fatal(err)
		}
		if i == 10 {
			before, _ = r.Status(t.Context())
		}
	}
	after, err := r.Status(t.Context())
	if err != nil || after.Processes > guestwire.MaxKept+1 || after.Open > before.Open+8 {
		t.Fatalf("before %+v, after %+v, %v", before, after, err)
	}
	if _, err := r.Get(t.Context(), "r0"); !errs.Is(err, errs.NotFound) {
		t.Fatalf("the oldest: %v", err)
	}
	if info, err := r.Get(t.Context(), fmt.Sprint("r", guestwire.MaxKept+99)); err != nil || info.End != guestwire.EndExited {
		t.Fatalf("the youngest: %+v, %v", info, err)
	}
}

func TestSync(t *testing.T) {
	r := newRunner(t, setup{})
	if err := r.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// TestIdleMemory has a guest work and then rest: what it holds by itself is what every idle sandbox
// costs.
func TestIdleMemory(t *testing.T) {
	c, pid := startPID(t, setup{})
	r := &runner{t: t, Client: c}
	for range 50 {
		r.sh("head -c 3000000 /dev/zero")
	}
	list, err := r.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range list {
		if err := r.Forget(t.Context(), p.ID); err != nil {
			t.Fatal(err)
		}
	}
	testenv.Eventually(t, 15*time.Second, "memory below 4 MB", func() bool {
		kb := anonymousKB(t, pid)
		t.Log(kb, "KB")
		return kb < 4<<10
	})
}

func anonymousKB(t *testing.T, pid int) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		t.Fatal(err)
	}
	sum := 0
	for line := range strings.SplitSeq(string(b), "\n") {
		var kb int
		if n, _ := fmt.Sscanf(line, "Pss_Anon: %d kB", &kb); n == 1 {
			sum += kb
		}
	}
	return sum
}
