package output

import (
	"slices"
	"time"

	"casemate.dev/internal/guestwire"
)

// Buffer keeps the output of one process: up to a quarter of its size from the beginning, and the
// rest from the end.
type Buffer struct {
	pool *Pool
	max  int64

	// All below is guarded by pool.mu.

	// total counts the bytes appended; size what the blocks cost.
	total, size int64
	// head joins from offset 0 on; tail joins up to total. Between them lies what was dropped.
	head, tail []block
	headFull   bool
	kept       int64 // bytes in the blocks
	readers    map[*Reader]struct{}
	pending    *Reader // holds from the first byte until a real one comes
	finished   bool
	listed     bool          // in pool.ended
	news       chan struct{} // closed when there is something new; nil while nobody waits
	room       chan struct{} // closed when a holder moved; nil while no writer waits
}

// NewBuffer returns a buffer of at most size bytes; 0 means guestwire.DefaultBuffer. With hold, writers wait
// for a holding reader from the first byte on, for at most guestwire.AttachLimit before it comes.
func (p *Pool) NewBuffer(size int64, hold bool) *Buffer {
	if size == 0 {
		size = guestwire.DefaultBuffer
	}
	b := &Buffer{pool: p, max: min(max(size, guestwire.MinBuffer), guestwire.MaxBuffer)}
	if hold {
		b.pending = &Reader{b: b, hold: true, limit: guestwire.AttachLimit, moved: time.Now()}
	}
	p.mu.Lock()
	p.running[b] = struct{}{}
	p.mu.Unlock()
	return b
}

// Append adds bytes of a stream. It returns once they are in the buffer, and waits only for a
// holding reader.
func (b *Buffer) Append(s guestwire.Stream, data []byte) {
	for len(data) > 0 {
		n := min(len(data), blockSize)
		b.append(s, data[:n], true)
		data = data[n:]
	}
}

// TryAppend is Append of at most a block's worth that does not wait. It returns how many bytes the buffer took:
// fewer where it would have waited for a holding reader.
func (b *Buffer) TryAppend(s guestwire.Stream, data []byte) int {
	return b.append(s, data[:min(len(data), blockSize)], false)
}

// append returns how many bytes were taken: all of them where it may wait.
func (b *Buffer) append(s guestwire.Stream, p []byte, wait bool) int {
	b.pool.mu.Lock()
	defer b.pool.mu.Unlock()
	all := len(p)
	for len(p) > 0 {
		if n := b.fillLocked(s, p); n > 0 {
			p = p[n:]
			continue
		}
		if b.growLocked() {
			continue
		}
		if !wait && b.heldLocked() != never {
			break
		}
		if b.waitLocked() {
			continue
		}
		// No room anywhere and nobody to wait for: the bytes themselves are the gap.
		b.cutLocked()
		b.total += int64(len(p))
		p = nil
	}
	b.announceLocked()
	return all - len(p)
}

// fillLocked puts bytes into the last block, without making a new one.
func (b *Buffer) fillLocked(s guestwire.Stream, p []byte) int {
	last := b.lastLocked()
	if last == nil || last.end() != b.total {
		return 0
	}
	before := last.cost()
	n := last.add(s, p)
	b.accountLocked(last.cost() - before)
	b.total += int64(n)
	b.kept += int64(n)
	return n
}

func (b *Buffer) lastLocked() *block {
	switch {
	case len(b.tail) > 0:
		return &b.tail[len(b.tail)-1]
	case len(b.head) > 0 && !b.headFull:
		return &b.head[len(b.head)-1]
	}
	return nil
}

// growLocked makes a new last block, dropping old ones for it. It reports false where that would
// take from a holder or where even dropping everything gives no room.
func (b *Buffer) growLocked() bool {
	n := blockSize
	if last := b.lastLocked(); b.total < smallOutput {
		n = firstBlock << min(len(b.head), 3) // 512, 1024, 2048, 4096
	} else if last != nil && len(last.runs) == maxRuns {
		n = maxRuns // bytes that change stream so often fill no large block
	}
	need := int64(n) + blockOverhead + 4*runSize
	if !b.headFull && b.size+need > b.max/4 {
		b.headFull = true
	}
	for b.size+need > b.max {
		if !b.mayDropLocked() || !b.dropLocked() {
			return false
		}
	}
	if b.pool.used+need > b.pool.limit {
		b.pool.reclaimLocked(need)
		if b.pool.used+need > b.pool.limit {
			return false
		}
	}
	b.listLocked() // output after the end, in a buffer that the pool has emptied
	// Reclaiming may have cut this very buffer, head included.
	blk := block{offset: b.total, data: b.pool.allocLocked(n), runs: make([]run, 0, 4)}
	b.accountLocked(blk.cost())
	if b.headFull || !b.joinsHeadLocked() {
		b.headFull = true
		b.tail = append(b.tail, blk)
	} else {
		b.head = append(b.head, blk)
	}
	return true
}

func (b *Buffer) joinsHeadLocked() bool {
	if len(b.head) == 0 {
		return b.total == 0
	}
	return b.head[len(b.head)-1].end() == b.total
}

func (b *Buffer) accountLocked(n int64) {
	b.size += n
	b.pool.used += n
}

// oldestLocked returns the block that is dropped first: the tail's oldest, and the head only when
// there is no tail left.
func (b *Buffer) oldestLocked() *block {
	switch {
	case len(b.tail) > 0:
		return &b.tail[0]
	case len(b.head) > 0:
		return &b.head[len(b.head)-1]
	}
	return nil
}

// mayDropLocked reports whether there is a block that no holder still needs.
func (b *Buffer) mayDropLocked() bool {
	oldest := b.oldestLocked()
	return oldest != nil && (oldest.end() <= b.heldLocked() || b.heldLocked() == never)
}

// dropLocked drops the oldest block, and reports whether there was one.
func (b *Buffer) dropLocked() bool {
	var old block
	switch {
	case len(b.tail) > 0:
		old = b.tail[0]
		b.tail[0] = block{}
		b.tail = b.tail[1:]
	case len(b.head) > 0:
		old = b.head[len(b.head)-1]
		b.head[len(b.head)-1] = block{}
		b.head = b.head[:len(b.head)-1]
		b.headFull = true
	default:
		return false
	}
	b.kept -= int64(len(old.data))
	b.accountLocked(-old.cost())
	b.pool.releaseLocked(&old)
	return true
}

// cutLocked makes the next byte begin after a gap.
func (b *Buffer) cutLocked() {
	for len(b.tail) > 0 {
		b.dropLocked()
	}
	b.headFull = true
}

func (b *Buffer) clearLocked() {
	for b.dropLocked() {
	}
}

// heldLocked returns the lowest offset that a holder has not taken, or never.
func (b *Buffer) heldLocked() int64 {
	held := int64(never)
	if b.pending != nil {
		held = b.pending.next
	}
	for r := range b.readers {
		if r.hold {
			held = min(held, r.next)
		}
	}
	return held
}

// poolLook is how long a writer waits until it looks again whether the pool has room: that comes without notice,
// when others let go of theirs.
const poolLook = 100 * time.Millisecond

// waitLocked waits until a holder has moved or lost its right. It reports false where there is no
// holder to wait for.
func (b *Buffer) waitLocked() bool {
	if b.heldLocked() == never {
		return false
	}
	if b.room == nil {
		b.room = make(chan struct{})
	}
	room, patience := b.room, b.patienceLocked()
	b.announceLocked()
	b.pool.mu.Unlock()
	timer := time.NewTimer(min(patience, poolLook))
	select {
	case <-room:
	case <-timer.C:
	}
	timer.Stop()
	b.pool.mu.Lock()
	b.dropStalledLocked()
	return true
}

// patienceLocked returns how long until the first holder's time is up.
func (b *Buffer) patienceLocked() time.Duration {
	left := guestwire.StallLimit
	each := func(r *Reader) {
		if r.hold {
			left = min(left, r.limit-time.Since(r.moved))
		}
	}
	if b.pending != nil {
		each(b.pending)
	}
	for r := range b.readers {
		each(r)
	}
	return max(left, 0)
}

func (b *Buffer) dropStalledLocked() {
	if b.pending != nil && time.Since(b.pending.moved) >= b.pending.limit {
		b.pending = nil
	}
	for r := range b.readers {
		if r.hold && time.Since(r.moved) >= r.limit {
			r.hold = false
		}
	}
}

// announceLocked wakes who waits for output.
func (b *Buffer) announceLocked() {
	if b.news != nil {
		close(b.news)
		b.news = nil
	}
}

// movedLocked wakes a writer that waits for a holder.
func (b *Buffer) movedLocked() {
	if b.room != nil {
		close(b.room)
		b.room = nil
	}
}

// Finish says that the output is complete: followers end, and the bytes may go when the pool needs
// room. Bytes that come later still land in the buffer. Idempotent.
func (b *Buffer) Finish() {
	b.pool.mu.Lock()
	defer b.pool.mu.Unlock()
	if b.finished {
		return
	}
	b.finished = true
	b.pending = nil
	delete(b.pool.running, b)
	b.listLocked()
	b.announceLocked()
}

// listLocked puts a finished buffer among those that the pool may empty.
func (b *Buffer) listLocked() {
	if b.finished && !b.listed {
		b.listed = true
		b.pool.ended = append(b.pool.ended, b)
	}
}

// Drop forgets all bytes.
func (b *Buffer) Drop() {
	b.pool.mu.Lock()
	defer b.pool.mu.Unlock()
	b.clearLocked()
	delete(b.pool.running, b)
	if i := slices.Index(b.pool.ended, b); i >= 0 {
		b.pool.ended = slices.Delete(b.pool.ended, i, i+1)
	}
	b.listed = false
}

// Sizes returns how many bytes were appended in all, and how many of them are no longer kept.
func (b *Buffer) Sizes() (total, dropped int64) {
	b.pool.mu.Lock()
	defer b.pool.mu.Unlock()
	return b.total, b.total - b.kept
}
