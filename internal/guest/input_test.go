package guest_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guest"
	"casemate.dev/internal/guestwire"
)

func TestInput(t *testing.T) {
	r := newRunner(t, setup{})
	p := guestwire.StartProcess{ID: "cat", Argv: []string{"cat"}, Stdin: guestwire.StdinPipe}
	if _, err := r.Start(t.Context(), p, nil); err != nil {
		t.Fatal(err)
	}
	in := func(offset int64, data string, closeIt bool) int64 {
		t.Helper()
		a, err := r.Input(t.Context(), guestwire.InputRequest{ID: "cat", Offset: offset, Close: closeIt}, strings.NewReader(data))
		if err != nil {
			t.Fatal(err)
		}
		return a.Offset
	}
	if n := in(-1, "hello ", false); n != 6 {
		t.Fatalf("offset %d", n)
	}
	if n := in(0, "hello world", false); n != 11 { // a repeat writes nothing twice
		t.Fatalf("offset %d", n)
	}
	_, err := r.Input(t.Context(), guestwire.InputRequest{ID: "cat", Offset: 99}, strings.NewReader("x"))
	if !errs.Is(err, errs.InvalidArgument) {
		t.Fatalf("offset beyond: %v", err)
	}
	big := strings.Repeat("x", 300_000)
	in(11, big, true)
	s, err := r.Output(t.Context(), guestwire.OutputRequest{ID: "cat", Follow: true})
	if err != nil {
		t.Fatal(err)
	}
	res, err := collect(s)
	if err != nil || string(res.out) != "hello world"+big || res.info.Code != 0 {
		t.Fatalf("%d bytes, %+v, %v", len(res.out), res.info, err)
	}
	for _, id := range []string{"cat", "none"} {
		_, err = r.Input(t.Context(), guestwire.InputRequest{ID: id, Offset: -1}, strings.NewReader("x"))
		if !errs.Is(err, errs.FailedPrecondition) && !errs.Is(err, errs.NotFound) {
			t.Fatalf("input of %s: %v", id, err)
		}
	}
	// Without standard input a reader sees the end at once (E2B 927).
	if res := r.run(guestwire.StartProcess{Argv: []string{"cat"}}); len(res.out) != 0 || res.info.Code != 0 {
		t.Fatalf("%+v", res)
	}
}

// TestInputNotRead fills the pipe of a process that does not read: the call blocks, and ends with
// its caller; the process goes on and input can be resumed where it stands.
func TestInputNotRead(t *testing.T) {
	r := newRunner(t, setup{})
	p := guestwire.StartProcess{ID: "slow", Argv: []string{"sh", "-c", "while [ ! -e /tmp/go ]; do sleep 0.01; done; wc -c"}, Stdin: guestwire.StdinPipe}
	if _, err := r.Start(t.Context(), p, nil); err != nil {
		t.Fatal(err)
	}
	data := bytes.Repeat([]byte("y"), 500_000)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err := r.Input(ctx, guestwire.InputRequest{ID: "slow", Offset: 0}, bytes.NewReader(data))
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("input: %v", err)
	}
	r.sh("touch /tmp/go")
	a, err := r.Input(t.Context(), guestwire.InputRequest{ID: "slow", Offset: 0, Close: true}, bytes.NewReader(data))
	if err != nil || a.Offset != int64(len(data)) {
		t.Fatalf("%+v, %v", a, err)
	}
	s, err := r.Output(t.Context(), guestwire.OutputRequest{ID: "slow", Follow: true})
	if err != nil {
		t.Fatal(err)
	}
	if res, err := collect(s); err != nil || string(res.out) != "500000\n" {
		t.Fatalf("%q, %v", res.out, err)
	}
}

func TestTerminalProcess(t *testing.T) {
	r := newRunner(t, setup{})
	p := guestwire.StartProcess{
		ID: "tty", TTY: true, Rows: 30, Cols: 100,
		Argv: []string{"bash", "--norc", "-c", "stty size; tty; echo $TERM; read x; stty size; echo got:$x; read y; echo end"},
	}
	_, s, err := r.Run(t.Context(), guestwire.RunProcess{Start: p, Output: guestwire.OutputRequest{Follow: true}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var seen string
	until := func(want string) {
		t.Helper()
		for !strings.Contains(seen, want) {
			item, err := s.Next()
			if err != nil {
				t.Fatalf("%v after %q, want %q", err, seen, want)
			}
			if item.Stream != guestwire.TTY {
				t.Fatalf("stream %d", item.Stream)
			}
			seen += string(item.Data)
		}
	}
	until("30 100\r\n/dev/pts/0\r\n" + guest.DefaultTerm)
	if err := r.Resize(t.Context(), guestwire.ResizeRequest{ID: "tty", Rows: 50, Cols: 120}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Input(t.Context(), guestwire.InputRequest{ID: "tty", Offset: -1}, strings.NewReader("hello\n")); err != nil {
		t.Fatal(err)
	}
	until("50 120\r\ngot:hello")
	if _, err := r.Input(t.Context(), guestwire.InputRequest{ID: "tty", Offset: -1, Close: true}, nil); err != nil {
		t.Fatal(err)
	}
	until("end\r\n")
	if _, err := s.Next(); err != io.EOF || s.Info().Code != 0 || !s.Info().TTY {
		t.Fatalf("%v, %+v", err, s.Info())
	}
	if err := r.Resize(t.Context(), guestwire.ResizeRequest{ID: "none"}); !errs.Is(err, errs.NotFound) {
		t.Fatal(err)
	}
}

// TestTerminalHangup ends the first process of a terminal: what it left behind gets SIGHUP, and the
// output is complete.
func TestTerminalHangup(t *testing.T) {
	r := newRunner(t, setup{})
	res := r.run(guestwire.StartProcess{TTY: true, Argv: []string{"bash", "-c", "sleep 300 & echo hi"}})
	if !strings.Contains(string(res.term), "hi") || !res.info.Complete {
		t.Fatalf("%q, %+v", res.term, res.info)
	}
}

// TestEndOfTerminalInput: every reader of a terminal learns that its input has ended, also the second one.
func TestEndOfTerminalInput(t *testing.T) {
	r := newRunner(t, setup{})
	p := guestwire.StartProcess{ID: "two", TTY: true, Argv: []string{"sh", "-c", "cat; cat; echo both"}}
	if _, err := r.Start(t.Context(), p, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Input(t.Context(), guestwire.InputRequest{ID: "two", Offset: -1, Close: true}, nil); err != nil {
		t.Fatal(err)
	}
	s, err := r.Output(t.Context(), guestwire.OutputRequest{ID: "two", Follow: true})
	if err != nil {
		t.Fatal(err)
	}
	res, err := collect(s)
	if err != nil || res.info.Bytes != int64(len("both\r\n")) || res.info.End != guestwire.EndExited {
		t.Errorf("%+v, %v", res.info, err)
	}
}
