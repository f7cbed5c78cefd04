package conformance

import (
	"syscall"
	"testing"
	"time"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/testenv"
)

func treeCases() []testCase {
	return []testCase{
		{name: "timeout", run: testTimeout},
		{name: "timeout takes the whole tree", run: testTimeoutTree},
		{name: "kill takes the whole tree", run: testKillTree},
		{name: "kill takes daemons", needs: []Feature{Proc}, run: testKillDaemon},
		{name: "scope kills from outside", run: testScopeKill},
		{name: "children hold nobody up", run: testChildrenHoldNobodyUp},
		{name: "what is left is counted", run: testLeftIsCounted},
		{name: "freeze", needs: []Feature{AnswersFrozen}, run: testFreeze},
		{name: "frozen time", needs: []Feature{CPUTime}, run: testFrozenTime},
		{name: "kill while frozen", run: testKillFrozen},
	}
}

func testTimeout(t *testing.T, h Harness) {
	b := startBox(t, h)
	var tr *transcript
	for limit := 200 * time.Millisecond; ; limit *= 4 {
		begun := time.Now()
		tr = b.run(guestwire.StartProcess{Argv: sh("echo begun; sleep 1000"), TimeoutMS: limit.Milliseconds(), GraceMS: patience.Milliseconds()})
		if took := time.Since(begun); took < limit*3/4 || took > patience {
			t.Errorf("a timeout of %v took %v", limit, took)
		}
		if tr.info.End != guestwire.EndTimedOut || tr.stdout.Len() > 0 || limit > patience/4 {
			break
		} // else the machine is busy, and the shell had not come to its first command
	}
	if tr.info.End != guestwire.EndTimedOut || tr.stdout.String() != "begun\n" {
		t.Errorf("got %s, %q", tr.info.End, tr.stdout.String())
	}
	begun := time.Now()
	tr = b.run(guestwire.StartProcess{Argv: sh(`trap "" TERM; sleep 1000`), TimeoutMS: 100, GraceMS: 300})
	if tr.info.End != guestwire.EndTimedOut {
		t.Errorf("a process that ignores SIGTERM: got %s", tr.info.End)
	}
	if took := time.Since(begun); took > patience/2 {
		t.Errorf("a process that ignores SIGTERM lived for %v", took)
	}
}

// family leaves children in every way there is: in the background, in a session of their own, and
// as orphans.
const family = `trap "" TERM; sleep 1000 & setsid sleep 1000 & (sleep 1000 &) ; echo up; sleep 1000`

func testTimeoutTree(t *testing.T, h Harness) {
	b := startBox(t, h)
	for limit := 500 * time.Millisecond; ; limit *= 4 {
		r := b.start(guestwire.StartProcess{Argv: sh(family), TimeoutMS: limit.Milliseconds(), GraceMS: 200})
		if info := r.wait(); info.End != guestwire.EndTimedOut {
			t.Errorf("got %s", info.End)
		}
		r.wantEmpty()
		if r.said("up") {
			return
		}
		if limit > patience/4 { // else the machine is busy, and the family was not complete
			t.Fatalf("nothing is up after %v", limit)
		}
	}
}

func testKillTree(t *testing.T, h Harness) {
	b := startBox(t, h)
	r, other := b.startScript(family), b.startScript("sleep 1000")
	r.until("up")
	if r.empty() {
		t.Error("the scope of a running tree is empty")
	}
	if err := b.client.Signal(limited(t), guestwire.SignalRequest{ID: r.id, Signal: int(syscall.SIGKILL), Tree: true}); err != nil {
		t.Fatal(err)
	}
	if info := r.wait(); info.End != guestwire.EndCanceled {
		t.Errorf("got %s", info.End)
	}
	r.wantEmpty()
	if info, err := b.client.Get(limited(t), other.id); err != nil || info.End != guestwire.EndNone {
		t.Errorf("another process of the sandbox was hit: %+v, %v", info, err)
	}
}

// testKillDaemon looks at all processes of the sandbox: what a tree does not know of, it would call none.
func testKillDaemon(t *testing.T, h Harness) {
	b := startBox(t, h)
	daemons := func() string {
		const count = `for p in /proc/[0-9]*; do tr '\0' ' ' 2>/dev/null <$p/cmdline; echo; done | grep -c '^sleep 1001 $'`
		return b.run(guestwire.StartProcess{Argv: sh(count)}).stdout.String()
	}
	r := b.startScript("(env -i PATH=/usr/bin:/bin setsid sleep 1001 &); sleep 1000") // the environment has no mark of its tree
	testenv.Eventually(t, patience, "the daemon is there", func() bool { return daemons() == "1\n" })
	if err := b.client.Signal(limited(t), guestwire.SignalRequest{ID: r.id, Signal: int(syscall.SIGKILL), Tree: true}); err != nil {
		t.Fatal(err)
	}
	r.wait()
	r.wantEmpty()
	if n := daemons(); n != "0\n" {
		t.Errorf("%q daemons of a killed tree live on", n)
	}
}

func testScopeKill(t *testing.T, h Harness) {
	b := startBox(t, h)
	r := b.startScript(family)
	r.until("up")
	if err := r.scope.Kill(limited(t)); err != nil {
		t.Fatal(err)
	}
	if info := r.wait(); info.End != guestwire.EndSignaled && info.End != guestwire.EndCanceled {
		t.Errorf("got %s", info.End)
	}
	r.wantEmpty()
	if err := r.scope.Kill(limited(t)); err != nil {
		t.Errorf("a second kill: %v", err)
	}
	if err := r.scope.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
}

// testChildrenHoldNobodyUp leaves a child that keeps the output open.
func testChildrenHoldNobodyUp(t *testing.T, h Harness) {
	b := startBox(t, h)
	begun := time.Now()
	r := b.startScript("sleep 1000 & echo done")
	info := r.wait()
	ended(t, "the first process", info, guestwire.EndExited, 0, 0)
	if took := time.Since(begun); took > patience/2 {
		t.Errorf("waiting took %v", took)
	}
	if tr := r.output(guestwire.OutputRequest{Follow: true}); tr.stdout.String() != "done\n" || !tr.info.Complete || tr.info.Leftover < 1 {
		t.Errorf("got %q, complete %v, %d left over", tr.stdout.String(), tr.info.Complete, tr.info.Leftover)
	}
	if r.empty() {
		t.Error("the child is gone, though nobody ended it")
	}
	if err := b.client.Signal(limited(t), guestwire.SignalRequest{ID: r.id, Signal: int(syscall.SIGKILL), Tree: true}); err != nil {
		t.Errorf("kill what is left over: %v", err)
	}
	r.wantEmpty()
}

// testLeftIsCounted leaves children that hold nothing of the call, so that it is answered at once. Its answer
// tells of them all the same: whoever took their scope for empty would give it to another process, whose end
// would be theirs.
func testLeftIsCounted(t *testing.T, h Harness) {
	b := startBox(t, h)
	for i := range 20 {
		if tr := b.runScript("sleep 1000 >/dev/null 2>&1 &"); tr.info.Leftover != 1 {
			t.Fatalf("call %d: %s, %d left over, want 1", i, tr.info.End, tr.info.Leftover)
		}
	}
}

const ticker = `while true; do echo tick; sleep 0.01; done`

func testFreeze(t *testing.T, h Harness) {
	b := startBox(t, h)
	r := b.startScript(ticker)
	r.until("tick")
	for range 2 { // idempotent
		if err := b.inst.Freeze(limited(t)); err != nil {
			t.Fatal(err)
		}
	}
	bytes := func() int64 {
		info, err := b.client.Get(limited(t), r.id)
		if err != nil {
			t.Fatalf("the guest of a frozen instance does not answer: %v", err)
		}
		return info.Bytes
	}
	// What was on its way into the guest's buffer may still arrive.
	quiet := bytes()
	for settled := time.Now(); time.Since(settled) < 200*time.Millisecond; {
		if now := bytes(); now != quiet {
			if now > quiet+4096 {
				t.Fatalf("a frozen process goes on printing: %d bytes, then %d", quiet, now)
			}
			quiet, settled = now, time.Now()
		}
	}
	for range 2 {
		if err := b.inst.Thaw(limited(t)); err != nil {
			t.Fatal(err)
		}
	}
	waitFor(t, "the thawed process goes on", func() bool { return bytes() > quiet })
}

// testFrozenTime looks from outside: a frozen instance uses no processor time, and goes on where it was.
func testFrozenTime(t *testing.T, h Harness) {
	b := startBox(t, h)
	r := b.startScript("i=0; while true; do i=$((i+1)); [ $((i % 5000)) = 0 ] && echo $i; done")
	r.until("5000")
	if err := b.inst.Freeze(limited(t)); err != nil {
		t.Fatal(err)
	}
	const frozen = time.Second
	before := b.usage().CPU
	<-time.After(frozen)
	if after := b.usage().CPU; after-before > frozen/4 {
		t.Errorf("a frozen instance used %v of processor time in %v", after-before, frozen)
	}
	if err := b.inst.Thaw(limited(t)); err != nil {
		t.Fatal(err)
	}
	bytes := func() int64 {
		info, err := b.client.Get(limited(t), r.id)
		if err != nil {
			t.Fatalf("get: %v", err)
		}
		return info.Bytes
	}
	thawed := bytes()
	waitFor(t, "the thawed process goes on", func() bool { return bytes() > thawed })
}

func testKillFrozen(t *testing.T, h Harness) {
	b := startBox(t, h)
	r := b.startScript(ticker)
	r.until("tick")
	if err := b.inst.Freeze(limited(t)); err != nil {
		t.Fatal(err)
	}
	destroy(t, b.inst)
	if left := h.Leftovers(t); len(left) > 0 {
		t.Errorf("a frozen instance left behind: %v", left)
	}
}
