package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"casemate.dev/internal/errs"
)

// lockDir marks dir as used by this server for as long as the file is open. A lock of flock(2)
// belongs to the open file, so it goes with the process however that ends, and is no process id that
// somebody else may have by then.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, lockName), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		defer func() { _ = f.Close() }()
		return nil, inUse(f, dir)
	}
	if err == nil {
		err = f.Truncate(0)
	}
	if err == nil {
		// For people and error messages only; the lock does not depend on it.
		_, err = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock data directory: %w", err), f.Close())
	}
	return f, nil
}

func inUse(f *os.File, dir string) error {
	who := "another server"
	var buf [16]byte
	n, _ := f.ReadAt(buf[:], 0) // the number is a courtesy: without it the message is shorter
	if pid, err := strconv.Atoi(strings.TrimSpace(string(buf[:n]))); err == nil {
		who = fmt.Sprintf("another server (process %d)", pid)
	}
	return errs.New(errs.FailedPrecondition, "cannot use data directory %s: %s is using it", dir, who).
		WithHint("stop that server, or give this one its own --data-dir and --run-dir")
}
