package server

import (
	"os"
	"path/filepath"
	"runtime"
	"sync"
)

// timerSlack is by how many nanoseconds the kernel may delay a timer of ours to join it with others; 50,000
// is what a process has by default (prctl(2), PR_SET_TIMERSLACK).
const timerSlack = "1000000"

// relaxTimers lets the kernel be late with timers of the thread by which Go's runtime looks after the others:
// while anything runs, that one sleeps for 20 µs at a time, and waking for it took a tenth of what starting a
// process cost the server. Of that thread alone: a thread that looks for work also sleeps, for 3 µs, and the
// work waits meanwhile. Where it is not permitted nothing is lost but that.
func relaxTimers() {
	makeThreads(threadsAhead)
	dir, err := os.Open("/proc/self/task")
	if err != nil {
		return
	}
	defer func() { _ = dir.Close() }()
	// They come in the order in which they were made: the main one, and then the watching one, which the runtime
	// makes before any other.
	threads, err := dir.Readdirnames(2)
	if err != nil || len(threads) < 2 {
		return
	}
	// Threads are not listed in /proc, but are there by their number; that file is not among those of a task.
	_ = os.WriteFile(filepath.Join("/proc", threads[1], "timerslack_ns"), []byte(timerSlack), 0)
}

// threadsAhead is how many threads there are before the watching one is relaxed: one that it makes inherits
// its slack, and it makes one only where none is idle.
const threadsAhead = 16

func makeThreads(n int) {
	var there, done sync.WaitGroup
	there.Add(n)
	for range n {
		done.Go(func() {
			runtime.LockOSThread() // so that while it waits no other goroutine has its thread
			defer runtime.UnlockOSThread()
			there.Done()
			there.Wait()
		})
	}
	done.Wait()
}
