package pidfd

import (
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// childInfo is the SIGCHLD variant of siginfo_t (sigaction(2)): signo, errno and code as int32, then
// on 64-bit machines 4 bytes of padding, pid, uid and status.
type childInfo struct {
	signo, errno, code int32
	_                  int32
	pid                int32
	uid                uint32
	status             int32
}

// waitFD reaps the child that fd names.
func waitFD(fd int) (State, error) {
	var si unix.Siginfo
	for {
		err := unix.Waitid(unix.P_PIDFD, fd, &si, unix.WEXITED|unix.WNOHANG, nil)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return State{}, err
		}
		break
	}
	info := (*childInfo)(unsafe.Pointer(&si))
	const exited, dumped = 1, 3 // CLD_EXITED, CLD_DUMPED; CLD_KILLED is 2
	switch {
	case info.pid == 0:
		return State{}, unix.ECHILD
	case info.code == exited:
		return State{Known: true, Code: int(info.status)}, nil
	default:
		return State{Known: true, Signal: syscall.Signal(info.status)}, nil
	}
}

func unixEpoch() time.Time { return time.Unix(1, 0) }

func noDeadline() time.Time { return time.Time{} }
