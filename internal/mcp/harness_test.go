package mcp_test

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"casemate.dev/client"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/fake"
	"casemate.dev/internal/mcp"
	"casemate.dev/internal/rootfs"
	fakelayers "casemate.dev/internal/rootfs/fake"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/server"
	"casemate.dev/internal/testenv"
)

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
	return nil, nil
}

// Templates implements sandbox.Roots.
func (roots) Templates(context.Context) ([]rootfs.Template, error) {
	return []rootfs.Template{{Name: "host", Profiles: []string{"locked"}, Ready: true}}, nil
}

// harness is a whole server over the fake backend.
type harness struct {
	*testing.T
	url    string
	admin  *client.Client
	socket string
	stop   func() // ends the server
}

func newHarness(t *testing.T) *harness {
	t.Helper()
	host := fake.NewHost()
	t.Cleanup(host.Close)
	dir := testenv.RunDir(t)
	s, err := server.New(t.Context(), server.Config{
		DataDir: filepath.Join(dir, "d"), RunDir: filepath.Join(dir, "r"), KeysDir: filepath.Join(dir, "k"),
		Listen: []string{"127.0.0.1:0"}, Defaults: sandbox.Defaults{Isolation: "fake"}, StopSandboxes: true,
		Backends: map[string]isolation.Backend{"fake": fake.New(fake.Config{Host: host})},
		Roots:    roots{fakelayers.NewLayers()},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	stopped := false
	stop := func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := testenv.Receive(t, "the server ends", done); err != nil {
			t.Errorf("run: %v", err)
		}
	}
	t.Cleanup(func() {
		stop()
		if err := s.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	h := &harness{T: t, url: "http://" + s.Addrs()[0].String(), socket: "unix://" + s.UnixSocket(), stop: stop}
	h.admin = h.client("")
	return h
}

// client connects as a key, or as the server's owner.
func (h *harness) client(key string) *client.Client {
	h.Helper()
	url := h.url
	if key == "" {
		url = h.socket
	}
	c, err := client.New(url, key)
	if err != nil {
		h.Fatal(err)
	}
	h.Cleanup(c.Close)
	return c
}

// key makes a key of nobody else's.
func (h *harness) key() string {
	h.Helper()
	_, secret, err := h.admin.System.CreateKey(h.Context(), &client.CreateKeyRequest{Name: h.Name()})
	if err != nil {
		h.Fatal(err)
	}
	return secret
}

// withKey is an http.Client's transport that shows a key.
type withKey struct{ key string }

// RoundTrip implements http.RoundTripper.
func (k withKey) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+k.key)
	return http.DefaultTransport.RoundTrip(r)
}

// peer is a client's end of an MCP session.
type peer struct {
	h *harness
	*sdk.ClientSession
}

// overHTTP opens a session with the official client over streamable HTTP.
func (h *harness) overHTTP(key string, o *sdk.ClientOptions) *peer {
	h.Helper()
	c := sdk.NewClient(&sdk.Implementation{Name: "tester", Version: "1"}, o)
	s, err := c.Connect(h.Context(), &sdk.StreamableClientTransport{
		Endpoint: h.url + "/mcp", HTTPClient: &http.Client{Transport: withKey{key}}, MaxRetries: -1,
	}, nil)
	if err != nil {
		h.Fatal(err)
	}
	h.Cleanup(func() { _ = s.Close() })
	return &peer{h, s}
}

// overStdio opens a session over a pair of pipes, as `casemate mcp` serves it.
func (h *harness) overStdio(shape func(*mcp.Config), o *sdk.ClientOptions) (p *peer, left <-chan error) {
	h.Helper()
	cfg := mcp.Config{Version: "test", Connect: func(string) (*client.Client, error) { return client.New(h.socket, "") }}
	if shape != nil {
		shape(&cfg)
	}
	toServer, fromClient := io.Pipe()
	toClient, fromServer := io.Pipe()
	done := make(chan error, 1)
	go func() { done <- mcp.New(cfg).RunStdio(context.Background(), toServer, fromServer) }()
	c := sdk.NewClient(&sdk.Implementation{Name: "tester", Version: "1"}, o)
	s, err := c.Connect(h.Context(), &sdk.IOTransport{Reader: toClient, Writer: fromClient}, nil)
	if err != nil {
		h.Fatal(err)
	}
	h.Cleanup(func() { _ = s.Close() })
	return &peer{h, s}, done
}

type object = map[string]any

// call calls a tool and returns its text and fields.
func (p *peer) call(name string, args object) (string, object) {
	p.h.Helper()
	text, fields, isErr := p.try(name, args)
	if isErr {
		p.h.Fatalf("%s %v: %s", name, args, text)
	}
	return text, fields
}

// refused calls a tool whose answer must be an error, and returns its text.
func (p *peer) refused(name string, args object) string {
	p.h.Helper()
	text, _, isErr := p.try(name, args)
	if !isErr {
		p.h.Fatalf("%s %v: it was accepted: %s", name, args, text)
	}
	return text
}

func (p *peer) try(name string, args object) (text string, fields object, isErr bool) {
	p.h.Helper()
	if args == nil {
		args = object{}
	}
	ctx, cancel := context.WithTimeout(p.h.Context(), 30*time.Second)
	defer cancel()
	r, err := p.CallTool(ctx, &sdk.CallToolParams{Name: name, Arguments: args})
	if err != nil {
		p.h.Fatalf("%s %v: %v", name, args, err)
	}
	for _, c := range r.Content {
		if t, ok := c.(*sdk.TextContent); ok {
			text += t.Text
		}
	}
	if raw, err := json.Marshal(r.StructuredContent); err == nil {
		_ = json.Unmarshal(raw, &fields)
	}
	return text, fields, r.IsError
}

// boxes lists the sandboxes that the server has.
func (h *harness) boxes() []*client.Sandbox {
	h.Helper()
	all, err := h.admin.Sandboxes.All(h.Context(), &client.ListRequest{})
	if err != nil {
		h.Fatal(err)
	}
	return all
}

func contains(t *testing.T, text string, wants ...string) {
	t.Helper()
	for _, w := range wants {
		if !strings.Contains(text, w) {
			t.Errorf("%q lacks %q", text, w)
		}
	}
}
