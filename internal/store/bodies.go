package store

import (
	"context"
	"encoding/binary"
)

// Body is one row of bodies: content that an event speaks of. Data is its beginning where Size says more.
type Body struct {
	Sandbox string
	Seq     uint64 // of the event
	Name    string // observer and fact, "server.argv"
	Size    int64
	Salt    []byte
	Data    []byte
}

const addBody = `INSERT OR REPLACE INTO bodies (sandbox, seq, name, size, salt, data) VALUES (?, ?, ?, ?, ?, ?)`

// AddBody adds a body, or what was there before a restart again.
func AddBody(b Body) Write {
	return Write{
		do: b.insert,
		redo: func(p []byte) []byte {
			p = binary.AppendVarint(appendText(append(p, redoBody), b.Sandbox), int64(b.Seq))
			p = binary.AppendVarint(appendText(p, b.Name), b.Size)
			return appendText(appendText(p, b.Salt), b.Data)
		},
	}
}

func (b Body) insert(tx *Tx) error {
	return tx.exec(addBody, b.Sandbox, int64(b.Seq), b.Name, b.Size, b.Salt, b.Data)
}

// BodiesOf returns the bodies of a sandbox's events with counters from from to to, in order. Of one with
// more than most bytes the Data is nil.
func (db *DB) BodiesOf(ctx context.Context, sandbox string, from, to uint64, most int) ([]Body, error) {
	var all []Body
	err := db.each(ctx, `SELECT sandbox, seq, name, size, salt, CASE WHEN length(data) <= ? THEN data END FROM bodies
WHERE sandbox = ? AND seq BETWEEN ? AND ? ORDER BY seq, name`, []any{most, sandbox, int64(from), int64(to)}, func(r scanner) error {
		var b Body
		var seq int64
		err := r.Scan(&b.Sandbox, &seq, &b.Name, &b.Size, &b.Salt, &b.Data)
		b.Seq = uint64(seq)
		all = append(all, b)
		return err
	})
	return all, err
}
