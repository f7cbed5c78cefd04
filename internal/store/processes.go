package store

import (
	"context"
	"encoding/binary"
)

// Process is one row of processes; Body is the domain's.
type Process struct {
	Sandbox string
	ID      string
	Started int64 // Unix nanoseconds
	Ended   int64 // 0: not ended, as far as the store knows
	Body    []byte
	// Late gives the Body when it is written, where it is set: a row that another replaces before that
	// is not made at all. Any goroutine may call it, more than once; it must not use the database.
	Late func() []byte
}

const (
	putProcess = `INSERT OR REPLACE INTO processes (sandbox, id, started, ended, body) VALUES (?, ?, ?, ?, ?)`
	addProcess = `INSERT OR IGNORE INTO processes (sandbox, id, started, ended, body) VALUES (?, ?, ?, ?, ?)`
)

// PutProcess adds or replaces a process.
func PutProcess(p Process) Write { return p.write(redoPutProcess, putProcess) }

// AddProcess adds a process, unless it is there: its end may have been written first.
func AddProcess(p Process) Write { return p.write(redoAddProcess, addProcess) }

// ReplaceInProcess replaces what lies at path, as SQLite's JSON functions write it, in the Body of a process by a value
// of JSON. It is for what must not bring back the rest of an older row. Nothing changes where there is no such process.
func ReplaceInProcess(sandbox, id, path, value string) Write {
	r := replacement{sandbox, id, path, value}
	return Write{
		do: r.do,
		redo: func(b []byte) []byte {
			b = appendText(appendText(append(b, redoReplaceInProcess), sandbox), id)
			return appendText(appendText(b, path), value)
		},
	}
}

type replacement struct{ sandbox, id, path, value string }

func (r replacement) do(tx *Tx) error {
	return tx.exec("UPDATE processes SET body = CAST(json_replace(CAST(body AS TEXT), ?, json(?)) AS BLOB) WHERE sandbox = ? AND id = ?",
		r.path, r.value, r.sandbox, r.id)
}

func (p Process) write(kind byte, query string) Write {
	row := p.Sandbox + "/" + p.ID
	w := Write{
		do: func(tx *Tx) error { return p.insert(tx, query) },
		redo: func(b []byte) []byte {
			b = appendText(appendText(append(b, kind), p.Sandbox), p.ID)
			return appendText(binary.AppendVarint(binary.AppendVarint(b, p.Started), p.Ended), p.body())
		},
	}
	if kind == redoAddProcess {
		w.adds = row
	} else {
		w.puts = row
	}
	return w
}

func (p Process) body() []byte {
	if p.Late != nil {
		return p.Late()
	}
	return p.Body
}

func (p Process) insert(tx *Tx, query string) error {
	return tx.exec(query, p.Sandbox, p.ID, p.Started, p.Ended, p.body())
}

const processColumns = "SELECT sandbox, id, started, ended, body FROM processes "

func (db *DB) processes(ctx context.Context, where string, args ...any) ([]Process, error) {
	var all []Process
	err := db.each(ctx, processColumns+where, args, func(r scanner) error {
		var p Process
		err := r.Scan(&p.Sandbox, &p.ID, &p.Started, &p.Ended, &p.Body)
		all = append(all, p)
		return err
	})
	return all, err
}

// GetProcess returns a process and whether there is one.
func (db *DB) GetProcess(ctx context.Context, sandbox, id string) (Process, bool, error) {
	all, err := db.processes(ctx, "WHERE sandbox = ? AND id = ?", sandbox, id)
	if err != nil || len(all) == 0 {
		return Process{}, false, err
	}
	return all[0], true, nil
}

// ListProcesses returns the newest limit processes of a sandbox, the oldest of them first.
func (db *DB) ListProcesses(ctx context.Context, sandbox string, limit int) ([]Process, error) {
	all, err := db.processes(ctx, "WHERE sandbox = ? ORDER BY started DESC, id DESC LIMIT ?", sandbox, limit)
	for i, j := 0, len(all)-1; i < j; i, j = i+1, j-1 {
		all[i], all[j] = all[j], all[i]
	}
	return all, err
}

// OpenProcesses returns the processes of a sandbox that have no end.
func (db *DB) OpenProcesses(ctx context.Context, sandbox string) ([]Process, error) {
	return db.processes(ctx, "WHERE sandbox = ? AND ended = 0 ORDER BY started, id", sandbox)
}
