package envd_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"casemate.dev/internal/e2b/envd"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/fake"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/rootfs"
	fakelayers "casemate.dev/internal/rootfs/fake"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/store"
	"casemate.dev/internal/testenv"
)

// cases are the tests that every backend passes, each with a sandbox of its own.
var cases = [...]struct {
	name string
	run  func(*testing.T, *harness)
}{
	{"Run", testRun},
	{"EnvironmentUserAndDirectory", testEnvironmentUserAndDirectory},
	{"TimeoutEndsTheProcess", testTimeoutEndsTheProcess},
	{"Kill", testKill},
	{"List", testList},
	{"Input", testInput},
	{"Terminal", testTerminal},
	{"LateConnections", testLateConnections},
	{"SignsOfLife", testSignsOfLife},
	{"StoppedSandbox", testStoppedSandbox},
	{"StreamInput", testStreamInput},
	{"UploadForms", testUploadForms},
	{"UploadBytes", testUploadBytes},
	{"UploadsThatAreRefused", testUploadsThatAreRefused},
	{"Metadata", testMetadata},
	{"Download", testDownload},
	{"DownloadEncodings", testDownloadEncodings},
	{"Compose", testCompose},
	{"OwnRoutes", testOwnRoutes},
	{"Stat", testStat},
	{"Directories", testDirectories},
	{"WatchDir", testWatchDir},
	{"Watchers", testWatchers},
	{"Binary", testBinary},
}

func runAll(t *testing.T, s *server) {
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) { c.run(t, s.box(t)) })
	}
}

func TestOnFake(t *testing.T) {
	host := fake.NewHost()
	t.Cleanup(host.Close)
	runAll(t, newServer(t, "fake", fake.New(fake.Config{Host: host}), roots{fakelayers.NewLayers()}))
}

// server is the handler over a Manager, behind a real HTTP server that takes the sandbox from the
// header, as SDKs send it.
type server struct {
	url     string
	manager *sandbox.Manager
	serving *atomic.Int32 // requests under way
}

// harness is a server with a sandbox.
type harness struct {
	*server
	t  testing.TB
	id string
}

var _ sandbox.Roots = roots{}

// roots plans nothing: the fake backend's files are its own.
type roots struct{ *fakelayers.Layers }

func (roots) Plan(context.Context, rootfs.Request) (rootfs.Plan, error) {
	return rootfs.Plan{User: "user", Dir: "/home/user"}, nil
}

func (roots) Release(context.Context, string) error { return nil }

func (roots) Sweep(context.Context, map[string]bool) ([]string, error) { return nil, nil }

func (roots) Changes(context.Context, string, rootfs.Plan, string) ([]rootfs.Change, error) {
	return nil, nil
}

func (roots) Templates(context.Context) ([]rootfs.Template, error) {
	return []rootfs.Template{{Name: "host", Profiles: []string{"standard", "locked"}, Ready: true}}, nil
}

const owner = "key_owner"

func newServer(t *testing.T, name string, backend isolation.Backend, r sandbox.Roots) *server {
	t.Helper()
	db, err := store.Open(store.Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	m, err := sandbox.New(sandbox.Config{
		DB: db, Journal: journal.Open(db, journal.Options{}), Backends: map[string]isolation.Backend{name: backend}, Roots: r,
		Defaults: sandbox.Defaults{Isolation: name, Profile: sandbox.Standard},
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := m.Close(ctx, true); err != nil {
			t.Errorf("close manager: %v", err)
		}
	})
	h := envd.New(envd.Config{Manager: m, Log: slog.New(slog.NewTextHandler(t.Output(), nil)), KeepAlive: 50 * time.Millisecond})
	t.Cleanup(h.Close)
	serving := new(atomic.Int32)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		serving.Add(1)
		defer serving.Add(-1)
		h.ServeSandbox(w, r, sandbox.Principal{ID: owner}, r.Header.Get("E2b-Sandbox-Id"))
	}))
	t.Cleanup(srv.Close)
	return &server{url: srv.URL, manager: m, serving: serving}
}

// box makes a sandbox.
func (s *server) box(t *testing.T) *harness {
	t.Helper()
	sb, err := s.manager.Create(t.Context(), sandbox.Principal{ID: owner}, sandbox.Spec{Env: map[string]string{"FROM_CREATE": "1"}}, sandbox.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = s.manager.Delete(context.Background(), sandbox.Principal{ID: owner}, sb.ID) })
	return &harness{server: s, t: t, id: sb.ID}
}

func (h *harness) request(method, path string, body io.Reader, header ...string) *http.Request {
	h.t.Helper()
	req, err := http.NewRequestWithContext(h.t.Context(), method, h.url+path, body)
	if err != nil {
		h.t.Fatal(err)
	}
	req.Header.Set("E2b-Sandbox-Id", h.id)
	req.Header.Set("E2b-Sandbox-Port", "49983")
	req.Header.Set("Accept-Encoding", "identity")
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	return req
}

// answer is a response that is read already.
type answer struct {
	StatusCode    int
	Header        http.Header
	ContentLength int64
}

// do makes a plain request.
func (h *harness) do(method, path, body string, header ...string) (answer, string) {
	h.t.Helper()
	resp, err := http.DefaultTransport.RoundTrip(h.request(method, path, strings.NewReader(body), header...))
	if err != nil {
		h.t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		h.t.Fatalf("%s %s: %v", method, path, err)
	}
	return answer{resp.StatusCode, resp.Header, resp.ContentLength}, string(b)
}

// object is a JSON object.
type object = map[string]any

// rpc makes a unary call in Connect's JSON, and returns status and answer.
func (h *harness) rpc(procedure string, msg any, header ...string) (int, object) {
	h.t.Helper()
	body, err := json.Marshal(msg)
	if err != nil {
		h.t.Fatal(err)
	}
	header = append([]string{"Content-Type", "application/json", "Connect-Protocol-Version", "1"}, header...)
	resp, text := h.do("POST", procedure, string(body), header...)
	out := object{}
	if err := json.Unmarshal([]byte(text), &out); err != nil {
		h.t.Fatalf("%s: %d %s", procedure, resp.StatusCode, text)
	}
	return resp.StatusCode, out
}

// must is rpc for a call that succeeds.
func (h *harness) must(procedure string, msg any, header ...string) object {
	h.t.Helper()
	status, out := h.rpc(procedure, msg, header...)
	if status != http.StatusOK {
		h.t.Fatalf("%s: %d %v", procedure, status, out)
	}
	return out
}

// refused is rpc for a call that fails, with a code and a text.
func (h *harness) refused(procedure string, msg any, status int, code, text string, header ...string) {
	h.t.Helper()
	got, out := h.rpc(procedure, msg, header...)
	if got != status || out["code"] != code || !strings.Contains(fmt.Sprint(out["message"]), text) {
		h.t.Errorf("%s %v: %d %v, want %d %s: %s", procedure, msg, got, out, status, code, text)
	}
}

// stream is the answer of a streaming call.
type stream struct {
	t    testing.TB
	body io.ReadCloser
	end  object // the last frame
	cut  bool   // the connection was dropped
}

// enveloped puts messages into Connect's envelopes: a flag, a length, and the JSON.
func enveloped(t testing.TB, msgs ...any) string {
	t.Helper()
	var b bytes.Buffer
	for _, msg := range msgs {
		body, err := json.Marshal(msg)
		if err != nil {
			t.Fatal(err)
		}
		b.Write(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(body))))
		b.Write(body)
	}
	return b.String()
}

// open begins a streaming call with its one message in an envelope.
func (h *harness) open(procedure string, msg any, header ...string) *stream {
	h.t.Helper()
	header = append([]string{"Content-Type", "application/connect+json", "Connect-Protocol-Version", "1"}, header...)
	resp, err := http.DefaultTransport.RoundTrip(h.request("POST", procedure, strings.NewReader(enveloped(h.t, msg)), header...)) //nolint:bodyclose // the stream closes it
	if err != nil {
		h.t.Fatal(err)
	}
	if kind := resp.Header.Get("Content-Type"); resp.StatusCode != http.StatusOK || kind != "application/connect+json" {
		h.t.Fatalf("%s: %d %s", procedure, resp.StatusCode, kind)
	}
	s := &stream{t: h.t, body: resp.Body}
	h.t.Cleanup(s.close)
	return s
}

func (s *stream) close() { _ = s.body.Close() }

// disconnect closes a stream, and returns when the server has noticed: until then what a process
// writes counts as seen by it. No other request may be under way.
func (h *harness) disconnect(s *stream) {
	h.t.Helper()
	s.close()
	testenv.Eventually(h.t, time.Minute, "the server notices that a client is gone", func() bool { return h.serving.Load() == 0 })
}

// next returns the next message, nil after the last.
func (s *stream) next() object {
	s.t.Helper()
	var head [5]byte
	if _, err := io.ReadFull(s.body, head[:]); err != nil {
		s.cut = true
		return nil
	}
	body := make([]byte, binary.BigEndian.Uint32(head[1:]))
	if _, err := io.ReadFull(s.body, body); err != nil {
		s.cut = true
		return nil
	}
	out := object{}
	if err := json.Unmarshal(body, &out); err != nil {
		s.t.Fatalf("frame %q: %v", body, err)
	}
	if head[0] == 2 {
		s.end = out
		return nil
	}
	return out
}

// outcome is what a process's stream told.
type outcome struct {
	pid              uint32
	out, errs, pty   string
	alive            int // signs of life
	end              object
	code             string // of the error that ended the stream
	message          string
	cut              bool
	startedFirst     bool
	afterEnd, events int
}

func bytesOf(t testing.TB, v any) string {
	t.Helper()
	if v == nil {
		return ""
	}
	b, err := base64.StdEncoding.DecodeString(v.(string))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// event takes the next event of a process's stream into o, and reports whether there was one.
func (s *stream) event(o *outcome) bool {
	s.t.Helper()
	msg := s.next()
	if msg == nil {
		o.cut = s.cut
		if e, ok := s.end["error"].(object); ok {
			o.code, o.message = fmt.Sprint(e["code"]), fmt.Sprint(e["message"])
		}
		return false
	}
	if o.end != nil {
		o.afterEnd++
	}
	e := msg["event"].(object)
	if start, ok := e["start"].(object); ok {
		o.pid, o.startedFirst = uint32(start["pid"].(float64)), o.events == 0
	}
	o.events++
	if data, ok := e["data"].(object); ok {
		o.out += bytesOf(s.t, data["stdout"])
		o.errs += bytesOf(s.t, data["stderr"])
		o.pty += bytesOf(s.t, data["pty"])
	}
	if _, ok := e["keepalive"]; ok {
		o.alive++
	}
	if end, ok := e["end"].(object); ok {
		o.end = end
	}
	return true
}

// rest reads a process's stream to its end.
func (s *stream) rest(o *outcome) outcome {
	s.t.Helper()
	for s.event(o) {
	}
	return *o
}

func command(script string) object {
	return object{"process": object{"cmd": "/bin/bash", "args": []string{"-l", "-c", script}}, "stdin": false}
}

const (
	processStart   = "/process.Process/Start"
	processConnect = "/process.Process/Connect"
	processSignal  = "/process.Process/SendSignal"
	processInput   = "/process.Process/SendInput"
	processList    = "/process.Process/List"
)

// run runs a shell command as SDKs do.
func (h *harness) run(script string, header ...string) outcome {
	h.t.Helper()
	return h.open(processStart, command(script), header...).rest(&outcome{})
}

// begin starts a process and returns its stream after the start event.
func (h *harness) begin(msg any, header ...string) (*stream, *outcome) {
	h.t.Helper()
	s, o := h.open(processStart, msg, header...), &outcome{}
	if !s.event(o) || o.pid == 0 {
		h.t.Fatalf("no start: %+v", o)
	}
	return s, o
}

func selector(pid uint32) object { return object{"pid": pid} }

func basic(user string) string {
	return "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"))
}
