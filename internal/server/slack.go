package server

import (
	"os"
	"path/filepath"
)

// timerSlack is by how many nanoseconds the kernel may delay a timer of ours to join it with others; 50,000
// is what a process has by default (prctl(2), PR_SET_TIMERSLACK).
const timerSlack = "1000000"

// relaxTimers lets the kernel be late with timers of every thread there is; those to come inherit it. It is
// about the thread by which Go's runtime watches over the others: while anything runs, that one sleeps for
// 20 µs at a time, and waking for it took a tenth of what starting a process cost the server. Where it is not
// permitted nothing is lost but that.
func relaxTimers() {
	// Threads are not listed in /proc, but are there by their number; that file is not among those of a task.
	threads, _ := os.ReadDir("/proc/self/task")
	for _, t := range threads {
		_ = os.WriteFile(filepath.Join("/proc", t.Name(), "timerslack_ns"), []byte(timerSlack), 0)
	}
}
