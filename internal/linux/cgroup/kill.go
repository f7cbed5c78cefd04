package cgroup

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// signalAll sends SIGKILL to every process that list shows, and returns how many there were. A pid
// may be reused between being listed and being signalled, so each is pinned by a pidfd first, and
// signalled only if a second listing still shows it: what the pidfd pins was then alive after the
// first listing, and either is the process of the second one or dead. Our own process is never hit.
func signalAll(list func() ([]int, error)) (int, error) {
	first, err := list()
	if err != nil || len(first) == 0 {
		return 0, err
	}
	self := os.Getpid()
	pinned := make(map[int]int, len(first))
	defer func() {
		for _, fd := range pinned {
			_ = unix.Close(fd)
		}
	}()
	for _, pid := range first {
		if _, dup := pinned[pid]; dup || pid == self {
			continue
		}
		fd, err := unix.PidfdOpen(pid, 0)
		switch {
		case err == nil:
			pinned[pid] = fd
		case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
			// Out of descriptors: kill the ones pinned so far, the caller comes back for the rest.
		case !errors.Is(err, unix.ESRCH) && !errors.Is(err, unix.EINVAL):
			return 0, err
		}
	}
	second, err := list()
	if err != nil {
		return 0, err
	}
	for _, pid := range second {
		if fd, ok := pinned[pid]; ok {
			if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
				return 0, err
			}
		}
	}
	return len(second), nil
}
