package gvisor_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	// The guest is built while the tests run; this tells go test that its answers depend on it.
	_ "casemate.dev/internal/guest"
	_ "casemate.dev/internal/guest/launch"
	"casemate.dev/internal/id"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/gvisor"
	"casemate.dev/internal/isolation/namespace"
	"casemate.dev/internal/rootfs"
	"casemate.dev/internal/testenv"
)

func testLimits() isolation.Limits {
	return isolation.Limits{MemoryBytes: 256 << 20, CPUs: 2, Pids: 128, OpenFiles: 256, DiskBytes: 64 << 20}
}

// host is what the backends of one test share: a run directory, id claims, a server id.
type host struct {
	t   *testing.T
	cfg namespace.Config
}

func newHost(t *testing.T) *host {
	t.Helper()
	testenv.Root(t)
	run := testenv.RunDir(t)
	h := &host{t: t, cfg: namespace.Config{
		ServerID: testenv.ServerID(t), RunDir: filepath.Join(run, "r"), IDDir: filepath.Join(run, "ids"),
		Guest: testenv.Guest(t), Spares: -1, SpareLimits: testLimits(), Cells: true,
	}}
	t.Cleanup(func() {
		b, err := namespace.New(h.cfg)
		if err != nil {
			t.Errorf("open for the last sweep: %v", err)
			return
		}
		if _, err := b.Sweep(context.Background(), nil); err != nil {
			t.Errorf("last sweep: %v", err)
		}
		if err := b.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return h
}

// runsc is where `make runsc` puts it.
func runsc(t *testing.T) string {
	t.Helper()
	path, err := filepath.Abs("../../../.cache/runsc/runsc")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("run `make runsc` first: %v", err)
	}
	return path
}

func (h *host) backend() isolation.Backend { return h.with(runsc(h.t)) }

func (h *host) with(program string) isolation.Backend {
	h.t.Helper()
	cells, err := namespace.New(h.cfg)
	if err != nil {
		h.t.Fatal(err)
	}
	b := gvisor.New(gvisor.Config{Cells: cells, Program: program})
	h.t.Cleanup(func() {
		if err := b.Close(); err != nil {
			h.t.Errorf("close: %v", err)
		}
	})
	return b
}

// leftovers lists what is on the host of this test's instances.
func (h *host) leftovers() []string {
	left := testenv.Leftovers(h.cfg.ServerID)
	files, _ := os.ReadDir(h.cfg.RunDir)
	for _, f := range files {
		if !strings.HasPrefix(f.Name(), "inside-") { // the guest's program, which stays for the next
			left = append(left, "file "+f.Name())
		}
	}
	// The server's own directories of control groups stay while the server lives.
	own := "/casemate-" + h.cfg.ServerID
	out := left[:0]
	for _, l := range left {
		if !strings.HasSuffix(l, own) {
			out = append(out, l)
		}
	}
	return out
}

// template makes the read-only layer of a root that borrows the host's /usr.
func template(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "lower")
	for _, d := range []string{"usr", "etc", "home/user", "root", "tmp", "var/tmp", "proc", "sys", "dev", "run"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range []string{"tmp", "var/tmp"} {
		if err := unix.Chmod(filepath.Join(dir, d), 0o1777); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chown(filepath.Join(dir, "home/user"), 1000, 1000); err != nil {
		t.Fatal(err)
	}
	for _, l := range []string{"bin", "sbin", "lib", "lib64"} {
		if err := os.Symlink("usr/"+l, filepath.Join(dir, l)); err != nil {
			t.Fatal(err)
		}
	}
	for name, text := range map[string]string{
		"etc/passwd": "root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n",
		"etc/group":  "root:x:0:\ntty:x:5:\nuser:x:1000:\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// writable makes a writable layer of testLimits' size.
func writable(t *testing.T) (upper, work string) {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("layer", dir, "tmpfs", 0, fmt.Sprintf("mode=700,size=%d", testLimits().DiskBytes)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount layer: %v", err)
		}
	})
	upper, work = filepath.Join(dir, "upper"), filepath.Join(dir, "work")
	for _, d := range []string{upper, work} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return upper, work
}

func newSpec(t *testing.T, p isolation.Profile) isolation.Spec {
	t.Helper()
	upper, work := writable(t)
	return isolation.Spec{
		ID: id.Sandbox(), Profile: p, Limits: testLimits(),
		Root: rootfs.Plan{
			Lowers: []string{template(t)}, Upper: upper, Work: work,
			Binds: []rootfs.Bind{{Source: "/usr", Target: "/usr"}},
			Env:   map[string]string{"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
			User:  "user", Dir: "/home/user",
			Disk: rootfs.DiskLimit{Mechanism: "tmpfs", Bytes: testLimits().DiskBytes},
		},
	}
}
