package client

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// scripted is a server whose one process prints text and whose streams break after so many bytes.
type scripted struct {
	casematev1connect.UnimplementedProcessServiceHandler
	text      string
	breakAt   int // every stream breaks after that many bytes; 0: never
	loseStart int // so many first Runs break before anything was told

	mu      sync.Mutex
	starts  map[string]int // by process id
	runs    int
	offsets []int64 // of the Output calls
	input   []byte
	closed  bool
	ended   chan struct{}
}

func newScripted(text string) *scripted {
	return &scripted{text: text, starts: map[string]int{}, ended: make(chan struct{})}
}

// Run implements ProcessServiceHandler.
func (s *scripted) Run(_ context.Context, req *v1.RunRequest, stream *connect.ServerStream[v1.ProcessEvent]) error {
	s.mu.Lock()
	s.starts[req.GetProcess().GetId()]++
	s.runs++
	lose := s.runs <= s.loseStart
	s.mu.Unlock()
	if lose {
		panic(http.ErrAbortHandler)
	}
	p := &v1.Process{Id: req.GetProcess().GetId()}
	_ = stream.Send(&v1.ProcessEvent{Event: &v1.ProcessEvent_Started{Started: p}})
	if req.GetProcess().GetStdin() {
		<-s.ended
	}
	return s.print(stream, 0, req.GetProcess().GetId())
}

// Output implements ProcessServiceHandler.
func (s *scripted) Output(_ context.Context, req *v1.OutputRequest, stream *connect.ServerStream[v1.ProcessEvent]) error {
	s.mu.Lock()
	s.offsets = append(s.offsets, req.GetOffset())
	s.mu.Unlock()
	return s.print(stream, int(req.GetOffset()), req.GetProcess())
}

func (s *scripted) print(stream *connect.ServerStream[v1.ProcessEvent], offset int, id string) error {
	sent := 0
	for at := offset; at < len(s.text); at++ {
		if s.breakAt > 0 && sent == s.breakAt {
			panic(http.ErrAbortHandler)
		}
		kind := v1.Stream_STREAM_STDOUT
		if s.text[at] >= 'a' {
			kind = v1.Stream_STREAM_STDERR
		}
		out := &v1.Output{Stream: kind, Offset: int64(at), Data: []byte{s.text[at]}}
		if err := stream.Send(&v1.ProcessEvent{Event: &v1.ProcessEvent_Output{Output: out}}); err != nil {
			return err
		}
		sent++
	}
	end := &v1.Process{Id: id, End: "exited", Bytes: int64(len(s.text))}
	return stream.Send(&v1.ProcessEvent{Event: &v1.ProcessEvent_Ended{Ended: end}})
}

// WriteInput implements ProcessServiceHandler.
func (s *scripted) WriteInput(_ context.Context, req *v1.WriteInputRequest) (*v1.WriteInputResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	// As the guest does: bytes that the caller's offset says were taken before are dropped.
	if skip := len(s.input) - int(req.GetOffset()); req.Offset != nil && skip > 0 {
		req.Data = req.GetData()[min(skip, len(req.GetData())):]
	}
	s.input = append(s.input, req.GetData()...)
	if req.GetClose() && !s.closed {
		s.closed = true
		close(s.ended)
	}
	return &v1.WriteInputResponse{Offset: int64(len(s.input))}, nil
}

// serve returns a client of a server that answers with h.
func serve(t *testing.T, h http.Handler, opts ...Option) *Client {
	t.Helper()
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	c, err := New(srv.URL, "csm_test", opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func serveScript(t *testing.T, s *scripted) *Client {
	t.Helper()
	_, h := casematev1connect.NewProcessServiceHandler(s)
	return serve(t, h)
}

// TestRunResumesAtTheByteReached: a stream that breaks again and again loses nothing and repeats
// nothing, and the process is started once.
func TestRunResumesAtTheByteReached(t *testing.T) {
	s := newScripted("HELLO-world-0123456789")
	s.breakAt = 5
	c := serveScript(t, s)
	var out, errOut bytes.Buffer
	p, err := c.Processes.Run(t.Context(), "box", &ProcessSpec{Argv: []string{"x"}}, RunOptions{Stdout: &out, Stderr: &errOut})
	if err != nil {
		t.Fatal(err)
	}
	if got := out.String(); got != "HELLO--0123456789" {
		t.Errorf("stdout %q", got)
	}
	if got := errOut.String(); got != "world" {
		t.Errorf("stderr %q", got)
	}
	if p.GetEnd() != "exited" || len(s.starts) != 1 || s.starts[p.GetId()] != 1 {
		t.Errorf("end %q, starts %v", p.GetEnd(), s.starts)
	}
	if want := []int64{5, 10, 15, 20}; len(s.offsets) != len(want) {
		t.Errorf("resumed at %v, want %v", s.offsets, want)
	}
}

// TestRunRepeatsALostStart: where not even the start was told, the same id is started again, which
// attaches to the process if it is there.
func TestRunRepeatsALostStart(t *testing.T) {
	s := newScripted("HI")
	s.loseStart = 2
	c := serveScript(t, s)
	var out bytes.Buffer
	if _, err := c.Processes.Run(t.Context(), "box", &ProcessSpec{Argv: []string{"x"}}, RunOptions{Stdout: &out}); err != nil {
		t.Fatal(err)
	}
	if out.String() != "HI" || len(s.starts) != 1 {
		t.Errorf("stdout %q, ids %v; want one id", out.String(), s.starts)
	}
}

func TestRunFeedsInput(t *testing.T) {
	s := newScripted("OK")
	c := serveScript(t, s)
	in := strings.Repeat("0123456789", 20_000)
	if _, err := c.Processes.Run(t.Context(), "box", &ProcessSpec{Argv: []string{"cat"}}, RunOptions{Stdin: strings.NewReader(in)}); err != nil {
		t.Fatal(err)
	}
	if string(s.input) != in || !s.closed {
		t.Errorf("took %d bytes, closed %v; want %d and closed", len(s.input), s.closed, len(in))
	}
}

// TestRunReturnsTheWritersError: what fails on the caller's side is not retried.
func TestRunReturnsTheWritersError(t *testing.T) {
	s := newScripted("HELLO")
	c := serveScript(t, s)
	full := errors.New("disk full")
	_, err := c.Processes.Run(t.Context(), "box", &ProcessSpec{}, RunOptions{Stdout: writerFunc(func([]byte) (int, error) { return 0, full })})
	if !errors.Is(err, full) || len(s.offsets) != 0 {
		t.Errorf("Run = %v after %v more streams, want %v after none", err, len(s.offsets), full)
	}
}

type writerFunc func(b []byte) (int, error)

// Write implements io.Writer.
func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

func TestRunGivesUp(t *testing.T) {
	c := serve(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }), WithReconnect(50*time.Millisecond))
	_, err := c.Processes.Run(t.Context(), "box", &ProcessSpec{}, RunOptions{})
	if KindOf(err) != Unavailable {
		t.Errorf("Run = %v (%s), want unavailable", err, KindOf(err))
	}
}

// TestRunWithoutAServerFailsAtOnce: a server that never was there is not one that restarts.
func TestRunWithoutAServerFailsAtOnce(t *testing.T) {
	c, err := New("unix://"+filepath.Join(t.TempDir(), "none.sock"), "")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second) // a retry would last 30 s
	defer cancel()
	_, err = c.Processes.Run(ctx, "box", &ProcessSpec{}, RunOptions{})
	if KindOf(err) != Unavailable {
		t.Errorf("Run = %v (%s), want unavailable", err, KindOf(err))
	}
}

func TestErrorCarriesKindAndHint(t *testing.T) {
	rpcErr := connect.NewError(connect.CodeAborted, errors.New("same key, other body"))
	d, err := connect.NewErrorDetail(&v1.ErrorDetail{Kind: "conflict", Hint: "use another key", Id: "err_1"})
	if err != nil {
		t.Fatal(err)
	}
	rpcErr.AddDetail(d)
	_, h := casematev1connect.NewSystemServiceHandler(failing{err: rpcErr})
	c := serve(t, h)
	_, err = c.System.Version(t.Context())
	var e *Error
	if !errors.As(err, &e) || e.Kind != Conflict || e.Hint != "use another key" || e.ID != "err_1" || e.Message != "same key, other body" {
		t.Errorf("error %#v", err)
	}
}

type failing struct {
	casematev1connect.UnimplementedSystemServiceHandler
	err error
}

// GetVersion implements SystemServiceHandler.
func (f failing) GetVersion(context.Context, *v1.GetVersionRequest) (*v1.Version, error) {
	return nil, f.err
}

// TestErrorOfAnAbsentServer tells what to do, and under which name it was looked for.
func TestErrorOfAnAbsentServer(t *testing.T) {
	path := filepath.Join(t.TempDir(), "none.sock")
	c, err := New("unix://"+path, "")
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.System.Version(t.Context())
	var e *Error
	if !errors.As(err, &e) || e.Kind != Unavailable || !strings.Contains(e.Message, path) || e.Hint == "" {
		t.Errorf("error %#v", err)
	}
}

// TestErrorsOnTheWay: what keeps a request from a server is not always that there is none.
func TestErrorsOnTheWay(t *testing.T) {
	untrusted := httptest.NewUnstartedServer(http.NotFoundHandler())
	untrusted.Config.ErrorLog = log.New(io.Discard, "", 0) // it tells of the handshake that fails
	untrusted.StartTLS()
	t.Cleanup(untrusted.Close)
	for _, tt := range []struct {
		name, url, id string
		kind          Kind
		says          string
	}{
		{"no text", "unix://" + filepath.Join(t.TempDir(), "none.sock"), "\xff", InvalidArgument, "UTF-8"},
		{"a certificate of nobody's", untrusted.URL, "x", Unavailable, "casemate ca"},
	} {
		c, err := New(tt.url, "")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(c.Close)
		_, err = c.Sandboxes.Get(t.Context(), tt.id)
		var e *Error
		if !errors.As(err, &e) || e.Kind != tt.kind || !strings.Contains(e.Message+e.Hint, tt.says) {
			t.Errorf("%s: %+v", tt.name, err)
		}
	}
}

func TestNewChecksTheURL(t *testing.T) {
	t.Setenv(EnvURL, "")
	t.Setenv(EnvKey, "")
	for _, bad := range []string{"127.0.0.1:7433", "ftp://x", "unix://", "http://", "http://a b/"} {
		if _, err := New(bad, ""); KindOf(err) != InvalidArgument {
			t.Errorf("New(%q) = %v, want invalid_argument", bad, err)
		}
	}
	t.Setenv(EnvURL, "http://127.0.0.1:1/base/")
	c, err := New("", "")
	if err != nil || c.conn.base != "http://127.0.0.1:1/base" {
		t.Errorf("from the environment: %v, %v", c.conn.base, err)
	}
	t.Setenv(EnvURL, "")
	if c, err = New("", ""); err != nil || c.URL() != DefaultURL {
		t.Errorf("default: %v, %v", c.URL(), err)
	}
}

// TestKeyStaysHome: the key goes over TCP as a bearer token, and never over a Unix socket.
func TestKeyStaysHome(t *testing.T) {
	got := make(chan string, 2)
	h := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { got <- r.Header.Get("Authorization") })
	c := serve(t, h)
	_, _ = c.System.Version(t.Context())
	if k := <-got; k != "Bearer csm_test" {
		t.Errorf("over TCP: %q", k)
	}
	path := filepath.Join(t.TempDir(), "s")
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", path)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: h, ReadHeaderTimeout: time.Minute}
	go func() { _ = srv.Serve(l) }()
	defer func() { _ = srv.Close() }()
	u, err := New("unix://"+path, "csm_test")
	if err != nil {
		t.Fatal(err)
	}
	_, _ = u.System.Version(t.Context())
	if k := <-got; k != "" {
		t.Errorf("over a Unix socket: %q", k)
	}
}

// TestDialUpgrades: bytes that the server sends right behind its answer are not lost.
func TestDialUpgrades(t *testing.T) {
	c := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "casemate-tcp" || r.URL.Path != "/v1/sandboxes/box/ports/80" {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusNotFound)
			_, _ = io.WriteString(w, `{"code":"not_found","message":"no such sandbox","hint":"look"}`)
			return
		}
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { _ = conn.Close() }()
		_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: casemate-tcp\r\n\r\nhello ")
		_, _ = io.Copy(conn, conn)
	}))
	conn, err := c.Ports.Dial(t.Context(), "box", 80)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.WriteString(conn, "there")
	got := make([]byte, 11)
	if _, err := io.ReadFull(conn, got); err != nil || string(got) != "hello there" {
		t.Errorf("read %q, %v", got, err)
	}
	_ = conn.Close()
	_, err = c.Ports.Dial(t.Context(), "other", 80)
	var e *Error
	if !errors.As(err, &e) || e.Kind != NotFound || e.Hint != "look" {
		t.Errorf("dial of nothing = %#v", err)
	}
}
