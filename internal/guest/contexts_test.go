package guest_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/testenv"
)

// interpreter is a context in a guest.
type interpreter struct {
	*runner
	id string
}

// said is what a run said.
type said struct {
	info           guestwire.RunInfo
	stdout, stderr strings.Builder
	results        []map[string]any
	errors         []map[string]any
	order          []guestwire.ItemKind
	gaps           int64
}

// driver is the driver of these tests, as small as one can be.
func driver(t testing.TB) string {
	t.Helper()
	b, err := os.ReadFile("testdata/driver.py")
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func (r *runner) interpreter(shape ...func(*guestwire.CreateContext)) *interpreter {
	r.t.Helper()
	req := guestwire.CreateContext{
		ID: r.serial(), Language: "python", Driver: driver(r.t),
		Argv: []string{"python3", "-u", "-c", `import os;exec(compile(os.fdopen(4,"rb").read(),"<casemate>","exec"))`},
	}
	for _, f := range shape {
		f(&req)
	}
	info, err := r.CreateContext(r.t.Context(), req, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	if info.State != guestwire.ContextIdle || info.PID < 2 || info.Starts != 1 {
		r.t.Fatalf("new context is %+v", info)
	}
	return &interpreter{r, req.ID}
}

func (i *interpreter) run(code string, shape ...func(*guestwire.RunCode)) *said {
	i.t.Helper()
	s, err := i.try(code, shape...)
	if err != nil {
		i.t.Fatalf("run %.80q: %v", code, err)
	}
	return s
}

func (i *interpreter) try(code string, shape ...func(*guestwire.RunCode)) (*said, error) {
	ctx, cancel := context.WithTimeout(i.t.Context(), 60*time.Second)
	defer cancel()
	req := guestwire.RunCode{ID: i.serial(), Context: i.id, Items: guestwire.ItemsRequest{Follow: true, Hold: true}}
	for _, f := range shape {
		f(&req)
	}
	_, stream, err := i.RunCode(ctx, req, code)
	if err != nil {
		return nil, err
	}
	return hear(stream)
}

// hold starts code that never ends and returns once it has printed something: whatever comes after that
// would wait for it.
func (i *interpreter) hold(code string) {
	i.t.Helper()
	req := guestwire.RunCode{ID: i.serial(), Context: i.id, Items: guestwire.ItemsRequest{Follow: true, Hold: true}}
	_, stream, err := i.RunCode(i.t.Context(), req, code)
	if err != nil {
		i.t.Fatalf("hold %q: %v", code, err)
	}
	if _, err := stream.Next(); err != nil {
		i.t.Fatalf("hold %q: %v", code, err)
	}
	go func() { _, _ = hear(stream) }()
}

func hear(stream *guestwire.ItemStream) (*said, error) {
	defer stream.Close()
	s := &said{}
	for {
		it, err := stream.Next()
		if err == io.EOF {
			s.info = stream.Info()
			return s, nil
		}
		if err != nil {
			return s, err
		}
		s.order = append(s.order, it.Kind)
		switch it.Kind {
		case guestwire.ItemStdout:
			s.stdout.Write(it.Data)
		case guestwire.ItemStderr:
			s.stderr.Write(it.Data)
		case 0:
			s.gaps += it.Gap
		default:
			var m map[string]any
			if err := json.Unmarshal(it.Data, &m); err != nil {
				return s, err
			}
			if it.Kind == guestwire.ItemResult {
				s.results = append(s.results, m)
			} else {
				s.errors = append(s.errors, m)
			}
		}
	}
}

// text is the text of the only result.
func (s *said) text(t testing.TB) string {
	t.Helper()
	if len(s.results) != 1 {
		t.Fatalf("%d results, errors %v, end %s", len(s.results), s.errors, s.info.End)
	}
	return s.results[0]["data"].(map[string]any)["text/plain"].(string)
}

func TestContextKeepsState(t *testing.T) {
	c := newRunner(t, setup{}).interpreter()
	if end := c.run("x = 20\nimport os\nos.chdir('/tmp')").info.End; end != guestwire.RunCompleted {
		t.Fatalf("end %s", end)
	}
	if got := c.run("x + 1").text(t); got != "21" {
		t.Errorf("x + 1 is %s", got)
	}
	if got := c.run("os.getcwd()").text(t); got != "'/tmp'" {
		t.Errorf("directory %s", got)
	}
	s := c.run("1/0")
	if s.info.End != guestwire.RunFailed || s.info.Name != "ZeroDivisionError" || len(s.errors) != 1 || s.info.Count != 4 {
		t.Errorf("1/0 ended %+v with %v", s.info, s.errors)
	}
}

func TestContextOrder(t *testing.T) {
	c := newRunner(t, setup{}).interpreter()
	s := c.run(`
import sys, subprocess
print("one"); subprocess.run(["sh", "-c", "echo two; echo bad >&2"]); print("three")
1/0`)
	if got := s.stdout.String(); got != "one\ntwo\nthree\n" {
		t.Errorf("output %q", got)
	}
	if s.stderr.String() != "bad\n" || s.order[len(s.order)-1] != guestwire.ItemError {
		t.Errorf("order %v, stderr %q", s.order, s.stderr.String())
	}
}

func TestContextInterruptKeepsState(t *testing.T) {
	c := newRunner(t, setup{}).interpreter()
	c.run("x = 1")
	began := make(chan *said)
	go func() {
		s, _ := c.try("print('go', flush=True)\nwhile True: pass", func(r *guestwire.RunCode) { r.ID = "loop" })
		began <- s
	}()
	c.await("loop", 1)
	if r, err := c.Interrupt(t.Context(), guestwire.RunRef{Context: c.id}); err != nil || r.Run != "loop" {
		t.Fatalf("interrupt: %v %v", r, err)
	}
	if s := testenv.Receive(t, "the run ends", began); s.info.End != guestwire.RunInterrupted || s.info.Name != "KeyboardInterrupt" {
		t.Errorf("end %+v", s.info)
	}
	if got := c.run("x").text(t); got != "1" {
		t.Errorf("x is %s", got)
	}
	// Nothing executes: an interrupt hits nothing, then or later.
	for range 5 {
		if r, err := c.Interrupt(t.Context(), guestwire.RunRef{Context: c.id}); err != nil || r.Run != "" {
			t.Fatalf("interrupt of nothing: %v %v", r, err)
		}
	}
	if got := c.run("x").text(t); got != "1" {
		t.Errorf("x is %s", got)
	}
}

// An interrupt that the interpreter loses is sent again, and one that it has taken is not. On a busy machine its answer
// may come when the next is out already: so each has a few tries for being left alone.
func TestContextInterruptIsAnswered(t *testing.T) {
	c := newRunner(t, setup{}).interpreter()
	for name, lost := range map[string]int{"lost": 2, "taken": 0} {
		var got string
		for try := 0; try < 20 && got != "'once'"; try++ {
			c.run(fmt.Sprintf("import __main__, time\n__main__.deaf = %d\nn = 'never'", lost))
			id := fmt.Sprint(name, try)
			ended := make(chan *said)
			go func() {
				s, err := c.try("try:\n    print('go', flush=True)\n    while True: pass\nexcept KeyboardInterrupt:\n    n = 'once'\n"+
					"try:\n    time.sleep(1.5)\nexcept KeyboardInterrupt:\n    n = 'more than once'\nn",
					func(r *guestwire.RunCode) { r.ID = id })
				if err != nil {
					t.Error(err)
					s = &said{}
				}
				ended <- s
			}()
			c.await(id, 1)
			if _, err := c.Interrupt(t.Context(), guestwire.RunRef{Context: c.id}); err != nil {
				t.Fatal(err)
			}
			if s := testenv.Receive(t, "the run ends", ended); len(s.results) == 1 { // else it was not left alone in its last line either
				got = s.text(t)
			}
		}
		if got != "'once'" {
			t.Errorf("an interrupt that was %s raises %s", name, got)
		}
	}
}

// await waits until a run has said so many items.
func (i *interpreter) await(run string, items int64) {
	i.t.Helper()
	testenv.Eventually(i.t, time.Minute, fmt.Sprintf("run %s says %d items", run, items), func() bool {
		runs, err := i.ContextRuns(i.t.Context(), i.id)
		if err != nil {
			i.t.Fatal(err)
		}
		return slices.ContainsFunc(runs, func(r guestwire.RunInfo) bool { return r.ID == run && r.Items >= items })
	})
}

func TestContextTimeout(t *testing.T) {
	c := newRunner(t, setup{}).interpreter()
	c.run("x = 5")
	// Whoever takes notice may take its time for it.
	if s := c.run("while True: pass", func(r *guestwire.RunCode) { r.TimeoutMS, r.GraceMS = 200, 60_000 }); s.info.End != guestwire.RunTimedOut {
		t.Errorf("loop ended %+v", s.info)
	}
	if got := c.run("x").text(t); got != "5" {
		t.Errorf("x is %s", got)
	}
	// Who takes no notice, which it has made sure of long before, is killed, and the context with it.
	s := c.run("import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass", func(r *guestwire.RunCode) { r.TimeoutMS, r.GraceMS = 3000, 200 })
	if s.info.End != guestwire.RunTimedOut || s.info.Driver != guestwire.EndSignaled || s.info.Signal != 9 {
		t.Errorf("stubborn loop ended %+v", s.info)
	}
	if _, err := c.try("x"); errs.KindOf(err) != errs.FailedPrecondition {
		t.Errorf("run in an ended context: %v", err)
	}
	if info, err := c.RestartContext(t.Context(), c.id); err != nil || info.Starts != 2 || info.State != guestwire.ContextIdle {
		t.Fatalf("restart: %+v, %v", info, err)
	}
	if s := c.run("x"); s.info.Name != "NameError" {
		t.Errorf("x after a restart: %+v", s.info)
	}
}

func TestContextSegfault(t *testing.T) {
	r := newRunner(t, setup{})
	c := r.interpreter()
	s := c.run("print('last words', flush=True)\nimport ctypes; ctypes.string_at(0)")
	if s.info.End != guestwire.RunLost || s.info.Driver != guestwire.EndSignaled || s.info.Signal != 11 {
		t.Errorf("end %+v", s.info)
	}
	if s.stdout.String() != "last words\n" {
		t.Errorf("output %q", s.stdout.String())
	}
	if got := string(r.sh("echo alive").out); got != "alive\n" {
		t.Errorf("the sandbox says %q", got)
	}
	info, err := c.WaitContext(t.Context(), guestwire.WaitContext{ID: c.id, Starts: 1})
	if err != nil || info.State != guestwire.ContextEnded || info.Signal != 11 {
		t.Errorf("context %+v, %v", info, err)
	}
}

func TestContextQueueAndAttach(t *testing.T) {
	c := newRunner(t, setup{}).interpreter()
	first := make(chan *said)
	go func() {
		s, _ := c.try("import time; print('a'); time.sleep(0.3); print('b'); l = [1]", func(r *guestwire.RunCode) { r.ID = "first" })
		first <- s
	}()
	c.await("first", 0)
	if got := c.run("l.append(2); l", func(r *guestwire.RunCode) { r.ID = "second" }).text(t); got != "[1, 2]" {
		t.Errorf("l is %s", got)
	}
	if s := testenv.Receive(t, "the first run ends", first); s.stdout.String() != "a\nb\n" {
		t.Errorf("first said %q", s.stdout.String())
	}
	// The same id attaches: it says the same again, and runs nothing.
	if got := c.run("l.append(3); l", func(r *guestwire.RunCode) { r.ID = "second" }).text(t); got != "[1, 2]" {
		t.Errorf("attached run says %s", got)
	}
	if got := c.run("l").text(t); got != "[1, 2]" {
		t.Errorf("l is %s", got)
	}
	stream, err := c.Items(t.Context(), guestwire.ItemsRequest{Context: c.id, Run: "first", Offset: 1, Follow: true})
	if err != nil {
		t.Fatal(err)
	}
	if s, err := hear(stream); err != nil || s.info.Items != int64(len(s.order))+1 || strings.HasPrefix(s.stdout.String(), "a") {
		t.Errorf("from item 1 on: %q, %v", s.stdout.String(), err)
	}
}

// TestContextMuchOutput holds the guest to its bounds while code prints without end.
func TestContextMuchOutput(t *testing.T) {
	c := newRunner(t, setup{}).interpreter()
	s := c.run("import sys\nfor i in range(300): sys.stdout.write('x' * (1 << 20))\n'done'", func(r *guestwire.RunCode) {
		r.Items.Hold = false
		r.Items.Follow = true
	})
	if s.text(t) != "'done'" || s.gaps == 0 && s.stdout.Len() != 300<<20 {
		t.Errorf("end %+v, %d bytes, %d gaps", s.info, s.stdout.Len(), s.gaps)
	}
	// With a reader that is to lose nothing, nothing is lost.
	s = c.run("for i in range(16): sys.stdout.write('x' * (1 << 20))\n'done'")
	if s.gaps != 0 || s.stdout.Len() != 16<<20 {
		t.Errorf("%d bytes, %d gaps", s.stdout.Len(), s.gaps)
	}
}

func TestContextHostileDriver(t *testing.T) {
	c := newRunner(t, setup{}).interpreter()
	s := c.run(`
import os
for junk in [b"\n", b"{\n", b"[]\n", b'"end"\n', b"\xff\xfe\n", b'{"ev":"end","id":"other"}\n', b'{"ev":"ready"}\n',
    b'{"ev":7}\n', b'{"ev":"result","id":"other","data":{}}\n', b"[" * 100000 + b"\n"]:
    os.write(3, junk)
big = b'x' * (1 << 20)
for i in range(9): os.write(3, big)
os.write(3, b"\n")
'fine'`)
	if s.info.End != guestwire.RunFailed && s.info.End != guestwire.RunCompleted || len(s.results) != 1 {
		t.Errorf("end %+v, %d results", s.info, len(s.results))
	}
	if len(s.errors) != 1 || s.errors[0]["name"] != "ResultTooLarge" {
		t.Errorf("errors %v", s.errors)
	}
	if got := c.run("1+1").text(t); got != "2" {
		t.Errorf("1+1 is %s", got)
	}
}

// TestContextRestarts: the end of one interpreter never hits the next.
func TestContextRestarts(t *testing.T) {
	c := newRunner(t, setup{}).interpreter()
	for i := range 30 {
		if i%3 == 0 { // one that is hard to end
			c.hold("import os\nfor i in range(20):\n  if os.fork() == 0: break\nprint('on', flush=True)\nwhile True: pass")
		}
		if _, err := c.RestartContext(t.Context(), c.id); err != nil {
			t.Fatalf("restart %d: %v", i, err)
		}
		if got := c.run("1+1").text(t); got != "2" {
			t.Errorf("1+1 is %s", got)
		}
	}
}

func TestContextRefusals(t *testing.T) {
	r := newRunner(t, setup{})
	_, err := r.CreateContext(t.Context(), guestwire.CreateContext{ID: "a", Language: "x", Argv: []string{"no-such-program"}}, nil)
	if errs.KindOf(err) != errs.NotFound {
		t.Errorf("no program: %v", err)
	}
	_, err = r.CreateContext(t.Context(), guestwire.CreateContext{ID: "b", Language: "x", Argv: []string{"sh", "-c", "echo oh no; exit 3"}}, nil)
	if errs.KindOf(err) != errs.FailedPrecondition || !strings.Contains(err.Error(), "oh no") || !strings.Contains(err.Error(), "code 3") {
		t.Errorf("driver that ends: %v", err)
	}
	_, err = r.CreateContext(t.Context(), guestwire.CreateContext{
		ID: "c", Language: "x", StartMS: 100, Argv: []string{"sleep", "100"},
	}, nil)
	if errs.KindOf(err) != errs.DeadlineExceeded {
		t.Errorf("driver that is never ready: %v", err)
	}
	if list, err := r.Contexts(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("contexts that did not come up are listed: %v, %v", list, err)
	}
	c := r.interpreter()
	if err := r.DeleteContext(t.Context(), c.id); err != nil {
		t.Fatal(err)
	}
	if _, err := c.try("1"); errs.KindOf(err) != errs.NotFound {
		t.Errorf("run in a deleted context: %v", err)
	}
}

func BenchmarkContext(b *testing.B) {
	c := newRunner(b, setup{}).interpreter()
	for b.Loop() {
		if c.run("1+1").text(b) != "2" {
			b.Fatal("no 2")
		}
	}
}
