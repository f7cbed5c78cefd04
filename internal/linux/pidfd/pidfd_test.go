package pidfd

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// child starts a program that nobody but the test waits for.
func child(t *testing.T, argv ...string) *Handle {
	t.Helper()
	path, err := exec.LookPath(argv[0])
	if err != nil {
		t.Fatal(err)
	}
	fd := -1
	pid, err := syscall.ForkExec(path, argv, &syscall.ProcAttr{Sys: &syscall.SysProcAttr{PidFD: &fd}})
	if err != nil {
		t.Fatal(err)
	}
	h, err := FromFD(fd, pid)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = h.Signal(unix.SIGKILL)
		_, _ = h.Wait(context.Background())
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	return h
}

func TestWaitTellsTheEnd(t *testing.T) {
	for script, want := range map[string]State{
		"exit 0":     {Known: true},
		"exit 7":     {Known: true, Code: 7},
		"kill -9 $$": {Known: true, Signal: unix.SIGKILL},
	} {
		h := child(t, "sh", "-c", script)
		got, err := h.Wait(t.Context())
		if err != nil || got != want {
			t.Errorf("%s: %+v, %v", script, got, err)
		}
		if h.Alive() {
			t.Errorf("%s: still alive", script)
		}
		// Reaped already: nobody can tell any more.
		if got, err := h.Wait(t.Context()); err != nil || got.Known {
			t.Errorf("%s again: %+v, %v", script, got, err)
		}
		if err := h.Signal(unix.SIGTERM); !errors.Is(err, unix.ESRCH) {
			t.Errorf("%s: signal after the end: %v", script, err)
		}
	}
}

// A second handle sees the end, too, and only one of them the state.
func TestWaitThroughASecondHandle(t *testing.T) {
	h := child(t, "sleep", "1000")
	other, err := Open(h.PID())
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if !other.Alive() {
		t.Error("not alive")
	}
	known := make(chan bool, 2)
	for _, w := range []*Handle{h, other} {
		go func() {
			st, err := w.Wait(t.Context())
			if err != nil {
				t.Error(err)
			}
			known <- st.Known
		}()
	}
	if err := other.Signal(unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if a, b := <-known, <-known; !a && !b {
		t.Errorf("nobody saw the state")
	}
}

func TestWaitEndsWithItsContext(t *testing.T) {
	h := child(t, "sleep", "1000")
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := h.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("wait: %v", err)
	}
	// And can be called again.
	if err := h.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if st, err := h.Wait(t.Context()); err != nil || st.Signal != unix.SIGTERM {
		t.Errorf("wait again: %+v, %v", st, err)
	}
}

func TestOpenNothing(t *testing.T) {
	if _, err := Open(1 << 22); !errors.Is(err, unix.ESRCH) {
		t.Errorf("open: %v", err)
	}
}

func TestStartTime(t *testing.T) {
	own, err := StartTime(os.Getpid())
	if err != nil || own == 0 {
		t.Fatalf("own start time: %d, %v", own, err)
	}
	if again, err := StartTime(os.Getpid()); err != nil || again != own {
		t.Errorf("it changed: %d, %v", again, err)
	}
	if later, err := StartTime(child(t, "sleep", "1000").PID()); err != nil || later < own {
		t.Errorf("a child's: %d before %d, %v", later, own, err)
	}
	if id, err := BootID(); err != nil || len(id) != 36 {
		t.Errorf("boot id %q, %v", id, err)
	}
}

func TestParseStart(t *testing.T) {
	fields := " S " + strings.Repeat("0 ", 18) + "4711 0 0\n"
	for _, name := range []string{"sh", "a b", "a) S 1 (b", "((", ")"} {
		got, err := parseStart([]byte("12 (" + name + ")" + fields))
		if err != nil || got != 4711 {
			t.Errorf("%q: %d, %v", name, got, err)
		}
	}
	for _, text := range []string{"", "12", "12 (sh)", "12 (sh) S 1 2 3", "12 (sh) S " + strings.Repeat("0 ", 18) + "x"} {
		if got, err := parseStart([]byte(text)); err == nil {
			t.Errorf("%q: %d", text, got)
		}
	}
}
