package cgroup

import (
	"os/exec"
	"testing"

	"casemate.dev/internal/errs"
)

// A scope that is given back serves the next process under that one's name; the handle of the process
// before has no hold on it any more.
func TestRecycledScopeServesTheNextProcess(t *testing.T) {
	versions(t, func(t *testing.T, h *Hierarchy) {
		g := create(t, h, Limits{})
		first, err := g.NewScope("prc_first")
		if err != nil {
			t.Fatal(err)
		}
		done := exec.Command("/bin/true")
		inScope(t, g, first, false, done)
		if err := done.Wait(); err != nil {
			t.Fatal(err)
		}
		if first.Recycle() != (h.Version() == 1) { // groups of version 2 can't be renamed
			t.Error("was it kept?")
		}
		if err := first.Close(); err != nil { // no effect on one that is kept
			t.Fatal(err)
		}
		second, err := g.NewScope("prc_second")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := g.OpenScope("prc_first"); !errs.Is(err, errs.NotFound) {
			t.Errorf("open the scope of the process before: %v", err)
		}
		sleep := exec.Command("/bin/sleep", "300")
		inScope(t, g, second, false, sleep)
		if err := first.Close(); err != nil {
			t.Fatal(err)
		}
		if empty, err := second.Empty(); err != nil || empty {
			t.Errorf("empty %v %v after the first handle was closed, want false", empty, err)
		}
		again, err := g.OpenScope("prc_second")
		if err != nil {
			t.Fatal(err)
		}
		if err := again.Close(); err != nil {
			t.Fatal(err)
		}
		if err := sleep.Wait(); err == nil {
			t.Error("close left the process alive")
		}
		_ = second.Close()
	})
}
