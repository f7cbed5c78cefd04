package store

import (
	"context"
	"strings"
)

// Build is one row of builds. Columns are what is searched by; Body is the domain's.
type Build struct {
	ID      string
	Owner   string
	Name    string // the template's
	State   string
	Created int64  // Unix nanoseconds
	Target  string // the commit that came of it, or ""
	Body    []byte
}

const putBuild = `INSERT INTO builds (id, owner, name, state, created, target, body) VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET state = excluded.state, target = excluded.target, body = excluded.body`

// PutBuild adds a build, or replaces what changes in its life: owner, name and time of creation never do.
func PutBuild(b Build) Write {
	return Func(func(tx *Tx) error {
		return tx.exec(putBuild, b.ID, b.Owner, b.Name, b.State, b.Created, b.Target, b.Body)
	})
}

// DropBuild removes a build.
func DropBuild(id string) Write {
	return Func(func(tx *Tx) error { return tx.exec("DELETE FROM builds WHERE id = ?", id) })
}

// BuildQuery selects builds. Empty fields select all.
type BuildQuery struct {
	ID     string
	Owner  string
	Name   string
	State  string
	Target string
	Limit  int // 0: no limit
}

// Builds returns builds, the newest first.
func (db *DB) Builds(ctx context.Context, q BuildQuery) ([]Build, error) {
	var where []string
	var args []any
	for _, c := range [][2]string{{"id", q.ID}, {"owner", q.Owner}, {"name", q.Name}, {"state", q.State}, {"target", q.Target}} {
		if c[1] != "" {
			where = append(where, c[0]+" = ?")
			args = append(args, c[1])
		}
	}
	text := "SELECT id, owner, name, state, created, target, body FROM builds "
	if len(where) > 0 {
		text += "WHERE " + strings.Join(where, " AND ") + " "
	}
	text += "ORDER BY created DESC, id"
	if q.Limit > 0 {
		text += " LIMIT ?"
		args = append(args, q.Limit)
	}
	var all []Build
	err := db.each(ctx, text, args, func(r scanner) error {
		var b Build
		err := r.Scan(&b.ID, &b.Owner, &b.Name, &b.State, &b.Created, &b.Target, &b.Body)
		all = append(all, b)
		return err
	})
	return all, err
}

// BuildStep is one row of build_steps: what a step of a build gave, kept for the next build that has it.
type BuildStep struct {
	Key    string
	Target string // a commit
	Used   int64  // Unix nanoseconds
	Body   []byte
}

const putBuildStep = `INSERT INTO build_steps (key, target, used, body) VALUES (?, ?, ?, ?)
ON CONFLICT (key) DO UPDATE SET target = excluded.target, used = excluded.used, body = excluded.body`

// PutBuildStep keeps what a step gave; an older result of the same step is forgotten.
func PutBuildStep(s BuildStep) Write {
	return Func(func(tx *Tx) error { return tx.exec(putBuildStep, s.Key, s.Target, s.Used, s.Body) })
}

// BuildStepUsed notes when a kept step was last used.
func BuildStepUsed(key string, at int64) Write {
	return Func(func(tx *Tx) error { return tx.exec("UPDATE build_steps SET used = ? WHERE key = ?", at, key) })
}

// DropBuildSteps forgets kept steps that were last used before a time.
func DropBuildSteps(before int64) Write {
	return Func(func(tx *Tx) error { return tx.exec("DELETE FROM build_steps WHERE used < ?", before) })
}

// GetBuildStep returns a kept step whose commit is there, and whether there is one.
func (db *DB) GetBuildStep(ctx context.Context, key string) (BuildStep, bool, error) {
	var s BuildStep
	found := false
	const query = "SELECT key, target, used, body FROM build_steps WHERE key = ? AND target IN (SELECT id FROM commits)"
	err := db.each(ctx, query, []any{key}, func(r scanner) error {
		found = true
		return r.Scan(&s.Key, &s.Target, &s.Used, &s.Body)
	})
	return s, found, err
}

// BuildTargets returns the commits that builds and kept steps name.
func (db *DB) BuildTargets(ctx context.Context) (map[string]bool, error) {
	all := map[string]bool{}
	const query = "SELECT target FROM build_steps UNION SELECT target FROM builds WHERE target <> ''"
	err := db.each(ctx, query, nil, func(r scanner) error {
		var target string
		err := r.Scan(&target)
		all[target] = true
		return err
	})
	return all, err
}
