package store

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"modernc.org/sqlite"

	"casemate.dev/internal/errs"
)

// The file names in a data directory.
const (
	fileName = "casemate.db"
	lockName = "server.lock"
)

// readers is how many connections read at once: two cores' worth and some that wait for the disk.
const readers = 4

// Config says where the data lies.
type Config struct {
	// Dir is the data directory; it is made with mode 0700 where it is missing.
	Dir string
	// Shared opens beside a running server, for tools that change a row or two. Without it the
	// directory is locked, and a second server is refused.
	Shared bool
	// FlushEvery bounds how long a queued change that nobody waits for stays unwritten; default 25 ms.
	FlushEvery time.Duration
	// CommitEvery bounds how long what lies in the spool stays out of the database; default 100 ms. The more
	// changes share a transaction, the fewer pages each of them writes; whoever waits for the database writes
	// what is queued first, and so waits the longer.
	CommitEvery time.Duration
	// SyncEvery bounds how long a written change stays unflushed; default 25 ms. A power loss takes at
	// most what happened within the sum of FlushEvery and this.
	SyncEvery time.Duration
	// Log hears about faults that no caller can be told; default none.
	Log *slog.Logger
}

// DB is an open data directory. Its methods are safe for concurrent use.
type DB struct {
	cfg    Config
	lock   *os.File // nil where Shared
	writer *writer
	syncer *syncer
	pool   *sql.DB
	stmts  statements

	closing sync.Once
	closed  error
}

// Open opens the data directory, makes it where it is missing, and brings its schema up to date.
// FailedPrecondition: another server uses it, or a newer version wrote it. NotFound: it is to be shared, and is not there.
func Open(cfg Config) (*DB, error) {
	if cfg.FlushEvery <= 0 {
		cfg.FlushEvery = 25 * time.Millisecond
	}
	if cfg.CommitEvery <= 0 {
		cfg.CommitEvery = max(100*time.Millisecond, cfg.FlushEvery)
	}
	if cfg.SyncEvery <= 0 {
		cfg.SyncEvery = 25 * time.Millisecond
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if err := cfg.makeDir(); err != nil {
		return nil, err
	}
	db := &DB{cfg: cfg}
	if !cfg.Shared {
		lock, err := lockDir(cfg.Dir)
		if err != nil {
			return nil, err
		}
		db.lock = lock
	}
	if err := db.open(); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return db, nil
}

// makeDir makes the data directory, but for a tool: what it writes where no server has been, none would ever read.
func (cfg Config) makeDir() error {
	if !cfg.Shared {
		if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
			return fmt.Errorf("make data directory: %w", err)
		}
		return nil
	}
	_, err := os.Stat(filepath.Join(cfg.Dir, fileName))
	if errors.Is(err, os.ErrNotExist) {
		return errs.Wrap(err, errs.NotFound, "%s is no server's data directory", cfg.Dir).
			WithHint("a server makes it at its first start: casemate serve --data-dir")
	}
	return err
}

func (db *DB) open() error {
	path := filepath.Join(db.cfg.Dir, fileName)
	conn, err := connect(path, writerPragmas)
	if err != nil {
		return err
	}
	if err := migrate(conn); err != nil {
		return errors.Join(err, conn.Close())
	}
	wal, err := openWAL(conn, path)
	if err != nil {
		return errors.Join(err, conn.Close())
	}
	tx := &Tx{conn: conn, stmts: make(map[string]driver.StmtExecContext)}
	var spool *os.File
	if !db.cfg.Shared { // a tool has no business with the server's
		if spool, err = openSpool(db.cfg.Dir, tx, wal); err != nil {
			return errors.Join(err, wal.Close(), tx.close())
		}
	}
	db.syncer = newSyncer(db.cfg, path, wal, spool)
	db.writer = newWriter(tx, db.cfg, db.syncer, spool)
	pool, err := sqlite.NewConnector(dsn(path, readerPragmas))
	if err != nil {
		return fmt.Errorf("open database: %w", err)
	}
	db.pool = sql.OpenDB(pool)
	db.pool.SetMaxOpenConns(readers)
	db.pool.SetMaxIdleConns(readers)
	return nil
}

// Close writes what is queued, flushes it to disk and releases the directory. Idempotent.
func (db *DB) Close() error {
	db.closing.Do(func() { db.closed = db.close() })
	return db.closed
}

func (db *DB) close() error {
	var all []error
	if db.pool != nil {
		all = append(all, db.stmts.close(), db.pool.Close())
	}
	if db.writer != nil {
		all = append(all, db.writer.stop(), db.syncer.stop(), db.writer.close())
	}
	if db.lock != nil {
		all = append(all, db.lock.Close())
	}
	return errors.Join(all...)
}

// The settings of connections. The checkpoint is ours (see syncer), since SQLite's own runs inside
// an unlucky caller's commit, with its flushes. busy_timeout matters beside tools that write. What is deleted is
// overwritten (secure_delete): it may be what somebody wanted erased.
const (
	writerPragmas = "journal_mode(WAL) synchronous(NORMAL) wal_autocheckpoint(0) busy_timeout(5000) " +
		"cache_size(-8192) temp_store(MEMORY) foreign_keys(OFF) trusted_schema(OFF) secure_delete(ON)"
	readerPragmas = "busy_timeout(5000) cache_size(-2048) temp_store(MEMORY) trusted_schema(OFF) query_only(ON)"
)

// dsn names a database file in the driver's way; url.URL escapes what would end the path.
func dsn(path, pragmas string) string {
	q := make(url.Values)
	for p := range strings.FieldsSeq(pragmas) {
		q.Add("_pragma", p)
	}
	return (&url.URL{Scheme: "file", OmitHost: true, Path: path, RawQuery: q.Encode()}).String()
}

func connect(path, pragmas string) (driver.Conn, error) {
	c, err := sqlite.NewConnector(dsn(path, pragmas))
	if err != nil {
		return nil, fmt.Errorf("open database: %w", err)
	}
	conn, err := c.Connect(context.Background())
	if err != nil {
		return nil, fmt.Errorf("open database: %w", err)
	}
	return conn, nil
}
