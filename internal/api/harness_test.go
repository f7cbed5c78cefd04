package api

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
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
	"casemate.dev/internal/state"
	"casemate.dev/internal/store"
	"casemate.dev/internal/template"
)

// harness is the API over a Manager with the fake backend, behind a real HTTP server.
type harness struct {
	t       testing.TB
	api     *API
	fake    *fake.Backend
	url     string
	admin   string // an admin's key
	user    string // another key
	log     *syncBuffer
	manager *sandbox.Manager
}

// roots plans nothing: the fake backend's files are its own.
type roots struct{ *fakelayers.Layers }

// Plan implements sandbox.Roots.
func (roots) Plan(context.Context, rootfs.Request) (rootfs.Plan, error) {
	return rootfs.Plan{User: "user", Dir: "/home/user"}, nil
}

// Release implements sandbox.Roots.
func (roots) Release(context.Context, string) error { return nil }

// Sweep implements sandbox.Roots.
func (roots) Sweep(context.Context, map[string]bool) ([]string, error) { return nil, nil }

// Changes implements sandbox.Roots.
func (roots) Changes(context.Context, string, rootfs.Plan, string) ([]rootfs.Change, error) {
	return []rootfs.Change{{Op: "added", Path: "/home/user/new", Type: "file", Size: 3, Mode: 0o644}}, nil
}

// Templates implements sandbox.Roots.
func (roots) Templates(context.Context) ([]rootfs.Template, error) {
	return []rootfs.Template{{Name: "host", Profiles: []string{"locked", "standard"}, Ready: true}}, nil
}

// syncBuffer is a log that tests read while the server writes.
type syncBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

// Write implements io.Writer.
func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

// String returns what was logged.
func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// newHarness starts a server; shape may change its configuration.
func newHarness(t testing.TB, shape ...func(*Config)) *harness {
	t.Helper()
	db, err := store.Open(store.Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	h := &harness{t: t, log: &syncBuffer{}}
	host := fake.NewHost()
	t.Cleanup(host.Close)
	h.fake = fake.New(fake.Config{Host: host})
	layers := fakelayers.NewLayers()
	layers.Files = t.TempDir()
	key, err := journal.LoadKey(t.TempDir(), "casemate.test/log")
	if err != nil {
		t.Fatal(err)
	}
	events, err := journal.OpenSigned(t.Context(), db, journal.SignedOptions{Dir: t.TempDir(), Key: key})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = events.Close() })
	h.manager, err = sandbox.New(sandbox.Config{
		DB: db, Journal: events, Backends: map[string]isolation.Backend{"fake": h.fake}, Roots: roots{layers}, Gateway: noGateway{},
		Defaults: sandbox.Defaults{Isolation: "fake"},
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
	builder, err := template.New(t.Context(), template.Config{Manager: h.manager, DB: db, Dir: t.TempDir()})
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
	vault, err := secret.Open(t.Context(), secret.Config{DB: db, Journal: events, Key: make([]byte, 32)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(vault.Close)
	documents := state.New(state.Config{DB: db, Journal: events, Sandboxes: h.manager})
	keys := policy.NewKeys(db, nil)
	h.admin, h.user = h.newKey(keys, true), h.newKey(keys, false)
	cfg := Config{
		Manager: h.manager, Proofs: events, Keys: keys, Secrets: vault, State: documents, Builder: builder, Gateway: true, Log: slog.New(slog.NewTextHandler(h.log, nil)), Version: "v-test", ServerID: "testserver", Kernel: "6.1",
		KeepAlive: 50 * time.Millisecond, Authority: &Authority{PEM: "a certificate", SHA256: "00ff"},
		BuildTemplate: func(_ context.Context, name string, _ bool, progress func(string, float64, string)) (sandbox.Template, error) {
			progress("unpack", 0.5, "unpacking "+name)
			return sandbox.Template{Name: name, Ready: true}, nil
		},
		Images: fakeImages{},
	}
	for _, f := range shape {
		f(&cfg)
	}
	if h.api, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.api.Close)
	srv := httptest.NewUnstartedServer(h.api)
	srv.Config.Protocols = new(http.Protocols)
	srv.Config.Protocols.SetHTTP1(true)
	srv.Config.Protocols.SetUnencryptedHTTP2(true)
	srv.Start()
	t.Cleanup(srv.Close)
	h.url = srv.URL
	return h
}

func (h *harness) newKey(keys *policy.Keys, admin bool) string {
	h.t.Helper()
	_, secret, err := keys.Create(h.t.Context(), policy.KeyOptions{Name: "test", Admin: admin})
	if err != nil {
		h.t.Fatal(err)
	}
	return secret
}

// call makes a request with the user's key and returns status, header and body.
func (h *harness) call(method, path, body string, header ...string) (int, http.Header, string) {
	h.t.Helper()
	req, err := http.NewRequestWithContext(h.t.Context(), method, h.url+path, strings.NewReader(body))
	if err != nil {
		h.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+h.user)
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
		if header[i+1] == "" {
			req.Header.Del(header[i])
		}
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		h.t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		h.t.Fatalf("%s %s: %v", method, path, err)
	}
	return resp.StatusCode, resp.Header, string(b)
}

// box makes a sandbox that the user owns.
func (h *harness) box() string {
	h.t.Helper()
	p, err := h.api.cfg.Keys.Authenticate(h.t.Context(), h.user)
	if err != nil {
		h.t.Fatal(err)
	}
	sb, err := h.manager.Create(h.t.Context(), p, sandbox.Spec{}, sandbox.CreateOptions{})
	if err != nil {
		h.t.Fatal(err)
	}
	return sb.ID
}
