package store

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"
)

// maxBatch bounds the changes of one transaction.
const maxBatch = 512

var errClosed = errors.New("write to a closed database")

// Pending is a queued write.
type Pending struct {
	w *writer
	o *op
}

// Wait returns once the change survives the death of this process, or has failed. The caller may
// become the leader and commit for others too.
func (p Pending) Wait() error {
	if p.o.spooled {
		return nil
	}
	return p.w.wait(p.o)
}

// Spooled reports whether the change survives the death of this process already.
func (p Pending) Spooled() bool { return p.o.spooled }

// InOrder reports whether a later change that is spooled implies this one: whether no crash can take
// this one and leave that. Where it is false, that holds once this one is committed.
func (p Pending) InOrder() bool { return p.o.listed }

// Change is what one caller wants written: together or not at all.
type Change struct {
	Writes []Write
	// Instead, where it is set, says what is written at the same place in the order if Writes fail. (That is
	// not asked where the change is spooled, and so has happened.)
	Instead func() []Write
	// Synced asks for a flush to disk before the change counts as written.
	Synced bool
	// Spool asks for the change to survive the death of this process from Queue on, without a
	// transaction, together with what was queued before and is InOrder. It is a wish: Wait tells.
	Spool bool
	// After is called once with the outcome of Writes and, where it came to that, of Instead. Calls
	// come in the order of the commits. It must be short and must not call back into the database.
	// It is not called where the database is closed already.
	After func(err, insteadErr error)
}

// op is a queued Change.
type op struct {
	Change
	done chan struct{} // closed once err is set
	err  error
	// listed and spooled are set by Queue: the change is in the spool's next frame or in its file; the
	// latter.
	listed  bool
	spooled bool
}

// writer is the one way to change the database.
type writer struct {
	tx     *Tx
	syncer *syncer
	// every is how soon what nobody waits for is written, commitEvery how soon the database has what is spooled.
	every, commitEvery time.Duration

	// turn is held (by a token in it) by whoever commits: the leader.
	turn chan struct{}
	// kick wakes the flusher for writes that nobody waits for.
	kick    chan struct{}
	stopped chan struct{}
	flusher sync.WaitGroup
	// over is closed once nothing is taken any more: from then on the turn may never be free again.
	over chan struct{}

	// mu guards the fields below.
	mu     sync.Mutex
	queue  []*op
	spool  spool
	closed bool
}

func newWriter(tx *Tx, cfg Config, s *syncer, f *os.File) *writer {
	w := &writer{
		tx:          tx,
		spool:       spool{f: f, flush: s.flush},
		syncer:      s,
		every:       cfg.FlushEvery,
		commitEvery: cfg.CommitEvery,
		turn:        s.turn,
		kick:        make(chan struct{}, 1),
		stopped:     make(chan struct{}),
		over:        make(chan struct{}),
	}
	w.flusher.Go(w.flushLoop)
	return w
}

// Write commits the writes together and returns once they survive the death of this process.
func (db *DB) Write(writes ...Write) error { return db.Queue(Change{Writes: writes}).Wait() }

// Queue puts a change in line. It is written when somebody waits for it or for anything queued
// later, or else, after a Kick, within FlushEvery (then perhaps only into the spool).
func (db *DB) Queue(c Change) Pending {
	for _, write := range c.Writes {
		c.Synced = c.Synced || write.synced
	}
	o := &op{Change: c, done: make(chan struct{})}
	w := db.writer
	w.mu.Lock()
	if w.closed {
		w.mu.Unlock()
		o.After = nil // it may want a lock that our caller holds
		o.finish(errClosed, errClosed)
		return Pending{w, o}
	}
	w.queue = append(w.queue, o)
	if !o.Synced && w.spool.add(o.Writes) {
		o.listed = true
		if o.Spool {
			o.spooled = w.spoolLocked()
		}
	}
	w.mu.Unlock()
	return Pending{w, o}
}

// spoolLocked appends the next frame to the spool.
func (w *writer) spoolLocked() bool {
	if err := w.spool.write(); err != nil {
		w.syncer.log.Error("cannot use the spool; changes are slower", "error", err)
		return false
	}
	w.syncer.spooled()
	return true
}

// spoolQueue sees to it that all that is queued lies in the spool, and reports false where it can't.
func (w *writer) spoolQueue() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.spool.open() {
		return false
	}
	for _, o := range w.queue {
		if !o.listed {
			return false
		}
	}
	return len(w.spool.next) == 0 || w.spoolLocked()
}

// Kick makes the flusher write what is queued within FlushEvery. Queue needs it where nobody waits.
func (db *DB) Kick() { db.writer.wake() }

// Flush returns once everything that was queued before is in the database.
func (db *DB) Flush() error { return db.writer.flush() }

func (w *writer) wake() {
	select {
	case w.kick <- struct{}{}:
	default:
	}
}

func (w *writer) finish(o *op, err, insteadErr error) {
	if o.listed {
		w.mu.Lock()
		w.spool.settle(err != nil && o.spooled)
		w.mu.Unlock()
	}
	o.finish(err, insteadErr)
}

func (o *op) finish(err, insteadErr error) {
	o.err = err
	if o.After != nil {
		o.After(err, insteadErr)
	}
	close(o.done)
}

func (o *op) finished() bool {
	select {
	case <-o.done:
		return true
	default:
		return false
	}
}

// wait leads until o is done, or lets another leader do it.
func (w *writer) wait(o *op) error {
	select {
	case <-o.done:
		return o.err
	case w.turn <- struct{}{}:
	}
	for !o.finished() {
		w.commitNext()
	}
	<-w.turn
	return o.err
}

// commitNext commits the head of the queue. Preconditions: the caller holds the turn.
func (w *writer) commitNext() {
	w.mu.Lock()
	batch := w.queue
	if len(batch) > maxBatch {
		batch = batch[:maxBatch:maxBatch]
	}
	w.queue = w.queue[len(batch):]
	if len(w.queue) == 0 {
		w.queue = nil // let go of the array
	}
	w.mu.Unlock()
	if len(batch) == 0 {
		return
	}
	if err := w.commit(batch...); err != nil {
		// One bad write must not take its neighbours along.
		for _, o := range batch {
			w.commitAlone(o)
		}
		return
	}
	for _, o := range batch {
		w.finish(o, nil, nil)
	}
}

func (w *writer) commitAlone(o *op) {
	err := w.commit(o)
	if err == nil || o.Instead == nil || o.spooled {
		w.finish(o, err, err)
		return
	}
	w.finish(o, err, w.commit(&op{Change: Change{Writes: o.Instead(), Synced: o.Synced}}))
}

func (w *writer) commit(batch ...*op) error {
	if err := w.syncer.failed(); err != nil {
		return err
	}
	synced := false
	put := putBy(batch)
	err := w.tx.transact(func() error {
		for _, o := range batch {
			synced = synced || o.Synced
			for _, write := range o.Writes {
				if write.adds != "" && put[write.adds] {
					continue
				}
				if err := write.do(w.tx); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	if synced {
		return w.syncer.now()
	}
	w.syncer.dirty()
	return nil
}

// putBy returns the rows that a batch puts.
func putBy(batch []*op) map[string]bool {
	put := make(map[string]bool)
	for _, o := range batch {
		for _, write := range o.Writes {
			if write.puts != "" {
				put[write.puts] = true
			}
		}
	}
	return put
}

func (w *writer) flush() error {
	w.mu.Lock()
	var last *op
	if n := len(w.queue); n > 0 {
		last = w.queue[n-1]
	}
	w.mu.Unlock()
	if last != nil {
		return w.wait(last)
	}
	// Somebody may be committing what was queued before.
	select {
	case <-w.over:
		return errClosed
	case w.turn <- struct{}{}:
		<-w.turn
		return nil
	}
}

func (w *writer) flushLoop() {
	for {
		select {
		case <-w.kick:
		case <-w.stopped:
			return
		}
		// Waiting a little lets the next Write carry what was queued, and many share one commit. What a kill
		// can't take any more may wait longer.
		for begun := time.Now(); ; {
			t := time.NewTimer(w.every)
			select {
			case <-t.C:
			case <-w.stopped:
				t.Stop()
				return
			}
			if !w.spoolQueue() || time.Since(begun) >= w.commitEvery {
				break
			}
		}
		if err := w.flush(); err != nil {
			w.syncer.log.Error("cannot write queued changes", "error", err)
		}
	}
}

// stop ends the flusher and writes what is queued; later writes fail.
func (w *writer) stop() error {
	close(w.stopped)
	w.flusher.Wait()
	err := w.flush()
	w.mu.Lock()
	w.closed = true
	rest := w.queue
	w.queue = nil
	w.mu.Unlock()
	close(w.over)
	for _, o := range rest {
		o.finish(errClosed, errClosed)
	}
	if err != nil {
		return fmt.Errorf("write queued changes: %w", err)
	}
	return nil
}

func (w *writer) close() error {
	w.turn <- struct{}{} // for good
	err := w.tx.close()
	if w.spool.f != nil {
		if w.spool.unsettled == 0 && !w.spool.keep {
			err = errors.Join(err, w.spool.f.Truncate(0))
		}
		err = errors.Join(err, w.spool.f.Close())
	}
	return err
}
