package namespace

import (
	"errors"
	"os"
	"slices"
	"strconv"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/guestwire"
)

// Package syscall puts a child's error pipe on the descriptor above the highest of its files. A program
// that the server has open under just that number is gone in the child (the twin); as the last of the
// child's own files it is not.
func TestProgramIsNotOverwrittenInTheChild(t *testing.T) {
	image, err := os.ReadFile("/bin/true")
	if err != nil {
		t.Fatal(err)
	}
	p, err := newProgram(image)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = p.close() }()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = null.Close() }()
	const high = 900
	dup := func(f *os.File, want int) uintptr {
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, want)
		if err != nil || fd != want {
			t.Fatalf("descriptor %d: %d %v", want, fd, err)
		}
		t.Cleanup(func() { _ = unix.Close(fd) })
		return uintptr(fd)
	}
	files := slices.Repeat([]uintptr{null.Fd()}, guestwire.LaunchSysFD+1)
	files[guestwire.LaunchSysFD] = dup(null, high)
	above := dup(p.f, high+1)
	run := func(path string, files []uintptr) error {
		pid, err := syscall.ForkExec(path, []string{"true"}, &syscall.ProcAttr{Dir: "/", Files: files})
		if err != nil {
			return err
		}
		var status syscall.WaitStatus
		if _, err := syscall.Wait4(pid, &status, 0, nil); err != nil {
			return err
		}
		if status.ExitStatus() != 0 {
			return errors.New("exit " + strconv.Itoa(status.ExitStatus()))
		}
		return nil
	}
	if err := run("/proc/self/fd/"+strconv.Itoa(int(above)), files); !errors.Is(err, unix.EACCES) {
		t.Errorf("twin: %v, want EACCES: the test attacks nothing", err)
	}
	if err := run(programPath(), append(files, p.f.Fd())); err != nil {
		t.Errorf("start: %v", err)
	}
}
