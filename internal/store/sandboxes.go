package store

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
)

// StoppedState is the one state that the store knows: such sandboxes are many and rarely asked for.
const StoppedState = "stopped"

// Sandbox is one row of sandboxes. Columns are what is searched by; Body is the domain's.
type Sandbox struct {
	ID      string
	State   string
	Owner   string
	Parent  string // sandbox id, or ""
	Name    string
	Created int64 // Unix nanoseconds
	Ended   int64 // 0: not ended
	Labels  map[string]string
	Body    []byte
}

const putSandbox = `INSERT INTO sandboxes (id, state, owner, parent, name, created, ended, labels, body)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET state = excluded.state, name = excluded.name, ended = excluded.ended,
labels = excluded.labels, body = excluded.body`

// PutSandbox adds a sandbox, or replaces what changes in its life; owner, parent and time of creation
// never do.
func PutSandbox(s Sandbox) Write {
	return Func(func(tx *Tx) error {
		labels, err := json.Marshal(s.Labels)
		if err != nil {
			return fmt.Errorf("encode labels: %w", err)
		}
		if s.Labels == nil {
			labels = []byte("{}")
		}
		return tx.exec(putSandbox, s.ID, s.State, s.Owner, s.Parent, s.Name, s.Created, s.Ended,
			string(labels), s.Body)
	})
}

const sandboxColumns = "SELECT id, state, owner, parent, name, created, ended, labels, body FROM sandboxes "

func scanSandbox(r scanner) (Sandbox, error) {
	var s Sandbox
	var labels string
	err := r.Scan(&s.ID, &s.State, &s.Owner, &s.Parent, &s.Name, &s.Created, &s.Ended, &labels, &s.Body)
	if err != nil {
		return Sandbox{}, err
	}
	if err := json.Unmarshal([]byte(labels), &s.Labels); err != nil {
		return Sandbox{}, fmt.Errorf("decode labels of %s: %w", s.ID, err)
	}
	return s, nil
}

func (db *DB) sandboxes(ctx context.Context, where string, args ...any) ([]Sandbox, error) {
	var all []Sandbox
	err := db.each(ctx, sandboxColumns+where, args, func(r scanner) error {
		s, err := scanSandbox(r)
		all = append(all, s)
		return err
	})
	return all, err
}

// GetSandbox returns a sandbox by its whole id, and whether there is one.
func (db *DB) GetSandbox(ctx context.Context, id string) (Sandbox, bool, error) {
	return only(db.sandboxes(ctx, "WHERE id = ?", id))
}

// only returns the first of what a query found, and whether it found any.
func only[T any](all []T, err error) (T, bool, error) {
	if err != nil || len(all) == 0 {
		var none T
		return none, false, err
	}
	return all[0], true, nil
}

// SandboxesByPrefix returns at most limit sandboxes whose id begins with prefix.
func (db *DB) SandboxesByPrefix(ctx context.Context, prefix string, limit int) ([]Sandbox, error) {
	// Ids hold only [a-z0-9], and "{" follows "z" in ASCII.
	return db.sandboxes(ctx, "WHERE id >= ? AND id < ? ORDER BY id LIMIT ?", prefix, prefix+"{", limit)
}

// SandboxesByName returns at most limit sandboxes of that name, the newest first.
func (db *DB) SandboxesByName(ctx context.Context, name string, limit int) ([]Sandbox, error) {
	return db.sandboxes(ctx, "WHERE name = ? ORDER BY created DESC LIMIT ?", name, limit)
}

// LiveSandboxes returns every sandbox that is not stopped.
func (db *DB) LiveSandboxes(ctx context.Context) ([]Sandbox, error) {
	return db.sandboxes(ctx, "WHERE state <> 'stopped' ORDER BY created DESC, id")
}

// SandboxQuery selects sandboxes. Empty fields select all.
type SandboxQuery struct {
	States []string
	Labels map[string]string
	Owner  string
	Parent string
	// Since and Until select those that were there at some time between, in Unix nanoseconds; 0: no bound.
	Since, Until int64
	// Created and ID are where the page before ended; the zero value begins with the newest.
	Created int64
	ID      string
	Limit   int
}

// ListSandboxes returns a page of sandboxes, the newest first.
func (db *DB) ListSandboxes(ctx context.Context, q SandboxQuery) ([]Sandbox, error) {
	var where []string
	var args []any
	add := func(cond string, values ...any) {
		where = append(where, cond)
		args = append(args, values...)
	}
	if q.Created != 0 {
		add("(created < ? OR created = ? AND id > ?)", q.Created, q.Created, q.ID)
	}
	if len(q.States) > 0 {
		list := make([]any, len(q.States))
		alive := true
		for i, s := range q.States {
			list[i] = s
			alive = alive && s != StoppedState
		}
		add("state IN (?"+strings.Repeat(", ?", len(list)-1)+")", list...)
		if alive {
			// Says what follows from the above, so that the small index is used.
			add("state <> 'stopped'")
		}
	}
	if q.Owner != "" {
		add("owner = ?", q.Owner)
	}
	if q.Parent != "" {
		add("parent = ?", q.Parent)
	}
	if q.Since != 0 {
		add("(ended = 0 OR ended >= ?)", q.Since)
	}
	if q.Until != 0 {
		add("created < ?", q.Until)
	}
	for k, v := range q.Labels {
		// ->> with a JSON path: quoted, so that dots in a key mean nothing.
		add("labels ->> ? = ?", `$."`+k+`"`, v)
	}
	cond := ""
	if len(where) > 0 {
		cond = "WHERE " + strings.Join(where, " AND ") + " "
	}
	return db.sandboxes(ctx, cond+"ORDER BY created DESC, id LIMIT ?", append(args, q.Limit)...)
}
