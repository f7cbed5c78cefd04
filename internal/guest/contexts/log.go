package contexts

import (
	"slices"
	"sync"
	"time"

	"casemate.dev/internal/guestwire"
)

const (
	// itemCost is what an item costs beside its bytes.
	itemCost = 64
	// growTo bounds how long an item of text grows while nobody has read it.
	growTo = 32 << 10
)

// pool bounds the memory of all logs. Its one lock serves all of them: they share the bound.
type pool struct {
	limit int64

	// mu guards the fields below, and those of every log and reader.
	mu   sync.Mutex
	used int64
	logs []*log // those that hold items, oldest first
}

func newPool(limit int64) *pool { return &pool{limit: limit} }

// item is one thing that a run said.
type item struct {
	number int64
	kind   guestwire.ItemKind
	data   []byte
}

func (i *item) cost() int64 { return int64(len(i.data)) + itemCost }

// log keeps what a run said: the head and the tail of it where it is much.
type log struct {
	pool  *pool
	limit int64

	// All below is guarded by the pool's mu.
	head, tail []item
	headFull   bool
	next       int64 // number of the next item
	size       int64 // cost of what is kept
	headSize   int64
	dropped    int64 // bytes that are not kept any more
	taken      int64 // items below were given to somebody, and grow no more
	finished   bool
	free       bool // nobody is waited for any more
	news       chan struct{}
	room       chan struct{}
	readers    map[*reader]struct{}
}

func (p *pool) newLog(limit int64) *log {
	if limit <= 0 {
		limit = guestwire.DefaultRunBuffer
	}
	l := &log{pool: p, limit: min(max(limit, 64<<10), 2*guestwire.MaxItem)}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.logs = append(p.logs, l)
	return l
}

// append adds an item, and reports whether it did: nothing is added to what is finished. data of text
// is copied, that of others is kept. It may wait for a reader that asked to lose nothing.
func (l *log) append(kind guestwire.ItemKind, data []byte) bool {
	if len(data) == 0 {
		return true
	}
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	text := kind == guestwire.ItemStdout || kind == guestwire.ItemStderr
	for l.size+int64(len(data))+itemCost > l.limit && l.waitLocked() {
	}
	if l.finished {
		return false
	}
	if last := l.lastLocked(); text && last != nil && last.kind == kind && last.number >= l.taken && len(last.data)+len(data) <= growTo {
		last.data = append(last.data, data...)
		l.accountLocked(int64(len(data)))
	} else {
		if text {
			data = slices.Clone(data)
		}
		l.pushLocked(item{number: l.next, kind: kind, data: data})
	}
	l.trimLocked()
	l.pool.reclaimLocked()
	l.announceLocked()
	return true
}

func (l *log) accountLocked(n int64) {
	l.size += n
	l.pool.used += n
	if len(l.tail) == 0 {
		l.headSize += n
	}
}

func (l *log) pushLocked(it item) {
	l.next++
	if !l.headFull && l.headSize+it.cost() <= l.limit/2 {
		l.head = append(l.head, it)
	} else {
		l.headFull = true
		l.tail = append(l.tail, it)
	}
	l.accountLocked(it.cost())
}

func (l *log) lastLocked() *item {
	switch {
	case len(l.tail) > 0:
		return &l.tail[len(l.tail)-1]
	case len(l.head) > 0 && !l.headFull:
		return &l.head[len(l.head)-1]
	}
	return nil
}

// trimLocked drops the oldest of the tail beyond the limit; the last item always stays.
func (l *log) trimLocked() {
	for l.size > l.limit && len(l.tail) > 1 {
		l.dropTailLocked()
	}
}

func (l *log) dropTailLocked() {
	old := l.tail[0]
	l.tail[0] = item{}
	l.tail = l.tail[1:]
	l.size -= old.cost()
	l.pool.used -= old.cost()
	l.dropped += int64(len(old.data))
}

// emptyLocked drops everything.
func (l *log) emptyLocked() {
	for _, it := range l.head {
		l.dropped += int64(len(it.data))
		l.size -= it.cost()
		l.pool.used -= it.cost()
	}
	l.head, l.headSize, l.headFull = nil, 0, true
	for len(l.tail) > 0 {
		l.dropTailLocked()
	}
	l.tail = nil
}

// reclaimLocked brings the whole below its limit: what ended longest ago goes first, then the oldest of
// the largest tail.
func (p *pool) reclaimLocked() {
	for p.used > p.limit {
		i := slices.IndexFunc(p.logs, func(l *log) bool { return l.finished && len(l.readers) == 0 })
		if i >= 0 {
			p.logs[i].emptyLocked()
			p.logs = slices.Delete(p.logs, i, i+1)
			continue
		}
		var largest *log
		for _, l := range p.logs {
			if len(l.tail) > 1 && (largest == nil || l.size > largest.size) {
				largest = l
			}
		}
		if largest == nil {
			return // heads only, each of which is bounded
		}
		largest.dropTailLocked()
	}
}

// finish says that nothing more comes. Idempotent.
func (l *log) finish() {
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	l.finished, l.free = true, true
	l.announceLocked()
	l.movedLocked()
}

// release makes writers wait for nobody any more. Idempotent.
func (l *log) release() {
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	l.free = true
	l.movedLocked()
}

// drop forgets everything.
func (l *log) drop() {
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	l.emptyLocked()
	if i := slices.Index(l.pool.logs, l); i >= 0 {
		l.pool.logs = slices.Delete(l.pool.logs, i, i+1)
	}
}

// sizes returns how many items there were in all, and the bytes that are not kept any more.
func (l *log) sizes() (items, dropped int64) {
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	return l.next, l.dropped
}

func (l *log) announceLocked() {
	if l.news != nil {
		close(l.news)
		l.news = nil
	}
}

func (l *log) movedLocked() {
	if l.room != nil {
		close(l.room)
		l.room = nil
	}
}

// waitLocked waits until the slowest holder has moved, left or stalled. It reports false where there is
// none that is behind.
func (l *log) waitLocked() bool {
	if l.free {
		return false
	}
	patience := time.Duration(-1)
	for r := range l.readers {
		if !r.hold || r.next >= l.next {
			continue
		}
		left := guestwire.StallLimit - time.Since(r.moved)
		if left <= 0 {
			r.hold = false
			continue
		}
		if patience < 0 || left < patience {
			patience = left
		}
	}
	if patience < 0 {
		return false
	}
	// What all have taken makes room first.
	if l.dropTakenLocked() {
		return true
	}
	if l.room == nil {
		l.room = make(chan struct{})
	}
	room := l.room
	l.pool.mu.Unlock()
	timer := time.NewTimer(patience)
	select {
	case <-room:
	case <-timer.C:
	}
	timer.Stop()
	l.pool.mu.Lock()
	return true
}

// dropTakenLocked drops one item of the tail that every holder has taken.
func (l *log) dropTakenLocked() bool {
	if len(l.tail) == 0 {
		return false
	}
	for r := range l.readers {
		if r.hold && r.next <= l.tail[0].number {
			return false
		}
	}
	l.dropTailLocked()
	return true
}

// reader reads a log from an item on.
type reader struct {
	l *log

	// All below is guarded by the pool's mu.
	next  int64
	hold  bool
	moved time.Time
}

// newReader returns a reader that starts at an item, and with hold makes writers wait for it. It must
// be closed.
func (l *log) newReader(from int64, hold bool) *reader {
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	r := &reader{l: l, next: from, hold: hold, moved: time.Now()}
	if l.readers == nil {
		l.readers = make(map[*reader]struct{})
	}
	l.readers[r] = struct{}{}
	return r
}

// close lets writers go on without this reader. Idempotent.
func (r *reader) close() {
	r.l.pool.mu.Lock()
	defer r.l.pool.mu.Unlock()
	delete(r.l.readers, r)
	r.l.movedLocked()
}

// take returns the next item, or a gap, or neither: then either all was said, or news tells when there
// is more. The item's bytes do not change.
func (r *reader) take() (it item, gap int64, news <-chan struct{}, finished bool) {
	l := r.l
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	r.moved = time.Now()
	if r.next >= l.next {
		if l.finished {
			return item{}, 0, nil, true
		}
		if l.news == nil {
			l.news = make(chan struct{})
		}
		l.movedLocked()
		return item{}, 0, l.news, false
	}
	found := l.findLocked(r.next)
	if found == nil {
		to := l.next
		if len(l.tail) > 0 {
			to = l.tail[0].number
		}
		it, gap = item{number: r.next}, to-r.next
		r.next = to
	} else {
		it = *found
		r.next++
	}
	l.taken = max(l.taken, r.next)
	l.movedLocked()
	return it, gap, nil, false
}

func (l *log) findLocked(number int64) *item {
	for _, part := range [...][]item{l.head, l.tail} {
		if n := len(part); n > 0 && number >= part[0].number && number <= part[n-1].number {
			return &part[number-part[0].number]
		}
	}
	return nil
}
