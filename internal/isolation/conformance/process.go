package conformance

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
)

func processCases() []testCase {
	return []testCase{
		{name: "ends", run: testEnds},
		{name: "refused starts", run: testRefusedStarts},
		{name: "environment", run: testEnvironment},
		{name: "working directory", run: testWorkingDirectory},
		{name: "user locked", run: testUserLocked},
		{name: "user standard", needs: []Feature{Standard}, run: testUserStandard},
		{name: "same id attaches", run: testSameID},
		{name: "list and forget", run: testListAndForget},
		{name: "many at once", run: testManyAtOnce},
		{name: "orphans are reaped", needs: []Feature{Kernel}, run: testOrphansReaped},
	}
}

func testEnds(t *testing.T, h Harness) {
	b := startBox(t, h)
	for _, tt := range []struct {
		script string
		end    guestwire.End
		code   int
		signal int
	}{
		{"exit 0", guestwire.EndExited, 0, 0},
		{"exit 7", guestwire.EndExited, 7, 0},
		{"exit 255", guestwire.EndExited, 255, 0},
		{"false", guestwire.EndExited, 1, 0},
		{"kill -9 $$; sleep 10", guestwire.EndSignaled, 0, 9},
		{"kill -15 $$; sleep 10", guestwire.EndSignaled, 0, 15},
	} {
		tr := b.runScript(tt.script)
		ended(t, tt.script, tr.info, tt.end, tt.code, tt.signal)
		if tr.info.Ended < tr.info.Started || tr.info.Started == 0 || !tr.info.Complete {
			t.Errorf("%s: started %d, ended %d, complete %v", tt.script, tr.info.Started, tr.info.Ended, tr.info.Complete)
		}
	}
	// exec, since a shell that waits for a child catches the signal and goes on waiting.
	r := b.startScript("exec sleep 1000")
	if err := b.client.Signal(limited(t), guestwire.SignalRequest{ID: r.id, Signal: 2}); err != nil {
		t.Fatal(err)
	}
	ended(t, "interrupted from outside", r.wait(), guestwire.EndSignaled, 0, 2)
}

func testRefusedStarts(t *testing.T, h Harness) {
	b := startBox(t, h)
	for _, tt := range []struct {
		name  string
		start guestwire.StartProcess
		kinds []errs.Kind
	}{
		{"no argv", guestwire.StartProcess{}, []errs.Kind{errs.InvalidArgument}},
		{"no such program", guestwire.StartProcess{Argv: []string{"no-such-program"}}, []errs.Kind{errs.NotFound}},
		{"no such path", guestwire.StartProcess{Argv: []string{"/no/such/program"}}, []errs.Kind{errs.NotFound}},
		{"no such directory", guestwire.StartProcess{Argv: []string{"true"}, Dir: "/no/such/directory"}, []errs.Kind{errs.NotFound}},
		{"no such user", guestwire.StartProcess{Argv: []string{"true"}, User: "nobody-of-that-name"}, []errs.Kind{errs.NotFound, errs.InvalidArgument}},
	} {
		_, err := b.tryStart(tt.start)
		wantKind(t, tt.name, err, tt.kinds...)
	}
	_, err := b.client.Get(limited(t), "prc_never")
	wantKind(t, "an unknown process", err, errs.NotFound)
	b.prints("echo fine", "fine\n")
}

func testEnvironment(t *testing.T, h Harness) {
	b := startBox(t, h)
	tr := b.run(guestwire.StartProcess{
		Argv: sh(`echo "$FROM_CLAIM $BOTH $FROM_CALL $HOME"`),
		Env:  map[string]string{"FROM_CALL": "two words", "BOTH": "call"},
	})
	if got, want := tr.stdout.String(), "claim call two words /home/user\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if out := b.runScript("env").stdout.String(); !strings.Contains(out, "PATH=") || strings.Contains(out, "FROM_CALL") {
		t.Errorf("env:\n%s", out)
	}
}

func testWorkingDirectory(t *testing.T, h Harness) {
	b := startBox(t, h)
	b.prints("pwd", "/home/user\n")
	if tr := b.run(guestwire.StartProcess{Argv: []string{"pwd"}, Dir: "/tmp"}); tr.stdout.String() != "/tmp\n" {
		t.Errorf("in /tmp: got %q", tr.stdout.String())
	}
}

// testUserLocked wants one unprivileged user and no way to be asked into another.
func testUserLocked(t *testing.T, h Harness) {
	b := startBox(t, h)
	b.prints("id -u", "1000\n")
	for _, who := range []string{"root", "0"} {
		if r, err := b.tryStart(guestwire.StartProcess{Argv: []string{"id", "-u"}, User: who}); err == nil {
			r.wait()
			t.Errorf("profile locked ran a process as %s: %q", who, r.output(guestwire.OutputRequest{Follow: true}).all.String())
		}
	}
}

func testUserStandard(t *testing.T, h Harness) {
	b := startProfile(t, h, isolation.Standard)
	for _, tt := range []struct{ user, want string }{{"", "1000\n"}, {"root", "0\n"}, {"0", "0\n"}, {"user", "1000\n"}} {
		if tr := b.run(guestwire.StartProcess{Argv: []string{"id", "-u"}, User: tt.user}); tr.stdout.String() != tt.want {
			t.Errorf("user %q: got %q, want %q; %s", tt.user, tr.stdout.String(), tt.want, tr.stderr.String())
		}
	}
}

// testSameID starts one id from many sides at once: a caller that lost an answer asks again.
func testSameID(t *testing.T, h Harness) {
	b := startBox(t, h)
	const callers = 8
	var group sync.WaitGroup
	fresh := make(chan bool, callers)
	for range callers {
		group.Go(func() {
			info, err := b.client.Start(limited(t), guestwire.StartProcess{ID: "prc_same", Argv: sh("echo once; sleep 1000")}, nil)
			if err != nil {
				t.Errorf("start: %v", err)
				return
			}
			if !info.Attached {
				fresh <- true
			}
		})
	}
	group.Wait()
	if len(fresh) != 1 {
		t.Errorf("%d of %d callers started the process, want 1", len(fresh), callers)
	}
	all, err := b.client.List(limited(t))
	if err != nil || len(all) != 1 {
		t.Errorf("list: %+v, %v", all, err)
	}
}

func testListAndForget(t *testing.T, h Harness) {
	b := startBox(t, h)
	done, busy := b.startScript("exit 3"), b.startScript("sleep 1000")
	done.wait()
	all, err := b.client.List(limited(t))
	if err != nil || len(all) != 2 || all[0].ID != done.id || all[1].ID != busy.id {
		t.Fatalf("list: %+v, %v", all, err)
	}
	wantKind(t, "forget a running process", b.client.Forget(limited(t), busy.id), errs.FailedPrecondition)
	if err := b.client.Forget(limited(t), done.id); err != nil {
		t.Errorf("forget: %v", err)
	}
	_, err = b.client.Get(limited(t), done.id)
	wantKind(t, "a forgotten process", err, errs.NotFound)
}

func testManyAtOnce(t *testing.T, h Harness) {
	b := startBox(t, h)
	const n = 40
	all := make([]*running, n)
	for i := range all {
		all[i] = b.startScript(fmt.Sprintf("echo %d; exit %d", i, i))
	}
	for i, r := range all {
		ended(t, fmt.Sprintf("process %d", i), r.wait(), guestwire.EndExited, i, 0)
		if got := r.output(guestwire.OutputRequest{}).stdout.String(); got != fmt.Sprintf("%d\n", i) {
			t.Errorf("process %d printed %q", i, got)
		}
	}
}

// testOrphansReaped leaves many children without a parent; the first process must wait for them.
func testOrphansReaped(t *testing.T, h Harness) {
	b := startBox(t, h)
	b.prints("for i in $(seq 100); do (true &); done; echo left", "left\n")
	deadline := time.Now().Add(patience)
	for {
		out := b.runScript(`grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l`).stdout.String()
		if strings.TrimSpace(out) == "0" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("zombies stay: %s", out)
		}
	}
}
