package cgroup

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/testenv"
)

func TestFreezeAndThaw(t *testing.T) {
	versions(t, func(t *testing.T, h *Hierarchy) {
		g := create(t, h, Limits{})
		s, err := g.NewScope("prc_a")
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("/bin/sh", "-c", "while :; do echo tick; done")
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		inScope(t, g, s, false, cmd)
		r := bufio.NewReader(out)
		if _, err := r.ReadString('\n'); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := g.Freeze(ctx(t)); err != nil {
				t.Fatal(err)
			}
		}
		if f, err := g.Frozen(); err != nil || !f {
			t.Errorf("frozen %v %v", f, err)
		}
		cpu := func() string {
			b, err := os.ReadFile(fmt.Sprintf("/proc/%d/schedstat", cmd.Process.Pid))
			if err != nil {
				t.Fatal(err)
			}
			return strings.Fields(string(b))[0]
		}
		// Time must pass to show that nothing runs in it. What is frozen may still be on its way off the processor.
		stands := func() bool {
			before := cpu()
			time.Sleep(20 * time.Millisecond)
			return cpu() == before
		}
		testenv.Eventually(t, limit, "stands still", stands)
		before := cpu()
		if !stands() {
			t.Errorf("ran while frozen: %s then %s ns", before, cpu())
		}
		for range 2 {
			if err := g.Thaw(ctx(t)); err != nil {
				t.Fatal(err)
			}
		}
		if f, err := g.Frozen(); err != nil || f {
			t.Errorf("frozen after thaw %v %v", f, err)
		}
		go func() { _, _ = r.WriteTo(discard{}) }()
		testenv.Eventually(t, limit, "runs again", func() bool { return cpu() != before })
		if err := g.Remove(ctx(t)); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait()
		_ = s.Close()
	})
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

// A frozen sandbox is killed and removed like any other.
func TestRemoveWhileFrozen(t *testing.T) {
	versions(t, func(t *testing.T, h *Hierarchy) {
		g := create(t, h, Limits{})
		s, err := g.NewScope("prc_a")
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("/bin/sleep", "300")
		inScope(t, g, s, false, cmd)
		if err := g.Freeze(ctx(t)); err != nil {
			t.Fatal(err)
		}
		if err := g.Remove(ctx(t)); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err == nil {
			t.Error("the process ended well, want killed")
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
}
