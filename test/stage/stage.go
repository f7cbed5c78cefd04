// Package stage is a server of a test's own in a fake internet: the real program, with a client of its owner's,
// and web sites that keep what they are sent.
//
// What belongs here: what the packages of tests beside it share. What does not: tests, and servers inside the
// test's own process.
package stage

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"casemate.dev/client"
	"casemate.dev/internal/testenv"
	"casemate.dev/internal/testenv/world"
)

// programDir names in the environment the directory that the program is built into.
const programDir = "CASEMATE_TEST_PROGRAM_DIR"

// Main is world.Main for packages whose tests start stages: the program is built once for all of them.
func Main(m *testing.M) int {
	if os.Getenv(programDir) == "" {
		dir, err := os.MkdirTemp("", "cms")
		if err == nil {
			err = os.Setenv(programDir, dir)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "make a directory for the program:", err)
			return 1
		}
		defer func() { _ = os.RemoveAll(dir) }()
	}
	return world.Main(m)
}

// Stage is the server. T is the test that its methods fail, which a test of parts may change.
type Stage struct {
	*client.Client
	T     testing.TB
	World *world.World
	// Dir is the server's own: d, r and k in it are its directories for data, its run and keys.
	Dir string

	args  []string
	run   *exec.Cmd
	ended <-chan error
}

// Start starts the server, with more flags if there are any. It listens on its Unix
// socket only unless a flag says where else, asks the world's
// name server, and trusts the world's authority. The test binary must have called Main.
func Start(t testing.TB, more ...string) *Stage {
	t.Helper()
	testenv.Root(t)
	s := &Stage{T: t, World: world.New(t), Dir: testenv.RunDir(t)}
	ca := filepath.Join(s.Dir, "ca.pem")
	if err := os.WriteFile(ca, s.World.CAPEM(), 0o644); err != nil {
		t.Fatal(err)
	}
	s.args = append([]string{
		build(t), "serve", "--data-dir=" + s.Dir + "/d", "--run-dir=" + s.Dir + "/r", "--keys-dir=" + s.Dir + "/k",
		"--store-size=1g", "--dns=" + world.Resolver, "--extra-ca=" + ca,
	}, more...)
	if !slices.ContainsFunc(more, func(a string) bool { return strings.HasPrefix(a, "--listen=") }) {
		s.args = append(s.args, "--listen=none")
	}
	t.Cleanup(s.stop)
	s.Launch()
	var err error
	if s.Client, err = client.New("unix://"+s.Dir+"/r/casemate.sock", ""); err != nil {
		t.Fatal(err)
	}
	return s
}

// Launch starts the server, again after Kill, and waits until it answers.
func (s *Stage) Launch() {
	s.T.Helper()
	log, err := os.OpenFile(s.Dir+"/server.log", os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		s.T.Fatal(err)
	}
	defer log.Close()
	_ = os.Remove(s.Dir + "/r/server.json") // of one that was killed
	s.run = exec.Command(s.args[0], s.args[1:]...)
	s.run.Stdout, s.run.Stderr = log, log
	if err := s.run.Start(); err != nil {
		s.T.Fatal(err)
	}
	run, ended := s.run, make(chan error, 1) // waited for, or else it would not be gone when it has ended
	s.ended = ended
	go func() { ended <- run.Wait() }()
	testenv.Eventually(s.T, time.Minute, "the server is up", func() bool {
		raw, err := os.ReadFile(s.Dir + "/r/server.json")
		return err == nil && json.Valid(raw)
	})
}

// Kill kills the server. Its sandboxes and its gateway stay.
func (s *Stage) Kill() {
	s.T.Helper()
	if err := s.run.Process.Kill(); err != nil {
		s.T.Fatal(err)
	}
	s.T.Logf("the server has ended: %v", <-s.ended)
}

// Server returns the process id of the server.
func (s *Stage) Server() int { return s.run.Process.Pid }

// Gateway returns the process id of the server's gateway.
func (s *Stage) Gateway() int {
	s.T.Helper()
	raw, err := os.ReadFile(s.Dir + "/r/gateway.json")
	var r struct{ PID int }
	if err == nil {
		err = json.Unmarshal(raw, &r)
	}
	if err != nil || r.PID <= 1 {
		s.T.Fatalf("there is no gateway: %v", err)
	}
	return r.PID
}

// CLI runs the program's command line against the server, with input, and returns what it prints on both streams.
func (s *Stage) CLI(input string, args ...string) (string, error) {
	cmd := exec.Command(s.args[0], append([]string{"--url", "unix://" + s.Dir + "/r/casemate.sock"}, args...)...)
	cmd.Stdin = strings.NewReader(input)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func (s *Stage) stop() {
	down := exec.Command(s.args[0], "down", "--sandboxes", "--run-dir", s.Dir+"/r")
	out, err := down.CombinedOutput()
	if err != nil {
		s.T.Errorf("down: %v %s", err, out)
		_ = s.run.Process.Signal(syscall.SIGTERM)
	}
	s.T.Logf("the server has ended: %v", <-s.ended)
	if s.T.Failed() {
		text, _ := os.ReadFile(s.Dir + "/server.log")
		s.T.Logf("the server's log:\n%s", text)
	}
}

// build builds the program with its guest, unless that is done.
func build(t testing.TB) string {
	t.Helper()
	dir := os.Getenv(programDir)
	if dir == "" {
		t.Fatal("call stage.Main from TestMain")
	}
	out := filepath.Join(dir, "casemate")
	if _, err := os.Stat(out); err == nil {
		return out
	}
	guest := filepath.Join(dir, "guest")
	if err := os.WriteFile(guest, testenv.Guest(t), 0o755); err != nil {
		t.Fatal(err)
	}
	target := filepath.Join(testenv.Module(t), "internal", "guestbin", "bin", "guest-linux-"+runtime.GOARCH)
	overlay := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(overlay, fmt.Appendf(nil, `{"Replace": {%q: %q}}`, target, guest), 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("go", "build", "-trimpath", "-overlay", overlay, "-o", out, "casemate.dev/cmd/casemate")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build casemate: %v\n%s", err, text)
	}
	return out
}

// Secret keeps a value and binds it, for all sandboxes unless the binding says for which.
func (s *Stage) Secret(name, value string, b *client.SecretBinding) {
	s.T.Helper()
	ctx := context.Background()
	if _, err := s.Secrets.Set(ctx, &client.SetSecretRequest{Name: name, Value: value}); err != nil {
		s.T.Fatal(err)
	}
	if b.For == nil {
		b.For = &client.SandboxSelector{All: true}
	}
	if _, err := s.Secrets.Bind(ctx, name, b); err != nil {
		s.T.Fatal(err)
	}
}

// Box makes a sandbox that may reach what rules say.
func (s *Stage) Box(rules ...string) string {
	s.T.Helper()
	sb, err := s.Sandboxes.Create(context.Background(), &client.CreateRequest{Network: &client.NetworkRules{Rules: rules}})
	if err != nil {
		s.T.Fatal(err)
	}
	return sb.GetId()
}

// patience is how long a script may take: far longer than on an idle machine.
const patience = 5 * time.Minute

// Sh runs a script in a sandbox and returns what it prints on both streams.
func (s *Stage) Sh(box, script string) string {
	s.T.Helper()
	out, _ := s.Run(box, script)
	return out
}

// Run is Sh with the process's end, which must be its own.
func (s *Stage) Run(box, script string) (string, *client.Process) {
	s.T.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	r, err := s.Processes.Execute(ctx, box, &client.ProcessSpec{
		Argv: []string{"/bin/bash", "-c", script}, Timeout: durationpb.New(patience - 10*time.Second),
	}, nil)
	if err != nil {
		s.T.Fatal(err)
	}
	if end := r.GetProcess().GetEnd(); end != "exited" {
		s.T.Fatalf("%s\nended as %s: %s%s", script, end, r.GetStdout(), r.GetStderr())
	}
	return string(r.GetStdout()) + string(r.GetStderr()), r.GetProcess()
}
