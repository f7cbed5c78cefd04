package store

import (
	"context"
	"database/sql/driver"
	"embed"
	"errors"
	"fmt"
	"io"
	"io/fs"

	"casemate.dev/internal/errs"
)

// migrations holds the schema's steps. They only go forward, and one that was released never
// changes: the file's number is the schema version that it leads to.
//
//go:embed migrations/*.sql
var migrations embed.FS

// migrate brings the schema up to date, one transaction for each step. A concurrent caller in
// another process is harmless: the version is read again once the write lock is held.
func migrate(conn driver.Conn) error {
	files, err := fs.Glob(migrations, "migrations/*.sql")
	if err != nil {
		return err
	}
	have, err := schemaVersion(conn)
	if err != nil {
		return err
	}
	if have > len(files) {
		return errs.New(errs.FailedPrecondition,
			"cannot use the data directory: its schema %d is newer than this version knows (%d)", have, len(files)).
			WithHint("install the version of casemate that wrote it, or a newer one")
	}
	for i := have; i < len(files); i++ {
		if err := step(conn, files[i], i+1); err != nil {
			return fmt.Errorf("migrate to schema %d: %w", i+1, err)
		}
	}
	return nil
}

func step(conn driver.Conn, file string, version int) error {
	text, err := migrations.ReadFile(file)
	if err != nil {
		return err
	}
	if err := run(conn, "BEGIN IMMEDIATE"); err != nil {
		return err
	}
	have, err := schemaVersion(conn)
	if err == nil && have < version {
		err = run(conn, string(text))
		if err == nil {
			err = run(conn, fmt.Sprintf("PRAGMA user_version = %d", version))
		}
	}
	if err != nil {
		_ = run(conn, "ROLLBACK") // the first error counts
		return err
	}
	return run(conn, "COMMIT")
}

func schemaVersion(conn driver.Conn) (int, error) {
	row, err := one(conn, "PRAGMA user_version")
	if err != nil {
		return 0, fmt.Errorf("read schema version: %w", err)
	}
	n, ok := row[0].(int64)
	if !ok {
		return 0, fmt.Errorf("read schema version: got %T", row[0])
	}
	return int(n), nil
}

// run executes SQL without parameters on a connection of ours.
func run(conn driver.Conn, query string) error {
	x, ok := conn.(driver.ExecerContext)
	if !ok {
		return fmt.Errorf("driver %T can't execute", conn)
	}
	_, err := x.ExecContext(context.Background(), query, nil)
	return err
}

// one returns the first row of a query without parameters.
func one(conn driver.Conn, query string) ([]driver.Value, error) {
	q, ok := conn.(driver.QueryerContext)
	if !ok {
		return nil, fmt.Errorf("driver %T can't query", conn)
	}
	rows, err := q.QueryContext(context.Background(), query, nil)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	row := make([]driver.Value, len(rows.Columns()))
	if err := rows.Next(row); err != nil {
		if errors.Is(err, io.EOF) {
			err = errors.New("no row")
		}
		return nil, err
	}
	return row, nil
}
