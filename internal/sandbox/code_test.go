package sandbox

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/testenv"
)

// heard is a CodeSink that keeps what it is told.
type heard struct {
	mu      sync.Mutex
	started CodeRun
	text    strings.Builder
	items   []CodeItem
	began   chan struct{}
	once    sync.Once
}

func newHeard() *heard { return &heard{began: make(chan struct{})} }

// Started implements CodeSink.
func (h *heard) Started(r CodeRun) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.started = r
	h.once.Do(func() { close(h.began) })
	return nil
}

// Item implements CodeSink.
func (h *heard) Item(i CodeItem) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.text.Write(i.Text)
	i.Text = nil
	h.items = append(h.items, i)
	return nil
}

// Gap implements CodeSink.
func (h *heard) Gap(Gap) error { return nil }

// value is the text of the last result.
func (h *heard) value() string {
	for _, i := range slices.Backward(h.items) {
		if i.Result != nil {
			var text string
			_ = json.Unmarshal(i.Result.Data["text/plain"], &text)
			return text
		}
	}
	return ""
}

func (s *server) code(id string, spec CodeSpec) (CodeRun, *heard) {
	s.w.t.Helper()
	h := newHeard()
	r, err := s.RunCode(s.w.t.Context(), alice, id, spec, "", h)
	if err != nil {
		s.w.t.Fatalf("run %q: %v", spec.Code, err)
	}
	return r, h
}

func TestCodeKeepsVariables(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{})
	r, _ := s.code(sb.ID, CodeSpec{Code: "set x 41"})
	if r.End != RunCompleted || r.ContextID != "python" {
		t.Fatalf("run %+v", r)
	}
	if _, h := s.code(sb.ID, CodeSpec{Code: "get x", Context: "python"}); h.value() != "41" {
		t.Errorf("x is %q", h.value())
	}
	other, err := s.CreateContext(t.Context(), alice, sb.ID, CodeContextSpec{ID: "other"})
	if err != nil || other.Language != "python" || other.State != guestwire.ContextIdle {
		t.Fatalf("context %+v, %v", other, err)
	}
	r, h := s.code(sb.ID, CodeSpec{Code: "get x", Context: "other"})
	if r.End != RunFailed || r.ErrorName != "NameError" || len(h.items) != 1 || h.items[0].Error == nil {
		t.Errorf("another context's x: %+v", r)
	}
	again, err := s.CreateContext(t.Context(), alice, sb.ID, CodeContextSpec{ID: "other"})
	if err != nil || !again.Attached || !again.CreatedAt.Equal(other.CreatedAt) {
		t.Errorf("again: %+v, %v", again, err)
	}
	all, err := s.ListContexts(t.Context(), alice, sb.ID)
	if err != nil || len(all) != 2 || all[0].ID != "python" || all[0].Runs != 2 {
		t.Errorf("list: %+v, %v", all, err)
	}
}

func TestCodeRefusals(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{})
	ctx := t.Context()
	run := func(spec CodeSpec) error {
		_, err := s.RunCode(ctx, alice, sb.ID, spec, "", newHeard())
		return err
	}
	wantKind(t, "no such context", run(CodeSpec{Context: "nope", Code: "1+1"}), errs.NotFound)
	wantKind(t, "no such language", run(CodeSpec{Language: "cobol", Code: "1+1"}), errs.InvalidArgument)
	wantKind(t, "malformed context", run(CodeSpec{Context: "a/b", Code: "1+1"}), errs.InvalidArgument)
	wantKind(t, "malformed run", run(CodeSpec{ID: "a b", Code: "1+1"}), errs.InvalidArgument)
	wantKind(t, "too much code", run(CodeSpec{Code: strings.Repeat("x", guestwire.MaxCode+1)}), errs.InvalidArgument)
	wantKind(t, "code that is no text", run(CodeSpec{Code: "\xff"}), errs.InvalidArgument)
	wantKind(t, "malformed variable", run(CodeSpec{Code: "1", Env: map[string]string{"a=b": ""}}), errs.InvalidArgument)
	wantKind(t, "negative timeout", run(CodeSpec{Code: "1", Timeout: -1}), errs.InvalidArgument)
	_, err := s.RunCode(ctx, bob, sb.ID, CodeSpec{Code: "1+1"}, "", newHeard())
	wantKind(t, "another's sandbox", err, errs.NotFound)
	_, err = s.ListContexts(ctx, bob, sb.ID)
	wantKind(t, "another's contexts", err, errs.NotFound)
	wantKind(t, "another's delete", s.DeleteContext(ctx, bob, sb.ID, "python"), errs.NotFound)
	for i := range guestwire.MaxContexts {
		if _, err := s.CreateContext(ctx, alice, sb.ID, CodeContextSpec{ID: fmt.Sprint("c", i)}); err != nil {
			t.Fatal(err)
		}
	}
	_, err = s.CreateContext(ctx, alice, sb.ID, CodeContextSpec{ID: "one-more"})
	wantKind(t, "too many contexts", err, errs.ResourceExhausted)
}

func TestCodeInterruptAndTimeout(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{})
	s.code(sb.ID, CodeSpec{Code: "set x 1"})
	h, ended := newHeard(), make(chan CodeRun, 1)
	go func() {
		r, _ := s.RunCode(t.Context(), alice, sb.ID, CodeSpec{ID: "long", Code: "sleep 60000"}, "", h)
		ended <- r
	}()
	testenv.Receive(t, "the run begins", h.began)
	if hit, err := s.InterruptContext(t.Context(), alice, sb.ID, "python", ""); err != nil || hit != "long" {
		t.Fatalf("interrupt: %q, %v", hit, err)
	}
	if r := testenv.Receive(t, "the run ends", ended); r.End != RunInterrupted {
		t.Errorf("end %+v", r)
	}
	if r, _ := s.code(sb.ID, CodeSpec{Code: "sleep 60000", Timeout: 20e6}); r.End != RunTimedOut {
		t.Errorf("end %+v", r)
	}
	if _, h := s.code(sb.ID, CodeSpec{Code: "get x"}); h.value() != "1" {
		t.Errorf("x is %q", h.value())
	}
	if hit, err := s.InterruptContext(t.Context(), alice, sb.ID, "python", ""); err != nil || hit != "" {
		t.Errorf("interrupt of nothing: %q, %v", hit, err)
	}
}

func TestCodeInterpreterEnds(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{})
	ctx := t.Context()
	r, _ := s.code(sb.ID, CodeSpec{Code: "set x 1\nprint last\ndie 11"})
	if r.End != RunDriverEnded || r.Driver != EndSignaled || r.Signal != 11 {
		t.Errorf("run %+v", r)
	}
	_, err := s.RunCode(ctx, alice, sb.ID, CodeSpec{Code: "1+1"}, "", newHeard())
	wantKind(t, "run without an interpreter", err, errs.FailedPrecondition)
	if c, err := s.GetContext(ctx, alice, sb.ID, "python"); err != nil || c.State != guestwire.ContextEnded || c.End != EndSignaled || c.Signal != 11 {
		t.Errorf("context %+v, %v", c, err)
	}
	if c, err := s.RestartContext(ctx, alice, sb.ID, "python"); err != nil || c.Starts != 2 || c.State != guestwire.ContextIdle {
		t.Fatalf("restart: %+v, %v", c, err)
	}
	if r, _ := s.code(sb.ID, CodeSpec{Code: "get x"}); r.ErrorName != "NameError" {
		t.Errorf("x after a restart: %+v", r)
	}
	// What ran when the context goes is canceled.
	h, ended := newHeard(), make(chan CodeRun, 1)
	go func() {
		r, _ := s.RunCode(ctx, alice, sb.ID, CodeSpec{Code: "stubborn"}, "", h)
		ended <- r
	}()
	testenv.Receive(t, "the run begins", h.began)
	if err := s.DeleteContext(ctx, alice, sb.ID, "python"); err != nil {
		t.Fatal(err)
	}
	if r := testenv.Receive(t, "the run ends", ended); r.End != RunCanceled {
		t.Errorf("end %+v", r)
	}
	testenv.Eventually(t, soon, "the ends are recorded", func() bool {
		n := 0
		for _, typ := range s.history(sb.ID) {
			if typ == journal.ContextEnded {
				n++
			}
		}
		return n == 2
	})
}

func TestCodeJournal(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{})
	s.code(sb.ID, CodeSpec{ID: "r1", Code: "print my-secret-value\nraise Oops it", Env: map[string]string{"TOKEN": "hidden"}})
	events, err := s.Events(t.Context(), alice, sb.ID, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	var types []journal.Type
	for _, e := range events {
		text, _ := json.Marshal(e)
		if strings.Contains(string(text), "my-secret-value") || strings.Contains(string(text), "hidden") {
			t.Errorf("the journal holds what the code does: %s", text)
		}
		switch types = append(types, e.Type); e.Type {
		case journal.RunStarted:
			var f runFacts
			if err := json.Unmarshal(e.Facts[journal.Server], &f); err != nil || f.Run != "r1" || !slices.Equal(f.Env, []string{"TOKEN"}) {
				t.Errorf("facts %+v, %v", f, err)
			}
			if len(e.Bodies) != 1 || e.Bodies[0].Name != "code" || e.Bodies[0].Size != 35 {
				t.Errorf("bodies %+v", e.Bodies)
			}
		case journal.RunEnded:
			var f runSaidFacts
			if err := json.Unmarshal(e.Facts[journal.Guest], &f); err != nil || f.End != RunFailed || f.Error != "Oops" {
				t.Errorf("facts %+v, %v", f, err)
			}
		}
	}
	if want := []journal.Type{journal.ContextCreated, journal.RunStarted, journal.RunEnded}; !slices.Equal(types[len(types)-3:], want) {
		t.Errorf("history %v", types)
	}
}

func TestCodeOnceForItsKey(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{})
	s.code(sb.ID, CodeSpec{Code: "1+1"})
	run := func(code string) (CodeRun, *heard, error) {
		h := newHeard()
		r, err := s.RunCode(t.Context(), alice, sb.ID, CodeSpec{Code: code}, "key", h)
		return r, h, err
	}
	first, h, err := run("print once")
	if err != nil || first.End != RunCompleted || h.text.String() != "once\n" {
		t.Fatalf("%+v, %q, %v", first, h.text.String(), err)
	}
	second, h, err := run("print once")
	if err != nil || second.ID != first.ID || h.text.String() != "once\n" {
		t.Errorf("%+v, %q, %v", second, h.text.String(), err)
	}
	_, _, err = run("print other")
	wantKind(t, "another body", err, errs.Conflict)
	if c, err := s.GetContext(t.Context(), alice, sb.ID, "python"); err != nil || c.Runs != 2 {
		t.Errorf("context %+v, %v", c, err)
	}
}

func TestCodeSurvivesServer(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{})
	ctx := t.Context()
	s.code(sb.ID, CodeSpec{Code: "set x 7"})
	h := newHeard()
	gone, cancel := context.WithCancel(ctx)
	left := make(chan error, 1)
	go func() {
		_, err := s.RunCode(gone, alice, sb.ID, CodeSpec{ID: "over", Code: "print before\nawait go\nprint after\n1+1"}, "", h)
		left <- err
	}()
	testenv.Receive(t, "the run begins", h.began)
	cancel()
	if err := testenv.Receive(t, "the call ends", left); err == nil {
		t.Error("a caller that left got an answer")
	}
	s.stop(false)

	s = s.w.serve()
	if _, err := s.CreateContext(ctx, alice, sb.ID, CodeContextSpec{ID: "other"}); err != nil {
		t.Fatal(err)
	}
	s.code(sb.ID, CodeSpec{Context: "other", Code: "set go 1"})
	g := newHeard()
	r, err := s.CodeItems(ctx, alice, sb.ID, "python", "over", CodeItemsOptions{Follow: true}, g)
	if err != nil || r.End != RunCompleted || g.text.String() != "before\nafter\n" || g.value() != "2" {
		t.Errorf("over a restart: %+v, %q, %v", r, g.text.String(), err)
	}
	g = newHeard()
	if _, err := s.CodeItems(ctx, alice, sb.ID, "python", "over", CodeItemsOptions{Offset: 1}, g); err != nil || g.text.String() != "after\n" {
		t.Errorf("from item 1 on: %q, %v", g.text.String(), err)
	}
	if _, h := s.code(sb.ID, CodeSpec{Code: "get x"}); h.value() != "7" {
		t.Errorf("x is %q", h.value())
	}
	starts, ends := 0, 0
	for _, typ := range s.history(sb.ID) {
		switch typ {
		case journal.RunStarted:
			starts++
		case journal.RunEnded:
			ends++
		}
	}
	if starts != 4 || ends != 4 {
		t.Errorf("%d starts and %d ends are recorded", starts, ends)
	}
}

func TestCodeEndsWithSandbox(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{})
	h, ended := newHeard(), make(chan CodeRun, 1)
	go func() {
		r, err := s.RunCode(t.Context(), alice, sb.ID, CodeSpec{Code: "stubborn"}, "", h)
		if err != nil {
			t.Error(err)
		}
		ended <- r
	}()
	testenv.Receive(t, "the run begins", h.began)
	if _, err := s.Delete(t.Context(), alice, sb.ID); err != nil {
		t.Fatal(err)
	}
	if r := testenv.Receive(t, "the run ends", ended); r.End != RunStopped {
		t.Errorf("end %+v", r)
	}
}

// TestCodeLiesOfTheGuest holds back what can't be so: all of it is the guest's word.
func TestCodeLiesOfTheGuest(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{})
	for _, line := range []string{`{`, `[]`, `{"data":{}}`, `{"data":7}`, `{"main":"x","data":{"a":"b"}}`, strings.Repeat("[", 5000)} {
		r, h := s.code(sb.ID, CodeSpec{Code: "line " + line})
		if len(h.items) != 1 || h.items[0].Error == nil || h.items[0].Error.Name != "MalformedResult" || r.End != RunCompleted {
			t.Errorf("%.40s: %+v", line, h.items)
		}
	}
	i := believedContext(guestwire.ContextInfo{State: "weird", End: "oom_killed", Version: strings.Repeat("v", 1<<20), Run: "../.."})
	if i.State != guestwire.ContextEnded || i.End != EndProcessLost || len(i.Version) > maxPath || i.Run != "" {
		t.Errorf("believed %.200s", fmt.Sprint(i))
	}
	r := believedRun(guestwire.RunInfo{End: "fine", Driver: "oom_killed", Items: -1, Dropped: -1, Count: -1})
	if r.End != RunUnknown || r.Driver != EndProcessLost || r.Items != 0 || r.Dropped != 0 || r.Count != 0 {
		t.Errorf("believed %+v", r)
	}
}

func TestFreshRuns(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{})
	ctx := t.Context()
	s.code(sb.ID, CodeSpec{Code: "set x 1"})
	seen := map[string]bool{}
	for range 10 {
		r, h := s.code(sb.ID, CodeSpec{Code: "get x\n", Fresh: true, Imports: []string{"json", "os.path"}})
		if r.End != RunFailed || r.ErrorName != "NameError" || seen[r.ContextID] || len(h.items) != 1 {
			t.Fatalf("a fresh run saw another: %+v", r)
		}
		seen[r.ContextID] = true
		s.code(sb.ID, CodeSpec{Code: "set x 1", Fresh: true, Imports: []string{"os.path", "json"}})
	}
	if all, err := s.ListContexts(ctx, alice, sb.ID); err != nil || len(all) != 1 || all[0].ID != "python" {
		t.Errorf("contexts %+v, %v", all, err)
	}
	testenv.Eventually(t, soon, "what was forked is thrown away", func() bool {
		b := s.find(sb.ID)
		b.mu.Lock()
		defer b.mu.Unlock()
		return len(b.codes) <= 2+freshAhead && len(b.fresh) == 1
	})
	contexts := 0
	for _, typ := range s.history(sb.ID) {
		if typ == journal.ContextCreated {
			contexts++
		}
	}
	if contexts != 2 { // python, and the warm one
		t.Errorf("%d contexts are recorded", contexts)
	}
	for what, spec := range map[string]CodeSpec{
		"a context":          {Fresh: true, Context: "python"},
		"no module":          {Fresh: true, Imports: []string{"os; import x"}},
		"imports of nothing": {Imports: []string{"os"}},
	} {
		_, err := s.RunCode(ctx, alice, sb.ID, spec, "", newHeard())
		wantKind(t, what, err, errs.InvalidArgument)
	}
	_, err := s.RunCode(ctx, alice, sb.ID, CodeSpec{Fresh: true, Code: "1+1"}, "key", newHeard())
	wantKind(t, "a key", err, errs.InvalidArgument)
}

func TestFreshRunsSurviveServer(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{})
	s.code(sb.ID, CodeSpec{Code: "1+1", Fresh: true})
	s.stop(false)
	s = s.w.serve()
	if _, h := s.code(sb.ID, CodeSpec{Code: "1+1", Fresh: true}); h.value() != "2" {
		t.Errorf("after a restart: %q", h.value())
	}
	if all, err := s.ListContexts(t.Context(), alice, sb.ID); err != nil || len(all) != 0 {
		t.Errorf("contexts %+v, %v", all, err)
	}
}

// TestCodeFromInside: what a sandbox's own code asks for is recorded as its doing, not as its owner's.
func TestCodeFromInside(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{})
	inside := alice
	inside.Inside = true
	for _, p := range []Principal{inside, alice} {
		if _, err := s.RunCode(t.Context(), p, sb.ID, CodeSpec{Code: "1+1"}, "", newHeard()); err != nil {
			t.Fatal(err)
		}
	}
	events, err := s.cfg.Journal.Events(t.Context(), sb.ID, 0, 1000)
	if err != nil {
		t.Fatal(err)
	}
	var actors []string
	for _, e := range events {
		if e.Type == journal.RunStarted || e.Type == journal.ContextCreated {
			actors = append(actors, e.Actor)
		}
	}
	want := []string{"sandbox:" + sb.ID, "sandbox:" + sb.ID, alice.ID}
	if !slices.Equal(actors, want) {
		t.Errorf("actors %v, want %v", actors, want)
	}
	bob := Principal{ID: "bob", Inside: true}
	if _, err := s.RunCode(t.Context(), bob, sb.ID, CodeSpec{Code: "1+1"}, "", newHeard()); !errs.Is(err, errs.NotFound) {
		t.Errorf("another's: %v", err)
	}
}

func TestContextsAreWarm(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{Contexts: []CodeContextSpec{{ID: "mine", Language: "python"}, {ID: "none", Language: "cobol"}}})
	testenv.Eventually(t, soon, "the context is there without being asked for", func() bool {
		all, err := s.ListContexts(t.Context(), alice, sb.ID)
		return err == nil && len(all) == 1 && all[0].ID == "mine"
	})
}

func FuzzItem(f *testing.F) {
	f.Add(byte(3), []byte(`{"main":true,"data":{"text/plain":"2","chart":{"a":[1]}}}`))
	f.Add(byte(4), []byte(`{"name":"E","value":"v","traceback":"t"}`))
	f.Add(byte(1), []byte("x"))
	f.Fuzz(func(t *testing.T, kind byte, data []byte) {
		i := itemOf(guestwire.RunItem{Kind: ItemKind(kind%4 + 1), Data: data})
		switch i.Kind {
		case ItemResult:
			if i.Result == nil || len(i.Result.Data) > maxTypes {
				t.Fatalf("%+v", i)
			}
			for mime, v := range i.Result.Data {
				if !json.Valid(v) {
					t.Fatalf("%q is not JSON: %q", mime, v)
				}
			}
		case ItemError:
			if i.Error == nil {
				t.Fatalf("%+v", i)
			}
		}
	})
}
