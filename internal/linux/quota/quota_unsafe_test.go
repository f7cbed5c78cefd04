package quota

import (
	"errors"
	"os"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/testenv"
)

// A file system without project quotas is told apart, and the probe leaves nothing.
func TestProbeFallsThrough(t *testing.T) {
	testenv.Root(t)
	dir := t.TempDir()
	if err := unix.Mount("none", dir, "tmpfs", 0, "size=4m"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	}()
	if err := Probe(dir); !errs.Is(err, errs.Unsupported) {
		t.Errorf("tmpfs: %v, want unsupported", err)
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("left %v", left)
	}
}

// Where the kernel has them, the limit holds; where not, that is said. Both are right answers of this
// machine, a wrong one is a limit that is set and does not hold.
func TestProbeTellsTheTruth(t *testing.T) {
	testenv.Root(t)
	dir := t.TempDir()
	if err := Probe(dir); err != nil {
		if !errs.Is(err, errs.Unsupported) {
			t.Fatal(err)
		}
		if _, err := Used(dir, 1); err == nil {
			t.Error("quotas can be read after all")
		}
		return
	}
	sub := dir + "/sub"
	if err := os.Mkdir(sub, 0o755); err != nil {
		t.Fatal(err)
	}
	id, err := Assign(sub)
	if err != nil {
		t.Fatal(err)
	}
	if err := Limit(sub, id, 1<<20, 100); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(sub+"/f", make([]byte, 4<<20), 0o644); !errors.Is(err, unix.EDQUOT) {
		t.Errorf("4 MB into 1: %v", err)
	}
}

func TestLayouts(t *testing.T) {
	if n := unsafe.Sizeof(attr{}); n != 28 {
		t.Errorf("fsxattr has %d bytes, want 28", n)
	}
	if n := unsafe.Sizeof(block{}); n != 72 {
		t.Errorf("if_dqblk has %d bytes, want 72", n)
	}
}
