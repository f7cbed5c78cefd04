package fake

import (
	"context"
	"math"
	"sync"

	"casemate.dev/internal/guestwire"
)

// output keeps what a process printed: all of it up to a limit, then its head and its tail.
type output struct {
	limit int64

	// mu guards the fields below.
	mu      sync.Mutex
	changed *sync.Cond
	chunks  []chunk
	end     int64
	dropped int64
	closed  bool
	armed   bool           // a follower that loses nothing is expected
	holders map[*int64]int // offsets of followers that lose nothing
}

type chunk struct {
	stream guestwire.Stream
	offset int64
	data   []byte
}

func newOutput(limit int64, hold bool) *output {
	o := &output{limit: limit, armed: hold, holders: map[*int64]int{}}
	o.changed = sync.NewCond(&o.mu)
	return o
}

// write adds output. It waits while a follower that must lose nothing is a whole buffer behind.
func (o *output) write(ctx context.Context, s guestwire.Stream, p []byte) error {
	defer context.AfterFunc(ctx, o.wake)()
	o.mu.Lock()
	defer o.mu.Unlock()
	for len(p) > 0 {
		n := min(len(p), guestwire.ChunkSize)
		for ctx.Err() == nil && o.mustWaitLocked(int64(n)) {
			o.changed.Wait()
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if o.closed {
			return nil // nobody reads any more: as writing into a pipe that the guest drains
		}
		o.chunks = append(o.chunks, chunk{s, o.end, append([]byte(nil), p[:n]...)})
		o.end += int64(n)
		p = p[n:]
		o.trimLocked()
		o.changed.Broadcast()
	}
	return nil
}

// mustWaitLocked reports whether n more bytes would leave a follower that must lose nothing more
// than half the limit behind: the other half is the head's.
func (o *output) mustWaitLocked(n int64) bool {
	slowest := o.slowestLocked()
	return slowest < o.end && o.end+n-slowest > o.limit/2
}

// slowestLocked returns where the slowest follower that must lose nothing stands; with none, far
// ahead.
func (o *output) slowestLocked() int64 {
	if o.armed {
		return 0
	}
	slowest := int64(math.MaxInt64)
	for offset := range o.holders {
		slowest = min(slowest, *offset)
	}
	return slowest
}

// trimLocked drops from the middle: the first half of the limit stays, and the last bytes do.
func (o *output) trimLocked() {
	kept, slowest := o.end-o.dropped, o.slowestLocked()
	for i := 0; kept > o.limit && i < len(o.chunks)-1; {
		c := o.chunks[i]
		end := c.offset + int64(len(c.data))
		if end <= o.limit/2 {
			i++
			continue
		}
		if end > slowest {
			return
		}
		o.dropped += int64(len(c.data))
		kept -= int64(len(c.data))
		o.chunks = append(o.chunks[:i], o.chunks[i+1:]...)
	}
}

func (o *output) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = true
	o.changed.Broadcast()
}

func (o *output) wake() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.changed.Broadcast()
}

func (o *output) counts() (end, dropped int64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.end, o.dropped
}

// hold registers a follower for which writers wait; its offset is moved by next.
func (o *output) hold(offset *int64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.holders[offset]++
	o.armed = false
}

func (o *output) unhold(offset *int64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.holders, offset)
	o.changed.Broadcast()
}

// next returns what follows *offset and moves it: a chunk, or a gap as a chunk without data whose
// end is the new offset. With follow it waits; ok is false where there is nothing more.
func (o *output) next(ctx context.Context, offset *int64, follow bool) (c chunk, ok bool) {
	defer context.AfterFunc(ctx, o.wake)()
	o.mu.Lock()
	defer o.mu.Unlock()
	for *offset >= o.end {
		if !follow || o.closed || ctx.Err() != nil {
			return chunk{}, false
		}
		o.changed.Wait()
	}
	for _, c := range o.chunks {
		switch end := c.offset + int64(len(c.data)); {
		case end <= *offset:
		case c.offset > *offset: // what lay between was dropped
			gap := chunk{offset: *offset}
			*offset = c.offset
			o.changed.Broadcast()
			return gap, true
		default:
			c.data = c.data[*offset-c.offset:]
			c.offset = *offset
			*offset = end
			o.changed.Broadcast()
			return c, true
		}
	}
	return chunk{}, false
}
