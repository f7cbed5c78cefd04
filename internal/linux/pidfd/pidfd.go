// Package pidfd names processes so that the name can't come to mean another process.
//
// A pid is reused, a descriptor of a process is not (pidfd_open(2)). Across a restart of the server,
// where no descriptor survives, a process is known by boot id, pid and start time together.
//
// What belongs here: opening, waiting for, and signalling a process, and reading what identifies it.
// What does not: starting one.
package pidfd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Handle is one process.
type Handle struct {
	f   *os.File // in the runtime's poller: readable once the process has ended
	pid int
}

// Open returns a handle of the process that has pid now. Its error is unix.ESRCH where there is none.
func Open(pid int) (*Handle, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("pidfd_open %d: %w", pid, err)
	}
	return &Handle{f: os.NewFile(uintptr(fd), "pidfd:"+strconv.Itoa(pid)), pid: pid}, nil
}

// FromFD makes a handle of a descriptor, as clone(2) gives it, and owns it.
func FromFD(fd, pid int) (*Handle, error) {
	// The runtime's poller takes only descriptors that don't block.
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("fcntl", err)
	}
	return &Handle{f: os.NewFile(uintptr(fd), "pidfd:"+strconv.Itoa(pid)), pid: pid}, nil
}

// PID returns the process's pid. It names the process only while that lives or is not reaped.
func (h *Handle) PID() int { return h.pid }

// Close releases the handle; the process goes on.
func (h *Handle) Close() error { return h.f.Close() }

// Signal sends a signal. Its error is unix.ESRCH where the process was reaped.
func (h *Handle) Signal(sig syscall.Signal) error {
	return h.control("pidfd_send_signal", func(fd int) error {
		return unix.PidfdSendSignal(fd, sig, nil, 0)
	})
}

// Alive reports whether the process has not ended yet. A process that ended is not alive, reaped or
// not.
func (h *Handle) Alive() bool {
	ended := true
	err := h.control("poll", func(fd int) error {
		var err error
		ended, err = readable(fd)
		return err
	})
	return err == nil && !ended
}

// State is how a process ended.
type State struct {
	// Known is false where the process was not this one's child: then nobody tells.
	Known  bool
	Code   int            // exit code, where Signal is 0
	Signal syscall.Signal // the signal that ended it, or 0
}

// Wait waits until the process has ended, and reaps it where it is this process's child. It costs a
// goroutine, no thread. Other methods may be called meanwhile; when ctx ends so does the waiting.
func (h *Handle) Wait(ctx context.Context) (State, error) {
	conn, err := h.f.SyscallConn()
	if err != nil {
		return State{}, err
	}
	stop := context.AfterFunc(ctx, func() { _ = h.f.SetReadDeadline(unixEpoch()) })
	defer func() {
		if !stop() {
			_ = h.f.SetReadDeadline(noDeadline())
		}
	}()
	var pollErr error
	err = conn.Read(func(fd uintptr) bool {
		var ended bool
		ended, pollErr = readable(int(fd))
		return ended || pollErr != nil
	})
	switch {
	case err != nil && ctx.Err() != nil:
		return State{}, ctx.Err()
	case err != nil:
		return State{}, fmt.Errorf("wait for process %d: %w", h.pid, err)
	case pollErr != nil:
		return State{}, fmt.Errorf("wait for process %d: %w", h.pid, pollErr)
	}
	<-time.After(reapDelay)
	return h.reap()
}

// reapDelay lies between a process's end and its being reaped. The end is told while the last of the process's
// threads still takes its entries out of /proc, and who reaps meanwhile spins on them (shrink_dcache_parent)
// until the scheduler lets that thread go on: on a busy machine 5 ms, as much as making a sandbox costs.
const reapDelay = time.Millisecond

func (h *Handle) reap() (State, error) {
	var st State
	err := h.control("waitid", func(fd int) error {
		var err error
		st, err = waitFD(fd)
		return err
	})
	if errors.Is(err, unix.ECHILD) {
		return State{}, nil // a child of somebody else, or reaped before
	}
	return st, err
}

func (h *Handle) control(what string, call func(fd int) error) error {
	conn, err := h.f.SyscallConn()
	if err != nil {
		return err
	}
	var callErr error
	if err := conn.Control(func(fd uintptr) { callErr = call(int(fd)) }); err != nil {
		return err
	}
	if callErr != nil {
		return fmt.Errorf("%s %d: %w", what, h.pid, callErr)
	}
	return nil
}

func readable(fd int) (bool, error) {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(fds, 0)
		if !errors.Is(err, unix.EINTR) {
			return n > 0, err
		}
	}
}

// BootID returns the running kernel's boot id, which differs after every start of the machine.
func BootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read boot id: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// StartTime returns when a process started, in clock ticks after boot (field 22 of
// /proc/pid/stat). Together with pid and boot id it names one process.
func StartTime(pid int) (uint64, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, err
	}
	return parseStart(b)
}

// parseStart reads field 22. The second field is the program's name in parentheses, and may itself
// hold spaces and parentheses, so fields are counted from the last one.
func parseStart(stat []byte) (uint64, error) {
	end := bytes.LastIndexByte(stat, ')')
	if end < 0 {
		return 0, errors.New("process stat without a name")
	}
	fields := bytes.Fields(stat[end+1:])
	const startTime = 22 - 3 // the first field after the name is number 3
	if len(fields) <= startTime {
		return 0, errors.New("process stat is too short")
	}
	return strconv.ParseUint(string(fields[startTime]), 10, 64)
}
