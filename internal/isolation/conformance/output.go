package conformance

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"strings"
	"testing"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/testenv"
)

func outputCases() []testCase {
	return []testCase{
		{name: "streams", run: testStreams},
		{name: "output from any offset", run: testOffsets},
		{name: "output of a broken connection", run: testBrokenConnection},
		{name: "bounded output", run: testBoundedOutput},
		{name: "held output", run: testHeldOutput},
		{name: "bytes stay bytes", run: testBytes},
	}
}

func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	testenv.Eventually(t, patience, what, ok)
}

func testStreams(t *testing.T, h Harness) {
	b := startBox(t, h)
	tr := b.runScript("echo out; echo err >&2; echo out again")
	if tr.stdout.String() != "out\nout again\n" || tr.stderr.String() != "err\n" {
		t.Errorf("got %q and %q", tr.stdout.String(), tr.stderr.String())
	}
	if tr.info.Bytes != int64(tr.all.Len()) || tr.info.Dropped != 0 {
		t.Errorf("%d bytes were sent, the state says %d and %d dropped", tr.all.Len(), tr.info.Bytes, tr.info.Dropped)
	}
}

// lines prints n numbered lines.
func lines(n int) string {
	return fmt.Sprintf(`i=0; while [ $i -lt %d ]; do echo "line $i"; i=$((i+1)); done`, n)
}

func testOffsets(t *testing.T, h Harness) {
	b := startBox(t, h)
	r := b.startScript(lines(500))
	r.wait()
	whole := r.output(guestwire.OutputRequest{Follow: true}).all.String()
	if !strings.HasPrefix(whole, "line 0\nline 1\n") || !strings.HasSuffix(whole, "line 499\n") {
		t.Fatalf("got %d bytes: %.40q…", len(whole), whole)
	}
	for _, from := range []int{0, 1, 7, len(whole) / 2, len(whole) - 1, len(whole)} {
		if got := r.output(guestwire.OutputRequest{Offset: int64(from)}).all.String(); got != whole[from:] {
			t.Errorf("from %d: got %d bytes, want %d", from, len(got), len(whole)-from)
		}
	}
	if got := r.output(guestwire.OutputRequest{Offset: 5, Limit: 9}).all.String(); got != whole[5:14] {
		t.Errorf("9 bytes from 5: got %q", got)
	}
}

// testBrokenConnection cuts a follower off again and again; what it gets in all is complete.
func testBrokenConnection(t *testing.T, h Harness) {
	b := startBox(t, h)
	r := b.startScript(`i=0; while [ $i -lt 200 ]; do echo "line $i"; i=$((i+1)); sleep 0.002; done`)
	var got bytes.Buffer
	for cuts := 0; ; cuts++ {
		ctx, cancel := context.WithCancel(limited(t))
		s, err := b.client.Output(ctx, guestwire.OutputRequest{ID: r.id, Offset: int64(got.Len()), Follow: true})
		if err != nil {
			t.Fatal(err)
		}
		item, err := s.Next()
		if err == io.EOF {
			cancel()
			if cuts < 5 {
				t.Errorf("only %d cuts: this test cut nothing", cuts)
			}
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		got.Write(item.Data)
		cancel()
		s.Close()
	}
	var want strings.Builder
	for i := range 200 {
		fmt.Fprintf(&want, "line %d\n", i)
	}
	if got.String() != want.String() {
		t.Errorf("got %d bytes, want %d", got.Len(), want.Len())
	}
}

func testBoundedOutput(t *testing.T, h Harness) {
	b := startBox(t, h)
	r := b.start(guestwire.StartProcess{Argv: sh(lines(20000)), Buffer: 64 << 10})
	info := r.wait()
	ended(t, "a process whose output nobody reads", info, guestwire.EndExited, 0, 0)
	tr := r.output(guestwire.OutputRequest{Follow: true})
	whole := int64(len("line \n")*20000 + 10 + 90*2 + 900*3 + 9000*4 + 10000*5)
	if info.Bytes != whole || tr.gaps == 0 || tr.gaps+int64(tr.all.Len()) != whole {
		t.Errorf("%d bytes were printed; the state says %d, the stream gave %d and a gap of %d", whole, info.Bytes, tr.all.Len(), tr.gaps)
	}
	if tr.all.Len() > 80<<10 || tr.info.Dropped != tr.gaps {
		t.Errorf("kept %d bytes of a buffer of 64 KiB, dropped %d, gap %d", tr.all.Len(), tr.info.Dropped, tr.gaps)
	}
	if out := tr.all.String(); !strings.HasPrefix(out, "line 0\n") || !strings.HasSuffix(out, "line 19999\n") {
		t.Errorf("head and tail are not kept: %.20q … %.20q", out, out[max(0, len(out)-20):])
	}
}

// testHeldOutput reads slowly with Hold: the process waits rather than lose a byte.
func testHeldOutput(t *testing.T, h Harness) {
	b := startBox(t, h)
	// More than buffer, pipe and socket hold together: else the process may end with all of it in them.
	// Long lines, since each is a step of the scripted shell.
	const count = 6000
	script := strings.Replace(lines(count), "line", strings.Repeat("x", 100)+" line", 1)
	r := b.start(guestwire.StartProcess{Argv: sh(script), Buffer: 64 << 10, Hold: true})
	s, err := b.client.Output(limited(t), guestwire.OutputRequest{ID: r.id, Follow: true, Hold: true})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var got bytes.Buffer
	for n := 0; ; n++ {
		item, err := s.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if item.Gap > 0 {
			t.Fatalf("a held output lost %d bytes at %d", item.Gap, item.Offset)
		}
		got.Write(item.Data)
		if n == 0 {
			r.waitUntilStuck()
		}
	}
	if out := got.String(); strings.Count(out, "\n") != count || !strings.HasSuffix(out, fmt.Sprintf("line %d\n", count-1)) {
		t.Errorf("got %d lines", strings.Count(out, "\n"))
	}
}

// waitUntilStuck waits until the process prints no more, since it waits for its reader: 20 looks in a row
// see the same count.
func (r *running) waitUntilStuck() {
	r.box.t.Helper()
	last, same := int64(-1), 0
	waitFor(r.box.t, "the process waits for its reader", func() bool {
		info, err := r.box.client.Get(limited(r.box.t), r.id)
		if err != nil {
			r.box.t.Fatalf("get: %v", err)
		}
		if same++; info.Bytes != last {
			last, same = info.Bytes, 0
		}
		return same >= 20
	})
	if info, err := r.box.client.Get(limited(r.box.t), r.id); err != nil || info.End != guestwire.EndNone {
		r.box.t.Errorf("a process whose reader lags did not wait: %+v, %v", info, err)
	}
}

// testBytes prints characters of several bytes in pieces that cut them.
func testBytes(t *testing.T, h Harness) {
	b := startBox(t, h)
	text := strings.Repeat("☕你好 ü\x00", 3000)
	r := b.start(guestwire.StartProcess{Argv: []string{"cat"}, Stdin: guestwire.StdinPipe})
	go func() {
		_, _ = b.client.Input(context.Background(), guestwire.InputRequest{ID: r.id, Offset: -1, Close: true}, pieces(text, 7))
	}()
	if got := r.output(guestwire.OutputRequest{Follow: true}).all.String(); got != text {
		t.Errorf("got %d bytes, want %d", len(got), len(text))
	}
}

// pieces reads s a few bytes at a time.
func pieces(s string, n int) io.Reader { return &pieceReader{strings.NewReader(s), n} }

type pieceReader struct {
	r io.Reader
	n int
}

func (p *pieceReader) Read(b []byte) (int, error) { return p.r.Read(b[:min(len(b), p.n)]) }
