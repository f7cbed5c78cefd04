// Package signals keeps PID 1 alive whatever a process inside sends to it.
//
// What belongs here: signal actions of the guest itself. What does not: signals that are sent to
// processes.
package signals

import "golang.org/x/sys/unix"

// Shield makes PID 1 survive every signal that a process inside can send to it (HARDENING 3).
//
// The kernel protects an init process only from signals that it has not asked for
// (pid_namespaces(7)), and Go's runtime asks for all of them: it then ends the program on SIGTERM,
// HUP, INT, QUIT, ABRT and others. So they get their default action back, which the kernel does not
// deliver to an init process when somebody inside sends it. Subscribing to them (package signal)
// would not do: a SIGSEGV sent by sigqueue(3) or fcntl(F_SETSIG) passes for a fault of the program's
// own and ends it, subscribed to or not. Nor would it be cheap: it costs a hand-over between threads
// for each signal, half a millisecond in all, and wakes the program for each one that comes.
//
// A true fault of ours, which the kernel forces, ends the guest at once and without a trace: it fails
// closed, as it must. SIGCHLD goes nowhere, too: the reaper waits without it.
//
// Left alone are the runtime's own: SIGURG, by which it preempts, and 33, by which it makes calls on all
// threads. It ignores those when others send them. Package signal must not be used in this program, since it
// would put handlers back. 32 and 34, which belong to the C library, count here because children inherit
// what is ignored: glibc's posix_spawn, as make has it, starts programs with 32 ignored.
func Shield() error {
	for sig := unix.Signal(1); sig <= lastSignal; sig++ {
		switch sig {
		case unix.SIGKILL, unix.SIGSTOP: // can't be changed, and don't reach an init process
		case unix.SIGURG, 33:
		default:
			if err := defaultAction(sig); err != nil {
				return err
			}
		}
	}
	return nil
}

// lastSignal is SIGRTMAX.
const lastSignal = 64
