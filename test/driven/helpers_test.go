package driven

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"casemate.dev/client"
	"casemate.dev/internal/testenv"
)

// patience bounds every wait for what must happen.
const patience = 2 * time.Minute

// Files of several sizes arrive whole. ATTACK: a caller that goes half way leaves nothing that others take for a file.
// TWIN: whole, the same file is there.
func uploads(t *testing.T, b *box) {
	for _, size := range []int{0, 18 << 10, 64 << 10, 20 << 20} {
		data := make([]byte, size)
		_, _ = rand.Read(data) // never fails: crypto/rand.Read
		if _, err := b.Files.Write(t.Context(), b.id, "/tmp/whole", bytes.NewReader(data), client.WriteOptions{User: root}); err != nil {
			t.Fatal(err)
		}
		sum := sha256.Sum256(data)
		if got := b.asRoot(t, nil, "sha256sum /tmp/whole"); !strings.HasPrefix(got, hex.EncodeToString(sum[:])) {
			t.Errorf("%d bytes arrived as %s", size, got)
		}
	}
	broken := io.MultiReader(bytes.NewReader(make([]byte, 3<<20)), failing{})
	if _, err := b.Files.Write(t.Context(), b.id, "/tmp/part", broken, client.WriteOptions{User: root}); err == nil {
		t.Error("half a file was taken")
	}
	if got := b.asRoot(t, nil, "ls /tmp/part 2>&1"); !strings.Contains(got, "No such file") {
		t.Errorf("half a file is there: %s", got)
	}
	// In the place of one that is there, too.
	before := b.asRoot(t, nil, "sha256sum /tmp/whole")
	if _, err := b.Files.Write(t.Context(), b.id, "/tmp/whole", io.MultiReader(strings.NewReader("begun"), failing{}), client.WriteOptions{User: root}); err == nil {
		t.Error("half a file was taken")
	}
	if after := b.asRoot(t, nil, "sha256sum /tmp/whole"); after != before {
		t.Errorf("half a file took the place of a whole one: %s", after)
	}
}

// ATTACK: a process prints far more than a server could keep.
// VERIFIES: it comes to its end, all is counted, and the server's memory does not grow with it. TWIN: a reader that keeps all.
func endlessOutput(t *testing.T, b *box) {
	const size, most = 256 << 20, 128 << 20
	before := peak(t, strconv.Itoa(b.Server()))
	r, err := b.Processes.Execute(t.Context(), b.id, &client.ProcessSpec{Argv: []string{"/usr/bin/head", "-c", strconv.Itoa(size), "/dev/zero"}, User: root, Timeout: durationpb.New(testenv.Unhurried)}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if p := r.GetProcess(); p.GetEnd() != "exited" || p.GetCode() != 0 || p.GetBytes() != size {
		t.Errorf("it ended as %s, %d, with %d of %d bytes", p.GetEnd(), p.GetCode(), p.GetBytes(), size)
	}
	if grown := peak(t, strconv.Itoa(b.Server())) - before; grown > most {
		t.Errorf("the server grew by %d MiB", grown>>20)
	}
	const keeps = `import sys; kept = sys.stdin.buffer.read(); print(open("/proc/self/status").read())`
	twin := exec.CommandContext(t.Context(), "/bin/sh", "-c", "head -c "+strconv.Itoa(size)+" /dev/zero | /usr/bin/python3 -c '"+keeps+"'")
	out, err := twin.Output()
	if err != nil || peakIn(t, string(out)) < most {
		t.Errorf("the twin did not grow: %v\n%s", err, out)
	}
}

// peak returns the most memory that a process had so far, in bytes (proc_pid_status(5)).
func peak(t *testing.T, pid string) int {
	t.Helper()
	b, err := os.ReadFile("/proc/" + pid + "/status")
	if err != nil {
		t.Fatal(err)
	}
	return peakIn(t, string(b))
}

func peakIn(t *testing.T, status string) int {
	t.Helper()
	_, rest, _ := strings.Cut(status, "VmHWM:")
	var kib int
	if _, err := fmt.Sscan(rest, &kib); err != nil {
		t.Fatalf("%v in %q", err, status)
	}
	return kib << 10
}

// failing is a caller that goes.
type failing struct{}

func (failing) Read([]byte) (int, error) { return 0, errors.New("the caller has gone") }

// plant makes programs that helpers might take for theirs, and files that interpreters run by themselves. Each leaves a mark.
const plant = `mkdir -p /w3/bin; cd /w3
for p in ls cat tar sh bash python3 stat cp mv rm mkdir find; do printf '#!/bin/sh\n: > /w3/mark-%s\n' $p > bin/$p; chmod 755 bin/$p; done
printf ': > /w3/mark-bashenv\n' > env.sh
printf 'open("/w3/mark-python", "w")\n' > sitecustomize.py
for f in .bashrc .profile .bash_profile .zshenv; do printf ': > /w3/mark-profile\n' > /root/$f; done 2>/dev/null
ls /w3`

// planted is an environment in which a careless helper runs what was planted.
func planted() map[string]string {
	return map[string]string{
		"PATH": "/w3/bin:/usr/bin:/bin", "BASH_ENV": "/w3/env.sh", "ENV": "/w3/env.sh", "PYTHONPATH": "/w3", "LD_LIBRARY_PATH": "/w3", "HOME": "/root",
	}
}

// ATTACK: programs and files that run by themselves lie where a server's helpers might look: what the API does inside must run
// none of them. TWIN: a helper that is a shell with the sandbox's environment does.
func plantedPrograms(t *testing.T, b *box) {
	if got := b.asRoot(t, nil, plant); !strings.Contains(got, "sitecustomize.py") {
		t.Fatalf("nothing was planted: %s", got)
	}
	ctx := t.Context()
	steps := map[string]error{"write": b.write("/w3/a/b", "x")}
	_, steps["list"] = b.Files.List(ctx, b.id, "/w3", root, 3)
	_, steps["read"] = b.Files.ReadAll(ctx, b.id, "/w3/a/b")
	_, steps["stat"] = b.Files.Stat(ctx, b.id, "/w3/a/b", root, true)
	_, steps["move"] = b.Files.Move(ctx, b.id, "/w3/a/b", "/w3/a/c", root, true)
	_, steps["make a directory"] = b.Files.MakeDir(ctx, b.id, "/w3/d/e", root, 0o755, true)
	_, steps["change the mode"] = b.Files.Chmod(ctx, b.id, "/w3/a/c", root, 0o600)
	steps["remove"] = b.Files.Remove(ctx, b.id, "/w3/d", root, true)
	for what, err := range steps {
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	if got := b.asRoot(t, nil, "ls /w3"); strings.Contains(got, "mark-") {
		t.Errorf("a helper ran what was planted: %s", got)
	}
	b.asRoot(t, planted(), "ls >/dev/null; python3 -c 0")
	if got := b.asRoot(t, nil, "ls /w3"); !strings.Contains(got, "mark-bashenv") || !strings.Contains(got, "mark-ls") {
		t.Errorf("the twin ran nothing of what was planted: %s", got)
	}
}
