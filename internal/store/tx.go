package store

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"casemate.dev/internal/errs"
)

// Write is one change of the database.
type Write struct {
	do func(tx *Tx) error
	// redo appends the write in the form that the spool holds; nil: it has none.
	redo func(b []byte) []byte
	// puts names the row that the write sets whatever was there, adds the one that it makes unless it is
	// there; "" for neither. In one transaction a row that is put need not be added: most processes end
	// before their start has reached the database.
	puts, adds string
	// synced says that the change must be flushed to disk before it counts as written.
	synced bool
}

// Func returns a write that does what do does. do may be run twice: if a transaction fails, each of
// its changes is tried again alone. It must not keep tx.
func Func(do func(tx *Tx) error) Write { return Write{do: do} }

// Tx is the writing connection within a transaction. It speaks to the driver directly: database/sql
// would take locks and copies that a single connection does not need.
type Tx struct {
	conn  driver.Conn
	stmts map[string]driver.StmtExecContext
	args  []driver.NamedValue
}

// exec runs a statement; its text is a constant of this package, and it is prepared once.
func (tx *Tx) exec(query string, args ...driver.Value) error {
	_, err := tx.run(query, args...)
	return err
}

// affect is exec that tells how many rows were changed.
func (tx *Tx) affect(query string, args ...driver.Value) (int64, error) {
	r, err := tx.run(query, args...)
	if err != nil {
		return 0, err
	}
	return r.RowsAffected()
}

func (tx *Tx) run(query string, args ...driver.Value) (driver.Result, error) {
	s, err := tx.prepared(query)
	if err != nil {
		return nil, err
	}
	tx.args = tx.args[:0]
	for i, a := range args {
		tx.args = append(tx.args, driver.NamedValue{Ordinal: i + 1, Value: a})
	}
	r, err := s.ExecContext(context.Background(), tx.args)
	if err != nil {
		return nil, explain(err)
	}
	return r, nil
}

func (tx *Tx) prepared(query string) (driver.StmtExecContext, error) {
	if s, ok := tx.stmts[query]; ok {
		return s, nil
	}
	p, ok := tx.conn.(driver.ConnPrepareContext)
	if !ok {
		return nil, fmt.Errorf("driver %T can't prepare", tx.conn)
	}
	stmt, err := p.PrepareContext(context.Background(), query)
	if err != nil {
		return nil, fmt.Errorf("prepare %q: %w", query, err)
	}
	s, ok := stmt.(driver.StmtExecContext)
	if !ok {
		return nil, errors.Join(fmt.Errorf("driver statement %T can't execute", stmt), stmt.Close())
	}
	tx.stmts[query] = s
	return s, nil
}

// transact runs f between BEGIN and COMMIT.
func (tx *Tx) transact(f func() error) error {
	if err := tx.exec("BEGIN IMMEDIATE"); err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	err := f()
	if err == nil {
		if err = tx.exec("COMMIT"); err == nil {
			return nil
		}
		err = fmt.Errorf("commit: %w", err)
	}
	// SQLite has rolled back by itself after some errors (full disk, I/O): then this says that no
	// transaction is active, which is what is wanted.
	_ = tx.exec("ROLLBACK")
	return err
}

func (tx *Tx) close() error {
	var all []error
	for _, s := range tx.stmts {
		if c, ok := s.(driver.Stmt); ok {
			all = append(all, c.Close())
		}
	}
	return errors.Join(append(all, tx.conn.Close())...)
}

// explain gives the errors that a caller can do something about their kind.
func explain(err error) error {
	var e *sqlite.Error
	if !errors.As(err, &e) {
		return err
	}
	switch e.Code() & 0xff { // the primary code is the low byte of an extended one
	case sqlite3.SQLITE_FULL:
		return errs.Wrap(err, errs.ResourceExhausted, "cannot record the change: the server's disk is full").
			WithHint("free space on the file system of the data directory")
	case sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN:
		return errs.Wrap(err, errs.Unavailable, "cannot record the change: the server's disk fails")
	case sqlite3.SQLITE_CONSTRAINT:
		return errs.Wrap(err, errs.AlreadyExists, "already exists")
	case sqlite3.SQLITE_BUSY:
		return errs.Wrap(err, errs.Unavailable, "the database is busy").WithHint("try again")
	}
	return err
}
