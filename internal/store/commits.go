package store

import (
	"context"
	"strings"
)

// Commit is one row of commits. Columns are what is searched by; Body is the domain's.
type Commit struct {
	ID      string
	Owner   string
	Sandbox string
	Parent  string
	Layer   string
	Created int64 // Unix nanoseconds
	Body    []byte
}

const addCommit = "INSERT INTO commits (id, owner, sandbox, parent, layer, created, body) VALUES (?, ?, ?, ?, ?, ?, ?)"

// AddCommit adds a commit, which never changes.
func AddCommit(c Commit) Write {
	return Func(func(tx *Tx) error {
		return tx.exec(addCommit, c.ID, c.Owner, c.Sandbox, c.Parent, c.Layer, c.Created, c.Body)
	})
}

// DropCommit removes a commit with its tags.
func DropCommit(id string) Write {
	return Func(func(tx *Tx) error {
		if err := tx.exec("DELETE FROM commit_tags WHERE target = ?", id); err != nil {
			return err
		}
		return tx.exec("DELETE FROM commits WHERE id = ?", id)
	})
}

// CommitQuery selects commits. Empty fields select all.
type CommitQuery struct {
	Owner   string
	Sandbox string
	// Created and ID are where the page before ended; the zero value begins with the newest.
	Created int64
	ID      string
	Limit   int // 0: no limit
}

const commitColumns = "SELECT id, owner, sandbox, parent, layer, created, body FROM commits "

func (db *DB) commits(ctx context.Context, where string, args ...any) ([]Commit, error) {
	var all []Commit
	err := db.each(ctx, commitColumns+where, args, func(r scanner) error {
		var c Commit
		err := r.Scan(&c.ID, &c.Owner, &c.Sandbox, &c.Parent, &c.Layer, &c.Created, &c.Body)
		all = append(all, c)
		return err
	})
	return all, err
}

// ListCommits returns a page of commits, the newest first.
func (db *DB) ListCommits(ctx context.Context, q CommitQuery) ([]Commit, error) {
	var where []string
	var args []any
	add := func(cond string, values ...any) {
		where = append(where, cond)
		args = append(args, values...)
	}
	if q.Created != 0 {
		add("(created < ? OR created = ? AND id > ?)", q.Created, q.Created, q.ID)
	}
	if q.Owner != "" {
		add("owner = ?", q.Owner)
	}
	if q.Sandbox != "" {
		add("sandbox = ?", q.Sandbox)
	}
	text := ""
	if len(where) > 0 {
		text = "WHERE " + strings.Join(where, " AND ") + " "
	}
	text += "ORDER BY created DESC, id"
	if q.Limit > 0 {
		text += " LIMIT ?"
		args = append(args, q.Limit)
	}
	return db.commits(ctx, text, args...)
}

// GetCommit returns a commit by its id, and whether there is one.
func (db *DB) GetCommit(ctx context.Context, id string) (Commit, bool, error) {
	all, err := db.commits(ctx, "WHERE id = ?", id)
	if err != nil || len(all) == 0 {
		return Commit{}, false, err
	}
	return all[0], true, nil
}

// CommitsByPrefix returns at most limit commits whose id begins with prefix, which holds [a-z0-9_] only.
func (db *DB) CommitsByPrefix(ctx context.Context, prefix string, limit int) ([]Commit, error) {
	return db.commits(ctx, "WHERE id >= ? AND id < ? ORDER BY id LIMIT ?", prefix, prefix+"{", limit)
}

// CommitTag is one row of commit_tags: a name that an owner gave a commit.
type CommitTag struct {
	Owner  string
	Name   string
	Target string
	Moved  int64 // Unix nanoseconds
}

const putCommitTag = `INSERT INTO commit_tags (owner, name, target, moved) VALUES (?, ?, ?, ?)
ON CONFLICT (owner, name) DO UPDATE SET target = excluded.target, moved = excluded.moved`

// PutCommitTag gives a name to a commit, and takes it from the one that had it.
func PutCommitTag(t CommitTag) Write {
	return Func(func(tx *Tx) error { return tx.exec(putCommitTag, t.Owner, t.Name, t.Target, t.Moved) })
}

// DropCommitTag takes a name away.
func DropCommitTag(owner, name string) Write {
	return Func(func(tx *Tx) error {
		return tx.exec("DELETE FROM commit_tags WHERE owner = ? AND name = ?", owner, name)
	})
}

// CommitTags returns the tags of an owner, or all where it is "", by name.
func (db *DB) CommitTags(ctx context.Context, owner string) ([]CommitTag, error) {
	var all []CommitTag
	const query = "SELECT owner, name, target, moved FROM commit_tags WHERE owner = ? OR ? = '' ORDER BY owner, name"
	err := db.each(ctx, query, []any{owner, owner}, func(r scanner) error {
		var t CommitTag
		err := r.Scan(&t.Owner, &t.Name, &t.Target, &t.Moved)
		all = append(all, t)
		return err
	})
	return all, err
}
