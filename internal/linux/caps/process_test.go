package caps_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/linux/caps"
)

const limitedVariable = "CASEMATE_TEST_LIMITED"

// TestLimitProcess cuts a whole program down, which can't be undone, so it does that in a child.
func TestLimitProcess(t *testing.T) {
	if os.Getenv(limitedVariable) != "" {
		limitSelf(t)
		return
	}
	if os.Geteuid() != 0 {
		t.Fatal("this test needs root")
	}
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^TestLimitProcess$", "-test.count=1")
	cmd.Env = append(os.Environ(), limitedVariable+"=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

func limitSelf(t *testing.T) {
	keep := caps.Of(unix.CAP_KILL, unix.CAP_CHOWN)
	if err := caps.LimitProcess(keep); err != nil {
		t.Fatal(err)
	}
	tasks, err := filepath.Glob("/proc/self/task/*/status")
	if err != nil || len(tasks) < 2 {
		t.Fatalf("threads: %q, %v", tasks, err)
	}
	for _, path := range tasks {
		st, err := caps.ReadStatus(path)
		if err != nil {
			t.Fatal(err)
		}
		if st.Permitted != keep || st.Effective != keep || st.Inheritable != 0 {
			t.Errorf("%s: permitted %#x, effective %#x, inheritable %#x", path, st.Permitted, st.Effective, st.Inheritable)
		}
	}
	// What was given up is gone.
	if err := caps.LimitProcess(keep | caps.Of(unix.CAP_SYS_ADMIN)); err == nil {
		t.Error("a capability came back")
	}
}
