package signals

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/testenv"
)

const (
	playInit     = "play-init"
	playAttacker = "play-attacker"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 2 {
		switch os.Args[1] {
		case playInit:
			beInit(os.Args[2] == "shielded")
		case playAttacker:
			attack()
		}
	}
	os.Exit(m.Run())
}

// beInit is the first process of a pid namespace: it starts the attacker and says whether it lived.
func beInit(shielded bool) {
	if shielded {
		if err := Shield(); err != nil {
			panic(err)
		}
	}
	cmd := exec.Command("/proc/self/exe", playAttacker, "x")
	cmd.Stdout = os.Stdout
	if err := cmd.Run(); err != nil {
		panic(err)
	}
	fmt.Println("alive")
	os.Exit(0)
}

// attack sends every signal to process 1, by kill(2) and with other codes as sigqueue(3) does.
func attack() {
	fmt.Println("attacking")
	for sig := unix.Signal(1); sig <= 64; sig++ {
		for range 3 {
			_ = unix.Kill(1, sig)
			queue(1, sig)
		}
	}
	os.Exit(0)
}

// TestShield shows that a Go program without the shield does not survive as PID 1, and with it does.
func TestShield(t *testing.T) {
	testenv.Root(t)
	for name, want := range map[string]bool{"shielded": true, "bare": false} {
		t.Run(name, func(t *testing.T) {
			// Go's own end by SIGQUIT and the like may hang, which is no survival either.
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			cmd := exec.CommandContext(ctx, "/proc/self/exe", playInit, name)
			cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID, Pdeathsig: syscall.SIGKILL}
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			var lines []string
			for s := bufio.NewScanner(out); s.Scan(); {
				lines = append(lines, s.Text())
			}
			err = cmd.Wait()
			said := strings.Join(lines, ",")
			if !strings.HasPrefix(said, "attacking") || strings.HasSuffix(said, "alive") != want {
				t.Errorf("said %q, %v", said, err)
			}
		})
	}
}
