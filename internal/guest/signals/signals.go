// Package signals keeps PID 1 alive whatever a process inside sends to it.
//
// What belongs here: signal actions of the guest itself. What does not: signals that are sent to
// processes.
package signals

import (
	"os"
	"os/signal"

	"golang.org/x/sys/unix"
)

// Shield makes PID 1 survive every signal that a process inside can send to it (HARDENING 3).
// The kernel protects an init process only from signals that it has not asked for
// (pid_namespaces(7)), and Go's runtime asks for all of them.
//
// Signals that the runtime ends the program on (TERM, HUP, INT, QUIT, ABRT …) are subscribed to and
// dropped. That does not help for those that it takes for a fault of its own code: kill(2) sets
// si_code to SI_USER, which the runtime recognizes, but sigqueue(3) and fcntl(F_SETSIG) set others,
// and a SIGSEGV that came so ends the program whether subscribed to or not. Those are put back to
// their default action, which the kernel does not deliver to an init process when somebody inside
// sends it. A true fault of ours, which the kernel forces, then ends the guest at once and without
// a trace: it fails closed, as it must.
func Shield() error {
	// Whoever subscribed to all signals before, a flood of these two costs more than it tells.
	signal.Reset(unix.SIGURG, unix.SIGCHLD)
	drop := make(chan os.Signal, 1)
	for sig := unix.Signal(1); sig <= lastSignal; sig++ {
		switch sig {
		case unix.SIGKILL, unix.SIGSTOP: // can't be caught, and don't reach an init process
		case unix.SIGURG: // the runtime's own, for preemption; ignored by default
		case unix.SIGCHLD: // the reaper waits without it; ignored by default
		case unix.SIGSEGV, unix.SIGBUS, unix.SIGFPE, unix.SIGILL, unix.SIGTRAP, unix.SIGSTKFLT, unix.SIGSYS:
			if err := defaultAction(sig); err != nil {
				return err
			}
		default:
			// The channel stays full after the first one; package signal never blocks on it.
			signal.Notify(drop, sig)
		}
	}
	return nil
}

// lastSignal is SIGRTMAX.
const lastSignal = 64
