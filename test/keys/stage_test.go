package keys

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"casemate.dev/client"
	"casemate.dev/internal/testenv"
	"casemate.dev/internal/testenv/world"
)

func TestMain(m *testing.M) { os.Exit(world.Main(m)) }

// The names of the fake internet.
const (
	api   = "api.example.com"
	other = "other.example.net"
	model = "models.example.org"
)

// stage is a server in a fake internet, with a client of its owner's.
type stage struct {
	*client.Client
	t     *testing.T
	w     *world.World
	dir   string
	api   *site
	other *site
	spent string // a sandbox that has used up its budget
	args  []string
	run   *exec.Cmd
	ended <-chan error
}

// site is a web server that keeps what it gets.
type site struct {
	mu   sync.Mutex
	reqs []request
}

type request struct {
	host, path, proto, body string
	header                  http.Header
}

func (r request) text() string { return fmt.Sprint(r.host, r.path, r.header, r.body) }

// ServeHTTP keeps the request, and answers as its path says.
func (s *site) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	b, _ := io.ReadAll(r.Body)
	s.mu.Lock()
	s.reqs = append(s.reqs, request{r.Host, r.RequestURI, r.Proto, string(b), r.Header.Clone()})
	s.mu.Unlock()
	switch {
	case strings.HasPrefix(r.URL.Path, "/echo"):
		w.Header().Set("X-Echo", r.Header.Get("Authorization"))
		fmt.Fprintf(w, "you sent %v", r.Header)
	case strings.HasPrefix(r.URL.Path, "/error"):
		http.Error(w, "denied: "+r.Header.Get("Authorization"), http.StatusForbidden)
	case strings.HasPrefix(r.URL.Path, "/away"):
		http.Redirect(w, r, "https://"+other+"/landed", http.StatusFound)
	case strings.HasPrefix(r.URL.Path, "/v1/"):
		fmt.Fprint(w, `{"content":[{"type":"text","text":"hi"}],"usage":{"input_tokens":7,"output_tokens":3}}`)
	default:
		fmt.Fprint(w, "ok")
	}
}

func (s *site) all() []request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]request(nil), s.reqs...)
}

func (s *site) last(t *testing.T) request {
	t.Helper()
	all := s.all()
	if len(all) == 0 {
		t.Fatal("the site got nothing")
	}
	return all[len(all)-1]
}

// canary is a value that stands nowhere in the repository.
func canary(n int) string { return fmt.Sprintf("canary%d-%s", n, strings.Repeat("wX7", 8)) }

func start(t *testing.T) *stage {
	testenv.Root(t)
	s := &stage{t: t, w: world.New(t), dir: testenv.RunDir(t), api: &site{}, other: &site{}}
	s.serve(world.Web, s.api, api, model)
	s.serve(world.Other, s.other, other)
	ca := filepath.Join(s.dir, "ca.pem")
	if err := os.WriteFile(ca, s.w.CAPEM(), 0o644); err != nil {
		t.Fatal(err)
	}
	s.args = []string{
		build(t), "serve", "--data-dir=" + s.dir + "/d", "--run-dir=" + s.dir + "/r", "--keys-dir=" + s.dir + "/k",
		"--listen=none", "--store-size=1g", "--dns=" + world.Resolver, "--extra-ca=" + ca,
	}
	t.Cleanup(s.stop)
	s.launch()
	var err error
	if s.Client, err = client.New("unix://"+s.dir+"/r/casemate.sock", ""); err != nil {
		t.Fatal(err)
	}
	return s
}

// launch starts the server, and waits until it answers.
func (s *stage) launch() {
	log, err := os.OpenFile(s.dir+"/server.log", os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		s.t.Fatal(err)
	}
	defer log.Close()
	_ = os.Remove(s.dir + "/r/server.json") // of one that was killed
	s.run = exec.Command(s.args[0], s.args[1:]...)
	s.run.Stdout, s.run.Stderr = log, log
	if err := s.run.Start(); err != nil {
		s.t.Fatal(err)
	}
	run, ended := s.run, make(chan error, 1) // waited for, or else it would not be gone when it has ended
	s.ended = ended
	go func() { ended <- run.Wait() }()
	testenv.Eventually(s.t, 30*time.Second, "the server is up", func() bool {
		raw, err := os.ReadFile(s.dir + "/r/server.json")
		return err == nil && json.Valid(raw)
	})
}

// serve opens a site on 80, 443 and 8443 of an address, under names.
func (s *stage) serve(addr string, h http.Handler, names ...string) {
	for _, n := range names {
		s.w.Name(n, addr)
	}
	conf := s.w.TLS(names...)
	conf.NextProtos = []string{"h2", "http/1.1"}
	for _, port := range []string{":80", ":443", ":8443"} {
		l := s.w.Listen(addr + port)
		srv := &http.Server{Handler: h, ReadHeaderTimeout: time.Minute}
		if port != ":80" {
			l = tls.NewListener(l, conf)
		}
		go func() { _ = srv.Serve(l) }()
		s.t.Cleanup(func() { _ = srv.Close() })
	}
}

func (s *stage) stop() {
	down := exec.Command(s.args[0], "down", "--sandboxes", "--run-dir", s.dir+"/r")
	out, err := down.CombinedOutput()
	if err != nil {
		s.t.Errorf("down: %v %s", err, out)
		_ = s.run.Process.Signal(syscall.SIGTERM)
	}
	<-s.ended
	if s.t.Failed() {
		text, _ := os.ReadFile(s.dir + "/server.log")
		s.t.Logf("the server's log:\n%s", text)
	}
}

// build builds the program with its guest.
func build(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	guest := filepath.Join(dir, "guest")
	if err := os.WriteFile(guest, testenv.Guest(t), 0o755); err != nil {
		t.Fatal(err)
	}
	target := filepath.Join(testenv.Module(t), "internal", "guestbin", "bin", "guest-linux-"+runtime.GOARCH)
	overlay := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(overlay, fmt.Appendf(nil, `{"Replace": {%q: %q}}`, target, guest), 0o644); err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(dir, "casemate")
	cmd := exec.Command("go", "build", "-trimpath", "-overlay", overlay, "-o", out, "casemate.dev/cmd/casemate")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build casemate: %v\n%s", err, text)
	}
	return out
}

// secret keeps a value and binds it.
func (s *stage) secret(name, value string, b *client.SecretBinding) {
	s.t.Helper()
	ctx := context.Background()
	if _, err := s.Secrets.Set(ctx, &client.SetSecretRequest{Name: name, Value: value}); err != nil {
		s.t.Fatal(err)
	}
	if b.For == nil {
		b.For = &client.SandboxSelector{All: true}
	}
	if _, err := s.Secrets.Bind(ctx, name, b); err != nil {
		s.t.Fatal(err)
	}
}

// box makes a sandbox that may reach what rules say.
func (s *stage) box(rules ...string) string {
	s.t.Helper()
	sb, err := s.Sandboxes.Create(context.Background(), &client.CreateRequest{Network: &client.NetworkRules{Rules: rules}})
	if err != nil {
		s.t.Fatal(err)
	}
	return sb.GetId()
}

// sh runs a script in a sandbox and returns what it prints on both streams.
func (s *stage) sh(box, script string) string {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	r, err := s.Processes.Execute(ctx, box, &client.ProcessSpec{Argv: []string{"/bin/bash", "-c", script}}, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	return string(r.GetStdout()) + string(r.GetStderr())
}
