package store

import (
	"context"
	"encoding/binary"
	"strings"
)

// Event is one row of events; Facts is the journal's.
type Event struct {
	Sandbox string
	Seq     uint64
	Time    int64 // Unix nanoseconds
	Type    string
	Actor   string
	Process string
	Facts   []byte
}

const (
	addEvent = `INSERT INTO events (sandbox, seq, time, type, actor, process, facts) VALUES (?, ?, ?, ?, ?, ?, ?)`
	// restoreEvent is addEvent where the event may be there.
	restoreEvent = `INSERT OR REPLACE INTO events (sandbox, seq, time, type, actor, process, facts) VALUES (?, ?, ?, ?, ?, ?, ?)`
)

// AddEvent adds an event. AlreadyExists: its counter is taken.
func AddEvent(e Event) Write {
	return Write{
		do: func(tx *Tx) error { return e.insert(tx, addEvent) },
		redo: func(b []byte) []byte {
			b = appendText(append(b, redoEvent), e.Sandbox)
			b = binary.AppendVarint(binary.AppendVarint(b, int64(e.Seq)), e.Time)
			return appendText(appendText(appendText(appendText(b, e.Type), e.Actor), e.Process), e.Facts)
		},
	}
}

func (e Event) insert(tx *Tx, query string) error {
	return tx.exec(query, e.Sandbox, int64(e.Seq), e.Time, e.Type, e.Actor, e.Process, e.Facts)
}

// LastEvent returns the highest counter of a sandbox's events; 0 where there are none.
func (db *DB) LastEvent(ctx context.Context, sandbox string) (uint64, error) {
	var n int64
	_, err := db.first(ctx, "SELECT ifnull(max(seq), 0) FROM events WHERE sandbox = ?", []any{sandbox}, &n)
	return uint64(n), err
}

const eventsAfter = `SELECT sandbox, seq, time, type, actor, process, facts FROM events
WHERE sandbox = ? AND seq > ? ORDER BY seq LIMIT ?`

// EventsAfter returns at most limit events of a sandbox with a counter above after, in order.
func (db *DB) EventsAfter(ctx context.Context, sandbox string, after uint64, limit int) ([]Event, error) {
	return db.events(ctx, eventsAfter, sandbox, int64(after), limit)
}

// EventsOfTypes returns at most limit events of a sandbox that have one of these types and a counter above after, in order.
func (db *DB) EventsOfTypes(ctx context.Context, sandbox string, types []string, after uint64, limit int) ([]Event, error) {
	args := []any{sandbox, int64(after)}
	for _, t := range types {
		args = append(args, t)
	}
	return db.events(ctx, `SELECT sandbox, seq, time, type, actor, process, facts FROM events
WHERE sandbox = ? AND seq > ? AND type IN (?`+strings.Repeat(", ?", len(types)-1)+`) ORDER BY seq LIMIT ?`, append(args, limit)...)
}

func (db *DB) events(ctx context.Context, query string, args ...any) ([]Event, error) {
	var all []Event
	err := db.each(ctx, query, args, func(r scanner) error {
		var e Event
		var seq int64
		err := r.Scan(&e.Sandbox, &seq, &e.Time, &e.Type, &e.Actor, &e.Process, &e.Facts)
		e.Seq = uint64(seq)
		all = append(all, e)
		return err
	})
	return all, err
}

// EventStreams returns every sandbox that has events, in order. It steps from one to the next in the index,
// past what lies between.
func (db *DB) EventStreams(ctx context.Context) ([]string, error) {
	var all []string
	err := db.each(ctx, `WITH RECURSIVE streams(name) AS (
	SELECT min(sandbox) FROM events
	UNION ALL
	SELECT (SELECT min(sandbox) FROM events WHERE sandbox > name) FROM streams WHERE name IS NOT NULL
) SELECT name FROM streams WHERE name IS NOT NULL`, nil, func(r scanner) error {
		var name string
		err := r.Scan(&name)
		all = append(all, name)
		return err
	})
	return all, err
}
