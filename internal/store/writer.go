package store

import (
	"database/sql/driver"
	"errors"
	"fmt"
	"sync"
	"time"
)

// The bounds of one transaction and of what may wait for one.
const (
	maxBatch = 512
	maxLater = 2048
)

var errClosed = errors.New("write to a closed database")

// Pending is a queued write.
type Pending struct {
	w *writer
	o *op
}

// Wait returns once the write is committed or has failed. The caller may become the leader and
// commit for others too.
func (p Pending) Wait() error { return p.w.wait(p.o) }

// Change is what one caller wants written: together or not at all.
type Change struct {
	Writes []Write
	// Instead, where it is set, is written at the same place in the order if Writes fail.
	Instead []Write
	// Synced asks for a flush to disk before the change counts as written.
	Synced bool
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
}

// writer is the one way to change the database.
type writer struct {
	tx     *Tx
	syncer *syncer
	every  time.Duration

	// turn is held (by a token in it) by whoever commits: the leader.
	turn chan struct{}
	// kick wakes the flusher for writes that nobody waits for.
	kick    chan struct{}
	stopped chan struct{}
	flusher sync.WaitGroup

	// mu guards the fields below.
	mu     sync.Mutex
	queue  []*op
	later  []Write
	closed bool
}

func newWriter(conn driver.Conn, cfg Config, s *syncer) *writer {
	w := &writer{
		tx:      &Tx{conn: conn, stmts: make(map[string]driver.StmtExecContext)},
		syncer:  s,
		every:   cfg.FlushEvery,
		turn:    s.turn,
		kick:    make(chan struct{}, 1),
		stopped: make(chan struct{}),
	}
	w.flusher.Go(w.flushLoop)
	return w
}

// Write commits the writes together and returns once they survive the death of this process.
func (db *DB) Write(writes ...Write) error { return db.Queue(Change{Writes: writes}).Wait() }

// Queue puts a change in line. It is written when somebody waits for it or for anything queued
// later, or else, after a Kick, within FlushEvery.
func (db *DB) Queue(c Change) Pending {
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
	w.mu.Unlock()
	return Pending{w, o}
}

// Kick makes the flusher write what is queued within FlushEvery. Queue needs it where nobody waits.
func (db *DB) Kick() { db.writer.wake() }

// Later writes w within FlushEvery, after what others queue meanwhile. It is for what can be found
// out again after a crash. A failure is only logged.
func (db *DB) Later(write Write) {
	w := db.writer
	w.mu.Lock()
	if !w.closed {
		w.later = append(w.later, write)
	}
	full := len(w.later) >= maxLater
	w.mu.Unlock()
	w.wake()
	if full {
		w.flush() // the caller pays, so that memory stays bounded
	}
}

// Flush returns once everything that was queued before is written, also by Later.
func (db *DB) Flush() error { return db.writer.flush() }

func (w *writer) wake() {
	select {
	case w.kick <- struct{}{}:
	default:
	}
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
		o.finish(nil, nil)
	}
}

func (w *writer) commitAlone(o *op) {
	err := w.commit(o)
	if err == nil || len(o.Instead) == 0 {
		o.finish(err, nil)
		return
	}
	o.finish(err, w.commit(&op{Change: Change{Writes: o.Instead, Synced: o.Synced}}))
}

func (w *writer) commit(batch ...*op) error {
	if err := w.syncer.failed(); err != nil {
		return err
	}
	synced := false
	err := w.tx.transact(func() error {
		for _, o := range batch {
			synced = synced || o.Synced
			for _, write := range o.Writes {
				if err := write(w.tx); err != nil {
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

func (w *writer) flush() error {
	o := &op{done: make(chan struct{})}
	w.mu.Lock()
	o.Writes, w.later = w.later, nil
	if len(o.Writes) == 0 && len(w.queue) == 0 {
		w.mu.Unlock()
		// Somebody may be committing what was queued before.
		w.turn <- struct{}{}
		<-w.turn
		return nil
	}
	w.queue = append(w.queue, o)
	w.mu.Unlock()
	return w.wait(o)
}

func (w *writer) flushLoop() {
	for {
		select {
		case <-w.kick:
		case <-w.stopped:
			return
		}
		// Waiting a little lets the next Write carry what was queued, and many share one commit.
		t := time.NewTimer(w.every)
		select {
		case <-t.C:
		case <-w.stopped:
			t.Stop()
			return
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
	return w.tx.close()
}
