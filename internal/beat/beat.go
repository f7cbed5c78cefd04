// Package beat keeps a stream alive: a sign of life after each silence, never in the middle of something
// else.
//
// What belongs here: that clock. What does not: what a sign of life looks like, which is each stream's own.
package beat

import (
	"sync"
	"time"
)

// Beat serialises what is sent on one stream, and sends a sign of life after each silence. Its methods
// are safe for concurrent use.
type Beat struct {
	every time.Duration
	alive func() error

	// mu guards the fields below and the stream itself.
	mu      sync.Mutex
	timer   *time.Timer
	stopped bool
}

// New starts the clock. Stop must be called before the stream's handler returns.
func New(every time.Duration, alive func() error) *Beat {
	b := &Beat{every: every, alive: alive}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.timer = time.AfterFunc(every, b.tick)
	return b
}

func (b *Beat) tick() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.stopped || b.alive() != nil {
		return // a broken stream shows at the next send, and its context ends
	}
	b.timer.Reset(b.every)
}

// Do calls f alone, and leaves the clock as it is.
func (b *Beat) Do(f func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f()
}

// Send calls f alone, and begins the silence anew.
func (b *Beat) Send(f func() error) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	err := f()
	b.timer.Reset(b.every)
	return err
}

// Stop ends the signs of life; none is under way when it returns.
func (b *Beat) Stop() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.stopped = true
	b.timer.Stop()
}
