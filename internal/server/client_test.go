package server

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"casemate.dev/client"
	"casemate.dev/internal/testenv"
)

// newBox starts a server and makes a sandbox through the socket.
func newBox(t *testing.T) (running, *client.Client, string) {
	t.Helper()
	s := start(t, newPlace(t).config())
	c := s.unix(t)
	sb, err := c.Sandboxes.Create(t.Context(), &client.CreateRequest{Name: "box", Labels: map[string]string{"a": "b"}})
	if err != nil {
		t.Fatal(err)
	}
	return s, c, sb.GetId()
}

func TestClientSandboxes(t *testing.T) {
	_, c, box := newBox(t)
	ctx := t.Context()
	for range 3 {
		if _, err := c.Sandboxes.Create(ctx, &client.CreateRequest{}); err != nil {
			t.Fatal(err)
		}
	}
	if all, err := c.Sandboxes.All(ctx, &client.ListRequest{PageSize: 2}); err != nil || len(all) != 4 {
		t.Errorf("All = %d, %v; want 4 over two pages", len(all), err)
	}
	if page, next, err := c.Sandboxes.List(ctx, &client.ListRequest{Labels: map[string]string{"a": "b"}}); err != nil || len(page) != 1 || next != "" || page[0].GetId() != box {
		t.Errorf("List = %v, %q, %v", page, next, err)
	}
	if sb, err := c.Sandboxes.Get(ctx, box[:8]); err != nil || sb.GetId() != box {
		t.Errorf("Get by prefix = %v, %v", sb.GetId(), err)
	}
	if sb, err := c.Sandboxes.Update(ctx, &client.UpdateRequest{Sandbox: box, Lifetime: durationpb.New(0)}); err != nil || sb.GetExpiresAt() != nil {
		t.Errorf("Update = %v, %v; want no end", sb.GetExpiresAt(), err)
	}
	if sb, err := c.Sandboxes.Pause(ctx, box); err != nil || sb.GetState() != "paused" {
		t.Errorf("Pause = %v, %v", sb.GetState(), err)
	}
	if sb, err := c.Sandboxes.Resume(ctx, box); err != nil || sb.GetState() != "running" {
		t.Errorf("Resume = %v, %v", sb.GetState(), err)
	}
	if _, err := c.Sandboxes.Usage(ctx, box); err != nil {
		t.Error(err)
	}
	if _, err := c.Sandboxes.Changes(ctx, box, ""); err != nil {
		t.Error(err)
	}
	for range 2 {
		if sb, err := c.Sandboxes.Delete(ctx, box); err != nil || sb.GetState() != "stopped" {
			t.Errorf("Delete = %v, %v", sb.GetState(), err)
		}
	}
}

func TestClientProcesses(t *testing.T) {
	_, c, box := newBox(t)
	ctx := t.Context()
	var out, errOut bytes.Buffer
	p, err := c.Processes.Run(ctx, box, &client.ProcessSpec{Argv: []string{"sh", "-c", "cat; echo bad >&2; exit 7"}},
		client.RunOptions{Stdin: strings.NewReader("from stdin"), Stdout: &out, Stderr: &errOut})
	if err != nil || p.GetEnd() != "exited" || p.GetCode() != 7 || out.String() != "from stdin" || errOut.String() != "bad\n" {
		t.Errorf("Run = %v, %v; stdout %q, stderr %q", p, err, out.String(), errOut.String())
	}
	if _, err := c.Processes.Start(ctx, box, &client.ProcessSpec{Id: "bg", Argv: []string{"sh", "-c", "echo up; sleep 600"}}); err != nil {
		t.Fatal(err)
	}
	if p, err := c.Processes.Wait(ctx, box, "bg", 50*time.Millisecond); err != nil || p.GetEnd() != "" {
		t.Errorf("Wait = %v, %v; want it running", p, err)
	}
	if all, err := c.Processes.List(ctx, box); err != nil || len(all) != 2 {
		t.Errorf("List = %v, %v", all, err)
	}
	attached := make(chan error, 1)
	var seen bytes.Buffer
	go func() {
		p, err := c.Processes.Attach(ctx, box, "bg", 0, client.RunOptions{Stdout: &seen})
		if err == nil && p.GetEnd() != "canceled" {
			err = errors.New("it ended " + p.GetEnd())
		}
		attached <- err
	}()
	if piece, err := c.Processes.ReadOutput(ctx, box, "bg", 1, 1, time.Minute); err != nil || string(piece.Data) != "p" || piece.Next != 2 || piece.End != "" {
		t.Errorf("ReadOutput = %+v, %v", piece, err)
	}
	if err := c.Processes.Kill(ctx, box, "bg"); err != nil {
		t.Fatal(err)
	}
	if piece, err := c.Processes.ReadOutput(ctx, box, "bg", 3, 0, time.Minute); err != nil || len(piece.Data) != 0 || piece.Next != 3 || piece.End != "canceled" {
		t.Errorf("ReadOutput of the end = %+v, %v", piece, err)
	}
	if _, err := c.Processes.ReadOutput(ctx, box, "nobody", 0, 0, 0); client.KindOf(err) != client.NotFound {
		t.Errorf("ReadOutput of nothing = %v", err)
	}
	if err := testenv.Receive(t, "the one that follows ends", attached); err != nil || seen.String() != "up\n" {
		t.Errorf("Attach = %v, output %q", err, seen.String())
	}
	if _, err := c.Processes.Execute(ctx, box, &client.ProcessSpec{Argv: []string{"no-such-program"}}, nil); err != nil && client.KindOf(err) == client.Internal {
		t.Errorf("Execute of nothing = %v", err)
	}
}

// TestClientTerminal: both ends are one stream, and the size follows.
func TestClientTerminal(t *testing.T) {
	_, c, box := newBox(t)
	shell := func(id, text string) (screen *screenBuffer, typed *io.PipeWriter, sizes chan *client.Terminal, done chan error) {
		in, typed := io.Pipe()
		t.Cleanup(func() { _ = typed.Close() })
		screen = &screenBuffer{grown: make(chan struct{}, 1)}
		sizes, done = make(chan *client.Terminal), make(chan error, 1)
		tty := struct {
			io.Reader
			io.Writer
		}{in, screen}
		spec := &client.ProcessSpec{Id: id, Argv: []string{"sh", "-c", text}, Terminal: &client.Terminal{Rows: 5, Cols: 6}}
		go func() {
			_, err := c.Processes.Shell(t.Context(), box, spec, tty, sizes)
			done <- err
		}()
		return screen, typed, sizes, done
	}
	screen, typed, _, done := shell("typing", "tty; cat")
	screen.waitFor(t, "/dev/pts/")
	_, _ = io.WriteString(typed, "hello\n")
	screen.waitFor(t, "hello")
	if err := errors.Join(c.Processes.Kill(t.Context(), box, "typing"), testenv.Receive(t, "the shell ends", done)); err != nil {
		t.Error(err)
	}
	screen, _, sizes, done := shell("sizing", "while stty size; do sleep 0.01; done")
	screen.waitFor(t, "5 6")
	sizes <- &client.Terminal{Rows: 33, Cols: 44}
	screen.waitFor(t, "33 44")
	if err := errors.Join(c.Processes.Kill(t.Context(), box, "sizing"), testenv.Receive(t, "the shell ends", done)); err != nil {
		t.Error(err)
	}
}

// screenBuffer is a screen that a test watches.
type screenBuffer struct {
	grown chan struct{} // holds a token after each write

	// mu guards the field below.
	mu  sync.Mutex
	buf bytes.Buffer
}

// Write implements io.Writer.
func (b *screenBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	n, err := b.buf.Write(p)
	select {
	case b.grown <- struct{}{}:
	default:
	}
	return n, err
}

func (b *screenBuffer) text() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

func (b *screenBuffer) waitFor(t *testing.T, text string) {
	t.Helper()
	deadline := time.After(time.Minute)
	for !strings.Contains(b.text(), text) {
		select {
		case <-b.grown:
		case <-deadline:
			t.Fatalf("%q never came: %q", text, b.text())
		}
	}
}

func TestClientFiles(t *testing.T) {
	_, c, box := newBox(t)
	ctx := t.Context()
	f := c.Files
	if file, err := f.Write(ctx, box, "d/x", strings.NewReader("hello"), client.WriteOptions{Parents: true, Mode: 0o600, Size: 5}); err != nil || file.GetSize() != 5 || file.GetMode() != 0o600 {
		t.Errorf("Write = %v, %v", file, err)
	}
	if _, err := f.Write(ctx, box, "d/x", strings.NewReader(" there"), client.WriteOptions{Append: true}); err != nil {
		t.Error(err)
	}
	if b, err := f.ReadAll(ctx, box, "d/x"); err != nil || string(b) != "hello there" {
		t.Errorf("ReadAll = %q, %v", b, err)
	}
	for o, want := range map[client.ReadOptions]string{{Offset: 6}: "there", {Offset: 1, Length: 3}: "ell", {Offset: 99}: "", {Length: 2}: "he"} {
		r, err := f.Open(ctx, box, "d/x", o)
		if err != nil {
			t.Errorf("Open(%+v): %v", o, err)
			continue
		}
		b, err := io.ReadAll(r)
		if err != nil || string(b) != want {
			t.Errorf("Open(%+v) = %q, %v; want %q", o, b, err, want)
		}
		_ = r.Close()
	}
	if _, err := f.ReadAll(ctx, box, "none"); client.KindOf(err) != client.NotFound {
		t.Errorf("ReadAll of nothing = %v", err)
	}
	// A source that fails leaves the file as it was.
	broken := io.MultiReader(strings.NewReader("half"), failing{})
	if _, err := f.Write(ctx, box, "d/x", broken, client.WriteOptions{}); err == nil {
		t.Error("a write whose source failed was taken")
	}
	if b, _ := f.ReadAll(ctx, box, "d/x"); string(b) != "hello there" {
		t.Errorf("after a broken write: %q", b)
	}
	if _, err := f.MakeDir(ctx, box, "d/e/f", "", 0o755, true); err != nil {
		t.Error(err)
	}
	if file, err := f.Move(ctx, box, "d/x", "d/y", "", false); err != nil || file.GetName() != "y" {
		t.Errorf("Move = %v, %v", file, err)
	}
	if file, err := f.Chmod(ctx, box, "d/y", "", 0o640); err != nil || file.GetMode() != 0o640 {
		t.Errorf("Chmod = %v, %v", file, err)
	}
	if all, err := f.List(ctx, box, "d", "", 2); err != nil || len(all) != 3 {
		t.Errorf("List = %v, %v; want e, e/f and y", all, err)
	}
	watched := errors.New("seen")
	err := f.Watch(ctx, box, "d", "", true, func() {
		if _, err := f.Write(ctx, box, "d/new", strings.NewReader("x"), client.WriteOptions{}); err != nil {
			t.Error(err)
		}
	}, func(e *client.WatchEvent) error {
		if strings.HasSuffix(e.GetPath(), "/new") {
			return watched
		}
		return nil
	})
	if !errors.Is(err, watched) {
		t.Errorf("Watch = %v", err)
	}
	if err := f.Remove(ctx, box, "d", "", true); err != nil {
		t.Error(err)
	}
	if _, err := f.Stat(ctx, box, "d", "", true); client.KindOf(err) != client.NotFound {
		t.Errorf("Stat of what was removed = %v", err)
	}
}

type failing struct{}

// Read implements io.Reader.
func (failing) Read([]byte) (int, error) { return 0, errors.New("source broke") }

func TestClientJournalAndSystem(t *testing.T) {
	s, c, box := newBox(t)
	ctx := t.Context()
	events, err := c.Journal.Events(ctx, box, 0, 0)
	if err != nil || len(events) < 2 || events[0].GetSeq() != 1 {
		t.Fatalf("Events = %v, %v", events, err)
	}
	follow, cancel := context.WithCancel(ctx)
	defer cancel()
	var last uint64
	enough := errors.New("enough")
	if err := c.Journal.Follow(follow, box, 1, func(e *client.Event) error {
		last = e.GetSeq()
		return enough
	}); !errors.Is(err, enough) || last != 2 {
		t.Errorf("Follow = %v, last %d", err, last)
	}
	v, err := c.System.Version(ctx)
	if err != nil || v.GetServerId() != s.ID() || v.GetVersion() != "v1" {
		t.Errorf("Version = %v, %v", v, err)
	}
	if h, err := c.System.Host(ctx); err != nil || len(h.GetBackends()) != 1 || h.GetKernel() == "" {
		t.Errorf("Host = %v, %v", h, err)
	}
	if all, err := c.System.Templates(ctx); err != nil || len(all) != 1 {
		t.Errorf("Templates = %v, %v", all, err)
	}
	if _, err := c.System.BuildTemplate(ctx, "base", false, func(*client.BuildProgress) {}); client.KindOf(err) != client.Unsupported {
		t.Errorf("BuildTemplate = %v, want unsupported here", err)
	}
	key, secret, err := c.System.CreateKey(ctx, &client.CreateKeyRequest{Name: "k"})
	if err != nil {
		t.Fatal(err)
	}
	user := s.tcp(t, secret)
	if _, err := user.Sandboxes.Get(ctx, box); client.KindOf(err) != client.NotFound {
		t.Errorf("another key sees the sandbox: %v", err)
	}
	if _, err := c.System.RevokeKey(ctx, key.GetId()); err != nil {
		t.Error(err)
	}
	if _, _, err := user.Sandboxes.List(ctx, &client.ListRequest{}); client.KindOf(err) != client.Unauthenticated {
		t.Errorf("a revoked key: %v", err)
	}
	if all, err := c.System.Keys(ctx); err != nil || len(all) != 2 {
		t.Errorf("Keys = %v, %v", all, err)
	}
}

// TestClientPorts reaches a server inside through the proxy and through a tunnel.
func TestClientPorts(t *testing.T) {
	_, c, box := newBox(t)
	ctx := t.Context()
	for id, argv := range map[string][]string{"web": {"http-server", "8080"}, "echo": {"echo-server", "7"}} {
		if _, err := c.Processes.Start(ctx, box, &client.ProcessSpec{Id: id, Argv: argv}); err != nil {
			t.Fatal(err)
		}
		listening := errors.New("listening")
		if _, err := c.Processes.Attach(ctx, box, id, 0, client.RunOptions{Stdout: writerFunc(func() error { return listening })}); !errors.Is(err, listening) {
			t.Fatal(err)
		}
	}
	req, _ := http.NewRequestWithContext(ctx, http.MethodGet, c.Ports.URL(box, 8080)+"path", nil)
	resp, err := (&http.Client{Transport: c.Ports.Transport()}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	b, _ := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if !strings.HasPrefix(string(b), "GET /path ") {
		t.Errorf("%d %s", resp.StatusCode, b)
	}
	conn, err := c.Ports.Dial(ctx, box, 7)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.WriteString(conn, "ping")
	got := make([]byte, 4)
	if _, err := io.ReadFull(conn, got); err != nil || string(got) != "ping" {
		t.Errorf("echo %q, %v", got, err)
	}
	_ = conn.Close()
}

type writerFunc func() error

// Write implements io.Writer.
func (f writerFunc) Write(b []byte) (int, error) { return len(b), f() }
