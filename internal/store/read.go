package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
)

// statements prepares each query once; database/sql keeps it prepared on every connection.
type statements struct {
	// mu guards the field below.
	mu   sync.Mutex
	text map[string]*sql.Stmt
}

func (s *statements) get(ctx context.Context, pool *sql.DB, query string) (*sql.Stmt, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if st, ok := s.text[query]; ok {
		return st, nil
	}
	st, err := pool.PrepareContext(ctx, query) //nolint:sqlclosecheck // closed by statements.close
	if err != nil {
		return nil, fmt.Errorf("prepare %q: %w", query, err)
	}
	if s.text == nil {
		s.text = make(map[string]*sql.Stmt)
	}
	s.text[query] = st
	return st, nil
}

func (s *statements) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []error
	for _, st := range s.text {
		all = append(all, st.Close())
	}
	s.text = nil
	return errors.Join(all...)
}

// each calls scan for every row of a query. query is a constant of this package or one of few texts
// built from constants, since it stays prepared.
func (db *DB) each(ctx context.Context, query string, args []any, scan func(scanner) error) error {
	st, err := db.stmts.get(ctx, db.pool, query) //nolint:sqlclosecheck // kept prepared
	if err != nil {
		return err
	}
	rows, err := st.QueryContext(ctx, args...)
	if err != nil {
		return explain(err)
	}
	defer func() { _ = rows.Close() }()
	for rows.Next() {
		if err := scan(rows); err != nil {
			return err
		}
	}
	return rows.Err()
}

// scanner is *sql.Rows as the entities' files need it.
type scanner interface{ Scan(dest ...any) error }

// first scans the first row of a query and reports whether there was one.
func (db *DB) first(ctx context.Context, query string, args []any, dest ...any) (bool, error) {
	found := false
	err := db.each(ctx, query, args, func(r scanner) error {
		if found {
			return nil
		}
		found = true
		return r.Scan(dest...)
	})
	return found, err
}
