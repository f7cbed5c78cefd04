package envd

import (
	"sync"
	"time"
)

// beat serialises what is sent on one stream, and sends a sign of life after each silence.
type beat struct {
	every time.Duration
	alive func() error

	// mu guards the fields below and the stream itself.
	mu      sync.Mutex
	timer   *time.Timer
	stopped bool
}

// newBeat starts the clock. stop must be called before the stream's handler returns.
func newBeat(every time.Duration, alive func() error) *beat {
	b := &beat{every: every, alive: alive}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.timer = time.AfterFunc(every, b.tick)
	return b
}

func (b *beat) tick() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.stopped || b.alive() != nil {
		return // a broken stream shows at the next send, and its context ends
	}
	b.timer.Reset(b.every)
}

// send calls f alone, and begins the silence anew.
func (b *beat) send(f func() error) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	err := f()
	b.timer.Reset(b.every)
	return err
}

// stop ends the signs of life; none is under way when it returns.
func (b *beat) stop() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.stopped = true
	b.timer.Stop()
}
