package store

import (
	"context"
	"encoding/binary"
	"strings"
)

// Body is one row of bodies: content that an event speaks of. Data is a part of it where Size says more, and empty where
// only the salt of its hash is kept.
type Body struct {
	Sandbox string
	Seq     uint64 // of the event
	Name    string // observer and fact, "server.argv"
	Time    int64  // of the event, Unix nanoseconds
	Size    int64
	Salt    []byte
	Data    []byte
}

const (
	addBody   = `INSERT OR REPLACE INTO bodies (sandbox, seq, name, size, salt, data, time, kept) VALUES (?, ?, ?, ?, ?, ?, ?, ?)`
	eraseBody = `DELETE FROM bodies WHERE sandbox = ? AND seq = ? AND name = ?`
)

// AddBody adds a body, or what was there before a restart again.
func AddBody(b Body) Write {
	return Write{
		do: b.insert,
		redo: func(p []byte) []byte {
			p = binary.AppendVarint(appendText(append(p, redoBody), b.Sandbox), int64(b.Seq))
			p = binary.AppendVarint(appendText(p, b.Name), b.Size)
			return binary.AppendVarint(appendText(appendText(p, b.Salt), b.Data), b.Time)
		},
	}
}

func (b Body) insert(tx *Tx) error {
	if b.Data == nil {
		b.Data = []byte{} // not NULL
	}
	return tx.exec(addBody, b.Sandbox, int64(b.Seq), b.Name, b.Size, b.Salt, b.Data, b.Time, int64(len(b.Data)))
}

// EraseBody removes a body with its salt, so that nothing can be concluded from its hash. What was written of it before
// lies in the files until Scrub.
func EraseBody(sandbox string, seq uint64, name string) Write {
	b := Body{Sandbox: sandbox, Seq: seq, Name: name}
	return Write{
		do: b.erase,
		redo: func(p []byte) []byte {
			p = binary.AppendVarint(appendText(append(p, redoEraseBody), sandbox), int64(seq))
			return appendText(p, name)
		},
	}
}

func (b Body) erase(tx *Tx) error { return tx.exec(eraseBody, b.Sandbox, int64(b.Seq), b.Name) }

const bodyColumns = `SELECT sandbox, seq, name, time, size, salt, CASE WHEN kept <= ? THEN data END FROM bodies `

// BodiesOf returns the bodies of a sandbox's events with counters from from to to, in order; with names only those.
// Of one with more than most bytes the Data is nil.
func (db *DB) BodiesOf(ctx context.Context, sandbox string, from, to uint64, most int, names ...string) ([]Body, error) {
	query, args := bodyColumns+`WHERE sandbox = ? AND seq BETWEEN ? AND ? `, []any{most, sandbox, int64(from), int64(to)}
	if len(names) > 0 {
		query += `AND name IN (?` + strings.Repeat(`, ?`, len(names)-1) + `) `
		for _, n := range names {
			args = append(args, n)
		}
	}
	return db.bodies(ctx, query+`ORDER BY seq, name`, args...)
}

// OldBody is one of OldBodies.
type OldBody struct {
	Sandbox string
	Seq     uint64
	Name    string
	Time    int64 // of the event, Unix nanoseconds
	Kept    int64 // bytes
}

// OldBodies returns the oldest bodies, at most limit: those from before a time (Unix nanoseconds), or with before 0
// those of which content is kept.
func (db *DB) OldBodies(ctx context.Context, before int64, limit int) ([]OldBody, error) {
	query, args := `SELECT sandbox, seq, name, time, kept FROM bodies WHERE time < ? ORDER BY time LIMIT ?`, []any{before, limit}
	if before == 0 {
		query, args = `SELECT sandbox, seq, name, time, kept FROM bodies WHERE kept > 0 ORDER BY time LIMIT ?`, []any{limit}
	}
	var all []OldBody
	err := db.each(ctx, query, args, func(r scanner) error {
		var b OldBody
		var seq int64
		err := r.Scan(&b.Sandbox, &seq, &b.Name, &b.Time, &b.Kept)
		b.Seq = uint64(seq)
		all = append(all, b)
		return err
	})
	return all, err
}

// BodyBytes is how much is kept of all bodies together.
func (db *DB) BodyBytes(ctx context.Context) (int64, error) {
	var n int64
	_, err := db.first(ctx, `SELECT ifnull(sum(kept), 0) FROM bodies INDEXED BY bodies_by_age`, nil, &n)
	return n, err
}

func (db *DB) bodies(ctx context.Context, query string, args ...any) ([]Body, error) {
	var all []Body
	err := db.each(ctx, query, args, func(r scanner) error {
		var b Body
		var seq int64
		err := r.Scan(&b.Sandbox, &seq, &b.Name, &b.Time, &b.Size, &b.Salt, &b.Data)
		b.Seq = uint64(seq)
		all = append(all, b)
		return err
	})
	return all, err
}
