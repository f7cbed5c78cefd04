package output

import (
	"math"
	"sync"

	"casemate.dev/internal/guestwire"
)

// Pool bounds the memory of a set of buffers. Its one lock serves all of them: they share the bound.
// Methods of Pool, Buffer and Reader are safe for concurrent use.
type Pool struct {
	limit int64

	// mu guards the fields below, and those of every Buffer and Reader.
	mu      sync.Mutex
	used    int64
	ended   []*Buffer // finished ones that still hold bytes, oldest end first
	running map[*Buffer]struct{}
	free    [][]byte // full-size blocks for reuse, so that a stream of output makes no garbage
}

// maxFree bounds the blocks kept for reuse.
const maxFree = 8

// NewPool returns a pool that keeps at most limit bytes.
func NewPool(limit int64) *Pool {
	return &Pool{limit: max(limit, guestwire.MinBuffer), running: make(map[*Buffer]struct{})}
}

// Used returns how many bytes are accounted.
func (p *Pool) Used() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.used
}

// reclaimLocked makes room for n bytes as far as it may without taking from a holder.
func (p *Pool) reclaimLocked(n int64) {
	for i := 0; i < len(p.ended) && p.used+n > p.limit; {
		b := p.ended[i]
		if b.heldLocked() != never {
			i++
			continue
		}
		p.ended = append(p.ended[:i], p.ended[i+1:]...)
		b.listed = false
		b.clearLocked()
	}
	for p.used+n > p.limit {
		b := p.largestLocked()
		if b == nil || !b.dropLocked() {
			return
		}
	}
}

// largestLocked returns the running buffer that holds most and may be cut.
func (p *Pool) largestLocked() *Buffer {
	var largest *Buffer
	for b := range p.running {
		if b.mayDropLocked() && (largest == nil || b.size > largest.size) {
			largest = b
		}
	}
	return largest
}

func (p *Pool) allocLocked(n int) []byte {
	if n == blockSize && len(p.free) > 0 {
		b := p.free[len(p.free)-1]
		p.free = p.free[:len(p.free)-1]
		return b
	}
	return make([]byte, 0, n)
}

func (p *Pool) releaseLocked(b *block) {
	if cap(b.data) == blockSize && len(p.free) < maxFree {
		p.free = append(p.free, b.data[:0])
	}
}

// never is an offset that no reader reaches.
const never = math.MaxInt64
