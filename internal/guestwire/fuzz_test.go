package guestwire

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"io"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/testenv"
)

func FuzzReadFrame(f *testing.F) {
	f.Add(AppendFrame(nil, FrameReply, []byte("{}")))
	f.Add(AppendOutput(nil, Stderr, 7, []byte("x")))
	f.Add(AppendGap(nil, 1, 2))
	f.Add([]byte{byte(FrameFail), 0xff, 0xff, 0xff})
	f.Add([]byte{byte(FrameData), 0x10, 0, 0, 1})
	f.Add([]byte{0})
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bytes.NewReader(b)
		var buf []byte
		for {
			frame, err := ReadFrame(r, &buf)
			if err != nil {
				return
			}
			limit, ok := frame.Kind.bound()
			if !ok || len(frame.Payload) > limit || cap(buf) > MaxPayload+4<<10 {
				t.Fatalf("frame of kind %d with %d bytes", frame.Kind, len(frame.Payload))
			}
			// What was read is what would be written.
			var again bytes.Buffer
			if err := WriteFrame(&again, frame.Kind, frame.Payload); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// FuzzReadEntry reads trees as the guest does; what it takes is what a Pack would write.
func FuzzReadEntry(f *testing.F) {
	var b bytes.Buffer
	p := NewPack(&b)
	for _, e := range []Entry{
		{Path: "d", Type: TypeDir, Mode: 0o755, MTime: 1},
		{Path: "d/caf\xe9", Type: TypeFile, Size: 3, Attrs: map[string][]byte{"user.a": {0, 1}}},
		{Path: "h", Type: TypeFile, Hard: "d/caf\xe9"},
		{Path: "l", Type: TypeSymlink, Target: "../\xff"},
	} {
		if err := p.Add(e, strings.NewReader("abc")); err != nil {
			f.Fatal(err)
		}
	}
	f.Add(b.Bytes())
	f.Add([]byte{0, 0, 0})
	f.Add([]byte{0xff, 0xff, 0xff, 0xff})
	f.Add(append([]byte{0, 0, 0, 46}, `{"path":"a","type":"dir","mode":420,"size":10}`...))
	f.Add(append([]byte{0, 0, 0, 25}, `{"path":"\u0000","size":-1}`...))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bytes.NewReader(b)
		for {
			e, err := ReadEntry(r)
			if err != nil {
				return
			}
			if e.Size < 0 || e.Size > 0 && (e.Type != TypeFile || e.Hard != "") || e.Hard != "" && e.Type != TypeFile {
				t.Fatalf("%+v", e)
			}
			content, _ := io.ReadAll(io.LimitReader(r, e.Size))
			if int64(len(content)) < e.Size {
				return
			}
			if strings.Contains(e.Path+e.Hard+e.Target, "\x00") {
				t.Fatalf("a NUL in %+v", e)
			}
			var again bytes.Buffer
			if err := NewPack(&again).Add(e, bytes.NewReader(content)); err != nil {
				t.Fatal(err)
			}
			back, err := ReadEntry(&again)
			if err != nil || !reflect.DeepEqual(back, e) || again.String() != string(content) {
				t.Fatalf("%+v came back as %+v, %v", e, back, err)
			}
		}
	})
}

// conn is a connection that gives fixed bytes and swallows what is written.
type conn struct {
	net.Conn
	r io.Reader
}

func (c *conn) Read(p []byte) (int, error)  { return c.r.Read(p) }
func (c *conn) Write(p []byte) (int, error) { return len(p), nil }
func (c *conn) Close() error                { return nil }

// FuzzCall reads what a server might send, as the guest does: from a call on.
func FuzzCall(f *testing.F) {
	call := func(c Call) []byte {
		b, _ := AppendCall(nil, c)
		return AppendFrame(nil, FrameCall, b)
	}
	f.Add(call(Call{Version: Version, Method: MethodStart, Body: []byte(`{"id":"p","argv":["true"],"env":{"A":"b"}}`)}))
	f.Add(call(Call{Version: Version, Method: MethodRun, Body: []byte(`{"start":{"id":"p","argv":["a\u0000ff"]},"output":{"follow":true}}`)}))
	f.Add(call(Call{Version: 99, Method: MethodStatus}))
	f.Add(call(Call{Version: Version, Method: MethodWrite, Body: []byte(`{"path":"x","offset":-1,"size":3}`)}))
	f.Add(AppendFrame(nil, FrameCall, []byte("\x00\x64"+strings.Repeat("[", 100))))
	f.Add(AppendFrame(nil, FrameCall, []byte("\xff\xff{}")))
	f.Add(AppendFrame(nil, FrameCall, []byte{0}))
	f.Add(AppendFrame(nil, FrameData, nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		c := NewConn(&conn{r: bytes.NewReader(b)})
		call, files, err := c.ReadCall()
		if err != nil || len(files) > 0 {
			return
		}
		if call.Version != Version {
			t.Fatalf("version %d was taken", call.Version)
		}
		for _, v := range []any{
			&Claim{}, &StartProcess{}, &RunProcess{}, &OutputRequest{}, &InputRequest{}, &SignalRequest{}, &ResizeRequest{},
			&ProcessRef{}, &PathRequest{}, &ListRequest{}, &ReadRequest{}, &WriteRequest{}, &MakeDirRequest{}, &MoveRequest{},
			&RemoveRequest{}, &ChmodRequest{}, &WatchRequest{}, &DialRequest{}, &Launch{},
		} {
			_ = Unmarshal(call.Body, v)
		}
	})
}

// FuzzClientReply lets a hostile guest say anything to every method of the client. What the client
// hands on must keep the promises of its documentation.
func FuzzClientReply(f *testing.F) {
	info := []byte(`{"id":"p","end":"exited","bytes":3,"complete":true}`)
	f.Add(append(AppendOutput(nil, Stdout, 0, []byte("abc")), AppendFrame(nil, FrameEnd, info)...))
	f.Add(append(AppendFrame(nil, FrameReply, info), AppendGap(nil, 0, 9)...))
	f.Add(append(AppendFrame(nil, FrameReply, info), AppendFrame(AppendFrame(nil, FrameData, []byte("x")), FrameEnd, nil)...))
	f.Add(append(AppendFrame(nil, FrameEvent, info), AppendFrame(nil, FrameEnd, nil)...))
	f.Add(AppendFrame(nil, FrameFail, []byte(`{"kind":"not_found","message":"\u001b[31mno"}`)))
	f.Add(AppendOutput(nil, Stdout, -1, nil))
	f.Add(AppendFrame(nil, FrameReply, []byte(`{"ports":[1,2,99999999]}`)))
	f.Fuzz(func(t *testing.T, b []byte) {
		c := NewClient(func(context.Context) (net.Conn, error) { return &conn{r: bytes.NewReader(b)}, nil })
		ctx := t.Context()
		check := func(err error) {
			if err == nil {
				return
			}
			text, hint := errs.PublicText(err)
			if len(text)+len(hint) > 2*maxText || strings.ContainsAny(text+hint, "\x1b\n\r") || errs.Is(err, errs.Unauthenticated) {
				t.Fatalf("error %q", text)
			}
		}
		_, err := c.Status(ctx)
		check(err)
		_, err = c.Start(ctx, StartProcess{ID: "p"}, nil)
		check(err)
		_, err = c.List(ctx)
		check(err)
		_, err = c.Listenings(ctx)
		check(err)
		_, err = c.Write(ctx, WriteRequest{}, strings.NewReader("data"))
		check(err)
		if _, s, err := c.Run(ctx, RunProcess{}, nil); err == nil {
			fuzzOutput(t, s, check)
		}
		if s, err := c.Output(ctx, OutputRequest{}); err == nil {
			fuzzOutput(t, s, check)
		}
		if s, err := c.Watch(ctx, WatchRequest{}); err == nil {
			for err == nil {
				_, err = s.Next()
			}
		}
		if _, r, err := c.Read(ctx, ReadRequest{}); err == nil {
			_, err := io.Copy(io.Discard, r)
			check(err)
			_ = r.Close()
		}
		if p, err := c.DialPort(ctx, DialRequest{}); err == nil {
			_ = p.Close()
		}
	})
}

func fuzzOutput(t *testing.T, s *OutputStream, check func(error)) {
	defer s.Close()
	next := int64(0)
	for {
		item, err := s.Next()
		if err == io.EOF {
			return
		}
		if err != nil {
			check(err)
			return
		}
		if item.Offset != next || item.End() < next || item.Gap > 0 == (item.Stream != 0) {
			t.Fatalf("item %+v where %d was due", item, next)
		}
		next = item.End()
	}
}

func FuzzEscape(f *testing.F) {
	for _, s := range []string{"报告 ü.pdf", "caf\xe9", "\xff\x00ff", "\x00e9", "a\x00"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if strings.IndexByte(s, 0) < 0 {
			text := Escape(s)
			b, err := json.Marshal(text)
			if err != nil {
				t.Fatal(err)
			}
			var over string
			if err := Unmarshal(b, &over); err != nil {
				t.Fatal(err)
			}
			if back, ok := Unescape(over); !ok || back != s {
				t.Fatalf("%q became %q", s, back)
			}
		}
		if raw, ok := Unescape(s); ok && strings.IndexByte(raw, 0) >= 0 {
			t.Fatalf("%q holds a NUL", raw)
		}
	})
}

// TestHammer has many callers talk to a guest that answers, cuts and stalls at random: no call hangs
// beyond its context, no goroutine and no descriptor stays.
func TestHammer(t *testing.T) {
	goroutines, files := runtime.NumGoroutine(), openFiles(t)
	var n int64
	var mu sync.Mutex
	c := serve(t, func(c *Conn, call Call, _ []*os.File) {
		mu.Lock()
		n++
		turn := n
		mu.Unlock()
		switch turn % 5 {
		case 0: // cut
		case 1:
			_ = c.Fail(errs.New(errs.NotFound, "no"))
		case 2: // stall
			_, _ = c.ReadFrame()
		default:
			if call.Method == MethodOutput {
				_ = c.Output(Stdout, 0, bytes.Repeat([]byte("x"), 50_000))
				_ = c.End(ProcessInfo{ID: "p"})
				return
			}
			_ = c.Reply(Status{Version: Version})
		}
	})
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for range 50 {
				ctx, cancel := context.WithTimeout(context.Background(), 30*time.Millisecond)
				_, _ = c.Status(ctx)
				if s, err := c.Output(ctx, OutputRequest{}); err == nil {
					for err == nil {
						_, err = s.Next()
					}
				}
				cancel()
			}
		})
	}
	wg.Wait()
	testenv.Eventually(t, time.Minute, "no goroutine and no file stays", func() bool {
		return runtime.NumGoroutine() <= goroutines+2 && openFiles(t) <= files+2 // the listener and its socket
	})
}

func openFiles(t *testing.T) int {
	t.Helper()
	list, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

func TestPutOutputIsAppendOutput(t *testing.T) {
	data := []byte("data")
	buf := append(make([]byte, OutputHeader), data...)
	PutOutput(buf, Stderr, 1<<40)
	if want := AppendOutput(nil, Stderr, 1<<40, data); !bytes.Equal(buf, want) {
		t.Fatalf("%x, want %x", buf, want)
	}
	if binary.BigEndian.Uint64(buf[5:]) != 1<<40 {
		t.Fatal("offset")
	}
}
