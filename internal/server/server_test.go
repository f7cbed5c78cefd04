package server

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"casemate.dev/client"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/fake"
	"casemate.dev/internal/rootfs"
	fakelayers "casemate.dev/internal/rootfs/fake"
	"casemate.dev/internal/sandbox"
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

// place is the three directories of one server, and the machine that its sandboxes live on.
type place struct {
	dir  string
	host *fake.Host
}

func newPlace(t *testing.T) place {
	t.Helper()
	host := fake.NewHost()
	t.Cleanup(host.Close)
	return place{testenv.RunDir(t), host} // short: a socket's path holds 107 bytes
}

func (p place) config() Config {
	b := fake.New(fake.Config{Host: p.host})
	return Config{
		DataDir: filepath.Join(p.dir, "data"), RunDir: filepath.Join(p.dir, "run"), KeysDir: filepath.Join(p.dir, "keys"),
		Listen: []string{"127.0.0.1:0"}, Version: "v1", Defaults: sandbox.Defaults{Isolation: "fake"},
		Backends: map[string]isolation.Backend{"fake": b}, Roots: roots{fakelayers.NewLayers()}, DrainTimeout: 5 * time.Second,
	}
}

// running is a server that serves; stop ends it and returns what it said.
type running struct {
	*Server
	stop func() error
}

func start(t *testing.T, cfg Config) running {
	t.Helper()
	s, err := New(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	var stopped bool
	stop := func() error {
		if stopped {
			return nil
		}
		stopped = true
		cancel()
		return errors.Join(testenv.Receive(t, "the server ends", done), s.Close())
	}
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Errorf("stop: %v", err)
		}
	})
	return running{s, stop}
}

func (r running) unix(t *testing.T) *client.Client {
	t.Helper()
	c, err := client.New("unix://"+r.UnixSocket(), "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func (r running) tcp(t *testing.T, key string) *client.Client {
	t.Helper()
	t.Setenv(client.EnvKey, "")
	c, err := client.New("http://"+r.Addrs()[0].String(), key)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// TestFirstKeyOpensTCP: the socket needs no key; TCP takes the one that lies in the keys directory,
// readable by the owner alone.
func TestFirstKeyOpensTCP(t *testing.T) {
	s := start(t, newPlace(t).config())
	if _, err := s.unix(t).System.Keys(t.Context()); err != nil {
		t.Errorf("the socket: %v", err)
	}
	if _, err := s.tcp(t, "").System.Keys(t.Context()); client.KindOf(err) != client.Unauthenticated {
		t.Errorf("TCP without a key: %v", err)
	}
	secret, err := os.ReadFile(s.KeyPath())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.tcp(t, strings.TrimSpace(string(secret))).System.Keys(t.Context()); err != nil {
		t.Errorf("TCP with the first key: %v", err)
	}
	for path, want := range map[string]os.FileMode{s.KeyPath(): 0o600, s.UnixSocket(): 0o600, s.cfg.KeysDir: 0o700, s.cfg.DataDir: 0o700} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: %v, %v; want mode %o", path, info.Mode(), err, want)
		}
	}
}

// TestSecondServerIsTold: neither the data nor the run directory takes two servers.
func TestSecondServerIsTold(t *testing.T) {
	p := newPlace(t)
	start(t, p.config())
	for name, change := range map[string]func(*Config){
		"same data directory": func(c *Config) { c.RunDir += "2"; c.KeysDir += "2" },
		"same run directory":  func(c *Config) { c.DataDir += "2"; c.KeysDir += "2" },
	} {
		t.Run(name, func(t *testing.T) {
			cfg := p.config()
			change(&cfg)
			_, err := New(t.Context(), cfg)
			if !errs.Is(err, errs.FailedPrecondition) {
				t.Errorf("New = %v, want failed_precondition", err)
			}
		})
	}
}

// TestTwoServersShareAHost: with directories of their own, two servers keep out of each other's way.
func TestTwoServersShareAHost(t *testing.T) {
	a, b := start(t, newPlace(t).config()), start(t, newPlace(t).config())
	if a.ID() == b.ID() {
		t.Errorf("both are %s", a.ID())
	}
	sb, err := a.unix(t).Sandboxes.Create(t.Context(), &client.CreateRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.unix(t).Sandboxes.Get(t.Context(), sb.GetId()); client.KindOf(err) != client.NotFound {
		t.Errorf("the other server knows it: %v", err)
	}
}

// TestRestartKeepsSandboxes: a server that goes down and comes back has the same id, the same keys
// and the same sandboxes, and a client that follows a process notices nothing.
func TestRestartKeepsSandboxes(t *testing.T) {
	p := newPlace(t)
	first := start(t, p.config())
	c := first.unix(t)
	sb, err := c.Sandboxes.Create(t.Context(), &client.CreateRequest{})
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	started, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		_, err := c.Processes.Run(t.Context(), sb.GetId(), &client.ProcessSpec{Id: "p", Argv: []string{"cat"}, Stdin: true},
			client.RunOptions{Stdout: &out, Started: func(*client.Process) { close(started) }})
		ended <- err
	}()
	testenv.Receive(t, "the process starts", started)
	if _, err := c.Processes.WriteInput(t.Context(), sb.GetId(), "p", 0, []byte("before "), false); err != nil {
		t.Fatal(err)
	}
	if err := first.stop(); err != nil {
		t.Fatal(err)
	}
	second := start(t, p.config())
	if first.ID() != second.ID() || len(second.Recovered().Adopted) != 1 {
		t.Errorf("ids %s and %s, recovered %+v", first.ID(), second.ID(), second.Recovered())
	}
	if _, err := c.Processes.WriteInput(t.Context(), sb.GetId(), "p", 7, []byte("after"), true); err != nil {
		t.Fatal(err)
	}
	if err := testenv.Receive(t, "the run ends", ended); err != nil || out.String() != "before after" {
		t.Errorf("Run = %v, output %q", err, out.String())
	}
}

// TestStopSandboxes: told so, a server takes its sandboxes along.
func TestStopSandboxes(t *testing.T) {
	p := newPlace(t)
	cfg := p.config()
	cfg.StopSandboxes = true
	s := start(t, cfg)
	if _, err := s.unix(t).Sandboxes.Create(t.Context(), &client.CreateRequest{}); err != nil {
		t.Fatal(err)
	}
	if err := s.stop(); err != nil {
		t.Fatal(err)
	}
	if left := p.host.Instances(); len(left) != 0 {
		t.Errorf("left %v", left)
	}
}

// TestServerWithoutGuestRefuses names what to do.
func TestServerWithoutGuestRefuses(t *testing.T) {
	cfg := newPlace(t).config()
	cfg.Backends, cfg.Roots = nil, nil
	if _, err := guestProgram(cfg); err == nil {
		t.Log("this build has a guest")
		return
	}
	_, err := New(t.Context(), cfg)
	_, hint := errs.PublicText(err)
	if !errs.Is(err, errs.FailedPrecondition) || !strings.Contains(hint, "make build") {
		t.Errorf("New = %v, hint %q", err, hint)
	}
	if _, err := os.Stat(cfg.DataDir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("it made its data directory first: %v", err)
	}
}

// TestNewLeavesNothingOpen: what New opened before it failed is closed again.
func TestNewLeavesNothingOpen(t *testing.T) {
	p := newPlace(t)
	cfg := p.config()
	cfg.Listen = []string{"127.0.0.1:0", "256.0.0.1:1"}
	if _, err := New(t.Context(), cfg); err == nil {
		t.Fatal("listened on no address")
	}
	start(t, p.config()) // the locks are free
}

func TestAddressInUse(t *testing.T) {
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	cfg := newPlace(t).config()
	cfg.Listen = []string{l.Addr().String()}
	if _, err := New(t.Context(), cfg); !errs.Is(err, errs.FailedPrecondition) {
		t.Errorf("New = %v, want failed_precondition", err)
	}
}

// TestSlowHeadersAreCut: a connection that never ends its header is closed (slowloris).
func TestSlowHeadersAreCut(t *testing.T) {
	s := start(t, newPlace(t).config())
	for _, l := range s.listeners {
		if got := l.http.ReadHeaderTimeout; got <= 0 || got > 30*time.Second || l.http.MaxHeaderBytes > 1<<20 || l.http.IdleTimeout <= 0 {
			t.Errorf("%s: header timeout %v, header bytes %d, idle %v", l.Addr(), got, l.http.MaxHeaderBytes, l.http.IdleTimeout)
		}
	}
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", s.Addrs()[0].String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	_, _ = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: localhost\r\nX: "+strings.Repeat("x", 128<<10)+"\r\n\r\n")
	_ = conn.SetReadDeadline(time.Now().Add(time.Minute))
	b, _ := io.ReadAll(conn)
	if !strings.HasPrefix(string(b), "HTTP/1.1 431") {
		t.Errorf("a header of 128 KiB: %.60q", b)
	}
}

// TestHTTP2WithoutTLS: gRPC clients begin with HTTP/2 at once.
func TestHTTP2WithoutTLS(t *testing.T) {
	s := start(t, newPlace(t).config())
	p := new(http.Protocols)
	p.SetUnencryptedHTTP2(true)
	c := &http.Client{Transport: &http.Transport{Protocols: p}}
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+s.Addrs()[0].String()+"/-/health", nil)
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.ProtoMajor != 2 || resp.StatusCode != http.StatusOK {
		t.Errorf("%s %d", resp.Proto, resp.StatusCode)
	}
}
