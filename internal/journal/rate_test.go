package journal

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"testing"
	"time"
)

// The sustained load: events a second, each a process's end with its output and a checkpoint.
const sustainedRate = 1000

// TestSoakSustainedRate records 1,000 events a second with a checkpoint for each hundredth of a second, and wants memory to
// be flat after the first fifth: by day for two seconds, at night for ten minutes, or for the seconds of JOURNAL_RATE_SECONDS.
// That the rate is held is only wanted at night: a busy machine proves nothing.
func TestSoakSustainedRate(t *testing.T) {
	seconds := rounds(2, 600)
	if s, err := strconv.Atoi(os.Getenv("JOURNAL_RATE_SECONDS")); err == nil {
		seconds = s
	}
	l, _ := openSigned(t, t.TempDir())
	const tick = 10 * time.Millisecond
	each := sustainedRate * int(tick) / int(time.Second)
	total := seconds * sustainedRate
	begun := time.Now()
	var early uint64
	for n := 0; n < total; {
		for range each {
			e := Event{Sandbox: fmt.Sprint("s", n%50), Type: ProcessEnded, Process: fmt.Sprint("p", n)}.
				With(Server, map[string]int{"duration_ms": n % 1000})
			if _, err := l.Record(t.Context(), e.WithBody(Guest, "stdout", fmt.Appendf(nil, "output number %d\n", n))); err != nil {
				t.Fatal(err)
			}
			n++
		}
		if _, err := l.Checkpoint(); err != nil {
			t.Fatal(err)
		}
		if n >= total/5 && early == 0 {
			early = heap()
		}
		if n%(total/10) == 0 && seconds > 10 {
			t.Logf("%d events in %s, %d KiB of heap", n, time.Since(begun).Round(time.Second), heap()>>10)
		}
		if ahead := time.Duration(n)*time.Second/sustainedRate - time.Since(begun); ahead > 0 {
			time.Sleep(ahead) // the pace, not a wait for anything
		}
	}
	took := time.Since(begun)
	if late := heap(); late > early+(8<<20) {
		t.Errorf("%d KiB of heap after a fifth, %d KiB at the end", early>>10, late>>10)
	}
	if limit := time.Duration(seconds) * time.Second * 11 / 10; rounds(0, 1) == 1 && took > limit {
		t.Errorf("%d events took %s", total, took)
	}
	t.Logf("%d events in %s, %.0f a second", total, took, float64(total)/took.Seconds())
	checkLeaves(t, l)
}

// heap is how much memory is reachable.
func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
