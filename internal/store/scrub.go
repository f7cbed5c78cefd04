package store

import (
	"errors"
	"fmt"

	"casemate.dev/internal/errs"
)

// scrubTries bounds how often Scrub looks for a moment in which nothing is queued.
const scrubTries = 10_000

// Scrub returns once what was erased before lies nowhere in the data directory any more: the spool and the write-ahead
// log are emptied (the database itself overwrites what it frees). Unavailable: others write, or read, without a break;
// what was erased is gone from the database all the same, and from the files with the next Scrub.
func (db *DB) Scrub() error {
	w := db.writer
	select {
	case <-w.over:
		return errClosed
	case w.turn <- struct{}{}:
	}
	defer func() { <-w.turn }()
	if err := w.emptySpool(); err != nil {
		return err
	}
	conn, err := connect(db.syncer.path, "synchronous(NORMAL) wal_autocheckpoint(0) cache_size(-256) busy_timeout(2000)")
	if err != nil {
		return err
	}
	row, err := one(conn, "PRAGMA wal_checkpoint(TRUNCATE)") // busy, pages in the log, pages copied
	if err == nil && row[0] != int64(0) {
		err = errs.New(errs.Unavailable, "the database is read without a break").WithHint("try again")
	}
	return errors.Join(err, conn.Close())
}

// emptySpool commits what is queued and empties the spool. Preconditions: the caller holds the turn.
func (w *writer) emptySpool() error {
	for range scrubTries {
		w.commitNext()
		w.mu.Lock()
		if len(w.queue) == 0 {
			err := w.spool.empty()
			w.mu.Unlock()
			return err
		}
		w.mu.Unlock()
	}
	return errs.New(errs.Unavailable, "the database is written without a break").WithHint("try again")
}

// empty empties the file, all of which is in the database.
func (s *spool) empty() error {
	switch {
	case s.f == nil || s.size == 0:
		return nil
	case s.keep || s.unsettled > 0:
		return errs.New(errs.Unavailable, "the spool holds what the database has refused").WithHint("look at the server's log, and restart it")
	}
	if err := s.flush(); err != nil {
		return err
	}
	if err := s.f.Truncate(0); err != nil {
		s.broken = true
		return fmt.Errorf("empty the spool: %w", err)
	}
	s.size, s.full = 0, false
	return nil
}
