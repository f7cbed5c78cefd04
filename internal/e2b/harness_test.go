package e2b

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/fake"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/policy"
	"casemate.dev/internal/rootfs"
	fakelayers "casemate.dev/internal/rootfs/fake"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/secret"
	"casemate.dev/internal/store"
	"casemate.dev/internal/template"
	"casemate.dev/internal/usage"
)

// harness is E2B's protocol over a Manager with the fake backend, behind a real HTTP server.
type harness struct {
	t       testing.TB
	api     *API
	manager *sandbox.Manager
	url     string
	key     string // whose sandboxes the tests make
	other   string // another key
	envd    *recorder
	roots   *roots
	log     *syncBuffer
	keys    *policy.Keys
	builds  string // the builder's directory
	usage   *usage.History
	vault   *secret.Vault
}

// syncBuffer is a log that tests read.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// Write implements io.Writer.
func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

// String returns what was logged.
func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// recorder is an agent that tells what it was asked, and can hold a stream open.
type recorder struct {
	mu   sync.Mutex
	seen []string
}

// ServeSandbox implements Envd.
func (e *recorder) ServeSandbox(w http.ResponseWriter, r *http.Request, p sandbox.Principal, sandboxID string) {
	e.mu.Lock()
	e.seen = append(e.seen, r.Method+" "+r.URL.Path+" "+sandboxID+" "+p.ID)
	e.mu.Unlock()
	if r.URL.Path == "/health" {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	_, _ = io.WriteString(w, "begun")
	_ = http.NewResponseController(w).Flush()
	if r.URL.Query().Has("stream") {
		<-r.Context().Done()
	}
}

// last returns what the agent was asked last.
func (e *recorder) last() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.seen) == 0 {
		return ""
	}
	return e.seen[len(e.seen)-1]
}

// roots plans nothing: the fake backend's files are its own.
type roots struct {
	*fakelayers.Layers
	mu   sync.Mutex
	base bool // it is built
}

// Plan implements sandbox.Roots.
func (r *roots) Plan(_ context.Context, q rootfs.Request) (rootfs.Plan, error) {
	return rootfs.Plan{User: "user", Dir: "/home/user"}, r.Use(q.ID, q.Layer)
}

// Release implements sandbox.Roots.
func (r *roots) Release(_ context.Context, id string) error {
	r.Forget(id)
	return nil
}

// Sweep implements sandbox.Roots.
func (*roots) Sweep(context.Context, map[string]bool) ([]string, error) { return nil, nil }

// Changes implements sandbox.Roots.
func (*roots) Changes(context.Context, string, rootfs.Plan, string) ([]rootfs.Change, error) {
	return nil, nil
}

// Templates implements sandbox.Roots.
func (r *roots) Templates(context.Context) ([]rootfs.Template, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return []rootfs.Template{
		{Name: "host", Profiles: []string{"locked"}, Ready: true},
		{Name: "base", Profiles: []string{"locked", "standard"}, Ready: r.base},
	}, nil
}

// place is what outlives a server.
type place struct {
	dir     string
	host    *fake.Host
	gateway sandbox.Gateway // nil: sandboxes have no network
}

func newHarness(t testing.TB) *harness {
	t.Helper()
	host := fake.NewHost()
	t.Cleanup(host.Close)
	return newHarnessIn(t, place{dir: t.TempDir(), host: host})
}

func newHarnessIn(t testing.TB, at place) *harness {
	t.Helper()
	db, err := store.Open(store.Config{Dir: at.dir})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	h := &harness{t: t, envd: &recorder{}, roots: &roots{Layers: fakelayers.NewLayers()}}
	h.roots.Files = t.TempDir()
	h.manager, err = sandbox.New(sandbox.Config{
		DB: db, Journal: journal.Open(db, journal.Options{}), Roots: h.roots,
		Backends: map[string]isolation.Backend{"fake": fake.New(fake.Config{Host: at.host})},
		Defaults: sandbox.Defaults{Isolation: "fake"}, Gateway: at.gateway,
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.manager.Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := h.manager.Close(ctx, true); err != nil {
			t.Errorf("close manager: %v", err)
		}
	})
	keys := policy.NewKeys(db, nil)
	h.keys, h.builds = keys, filepath.Join(at.dir, "builds")
	h.key, h.other = h.newKey(keys), h.newKey(keys)
	h.log = &syncBuffer{}
	h.vault, err = secret.Open(t.Context(), secret.Config{DB: db, Journal: journal.Open(db, journal.Options{}), Key: make([]byte, 32)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.vault.Close)
	builder, err := template.New(t.Context(), template.Config{Manager: h.manager, DB: db, Dir: h.builds, MaxFiles: 4 << 20, Aliases: map[string]string{"ubuntu:22.04": "base"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := builder.Close(ctx); err != nil {
			t.Errorf("close builder: %v", err)
		}
	})
	h.usage = usage.New(usage.Config{Source: h.manager, Every: time.Nanosecond})
	h.api, err = New(Config{
		Manager: h.manager, Keys: keys, Envd: h.envd, Usage: h.usage, Secret: []byte("the secret of this test"), Domain: "e2b.test:8443",
		Log: slog.New(slog.NewTextHandler(h.log, nil)), Transforms: h.vault, Secrets: h.vault, Builder: builder,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.api.Close)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !h.api.Claims(r) {
			t.Errorf("not claimed: %s %s %s", r.Method, r.Host, r.URL)
		}
		h.api.ServeHTTP(w, r)
	}))
	t.Cleanup(srv.Close)
	h.url = srv.URL
	return h
}

func (h *harness) newKey(keys *policy.Keys) string {
	h.t.Helper()
	_, secret, err := keys.Create(h.t.Context(), policy.KeyOptions{Name: "test", E2B: true})
	if err != nil {
		h.t.Fatal(err)
	}
	return secret
}

// answer is what came back.
type answer struct {
	status int
	header http.Header
	body   string
}

// into decodes the body.
func (a answer) into(t testing.TB, v any) {
	t.Helper()
	if err := json.Unmarshal([]byte(a.body), v); err != nil {
		t.Fatalf("%d %s: %v", a.status, a.body, err)
	}
}

// call makes a request with the test's key; headers come in pairs, and an empty value removes one.
func (h *harness) call(method, path, body string, header ...string) answer {
	h.t.Helper()
	return h.send(method, path, body, append([]string{"X-API-Key", h.key}, header...)...)
}

// send makes a request.
func (h *harness) send(method, path, body string, header ...string) answer {
	h.t.Helper()
	resp, err := h.open(method, path, body, header...)
	if err != nil {
		h.t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		h.t.Fatalf("%s %s: %v", method, path, err)
	}
	return answer{resp.StatusCode, resp.Header, string(b)}
}

func (h *harness) open(method, path, body string, header ...string) (*http.Response, error) {
	h.t.Helper()
	req, err := http.NewRequestWithContext(h.t.Context(), method, h.url+path, strings.NewReader(body))
	if err != nil {
		h.t.Fatal(err)
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i+1 < len(header); i += 2 {
		switch {
		case header[i] == "Host":
			req.Host = header[i+1]
		case header[i+1] == "":
			req.Header.Del(header[i])
		default:
			req.Header.Set(header[i], header[i+1])
		}
	}
	return http.DefaultTransport.RoundTrip(req)
}

// create makes a sandbox as the newest SDK does; more is further fields of the request.
func (h *harness) create(more string) sandboxJSON {
	h.t.Helper()
	if more != "" {
		more = "," + more
	}
	a := h.call("POST", "/v2/sandboxes", `{"templateID":"base"`+more+`}`)
	if a.status != http.StatusCreated {
		h.t.Fatalf("create: %d %s", a.status, a.body)
	}
	var s sandboxJSON
	a.into(h.t, &s)
	return s
}

func (h *harness) detail(sandboxID string) detailJSON {
	h.t.Helper()
	a := h.call("GET", "/sandboxes/"+sandboxID, "")
	if a.status != http.StatusOK {
		h.t.Fatalf("detail: %d %s", a.status, a.body)
	}
	var d detailJSON
	a.into(h.t, &d)
	return d
}

// refused checks an error: its status, the code in its body, and a part of its text.
func (h *harness) refused(a answer, status int, text string) {
	h.t.Helper()
	var p problem
	a.into(h.t, &p)
	if a.status != status || p.Code != status || !strings.Contains(p.Message, text) || a.header.Get("Content-Type") != "application/json" {
		h.t.Errorf("%d %s, want %d %q", a.status, a.body, status, text)
	}
}
