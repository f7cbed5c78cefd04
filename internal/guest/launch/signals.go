package launch

import (
	"os"
	"os/signal"
)

// ignoreSignals subscribes to every signal and forgets what comes. PID 1 of a namespace is spared
// only what it has no handler for (pid_namespaces(7)); Go installs handlers for nearly all signals,
// and some of them end the program: SIGTERM, HUP, QUIT, SEGV, ABRT and BUS sent by root inside each
// killed it. Others may subscribe besides.
func ignoreSignals() {
	// Nobody reads: package signal drops what does not fit.
	signal.Notify(make(chan os.Signal, 1))
}
