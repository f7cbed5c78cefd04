package store

import (
	"database/sql/driver"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"casemate.dev/internal/durable"
	"casemate.dev/internal/errs"
)

// checkpointEvery is how many commits lie between two checkpoints; a commit is some 10 to 100 KB of
// write-ahead log. maxLogPages is the log's length from which a checkpoint holds the writer up.
const (
	checkpointEvery = 400
	maxLogPages     = 8 << 10
)

// syncer flushes the write-ahead log and the spool, and copies the log into the database file now and then.
type syncer struct {
	every time.Duration
	path  string
	log   *slog.Logger
	wal   *os.File
	spool *os.File      // nil where there is none
	turn  chan struct{} // the writer's

	kick    chan struct{}
	stopped chan struct{}
	loop    sync.WaitGroup
	commits atomic.Int64 // since the last checkpoint
	// dirtyWAL and dirtySpool say that something was written which is not flushed yet.
	dirtyWAL, dirtySpool atomic.Bool
	// err is set for good when a flush fails: the kernel may have dropped the pages and would call the
	// next flush a success (fsync(2), "Linux Notes"; PostgreSQL's fsync trouble of 2018).
	err atomic.Pointer[error]
}

// openWAL returns the write-ahead log for flushing. SQLite keeps the file until the last connection
// of any process closes, so it stays the same file for as long as conn is open. Opening and closing
// it beside SQLite is safe: its locks lie on the other two files (fcntl(2) drops a process's locks
// with any descriptor of the file).
func openWAL(conn driver.Conn, path string) (*os.File, error) {
	// The file may not be there yet; any write makes it.
	if err := run(conn, "BEGIN IMMEDIATE; INSERT INTO settings VALUES ('opened', '') "+
		"ON CONFLICT DO UPDATE SET value = excluded.value; COMMIT"); err != nil {
		return nil, fmt.Errorf("write to database: %w", err)
	}
	wal, err := os.OpenFile(path+"-wal", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("open write-ahead log: %w", err)
	}
	// A new file is only there after a power loss if its directory was flushed.
	if err := durable.SyncDir(filepath.Dir(path)); err != nil {
		return nil, errors.Join(err, wal.Close())
	}
	return wal, nil
}

func newSyncer(cfg Config, path string, wal, spool *os.File) *syncer {
	s := &syncer{
		every: cfg.SyncEvery, path: path, log: cfg.Log, wal: wal, spool: spool,
		turn: make(chan struct{}, 1), kick: make(chan struct{}, 1), stopped: make(chan struct{}),
	}
	s.loop.Go(s.run)
	return s
}

// dirty says that a commit was made which is not flushed yet.
func (s *syncer) dirty() {
	s.commits.Add(1)
	s.soil(&s.dirtyWAL)
}

// spooled says that something was appended to the spool which is not flushed yet.
func (s *syncer) spooled() { s.soil(&s.dirtySpool) }

func (s *syncer) soil(what *atomic.Bool) {
	if what.Swap(true) {
		return // the loop knows
	}
	select {
	case s.kick <- struct{}{}:
	default:
	}
}

// now flushes every commit made so far.
func (s *syncer) now() error {
	s.commits.Add(1)
	return s.flush()
}

// flush flushes the write-ahead log.
func (s *syncer) flush() error {
	s.dirtyWAL.Store(false) // before: what is written meanwhile is for the next time
	return s.checked(syncData(s.wal))
}

// flushAll flushes what needs it. The log comes first: what lies in the spool may follow from what the log holds.
func (s *syncer) flushAll() error {
	if s.dirtyWAL.Load() {
		if err := s.flush(); err != nil {
			return err
		}
	}
	if s.dirtySpool.Swap(false) {
		return s.checked(syncData(s.spool))
	}
	return nil
}

// checked remembers that a flush has failed.
func (s *syncer) checked(err error) error {
	if err == nil {
		return nil
	}
	err = errs.Wrap(err, errs.Unavailable, "cannot record the change: the server's disk fails")
	s.err.CompareAndSwap(nil, &err)
	return err
}

// syncData flushes a file. Its size is the only metadata that a later read needs, and fdatasync(2) flushes it.
func syncData(f *os.File) error {
	return os.NewSyscallError("fdatasync", syscall.Fdatasync(int(f.Fd())))
}

func (s *syncer) failed() error {
	if e := s.err.Load(); e != nil {
		return *e
	}
	return nil
}

func (s *syncer) run() {
	for {
		select {
		case <-s.kick:
		case <-s.stopped:
			return
		}
		t := time.NewTimer(s.every)
		select {
		case <-t.C:
		case <-s.stopped:
			t.Stop()
			return
		}
		if s.failed() != nil {
			continue
		}
		if err := s.flushAll(); err != nil {
			s.log.Error("cannot flush the database; no more changes are taken", "error", err)
			continue
		}
		if s.commits.Load() >= checkpointEvery {
			s.commits.Store(0)
			if err := s.checkpoint(); err != nil {
				s.log.Warn("cannot checkpoint the database", "error", err)
			}
		}
	}
}

// checkpoint copies the log into the database file, beside readers and the writer. Once all of it is
// copied, the writer's next transaction starts the log from its beginning again. A writer that never
// rests is always ahead of the copy: then the last stretch is done while it has to wait.
func (s *syncer) checkpoint() error {
	conn, err := connect(s.path, "synchronous(NORMAL) wal_autocheckpoint(0) cache_size(-256)")
	if err != nil {
		return err
	}
	pages, err := passive(conn)
	if err == nil && pages > maxLogPages {
		s.turn <- struct{}{}
		_, err = passive(conn)
		<-s.turn
	}
	return errors.Join(err, conn.Close())
}

// passive checkpoints as far as nobody is in the way, and returns the log's length.
func passive(conn driver.Conn) (int64, error) {
	row, err := one(conn, "PRAGMA wal_checkpoint(PASSIVE)") // busy, pages in the log, pages copied
	if err != nil {
		return 0, err
	}
	pages, ok := row[1].(int64)
	if !ok {
		return 0, fmt.Errorf("checkpoint: got %T", row[1])
	}
	return pages, nil
}

func (s *syncer) stop() error {
	close(s.stopped)
	s.loop.Wait()
	err := s.failed()
	if err == nil {
		err = s.flush()
	}
	return errors.Join(err, s.wal.Close())
}
