package conformance

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
)

func restartCases() []testCase {
	return []testCase{
		{name: "adopt", run: testAdopt},
		{name: "adopt while frozen", run: testAdoptFrozen},
		{name: "adopt what is gone", run: testAdoptGone},
		{name: "adopted instance dies", run: testAdoptedDies},
		{name: "sweep", run: testSweep},
	}
}

func adopt(t *testing.T, b isolation.Backend, record json.RawMessage) *box {
	t.Helper()
	i, err := b.Adopt(limited(t), record)
	if err != nil {
		t.Fatalf("adopt: %v", err)
	}
	t.Cleanup(func() { destroy(t, i) })
	return &box{t: t, inst: i, client: guestwire.NewClient(i.Dial)}
}

// testAdopt takes up an instance as a restarted server does: its processes went on, and nothing
// that they printed meanwhile is lost.
func testAdopt(t *testing.T, h Harness) {
	before := startBox(t, h)
	r := before.startScript(`i=0; while [ $i -lt 300 ]; do echo "line $i"; i=$((i+1)); sleep 0.005; done; exit 4`)
	keeps := before.startScript(family)
	keeps.until("up")
	r.until("line 3\n")
	record := before.inst.Record()
	applied := before.inst.Applied()
	if err := h.Backend.Close(); err != nil {
		t.Fatalf("close: %v", err)
	}

	after := adopt(t, h.Reopen(t), record)
	if after.inst.ID() != before.inst.ID() || string(after.inst.Record()) != string(record) {
		t.Errorf("id and record changed: %s, %s", after.inst.ID(), after.inst.Record())
	}
	if a := after.inst.Applied(); fmt.Sprint(a) != fmt.Sprint(applied) {
		t.Errorf("applied changed:\n%+v\n%+v", applied, a)
	}
	r.box = after
	ended(t, "a process that lived through the restart", r.wait(), guestwire.EndExited, 4, 0)
	var want strings.Builder
	for i := range 300 {
		fmt.Fprintf(&want, "line %d\n", i)
	}
	if got := r.output(guestwire.OutputRequest{Follow: true}).stdout.String(); got != want.String() {
		t.Errorf("its output has %d bytes, want %d", len(got), want.Len())
	}
	after.prints("echo new", "new\n")

	scope, err := after.inst.OpenScope(keeps.id)
	if err != nil {
		t.Fatalf("open scope: %v", err)
	}
	keeps.scope, keeps.box = scope, after
	if keeps.empty() {
		t.Error("the reopened scope of a running tree is empty")
	}
	if err := scope.Kill(limited(t)); err != nil {
		t.Errorf("kill through the reopened scope: %v", err)
	}
	keeps.wantEmpty()
	if err := scope.Close(); err != nil {
		t.Errorf("close the reopened scope: %v", err)
	}
}

// testAdoptFrozen takes up an instance that was frozen when its server ended: it is known as frozen, so that it tells
// its usage, freezing it again changes nothing, and one thaw lets it go on.
func testAdoptFrozen(t *testing.T, h Harness) {
	before := startBox(t, h)
	r := before.startScript(ticker)
	r.until("tick")
	if err := before.inst.Freeze(limited(t)); err != nil {
		t.Fatal(err)
	}
	record := before.inst.Record()
	if err := h.Backend.Close(); err != nil {
		t.Fatalf("close: %v", err)
	}
	after := adopt(t, h.Reopen(t), record)
	after.usage()
	if err := after.inst.Freeze(limited(t)); err != nil {
		t.Fatalf("freeze again: %v", err)
	}
	if err := after.inst.Thaw(limited(t)); err != nil {
		t.Fatal(err)
	}
	r.box = after
	bytes := func() int64 {
		info, err := after.client.Get(limited(t), r.id)
		if err != nil {
			t.Fatalf("get: %v", err)
		}
		return info.Bytes
	}
	thawed := bytes()
	waitFor(t, "the thawed process goes on", func() bool { return bytes() > thawed })
	if err := after.inst.Thaw(limited(t)); err != nil {
		t.Errorf("thaw again: %v", err)
	}
	after.prints("echo new", "new\n")
}

func testAdoptGone(t *testing.T, h Harness) {
	b := startBox(t, h)
	record := b.inst.Record()
	destroy(t, b.inst)
	_, err := h.Reopen(t).Adopt(limited(t), record)
	wantKind(t, "adopt a destroyed instance", err, errs.NotFound)
	_, err = h.Backend.Adopt(limited(t), json.RawMessage(`"nonsense"`))
	wantKind(t, "adopt nonsense", err, errs.NotFound, errs.InvalidArgument)
}

func testAdoptedDies(t *testing.T, h Harness) {
	b := adopt(t, h.Reopen(t), startBox(t, h).inst.Record())
	h.Kill(t, b.inst)
	select {
	case <-b.inst.Done():
	case <-time.After(patience):
		t.Fatal("nobody noticed that the adopted guest died")
	}
	destroy(t, b.inst)
	if left := h.Leftovers(t); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// testSweep removes what a server does not know: it was started by one that died before it could
// write it down.
func testSweep(t *testing.T, h Harness) {
	kept, lost := startBox(t, h), startBox(t, h)
	lost.startScript(family)
	next := h.Reopen(t)
	removed, err := next.Sweep(limited(t), map[string]bool{kept.inst.ID(): true})
	if err != nil {
		t.Fatalf("sweep: %v", err)
	}
	if !strings.Contains(strings.Join(removed, "\n"), lost.inst.ID()) {
		t.Errorf("what was removed does not name %s: %q", lost.inst.ID(), removed)
	}
	_, err = next.Adopt(limited(t), lost.inst.Record())
	wantKind(t, "adopt a swept instance", err, errs.NotFound)
	kept.prints("echo untouched", "untouched\n")
	if removed, err = next.Sweep(limited(t), map[string]bool{kept.inst.ID(): true}); err != nil || len(removed) > 0 {
		t.Errorf("a second sweep removed %q, %v", removed, err)
	}
	destroy(t, kept.inst)
	destroy(t, lost.inst)
	if left := h.Leftovers(t); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}
