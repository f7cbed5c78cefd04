package script

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"casemate.dev/client"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/fake"
	"casemate.dev/internal/rootfs"
	fakelayers "casemate.dev/internal/rootfs/fake"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/server"
	"casemate.dev/internal/testenv"
)

// stage is a server and the program that scripts use.
type stage struct {
	real    bool
	program string // path of casemate
	socket  string // unix:///…
	url     string // http://…
	admin   *client.Client
	// registry is the host of an image registry; "": there is none.
	registry string
}

// actorKeys are the keys of one script's actors.
type actorKeys struct {
	program, socket, url string
	user, other          string
}

type keysKey struct{}

// setup gives a script its actors: keys of its own, so that scripts do not see each other's
// sandboxes.
func (s *stage) setup(env *testscript.Env) error {
	k := &actorKeys{program: s.program, socket: s.socket, url: s.url}
	for _, secret := range []*string{&k.user, &k.other} {
		_, v, err := s.admin.System.CreateKey(context.Background(), &client.CreateKeyRequest{Name: filepath.Base(env.WorkDir)})
		if err != nil {
			return err
		}
		*secret = v
	}
	env.Values[keysKey{}] = k
	env.Setenv("CASEMATE_URL", s.socket)
	env.Setenv("PROGRAM", s.program)
	env.Setenv("USER_KEY", k.user)
	env.Setenv("TCP_URL", s.url)
	env.Setenv("HOME", env.WorkDir)
	env.Setenv("REGISTRY", s.registry)
	runsc, err := filepath.Abs("../../.cache/runsc/runsc") // where `make runsc` puts it
	if err != nil {
		return err
	}
	env.Setenv("RUNSC", runsc)
	env.Setenv("HOSTILE", "evil=a\x1b]0;x\x07b\u202ec")
	// A short directory, for servers that a script starts itself: sockets lie in it (unix(7)).
	short, err := testenv.MakeRunDir()
	if err != nil {
		return err
	}
	env.Setenv("S", short)
	env.Defer(func() {
		// A script that failed may have left servers there.
		runs, _ := filepath.Glob(filepath.Join(short, "*", "server.json"))
		for _, r := range runs {
			down := exec.CommandContext(context.Background(), s.program, "down", "--sandboxes", "--run-dir", filepath.Dir(r))
			_ = down.Run() // one that is gone already
		}
		_ = os.RemoveAll(short)
	})
	at := newWitness()
	env.Setenv("WITNESS", at.URL)
	env.Defer(at.Close)
	// A name for sandboxes that no other script uses.
	env.Setenv("N", strings.ToLower(strings.ReplaceAll(filepath.Base(env.WorkDir), "script-", "s-")))
	env.Defer(func() { s.sweep(k) })
	return nil
}

// sweep ends what a script left running.
func (s *stage) sweep(k *actorKeys) {
	for _, key := range []string{k.user, k.other} {
		c, err := client.New(s.url, key)
		if err != nil {
			continue
		}
		list, err := c.Sandboxes.All(context.Background(), &client.ListRequest{})
		for _, sb := range list {
			if err == nil {
				_, err = c.Sandboxes.Delete(context.Background(), sb.GetId())
			}
		}
		c.Close()
	}
}

// connect finds the server's addresses.
func (s *stage) connect(t *testing.T, socket, url string) {
	t.Helper()
	s.socket, s.url = "unix://"+socket, url
	c, err := client.New(s.socket, "")
	if err != nil {
		t.Fatal(err)
	}
	s.admin = c
	t.Cleanup(c.Close)
}

// startFake starts a server over a scripted backend inside this process.
func startFake(t *testing.T) *stage {
	dir := testenv.RunDir(t)
	s := &stage{program: buildProgram(t, nil)}
	host := fake.NewHost()
	t.Cleanup(host.Close)
	srv, err := server.New(t.Context(), server.Config{
		DataDir: filepath.Join(dir, "d"), RunDir: filepath.Join(dir, "r"), KeysDir: filepath.Join(dir, "k"),
		Listen: []string{"127.0.0.1:0"}, StopSandboxes: true, Version: "test",
		// Under the real one's name, so that the same scripts fit both.
		Backends: map[string]isolation.Backend{"namespace": fake.New(fake.Config{Name: "namespace", Host: host})},
		Roots:    fakeRoots{fakelayers.NewLayers()},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- srv.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := testenv.Receive(t, "the server ends", done); err != nil {
			t.Errorf("serve: %v", err)
		}
		if err := srv.Close(); err != nil {
			t.Errorf("close server: %v", err)
		}
	})
	s.connect(t, srv.UnixSocket(), "http://"+srv.Addrs()[0].String())
	return s
}

// fakeRoots plans nothing: the scripted backend's files are its own.
type fakeRoots struct{ *fakelayers.Layers }

func (fakeRoots) Plan(context.Context, rootfs.Request) (rootfs.Plan, error) {
	return rootfs.Plan{User: "user", Dir: "/home/user"}, nil
}
func (fakeRoots) Release(context.Context, string) error                    { return nil }
func (fakeRoots) Sweep(context.Context, map[string]bool) ([]string, error) { return nil, nil }
func (fakeRoots) Changes(context.Context, string, rootfs.Plan, string) ([]rootfs.Change, error) {
	return []rootfs.Change{{Op: "added", Path: "/home/user/new", Type: "file", Size: 3, Mode: 0o644}}, nil
}

func (fakeRoots) Templates(context.Context) ([]rootfs.Template, error) {
	return []rootfs.Template{
		{Name: "host", Description: "this machine's /usr", Profiles: []string{"locked"}, Ready: true},
		{Name: "base", Description: "a Debian", Profiles: []string{"standard", "locked"}},
	}, nil
}

var _ sandbox.Roots = fakeRoots{}

// startReal starts the program as a server of its own, as systemd would.
func startReal(t *testing.T) *stage {
	dir := testenv.RunDir(t)
	s := &stage{real: true, program: buildProgram(t, testenv.Guest(t)), registry: startRegistry(t)}
	run := filepath.Join(dir, "r")
	cmd := exec.CommandContext(context.Background(), s.program, "serve", "--data-dir="+filepath.Join(dir, "d"),
		"--run-dir="+run, "--keys-dir="+filepath.Join(dir, "k"), "--listen=127.0.0.1:0",
		"--insecure-registry="+s.registry)
	log, err := os.Create(filepath.Join(t.TempDir(), "server.log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stopReal(t, s, cmd, log) })
	var st struct {
		Socket string
		URLs   []string
	}
	testenv.Eventually(t, 30*time.Second, "the server is up", func() bool {
		raw, err := os.ReadFile(filepath.Join(run, "server.json"))
		return err == nil && json.Unmarshal(raw, &st) == nil || cmd.ProcessState != nil
	})
	if len(st.URLs) == 0 {
		t.Fatal("the server did not start")
	}
	s.connect(t, strings.TrimPrefix(st.Socket, "unix://"), st.URLs[0])
	return s
}

// stopReal ends every sandbox and the server, and shows its log where the test failed.
func stopReal(t *testing.T, s *stage, cmd *exec.Cmd, log *os.File) {
	if s.admin != nil {
		list, err := s.admin.Sandboxes.All(context.Background(), &client.ListRequest{})
		for _, sb := range list {
			if err == nil {
				_, err = s.admin.Sandboxes.Delete(context.Background(), sb.GetId())
			}
		}
		if err != nil {
			t.Errorf("end sandboxes: %v", err)
		}
	}
	cmd.Process.Signal(syscall.SIGTERM)
	if err := cmd.Wait(); err != nil {
		t.Errorf("server: %v", err)
	}
	if raw, err := os.ReadFile(log.Name()); err == nil && t.Failed() {
		t.Logf("server's log:\n%s", raw)
	}
	log.Close()
}

// buildProgram builds casemate as the release does; with guest, that program is embedded as if
// "make guest" had put it into the tree.
func buildProgram(t *testing.T, guest []byte) string {
	t.Helper()
	dir := t.TempDir()
	args := []string{"build", "-trimpath", "-ldflags", "-X main.version=test", "-o", filepath.Join(dir, "casemate")}
	if guest != nil {
		file := filepath.Join(dir, "guest")
		if err := os.WriteFile(file, guest, 0o755); err != nil {
			t.Fatal(err)
		}
		target := filepath.Join(testenv.Module(t), "internal", "guestbin", "bin", guestName())
		overlay := filepath.Join(dir, "overlay.json")
		raw := fmt.Sprintf(`{"Replace": {%q: %q}}`, target, file)
		if err := os.WriteFile(overlay, []byte(raw), 0o644); err != nil {
			t.Fatal(err)
		}
		args = append(args, "-overlay", overlay)
	}
	cmd := exec.CommandContext(t.Context(), "go", append(args, "casemate.dev/cmd/casemate")...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build casemate: %v\n%s", err, out)
	}
	return filepath.Join(dir, "casemate")
}
