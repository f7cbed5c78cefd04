package guestwire

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/testenv"
)

// serve answers every connection on a new Unix socket with handle, and returns a client of it.
func serve(t *testing.T, handle func(c *Conn, call Call, files []*os.File)) *Client {
	t.Helper()
	path := filepath.Join(t.TempDir(), "g")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer nc.Close()
				c := NewConn(nc)
				call, files, err := c.ReadCall()
				if err != nil {
					_ = c.Fail(err)
					return
				}
				defer closeAll(files)
				handle(c, call, files)
			}()
		}
	}()
	return NewClient(func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", path)
	})
}

func TestClientUnary(t *testing.T) {
	c := serve(t, func(c *Conn, call Call, _ []*os.File) {
		if call.Method != MethodStatus {
			_ = c.Fail(errs.New(errs.NotFound, "no such method: %s", call.Method))
			return
		}
		_ = c.Reply(Status{Version: Version, Processes: 3})
	})
	st, err := c.Status(t.Context())
	if err != nil || st.Processes != 3 {
		t.Fatalf("Status = %+v, %v", st, err)
	}
	err = c.Sync(t.Context())
	if text, _ := errs.PublicText(err); !errs.Is(err, errs.NotFound) || text != "no such method: sync" {
		t.Fatalf("Sync: %v", err)
	}
}

// TestClientPassesFiles sends files along with a call that is longer than one segment of the socket.
func TestClientPassesFiles(t *testing.T) {
	big := string(bytes.Repeat([]byte("x"), 600<<10))
	c := serve(t, func(c *Conn, call Call, files []*os.File) {
		var r StartProcess
		if err := Unmarshal(call.Body, &r); err != nil || len(files) != 1 || len(r.Argv) != 2 || r.Argv[1] != big {
			_ = c.Fail(errs.New(errs.InvalidArgument, "%d files, %v", len(files), err))
			return
		}
		_, _ = files[0].WriteString("hello")
		raw, _ := Unescape(r.Argv[0])
		_ = c.Reply(ProcessInfo{ID: r.ID, Dir: Escape(raw)})
	})
	pr, pw, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer pr.Close()
	info, err := c.Start(t.Context(), StartProcess{ID: "p", Argv: []string{"a\xff", big}}, []*os.File{pw})
	_ = pw.Close()
	if err != nil || info.Dir != "a\x00ff" {
		t.Fatalf("%+v, %v", info, err)
	}
	got, err := io.ReadAll(pr)
	if err != nil || string(got) != "hello" {
		t.Fatalf("pipe: %q, %v", got, err)
	}
}

func TestClientRunAndOutput(t *testing.T) {
	c := serve(t, func(c *Conn, call Call, _ []*os.File) {
		if call.Method == MethodRun {
			_ = c.Reply(ProcessInfo{ID: "p", PID: 7})
		}
		_ = c.Output(Stdout, 0, []byte("out"))
		_ = c.Gap(3, 10)
		_ = c.Output(Stderr, 10, []byte("err"))
		_ = c.End(ProcessInfo{ID: "p", End: EndExited, Code: 3})
	})
	info, s, err := c.Run(t.Context(), RunProcess{Start: StartProcess{ID: "p"}}, nil)
	if err != nil || info.PID != 7 {
		t.Fatalf("Run: %+v, %v", info, err)
	}
	defer s.Close()
	var ends []int64
	for {
		item, err := s.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		ends = append(ends, item.End())
	}
	if len(ends) != 3 || ends[2] != 13 || s.Info().Code != 3 || s.Offset() != 13 {
		t.Fatalf("ends %v, info %+v", ends, s.Info())
	}
}

// TestClientNeverInventsAnEnd cuts the stream after output: the client must say that it does not know.
func TestClientNeverInventsAnEnd(t *testing.T) {
	c := serve(t, func(c *Conn, _ Call, _ []*os.File) { _ = c.Output(Stdout, 0, []byte("out")) })
	s, err := c.Output(t.Context(), OutputRequest{ID: "p"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := s.Next(); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Next(); !errs.Is(err, errs.Unavailable) || errors.Is(err, io.EOF) {
		t.Fatalf("Next after the cut: %v", err)
	}
}

func TestClientHostileGuest(t *testing.T) {
	tests := []struct {
		name string
		send []byte
		kind errs.Kind
	}{
		{"unknown kind", []byte{99, 0, 0, 0}, errs.Internal},
		{"too long", []byte{byte(FrameReply), 0xff, 0xff, 0xff}, errs.Internal},
		{"hole in the output", AppendOutput(nil, Stdout, 5, []byte("x")), errs.Internal},
		{"no such stream", AppendOutput(nil, 9, 0, []byte("x")), errs.Internal},
		{"gap backwards", AppendGap(nil, 4, 2), errs.Internal},
		{"short gap", []byte{byte(FrameGap), 0, 0, 1, 0}, errs.Internal},
		{"end is no JSON", AppendFrame(nil, FrameEnd, []byte("{")), errs.Internal},
		{"deep JSON", AppendFrame(nil, FrameEnd, bytes.Repeat([]byte("["), 5000)), errs.Internal},
		{"reply in a stream", AppendFrame(nil, FrameReply, []byte("{}")), errs.Internal},
		{"cut", []byte{byte(FrameEnd)}, errs.Unavailable},
		{"cut in the payload", []byte{byte(FrameEnd), 0, 0, 9, '{'}, errs.Unavailable},
		{"speaks of keys", AppendFrame(nil, FrameFail, []byte(`{"kind":"unauthenticated","message":"x"}`)), errs.Internal},
		{"unknown failure", AppendFrame(nil, FrameFail, []byte(`{"kind":"x","message":"x"}`)), errs.Internal},
		{"empty", nil, errs.Unavailable},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := serve(t, func(c *Conn, _ Call, _ []*os.File) { _, _ = c.Write(tt.send) })
			s, err := c.Output(t.Context(), OutputRequest{ID: "p"})
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			if _, err := s.Next(); err == nil || errs.KindOf(err) != tt.kind {
				t.Fatalf("Next: %v (%v), want %v", err, errs.KindOf(err), tt.kind)
			}
		})
	}
}

// VULNERABILITY: a server that starts asks each guest for all that runs, and holds what it is told.
// ATTACK: a guest tells of more than there can be, or of what there can be with all the text that fits.
// VERIFIES: the first is refused, and of the second no more is held than of an honest guest, none of which is refused.
func TestHostileList(t *testing.T) {
	long := strings.Repeat("x", 200<<10)
	for name, tt := range map[string]struct {
		n    int
		info ProcessInfo
		ok   bool
	}{
		"all that there can be": {MaxRunning + MaxKept, ProcessInfo{ID: "p", Argv: []string{"true"}}, true},
		"one more":              {MaxRunning + MaxKept + 1, ProcessInfo{ID: "p", Argv: []string{"true"}}, false},
		"a long id":             {1, ProcessInfo{ID: long}, false},
		"a long end":            {1, ProcessInfo{ID: "p", End: End(long)}, false},
		"long arguments":        {100, ProcessInfo{ID: "p", Argv: []string{long}}, true},
		"many arguments":        {100, ProcessInfo{ID: "p", Argv: make([]string, 60_000)}, true},
		"long errors":           {100, ProcessInfo{ID: "p", Error: long}, true},
	} {
		t.Run(name, func(t *testing.T) {
			c := serve(t, func(c *Conn, _ Call, _ []*os.File) {
				for range tt.n {
					if c.Event(tt.info) != nil {
						return
					}
				}
				_ = c.End(nil)
			})
			all, err := c.List(t.Context())
			if !tt.ok {
				if !errs.Is(err, errs.Internal) || all != nil {
					t.Errorf("%d processes, %v", len(all), err)
				}
				return
			}
			held := 0
			for _, i := range all {
				held += i.texts()
			}
			if err != nil || len(all) != tt.n || held > maxListedText || all[0].texts() != tt.info.texts() {
				t.Errorf("%d processes with %d bytes of text, the first with %d: %v", len(all), held, all[0].texts(), err)
			}
		})
	}
	for n, ok := range map[int]bool{maxRuns: true, maxRuns + 1: false} {
		c := serve(t, func(c *Conn, _ Call, _ []*os.File) {
			for range n {
				if c.Event(RunInfo{ID: "r"}) != nil {
					return
				}
			}
			_ = c.End(nil)
		})
		if all, err := c.ContextRuns(t.Context(), "c"); (err == nil) != ok || ok && len(all) != n {
			t.Errorf("of %d runs: %d, %v", n, len(all), err)
		}
	}
}

// TestForkWords: a guest says one word about each fork that it was asked for, and none about another.
func TestForkWords(t *testing.T) {
	word := func(id string) []byte { return AppendFrame(nil, FrameEvent, []byte(`{"id":"`+id+`","info":{}}`)) }
	end := AppendFrame(nil, FrameEnd, nil)
	for _, tt := range []struct {
		name string
		send [][]byte
		told int
		ok   bool
	}{
		{"all", [][]byte{word("b"), word("a"), end}, 2, true},
		{"one of two", [][]byte{word("a"), end}, 1, false},
		{"twice", [][]byte{word("a"), word("a"), end}, 1, false},
		{"another", [][]byte{word("x"), end}, 0, false},
		{"no end", [][]byte{word("a"), word("b")}, 2, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := serve(t, func(c *Conn, _ Call, _ []*os.File) { _, _ = c.Write(bytes.Join(tt.send, nil)) })
			told := 0
			err := c.Fork(t.Context(), ForkContexts{IDs: []string{"a", "b"}}, nil, func(string, ContextInfo, error) { told++ })
			if told != tt.told || (err == nil) != tt.ok {
				t.Fatalf("%d told, %v", told, err)
			}
		})
	}
}

// TestRunCodeKeepsItsConnection: runs, forks and drops share a connection; one that the guest has closed
// meanwhile is replaced.
func TestRunCodeKeepsItsConnection(t *testing.T) {
	var dials atomic.Int32
	serving := func(calls int) *Client {
		ours := make(chan net.Conn, 8)
		go func() {
			for nc := range ours {
				go func() {
					defer nc.Close()
					c := NewConn(nc)
					for range calls {
						call, _, err := c.ReadCall()
						if err != nil {
							return
						}
						if call.Method == MethodContextRun {
							if text, err := c.ReadText(MaxCode); err != nil || text != "1+1" {
								return
							}
							_ = c.Reply(RunInfo{ID: "r"})
						}
						_ = c.End(RunInfo{ID: "r", End: RunCompleted})
					}
				}()
			}
		}()
		t.Cleanup(func() { close(ours) })
		dials.Store(0)
		return NewClient(func(context.Context) (net.Conn, error) {
			dials.Add(1)
			a, b := net.Pipe()
			ours <- b
			return a, nil
		})
	}
	call := func(c *Client) {
		t.Helper()
		_, s, err := c.RunCode(t.Context(), RunCode{ID: "r", Context: "c"}, "1+1")
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		if _, err := s.Next(); err != io.EOF || s.Info().End != RunCompleted {
			t.Fatalf("%v, %+v", err, s.Info())
		}
		if err := c.Drop(t.Context(), []string{"c"}); err != nil {
			t.Fatal(err)
		}
	}
	c := serving(100)
	for range 5 {
		call(c)
	}
	if n := dials.Load(); n != 1 {
		t.Errorf("%d connections for ten calls", n)
	}
	c = serving(1)
	for range 5 {
		call(c)
	}
	if n := dials.Load(); n != 10 {
		t.Errorf("%d connections for ten calls where the guest closes after each", n)
	}
}

func TestFailureTextIsPlain(t *testing.T) {
	f := Failure{Kind: "not_found", Message: "no\x1b[31m file\n\u202egpj.exe" + string(bytes.Repeat([]byte("y"), 9000))}
	text, _ := errs.PublicText(f.Err())
	if len(text) > maxText || bytes.ContainsAny([]byte(text), "\x1b\n") || bytes.Contains([]byte(text), []byte("\u202e")) {
		t.Fatalf("text %q", text)
	}
}

func TestClientCancel(t *testing.T) {
	gone := make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	c := serve(t, func(c *Conn, _ Call, _ []*os.File) {
		cancel()
		_, _ = c.ReadFrame() // returns when the client has closed
		close(gone)
	})
	if _, err := c.Wait(ctx, "p"); !errors.Is(err, context.Canceled) {
		t.Fatalf("Wait: %v", err)
	}
	testenv.Receive(t, "the connection goes", gone)
}

func TestClientUploadRefusedEarly(t *testing.T) {
	c := serve(t, func(c *Conn, _ Call, _ []*os.File) {
		_ = c.Fail(errs.New(errs.ResourceExhausted, "disk full"))
	})
	_, err := c.Write(t.Context(), WriteRequest{Size: -1, Offset: -1}, io.LimitReader(zeros{}, 64<<20))
	if !errs.Is(err, errs.ResourceExhausted) {
		t.Fatalf("Write: %v", err)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

func TestClientFiles(t *testing.T) {
	data := bytes.Repeat([]byte("☕你好\x00\xff"), 40000)
	c := serve(t, func(c *Conn, call Call, _ []*os.File) {
		switch call.Method {
		case MethodRead:
			_ = c.Reply(FileInfo{Size: int64(len(data))})
			_ = c.Data(data)
			_ = c.End(nil)
		case MethodWrite:
			var got []byte
			for {
				f, err := c.ReadFrame()
				if err != nil {
					return
				}
				if f.Kind == FrameEnd {
					break
				}
				got = append(got, f.Payload...)
			}
			if !bytes.Equal(got, data) {
				_ = c.Fail(errs.New(errs.Internal, "bytes differ"))
				return
			}
			_ = c.Reply(FileInfo{Size: int64(len(got))})
		}
	})
	_, r, err := c.Read(t.Context(), ReadRequest{Length: -1})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	got, err := io.ReadAll(r)
	if err != nil || !bytes.Equal(got, data) {
		t.Fatalf("Read: %d bytes of %d, %v", len(got), len(data), err)
	}
	if info, err := c.Write(t.Context(), WriteRequest{}, bytes.NewReader(data)); err != nil || info.Size != int64(len(data)) {
		t.Fatalf("Write: %+v, %v", info, err)
	}
}

func TestClientDialPortHandsOnRawBytes(t *testing.T) {
	c := serve(t, func(c *Conn, _ Call, _ []*os.File) {
		// Reply and first bytes in one segment: the client must not swallow the latter.
		_, _ = c.Write(append(AppendFrame(nil, FrameReply, nil), "SSH-2.0"...))
	})
	conn, err := c.DialPort(t.Context(), DialRequest{Network: "tcp", Port: 22})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	got, err := io.ReadAll(conn)
	if err != nil || string(got) != "SSH-2.0" {
		t.Fatalf("%q, %v", got, err)
	}
	if _, ok := conn.(*net.UnixConn); !ok {
		t.Fatalf("%T can't be spliced", conn)
	}
}

func TestEscape(t *testing.T) {
	for raw, text := range map[string]string{
		"报告 ü.pdf":     "报告 ü.pdf",
		"caf\xe9":      "caf\x00e9",
		"\xff\xfe/x":   "\x00ff\x00fe/x",
		"\xed\xa0\x80": "\x00ed\x00a0\x0080",
		"\ufffd":       "\ufffd",
	} {
		if got := Escape(raw); got != text {
			t.Errorf("Escape(%q) = %q, want %q", raw, got, text)
		}
		if got, ok := Unescape(text); !ok || got != raw {
			t.Errorf("Unescape(%q) = %q, %v", text, got, ok)
		}
	}
	for _, bad := range []string{"a\x00", "a\x002e", "\x00zz", "\x00f", "\x00FF"} {
		if got, ok := Unescape(bad); ok {
			t.Errorf("Unescape(%q) = %q", bad, got)
		}
	}
}
