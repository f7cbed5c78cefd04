package output

import (
	"sort"
	"time"

	"casemate.dev/internal/guestwire"
)

// Reader reads a buffer from an offset on.
type Reader struct {
	b *Buffer

	// All below is guarded by the pool's mu.
	next  int64
	hold  bool
	limit time.Duration // how long it may take nothing
	moved time.Time
}

// NewReader returns a reader that starts at offset, and with hold makes writers wait for it. It must
// be closed.
func (b *Buffer) NewReader(offset int64, hold bool) *Reader {
	b.pool.mu.Lock()
	defer b.pool.mu.Unlock()
	r := &Reader{b: b, next: offset, hold: hold, limit: guestwire.StallLimit, moved: time.Now()}
	if b.readers == nil {
		b.readers = make(map[*Reader]struct{})
	}
	b.readers[r] = struct{}{}
	if hold {
		b.pending = nil
	}
	return r
}

// Close lets writers go on without this reader. Idempotent.
func (r *Reader) Close() {
	r.b.pool.mu.Lock()
	defer r.b.pool.mu.Unlock()
	delete(r.b.readers, r)
	r.b.movedLocked()
}

// Piece is what a Reader gives.
type Piece struct {
	Stream guestwire.Stream
	Offset int64
	Data   []byte // nil for a gap
	Gap    int64  // bytes from Offset on that are gone
}

// State tells why Next gave nothing.
type State int

// The states.
const (
	More     State = iota // a piece was given
	Waiting               // no more yet: News tells when
	Finished              // no more, and the output is complete
)

// Next returns the next piece, its bytes copied into buf. Without one, the state says whether to
// wait for the channel, which is closed when there is news.
func (r *Reader) Next(buf []byte) (Piece, State, <-chan struct{}) {
	b := r.b
	b.pool.mu.Lock()
	defer b.pool.mu.Unlock()
	if r.next >= b.total {
		if b.finished {
			return Piece{}, Finished, nil
		}
		if b.news == nil {
			b.news = make(chan struct{})
		}
		// Who waits at the end is alive, however long the process is silent.
		r.moved = time.Now()
		return Piece{}, Waiting, b.news
	}
	p := b.pieceLocked(r.next, buf)
	r.next += int64(len(p.Data)) + p.Gap
	r.moved = time.Now()
	b.movedLocked()
	return p, More, nil
}

func (b *Buffer) pieceLocked(offset int64, buf []byte) Piece {
	blk := find(b.head, offset)
	if blk == nil {
		blk = find(b.tail, offset)
	}
	if blk == nil {
		to := b.total
		if len(b.tail) > 0 {
			to = b.tail[0].offset
		}
		return Piece{Offset: offset, Gap: to - offset}
	}
	s, data := blk.piece(offset)
	n := copy(buf, data)
	return Piece{Stream: s, Offset: offset, Data: buf[:n]}
}

// find returns the block that holds offset.
func find(blocks []block, offset int64) *block {
	i := sort.Search(len(blocks), func(i int) bool { return blocks[i].end() > offset })
	if i < len(blocks) && blocks[i].offset <= offset {
		return &blocks[i]
	}
	return nil
}
