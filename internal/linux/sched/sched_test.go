package sched

import (
	"errors"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/testenv"
)

// TestNormally: what is started below a server of a real-time class has none. The start without it is the
// twin that shows that it would.
func TestNormally(t *testing.T) {
	testenv.Root(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked: the thread ends with this goroutine
		// SCHED_RR needs a budget of the control group that the test runs in; the class itself needs none.
		class := &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_RR, Priority: 1}
		err := unix.SchedSetAttr(0, class, 0)
		want := "SCHED_RR"
		if errors.Is(err, unix.EPERM) {
			want = "SCHED_OTHER"
		} else if err != nil {
			t.Error(err)
			return
		}
		if got := classOfChild(t); got != want {
			t.Errorf("without it: %s, want %s", got, want)
		}
		err = Normally(func() error {
			if got := classOfChild(t); got != "SCHED_OTHER" {
				t.Errorf("with it: %s", got)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
		if got := classOfChild(t); got != want {
			t.Errorf("afterwards: %s, want %s", got, want)
		}
	}()
	<-done
}

// classOfChild returns the class of a process that this thread starts.
func classOfChild(t *testing.T) string {
	out, err := exec.CommandContext(t.Context(), "/bin/sh", "-c", "chrt -p $$").Output()
	if err != nil {
		t.Error(err)
	}
	line, _, _ := strings.Cut(string(out), "\n")
	_, class, _ := strings.Cut(line, "policy: ")
	return class
}
