package envd_test

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/isolation/namespace"
	"casemate.dev/internal/rootfs"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/testenv"
	"casemate.dev/internal/testenv/mounts"
)

// TestMain moves into a mount namespace of its own, as a server does: the store and the backend mount
// there.
func TestMain(m *testing.M) { os.Exit(mounts.Main(m)) }

// hostRoots gives template host for profile standard too: its files serve, but for sudo.
type hostRoots struct{ *rootfs.Store }

// Plan implements sandbox.Roots.
func (r hostRoots) Plan(ctx context.Context, q rootfs.Request) (rootfs.Plan, error) {
	q.Profile = string(sandbox.Locked)
	return r.Store.Plan(ctx, q)
}

// Templates implements sandbox.Roots.
func (r hostRoots) Templates(ctx context.Context) ([]rootfs.Template, error) {
	all, err := r.Store.Templates(ctx)
	for i := range all {
		all[i].Profiles = []string{string(sandbox.Locked), string(sandbox.Standard)}
	}
	return all, err
}

func TestOnNamespaces(t *testing.T) {
	testenv.Root(t)
	run := testenv.RunDir(t)
	layers, err := rootfs.Open(t.Context(), rootfs.Config{DataDir: filepath.Join(run, "d"), ImageBytes: 1 << 30, Spares: -1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := layers.Close(); err != nil {
			t.Errorf("close layers: %v", err)
		}
	})
	backend, err := namespace.New(namespace.Config{
		ServerID: testenv.ServerID(t), RunDir: filepath.Join(run, "r"), IDDir: filepath.Join(run, "ids"), Guest: testenv.Guest(t), Spares: -1,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := backend.Close(); err != nil {
			t.Errorf("close backend: %v", err)
		}
	})
	s := newServer(t, "namespace", backend, hostRoots{layers})
	runAll(t, s)
	t.Run("Real", func(t *testing.T) { testReal(t, s.box(t)) })
}

// testReal looks at what only a kernel can show.
func testReal(t *testing.T, h *harness) {
	if o := h.run("kill -9 $$"); o.end["status"] != "signal: killed" || o.end["exitCode"] != -1.0 || o.end["exited"] != nil {
		t.Errorf("killed by itself: %+v", o)
	}
	left := func() string { return h.run("pgrep -fa '^sleep 10' || true").out }
	s, o := h.begin(command("(setsid sleep 1001 &) ; sleep 1002 & wait"))
	testenv.Eventually(t, 10*time.Second, "both run", func() bool { return strings.Count(left(), "sleep") == 2 })
	h.must(processSignal, object{"process": selector(o.pid), "signal": "SIGNAL_SIGKILL"})
	testenv.Eventually(t, time.Minute, "nothing is left by a kill", func() bool { return left() == "" })
	s.rest(o)
	if o := h.run("(setsid sleep 1003 &) ; sleep 1004", "Connect-Timeout-Ms", "300"); o.code != "deadline_exceeded" {
		t.Errorf("timed out: %+v", o)
	}
	testenv.Eventually(t, time.Minute, "nothing is left by a timeout", func() bool { return left() == "" })
	if o := h.run("(sleep 30; echo late) & echo started"); o.out != "started\n" || o.end["status"] != "exit status 0" {
		t.Errorf("with a daemon that holds its output: %+v", o)
	}
	want := h.run("cat /proc/version").out
	for _, accept := range []string{"identity", "gzip, deflate"} {
		if _, text := h.do("GET", "/files?path=/proc/version", "", "Accept-Encoding", accept); text != want || want == "" {
			t.Errorf("procfs, %s: %q, want %q", accept, text, want)
		}
	}
	var envs map[string]string
	if _, text := h.do("GET", "/envs", ""); json.Unmarshal([]byte(text), &envs) != nil || envs["FROM_CREATE"] != "1" || envs["PATH"] != "" {
		t.Errorf("environment: %s", text)
	}
	if resp, text := h.do("POST", "/files?path=/root/deep/f", "x", "Content-Type", octets); resp.StatusCode != 200 {
		t.Errorf("where only root may: %d %s", resp.StatusCode, text)
	}
	if o := h.run("stat -c %U /root/deep/f", "Authorization", basic("root")); o.out != "user\n" {
		t.Errorf("to whom that belongs: %+v", o)
	}
	mkfifo := h.run("mkfifo pipe")
	if resp, text := h.do("GET", "/files?path=pipe", ""); resp.StatusCode != 400 || !strings.Contains(text, "not a regular file") {
		t.Errorf("a pipe: %d %s, %+v", resp.StatusCode, text, mkfifo)
	}
}
