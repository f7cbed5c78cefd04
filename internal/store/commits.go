package store

import (
	"context"
	"errors"
	"strings"

	"casemate.dev/internal/errs"
)

// Commit is one row of commits. Columns are what is searched by; Body is the domain's.
type Commit struct {
	ID      string
	Owner   string
	Sandbox string
	Parent  string
	Merged  string // the other parent of a merge, or ""
	Layer   string
	Created int64  // Unix nanoseconds
	Digest  string // of its files; "": not known yet
	Body    []byte
}

const addCommit = "INSERT INTO commits (id, owner, sandbox, parent, merged, layer, created, body) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"

// AddCommit adds a commit, which never changes.
func AddCommit(c Commit) Write {
	return Func(func(tx *Tx) error {
		return tx.exec(addCommit, c.ID, c.Owner, c.Sandbox, c.Parent, c.Merged, c.Layer, c.Created, c.Body)
	})
}

// PutCommitDigest notes the digest of a commit that has none.
func PutCommitDigest(id, digest string) Write {
	return Func(func(tx *Tx) error {
		return tx.exec("UPDATE commits SET digest = ? WHERE id = ? AND digest = ''", digest, id)
	})
}

const keepLineage = `INSERT OR IGNORE INTO commits_gone (id, owner, sandbox, parent, merged, created)
SELECT id, owner, sandbox, parent, merged, created FROM commits WHERE id = ?`

// DropCommit removes a commit with its tags. Its place in history is kept. FailedPrecondition: the newest version of a
// document names it, or, unless old is set, any version.
func DropCommit(id string, old bool) Write {
	links := "SELECT 1 FROM state_versions WHERE target = ?"
	if old {
		links = "SELECT 1 FROM state_versions JOIN state_documents USING (owner, agent, revision) WHERE target = ?"
	}
	return Func(func(tx *Tx) error {
		if err := tx.exec(keepLineage, id); err != nil {
			return err
		}
		if err := tx.exec("DELETE FROM commits WHERE id = ? AND NOT EXISTS ("+links+")", id, id); err != nil {
			return err
		}
		if n, err := tx.affect("UPDATE commits SET id = id WHERE id = ?", id); err != nil || n > 0 { // it is still there
			return errors.Join(err, errs.New(errs.FailedPrecondition, "commit %s is linked from a document", id))
		}
		return tx.exec("DELETE FROM commit_tags WHERE target = ?", id)
	})
}

// ForgetCommits removes what is kept of removed commits.
func ForgetCommits(ids []string) Write {
	return Func(func(tx *Tx) error {
		for _, id := range ids {
			if err := tx.exec("DELETE FROM commits_gone WHERE id = ?", id); err != nil {
				return err
			}
		}
		return nil
	})
}

// Ancestry is a commit's place in history.
type Ancestry struct {
	ID, Owner, Sandbox string
	// Parent and Merged are the commits that it was made of; "": none.
	Parent, Merged string
	Created        int64 // Unix nanoseconds
	// Gone says that the commit was removed.
	Gone bool
}

// Ancestries returns the places of all commits in history, also of removed ones, the newest first.
func (db *DB) Ancestries(ctx context.Context) ([]Ancestry, error) {
	const query = `SELECT id, owner, sandbox, parent, merged, created, 0 FROM commits
UNION ALL SELECT id, owner, sandbox, parent, merged, created, 1 FROM commits_gone ORDER BY 6 DESC, 1`
	var all []Ancestry
	err := db.each(ctx, query, nil, func(r scanner) error {
		var a Ancestry
		err := r.Scan(&a.ID, &a.Owner, &a.Sandbox, &a.Parent, &a.Merged, &a.Created, &a.Gone)
		all = append(all, a)
		return err
	})
	return all, err
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

const commitColumns = "SELECT id, owner, sandbox, parent, merged, layer, created, digest, body FROM commits "

func (db *DB) commits(ctx context.Context, where string, args ...any) ([]Commit, error) {
	var all []Commit
	err := db.each(ctx, commitColumns+where, args, func(r scanner) error {
		var c Commit
		err := r.Scan(&c.ID, &c.Owner, &c.Sandbox, &c.Parent, &c.Merged, &c.Layer, &c.Created, &c.Digest, &c.Body)
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
	return only(db.commits(ctx, "WHERE id = ?", id))
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
