package network

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"casemate.dev/client"
	"casemate.dev/internal/cli"
	"casemate.dev/internal/server"
	"casemate.dev/internal/testenv"
	"casemate.dev/internal/testenv/mounts"
	"casemate.dev/internal/testenv/world"
)

// TestMain is six programs: the command line, the gateway process, the keeper and the one that unpacks an image's layer, which the servers
// of the tests start; what makes the network namespace; and the tests in it.
func TestMain(m *testing.M) {
	programs := map[string]func([]string) error{
		server.GatewayVerb: server.RunGateway, server.UnpackVerb: server.UnpackLayer,
		server.KeeperVerb: func([]string) error { return server.RunKeeper() },
		"casemate":        func(args []string) error { os.Exit(cli.Main("test", args)); return nil },
	}
	if len(os.Args) > 1 && programs[os.Args[1]] != nil {
		if err := programs[os.Args[1]](os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if code := mounts.Enter(); code != 0 {
		os.Exit(code)
	}
	os.Exit(world.Main(m))
}

// place is the directories of a server, which may be started again on them.
type place struct {
	t   *testing.T
	dir string
	w   *world.World
	set func(*server.Config) // changes the configuration; may be nil
	srv *server.Server
	end context.CancelFunc
	run chan error
	*client.Client
}

func newPlace(t *testing.T) *place {
	t.Helper()
	return newPlaceIn(t, world.New(t), nil)
}

// newPlaceIn is newPlace in a world that is there, with a server that set configures.
func newPlaceIn(t *testing.T, w *world.World, set func(*server.Config)) *place {
	t.Helper()
	dir := testenv.RunDir(t)
	p := &place{t: t, dir: dir, w: w, set: set}
	if err := os.WriteFile(dir+"/ca.pem", w.CAPEM(), 0o644); err != nil {
		t.Fatal(err)
	}
	p.start()
	t.Cleanup(func() { p.stop(true) })
	return p
}

func (p *place) config() server.Config {
	return server.Config{
		DataDir: filepath.Join(p.dir, "d"), RunDir: filepath.Join(p.dir, "r"), KeysDir: filepath.Join(p.dir, "k"), Listen: []string{},
		StoreBytes: 1 << 30, Nameservers: []string{world.Resolver + ":53"}, NetworkSets: filepath.Join(p.dir, "n"),
		ExtraCAs: []string{filepath.Join(p.dir, "ca.pem")},
		Log:      slog.New(slog.NewTextHandler(testWriter{p.t}, &slog.HandlerOptions{Level: slog.LevelWarn})),
	}
}

type testWriter struct{ t *testing.T }

func (w testWriter) Write(b []byte) (int, error) {
	w.t.Logf("server: %s", b)
	return len(b), nil
}

func (p *place) start() {
	p.t.Helper()
	var err error
	cfg := p.config()
	if p.set != nil {
		p.set(&cfg)
	}
	if p.srv, err = server.New(context.Background(), cfg); err != nil {
		p.t.Fatal(err)
	}
	var ctx context.Context
	ctx, p.end = context.WithCancel(context.Background())
	p.run = make(chan error, 1)
	go func() { p.run <- p.srv.Run(ctx) }()
	if p.Client, err = client.New("unix://"+p.srv.UnixSocket(), ""); err != nil {
		p.t.Fatal(err)
	}
}

// stop ends the server, and its sandboxes and gateway where all is set.
func (p *place) stop(all bool) {
	p.t.Helper()
	if all {
		list, _, err := p.Sandboxes.List(context.Background(), &client.ListRequest{})
		if err != nil {
			p.t.Error(err)
		}
		for _, s := range list {
			if _, err := p.Sandboxes.Delete(context.Background(), s.GetId()); err != nil {
				p.t.Error(err)
			}
		}
	}
	p.Close()
	p.end()
	if err := testenv.Receive(p.t, "the server ends", p.run); err != nil {
		p.t.Errorf("serve: %v", err)
	}
	if err := p.srv.Close(); err != nil {
		p.t.Errorf("close: %v", err)
	}
}

// create makes a sandbox with the given rules; none at all is no network.
func (p *place) create(rules ...string) *client.Sandbox {
	p.t.Helper()
	req := &client.CreateRequest{}
	if rules != nil {
		req.Network = &client.NetworkRules{Rules: rules}
	}
	s, err := p.Sandboxes.Create(p.t.Context(), req)
	if err != nil {
		p.t.Fatal(err)
	}
	return s
}

// sh runs a script and returns what it printed, both streams together, and how it ended.
func (p *place) sh(s *client.Sandbox, script string) (string, *client.Process) {
	p.t.Helper()
	spec := &client.ProcessSpec{Argv: []string{"bash", "-c", "exec 2>&1\n" + script}, Timeout: durationpb.New(testenv.Unhurried)}
	r, err := p.Processes.Execute(p.t.Context(), s.GetId(), spec, nil)
	if err != nil {
		p.t.Fatal(err)
	}
	return string(r.GetStdout()), r.GetProcess()
}

func (p *place) expect(s *client.Sandbox, script, want string) {
	p.t.Helper()
	if got, _ := p.sh(s, script); strings.TrimSpace(got) != want {
		p.t.Errorf("%s\ngot  %q\nwant %q", script, got, want)
	}
}

// web serves HTTP and HTTPS for the names on world.Web.
func (p *place) web(names ...string) *world.Log {
	p.t.Helper()
	var seen world.Log
	h := http.HandlerFunc(func(out http.ResponseWriter, r *http.Request) {
		seen.Add(r.Host + r.URL.Path)
		_, _ = fmt.Fprintf(out, "hello from %s", r.Host)
	})
	for _, port := range []string{"80", "443"} {
		srv := &http.Server{Handler: h, ReadHeaderTimeout: time.Minute, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)}
		l := p.w.Listen(world.Web + ":" + port)
		if port == "443" {
			srv.TLSConfig = p.w.TLS(names...)
			go func() { _ = srv.ServeTLS(l, "", "") }()
		} else {
			go func() { _ = srv.Serve(l) }()
		}
		p.t.Cleanup(func() { _ = srv.Close() })
	}
	for _, n := range names {
		p.w.Name(n, world.Web)
	}
	return &seen
}

// echo serves TCP that sends back what it gets.
func (p *place) echo(addr string) {
	p.w.Serve(addr, func(c net.Conn) { _, _ = io.Copy(c, c) })
}
