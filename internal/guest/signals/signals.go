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
// (pid_namespaces(7)), and Go's runtime asks for nearly all of them. What it then does falls into
// three classes (runtime/sigtab_linux_generic.go):
//
// Most it drops where nobody has subscribed. On a few it ends the program: those are subscribed to,
// and dropped here. And some it takes for a fault of its own code. For these a subscription does not
// help: kill(2) sets si_code to SI_USER, which the runtime recognizes, but sigqueue(3) and
// fcntl(F_SETSIG) set others, and a SIGSEGV that came so ends the program whether subscribed to or
// not. They are put back to their default action, which the kernel does not deliver to an init
// process when somebody inside sends it. A true fault of ours, which the kernel forces, then ends
// the guest at once and without a trace: it fails closed, as it must.
//
// A second call changes nothing.
func Shield() error {
	// The channel stays full after the first one; package signal never blocks on it.
	signal.Notify(make(chan os.Signal, 1), unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGABRT, unix.SIGTERM)
	for _, sig := range [...]unix.Signal{
		unix.SIGSEGV, unix.SIGBUS, unix.SIGFPE, unix.SIGILL, unix.SIGTRAP, unix.SIGSTKFLT, unix.SIGSYS,
	} {
		if err := defaultAction(sig); err != nil {
			return err
		}
	}
	return nil
}
