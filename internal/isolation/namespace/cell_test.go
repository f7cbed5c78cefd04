package namespace

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"casemate.dev/internal/isolation"
	"casemate.dev/internal/testenv"
)

// A cell with a process that has an id outside of its range, root of the host's above all, is refused. Taken for one whose
// range it is, the same process is only listed.
func TestCellOfHostRoot(t *testing.T) {
	testenv.Root(t)
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	all, err := cellProcesses(os.Getpid(), 1<<20)
	if err == nil || !strings.Contains(err.Error(), "outside of its range") {
		t.Errorf("a cell with a process of root: %v, %v", all, err)
	}
	all, err = cellProcesses(os.Getpid(), 0)
	mine := func(p isolation.HostProcess) bool { return p.PID == cmd.Process.Pid && p.UID == 0 && p.GID == 0 }
	if err != nil || !slices.ContainsFunc(all, mine) {
		t.Errorf("with that range: %v, %v", all, err)
	}
}
