package cli

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/testenv"
)

// TestEnd: a server that did not start in time is gone when up returns, also one that ignores SIGTERM.
func TestEnd(t *testing.T) {
	for name, script := range map[string]string{
		"willing":   `echo up; exec sleep 60`,
		"unwilling": `trap "" TERM; echo up; while :; do sleep 0.1; done`,
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), "/bin/sh", "-c", script)
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
				t.Fatal(err)
			}
			exited := make(chan struct{})
			go func() {
				_ = cmd.Wait() // how it ended is looked at below
				close(exited)
			}()
			end(cmd.Process, exited, 50*time.Millisecond)
			if cmd.ProcessState == nil || cmd.ProcessState.Success() {
				t.Errorf("it ended as %v, not by a signal", cmd.ProcessState)
			}
		})
	}
}

// TestStartWatch: at a terminal a person sees what a server does that does not answer yet; elsewhere nothing is said.
func TestStartWatch(t *testing.T) {
	const before = "time=2026-01-01T00:00:00Z level=INFO msg=serving version=v1\n"
	log := filepath.Join(t.TempDir(), logFile)
	text := before + "time=2026-01-01T00:00:01Z level=INFO msg=\"adopting sandboxes\" count=12\n\tmore of a line\n"
	if err := os.WriteFile(log, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	watch := func(tty bool, begin int64) string {
		var out bytes.Buffer
		w := &startWatch{progress: &progress{w: &out, fd: -1, tty: tty, start: time.Now()}, log: log, begin: begin}
		w.tell()
		w.done()
		return out.String()
	}
	if got, want := watch(true, int64(len(before))), "\r\x1b[K   0s  starting a server: adopting sandboxes count=12\r\x1b[K"; got != want {
		t.Errorf("at a terminal: %q, want %q", got, want)
	}
	if got := watch(true, int64(len(text))); strings.Contains(got, "adopting") {
		t.Errorf("%q is of an earlier start", got)
	}
	if got := watch(false, int64(len(before))); got != "" {
		t.Errorf("where there is no terminal: %q", got)
	}
}

// TestLockUp: of two who start a server in one run directory, the second waits for the first.
func TestLockUp(t *testing.T) {
	dir := t.TempDir()
	unlock, err := lockUp(t.Context(), dir, func() {})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*pollEvery)
	defer cancel()
	if _, err := lockUp(ctx, dir, func() {}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the second one got %v while the first had the lock", err)
	}
	second := make(chan error, 1)
	go func() {
		unlock, err := lockUp(t.Context(), dir, func() {})
		if err == nil {
			unlock()
		}
		second <- err
	}()
	unlock()
	if err := testenv.Receive(t, "the second one's turn", second); err != nil {
		t.Error(err)
	}
}
