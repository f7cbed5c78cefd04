package guest_test

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"casemate.dev/internal/guestwire"
)

// TestNobodyHoldsADirectory looks from the host at what PID 1 and its worker have open after they have
// done everything once: with a directory of the host among it, a link to /proc/self/fd/N/.. would
// lead out (HARDENING 1).
func TestNobodyHoldsADirectory(t *testing.T) {
	c, pid := startPID(t, setup{})
	r := &runner{t: t, Client: c}
	if err := r.Claim(t.Context(), guestwire.Claim{Hostname: "x"}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.write(at("f"), "x"); err != nil {
		t.Fatal(err)
	}
	if _, err := r.list(guestwire.ListRequest{PathRequest: at("/"), Depth: 2}); err != nil {
		t.Fatal(err)
	}
	w, err := r.Watch(t.Context(), guestwire.WatchRequest{PathRequest: at("."), Recursive: true})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if err := r.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, p := range []guestwire.StartProcess{
		{ID: "tty", TTY: true, Argv: []string{"sleep", "431"}},
		{ID: "pipe", Stdin: guestwire.StdinPipe, Argv: []string{"sleep", "432"}},
	} {
		if _, err := r.Start(t.Context(), p, nil); err != nil {
			t.Fatal(err)
		}
	}
	for _, kind := range descriptors(t, pid) {
		if kind != "socket" && kind != "pipe" && kind != "anon_inode" && kind != "/dev/null" && kind != "/dev/pts/ptmx" &&
			kind != "/memfd" && kind != "stdio" {
			t.Errorf("PID 1 has %s open", kind)
		}
	}
	workers := 0
	for _, child := range children(t, pid) {
		if !strings.Contains(cmdline(t, child), "casemate-guest\x00files") {
			continue
		}
		workers++
		for fd, kind := range descriptors(t, child) {
			if kind != "/dev/null" && kind != "socket" && kind != "anon_inode" {
				t.Errorf("the worker has %s open as %d", kind, fd)
			}
		}
	}
	if workers != 1 {
		t.Errorf("%d workers", workers)
	}
}

// descriptors names what a process has open: the path, or the kind of what has none.
func descriptors(t *testing.T, pid int) map[int]string {
	t.Helper()
	list, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil || len(list) == 0 {
		t.Fatalf("%v, %v", list, err)
	}
	kinds := map[int]string{}
	for _, p := range list {
		target, err := os.Readlink(p)
		if err != nil {
			continue
		}
		fd, _ := strconv.Atoi(filepath.Base(p))
		kind, _, _ := strings.Cut(target, ":")
		if fi, err := os.Stat(p); err == nil && fi.IsDir() {
			kind = "directory " + target
		} else if err == nil && fi.Mode()&os.ModeCharDevice != 0 {
			kind = strings.TrimSuffix(kind, " (deleted)") // what the test inherited is the device, whatever became of its name
		}
		if fd <= 2 && pidIsTest(kind) {
			kind = "stdio" // the test's own output
		}
		kinds[fd] = kind
	}
	return kinds
}

func pidIsTest(kind string) bool { return !strings.HasPrefix(kind, "directory") && kind != "/dev/null" }

func children(t *testing.T, pid int) []int {
	t.Helper()
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil {
		t.Fatal(err)
	}
	var all []int
	for _, p := range tasks {
		f, err := os.Open(p)
		if err != nil {
			continue
		}
		b, _ := io.ReadAll(f)
		_ = f.Close()
		for _, s := range strings.Fields(string(b)) {
			if n, err := strconv.Atoi(s); err == nil {
				all = append(all, n)
			}
		}
	}
	return all
}

func cmdline(t *testing.T, pid int) string {
	t.Helper()
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return string(b)
}
