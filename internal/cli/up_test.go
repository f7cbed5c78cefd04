package cli

import (
	"bufio"
	"os/exec"
	"testing"
	"time"
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
