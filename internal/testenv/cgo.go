//go:build cgo

package testenv

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// heir is the descriptor by which a test program's children find the program they are to be.
const heir = 200

// WithoutCgo has the programs that a test program starts of itself be built without cgo, as the released ones are: the race
// detector needs cgo, and with it a program can't drop privileges on all its threads (syscall.AllThreadsSyscall). It comes first in
// TestMain, and does not return in a program that was started with a verb.
func WithoutCgo() {
	var err error
	if len(os.Args) > 1 && !strings.HasPrefix(os.Args[1], "-") {
		err = unix.Exec(fmt.Sprintf("/proc/self/fd/%d", heir), os.Args, os.Environ())
	} else {
		err = inheritTests()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "tests without cgo:", err)
		os.Exit(1)
	}
}

// inheritTests builds the tests of the working directory's package, and leaves them open for children.
func inheritTests() error {
	if _, err := unix.FcntlInt(heir, unix.F_GETFD, 0); err == nil {
		return nil // of this very program, which has started itself anew since
	}
	dir, err := os.MkdirTemp("", "cmt")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	out := filepath.Join(dir, "tests")
	cmd := exec.Command("go", "test", "-c", "-trimpath", "-o", out, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w\n%s", err, text)
	}
	f, err := os.Open(out)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = unix.FcntlInt(f.Fd(), unix.F_DUPFD, heir) // not closed on exec
	return err
}
