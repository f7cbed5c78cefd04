package guest

import (
	"runtime/debug"
	"sync/atomic"
	"time"
)

const (
	// gcPercent lets the heap grow to 2 MB before it is collected for the first time: an idle guest's
	// memory is paid for by every sandbox, and what a call leaves behind is little.
	gcPercent = 50
	// restAfter is how long no call must be under way until unused memory goes back to the kernel.
	restAfter = 3 * time.Second
)

// memory keeps the guest small: many sandboxes sit idle most of the time.
type memory struct {
	calls atomic.Int64
	timer *time.Timer
}

// newMemory sets the collector for this process. limit is what the guest should stay below; its
// control group allows more.
func newMemory(limit int64) *memory {
	debug.SetGCPercent(gcPercent)
	debug.SetMemoryLimit(limit)
	m := &memory{}
	m.timer = time.AfterFunc(restAfter, m.rest)
	return m
}

// begin and end frame a call.
func (m *memory) begin() { m.calls.Add(1) }

func (m *memory) end() {
	m.calls.Add(-1)
	m.timer.Reset(restAfter)
}

// rest gives memory back. A follower that waits for output is a call under way, so a process that is
// watched does not make the guest collect over and over.
func (m *memory) rest() {
	if m.calls.Load() == 0 {
		debug.FreeOSMemory()
	}
}
