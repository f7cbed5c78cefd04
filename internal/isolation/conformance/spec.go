package conformance

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/id"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/rootfs"
	"casemate.dev/internal/testenv"
)

// Limits are those of Spec.
func Limits() isolation.Limits {
	return isolation.Limits{MemoryBytes: 256 << 20, CPUs: 2, Pids: 128, OpenFiles: 256, DiskBytes: 64 << 20}
}

// Spec is a sandbox whose root borrows the host's /usr, for backends that run the host's programs. What it needs goes
// with the test.
func Spec(t *testing.T, p isolation.Profile) isolation.Spec {
	t.Helper()
	upper, work := Writable(t)
	return isolation.Spec{
		ID: id.Sandbox(), Profile: p, Limits: Limits(),
		Root: rootfs.Plan{
			Lowers: []string{template(t)}, Upper: upper, Work: work,
			Binds: []rootfs.Bind{{Source: "/usr", Target: "/usr"}},
			Env:   map[string]string{"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
			User:  "user", Dir: "/home/user",
			Disk: rootfs.DiskLimit{Mechanism: "tmpfs", Bytes: Limits().DiskBytes},
		},
	}
}

// template makes the read-only layer of Spec.
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

// Writable makes a writable layer of Limits' size, which goes with the test.
func Writable(t *testing.T) (upper, work string) {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("layer", dir, "tmpfs", 0, fmt.Sprintf("mode=700,size=%d", Limits().DiskBytes)); err != nil {
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

// Leftovers lists what is on the host of a server's instances, and what is in its run directory. The server's own
// directories of control groups don't count: they stay while it lives.
func Leftovers(serverID, runDir string) []string {
	var left []string
	for _, l := range testenv.Leftovers(serverID) {
		if !strings.HasSuffix(l, "/casemate-"+serverID) {
			left = append(left, l)
		}
	}
	files, _ := os.ReadDir(runDir)
	for _, f := range files {
		left = append(left, "file "+f.Name())
	}
	return left
}

// EchoServer is Harness.EchoServer in Python.
func EchoServer(port int) []string {
	return []string{"python3", "-u", "-c", fmt.Sprintf(echoServer, port)}
}

const echoServer = `
import socket
s = socket.create_server(("127.0.0.1", %d))
print("listening")
while True:
    c, _ = s.accept()
    while d := c.recv(65536):
        c.sendall(d)
    c.close()
`

// Allocate is Harness.Allocate in Python.
func Allocate(n int64) []string {
	return []string{"python3", "-c", "b = bytearray(" + strconv.FormatInt(n, 10) + ")\nfor i in range(0, len(b), 4096): b[i] = 1"}
}
