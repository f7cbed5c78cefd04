package conformance

import (
	"strings"
	"testing"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
)

func inputCases() []testCase {
	return []testCase{
		{name: "standard input", run: testInput},
		{name: "repeated input", run: testRepeatedInput},
		{name: "no standard input", run: testNoInput},
		{name: "terminal", run: testTerminal},
		{name: "terminal input", run: testTerminalInput},
	}
}

func (r *running) feed(offset int64, text string, end bool) int64 {
	r.box.t.Helper()
	reply, err := r.box.client.Input(limited(r.box.t), guestwire.InputRequest{ID: r.id, Offset: offset, Close: end}, strings.NewReader(text))
	if err != nil {
		r.box.t.Fatalf("input: %v", err)
	}
	return reply.Offset
}

func testInput(t *testing.T, h Harness) {
	b := startBox(t, h)
	r := b.start(guestwire.StartProcess{Argv: []string{"cat"}, Stdin: guestwire.StdinPipe})
	r.feed(-1, "first\n", false)
	r.until("first\n")
	r.feed(-1, "second\n", true)
	ended(t, "cat", r.wait(), guestwire.EndExited, 0, 0)
	if got := r.output(guestwire.OutputRequest{}).stdout.String(); got != "first\nsecond\n" {
		t.Errorf("got %q", got)
	}
	_, err := b.client.Input(limited(t), guestwire.InputRequest{ID: r.id, Offset: -1}, strings.NewReader("late"))
	wantKind(t, "input to an ended process", err, errs.FailedPrecondition, errs.NotFound)
}

// testRepeatedInput sends the same piece twice, as a caller does that lost the answer.
func testRepeatedInput(t *testing.T, h Harness) {
	b := startBox(t, h)
	r := b.start(guestwire.StartProcess{Argv: []string{"cat"}, Stdin: guestwire.StdinPipe})
	if at := r.feed(0, "abc", false); at != 3 {
		t.Errorf("after 3 bytes the offset is %d", at)
	}
	if at := r.feed(0, "abcdef", false); at != 6 {
		t.Errorf("after a repetition the offset is %d, want 6", at)
	}
	if at := r.feed(6, "", true); at != 6 {
		t.Errorf("after closing the offset is %d, want 6", at)
	}
	r.wait()
	if got := r.output(guestwire.OutputRequest{}).stdout.String(); got != "abcdef" {
		t.Errorf("got %q", got)
	}
}

func testNoInput(t *testing.T, h Harness) {
	b := startBox(t, h)
	tr := b.run(guestwire.StartProcess{Argv: []string{"cat"}})
	ended(t, "cat without input", tr.info, guestwire.EndExited, 0, 0)
	r := b.startScript("sleep 1000")
	_, err := b.client.Input(limited(t), guestwire.InputRequest{ID: r.id, Offset: -1}, strings.NewReader("x"))
	wantKind(t, "input to a process without", err, errs.FailedPrecondition)
}

func testTerminal(t *testing.T, h Harness) {
	b := startBox(t, h)
	tr := b.run(guestwire.StartProcess{Argv: sh(`test -t 1 && stty size`), TTY: true, Rows: 33, Cols: 101})
	if got := tr.tty.String(); got != "33 101\r\n" {
		t.Errorf("got %q, stdout %q, stderr %q", got, tr.stdout.String(), tr.stderr.String())
	}
	tr = b.runScript(`test -t 1 || echo no terminal`)
	if tr.stdout.String() != "no terminal\n" {
		t.Errorf("without a terminal: got %q", tr.stdout.String())
	}
	r := b.start(guestwire.StartProcess{Argv: sh(`while true; do stty size; sleep 0.02; done`), TTY: true, Rows: 24, Cols: 80})
	r.until("24 80")
	if err := b.client.Resize(limited(t), guestwire.ResizeRequest{ID: r.id, Rows: 40, Cols: 120}); err != nil {
		t.Fatal(err)
	}
	r.until("40 120")
}

func testTerminalInput(t *testing.T, h Harness) {
	b := startBox(t, h)
	r := b.start(guestwire.StartProcess{Argv: []string{"sh"}, TTY: true, Rows: 24, Cols: 80})
	r.feed(-1, "echo $((6*7))\n", false)
	r.until("42\r\n")
	r.feed(-1, "exit 5\n", false)
	ended(t, "a shell in a terminal", r.wait(), guestwire.EndExited, 5, 0)
}
