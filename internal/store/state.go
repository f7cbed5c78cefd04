package store

import (
	"context"

	"casemate.dev/internal/errs"
)

// StateAgent is one row of state_agents: what is kept of an agent beside its documents.
type StateAgent struct {
	Owner        string
	Agent        string
	Revision     uint64
	Removed      uint64
	Bytes        int64
	KeepVersions int64
	KeepFor      int64 // nanoseconds
	// Documents is how many of its documents are not deleted; reading fills it in.
	Documents int64
}

// StateVersion is one row of state_versions: a document as it was from one write to the next.
type StateVersion struct {
	Owner       string
	Agent       string
	Name        string
	Version     uint64
	Revision    uint64
	Created     int64 // Unix nanoseconds
	Author      string
	ContentType string
	Deleted     bool
	Size        int64
	Digest      []byte
	Sandbox     string
	Commit      string
	Content     []byte
}

// StateOverhead is what a version counts for beside its content.
const StateOverhead = 256

const (
	stateOverhead = "256"
	putStateAgent = `INSERT INTO state_agents (owner, agent, revision, removed, bytes, keep_versions, keep_for) VALUES (?, ?, ?, 0, ?, 0, 0)
ON CONFLICT (owner, agent) DO UPDATE SET revision = max(revision, excluded.revision), bytes = bytes + excluded.bytes`
	putStateDocument = `INSERT INTO state_documents (owner, agent, name, version, revision, deleted) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (owner, agent, name) DO UPDATE SET version = excluded.version, revision = excluded.revision, deleted = excluded.deleted`
	addStateVersion = `INSERT INTO state_versions (owner, agent, name, version, revision, created, author, content_type, deleted, size, digest, sandbox, target, content)
SELECT ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ? WHERE ? = '' OR EXISTS (SELECT 1 FROM commits WHERE id = ?)`
)

// AddStateVersion adds a version and makes it the document's newest. It is flushed to disk before it counts as
// written. AlreadyExists: there is such a version. NotFound: the commit that it names is gone.
func AddStateVersion(v StateVersion) Write {
	w := Func(func(tx *Tx) error {
		n, err := tx.affect(addStateVersion, v.Owner, v.Agent, v.Name, int64(v.Version), int64(v.Revision), v.Created, v.Author,
			v.ContentType, flag(v.Deleted), v.Size, v.Digest, v.Sandbox, v.Commit, v.Content, v.Commit, v.Commit)
		if err != nil {
			return err
		}
		if n == 0 {
			return errs.New(errs.NotFound, "no commit %q", v.Commit)
		}
		if err := tx.exec(putStateAgent, v.Owner, v.Agent, int64(v.Revision), v.Size+StateOverhead); err != nil {
			return err
		}
		return tx.exec(putStateDocument, v.Owner, v.Agent, v.Name, int64(v.Version), int64(v.Revision), flag(v.Deleted))
	})
	w.synced = true
	return w
}

// DropStateVersions removes the versions of a document up to one.
func DropStateVersions(owner, agent, name string, upTo uint64) Write {
	return Func(func(tx *Tx) error {
		return tx.dropVersions("owner = ? AND agent = ? AND name = ? AND version <= ?", owner, agent, name, int64(upTo))
	})
}

// ForgetStateDocument removes a document with all its versions, as if it had never been.
func ForgetStateDocument(owner, agent, name string) Write {
	return Func(func(tx *Tx) error {
		if err := tx.dropVersions("owner = ? AND agent = ? AND name = ? AND version <= ?", owner, agent, name, int64(1<<62)); err != nil {
			return err
		}
		return tx.exec("DELETE FROM state_documents WHERE owner = ? AND agent = ? AND name = ?", owner, agent, name)
	})
}

// dropVersions removes versions of one agent and keeps its sums true. where is a constant that begins with owner
// and agent.
func (tx *Tx) dropVersions(where, owner, agent, name string, upTo int64) error {
	err := tx.exec(`UPDATE state_agents SET bytes = bytes - (SELECT ifnull(sum(size + `+stateOverhead+`), 0) FROM state_versions WHERE `+where+`),
removed = max(removed, (SELECT ifnull(max(revision), 0) FROM state_versions WHERE `+where+`)) WHERE owner = ? AND agent = ?`,
		owner, agent, name, upTo, owner, agent, name, upTo, owner, agent)
	if err != nil {
		return err
	}
	return tx.exec("DELETE FROM state_versions WHERE "+where, owner, agent, name, upTo)
}

// KeepState sets how much of an agent's history is kept. The agent is made where there is none.
func KeepState(owner, agent string, versions, keepFor int64) Write {
	return Func(func(tx *Tx) error {
		return tx.exec(`INSERT INTO state_agents (owner, agent, revision, removed, bytes, keep_versions, keep_for) VALUES (?, ?, 0, 0, 0, ?, ?)
ON CONFLICT (owner, agent) DO UPDATE SET keep_versions = excluded.keep_versions, keep_for = excluded.keep_for`, owner, agent, versions, keepFor)
	})
}

const stateAgents = `SELECT owner, agent, revision, removed, bytes, keep_versions, keep_for,
(SELECT count(*) FROM state_documents d WHERE d.owner = a.owner AND d.agent = a.agent AND deleted = 0) FROM state_agents a `

func (db *DB) stateAgents(ctx context.Context, where string, args ...any) ([]StateAgent, error) {
	var all []StateAgent
	err := db.each(ctx, stateAgents+where, args, func(r scanner) error {
		var a StateAgent
		var revision, removed int64
		err := r.Scan(&a.Owner, &a.Agent, &revision, &removed, &a.Bytes, &a.KeepVersions, &a.KeepFor, &a.Documents)
		a.Revision, a.Removed = uint64(revision), uint64(removed)
		all = append(all, a)
		return err
	})
	return all, err
}

// StateAgents returns at most limit agents behind one, by owner and name; only those of an owner unless it is "".
func (db *DB) StateAgents(ctx context.Context, owner, afterOwner, afterAgent string, limit int) ([]StateAgent, error) {
	return db.stateAgents(ctx, "WHERE (? = '' OR owner = ?) AND (owner, agent) > (?, ?) ORDER BY owner, agent LIMIT ?",
		owner, owner, afterOwner, afterAgent, limit)
}

// GetStateAgent returns one agent; without documents or settings, the zero value with its name.
func (db *DB) GetStateAgent(ctx context.Context, owner, agent string) (StateAgent, error) {
	all, err := db.stateAgents(ctx, "WHERE owner = ? AND agent = ?", owner, agent)
	if err != nil || len(all) == 0 {
		return StateAgent{Owner: owner, Agent: agent}, err
	}
	return all[0], nil
}

// StateUsed returns how many bytes an owner's documents hold, old versions included.
func (db *DB) StateUsed(ctx context.Context, owner string) (int64, error) {
	var n int64
	_, err := db.first(ctx, "SELECT ifnull(sum(bytes), 0) FROM state_agents WHERE owner = ?", []any{owner}, &n)
	return n, err
}

const (
	stateColumns  = "SELECT v.owner, v.agent, v.name, v.version, v.revision, created, author, content_type, v.deleted, size, digest, sandbox, target"
	stateVersions = " FROM state_versions v "
)

// stateRows reads versions; their content only where it is asked for.
func (db *DB) stateRows(ctx context.Context, content bool, rest string, args ...any) ([]StateVersion, error) {
	query := stateColumns
	if content {
		query += ", content"
	}
	var all []StateVersion
	err := db.each(ctx, query+rest, args, func(r scanner) error {
		var v StateVersion
		var version, revision, deleted int64
		into := []any{
			&v.Owner, &v.Agent, &v.Name, &version, &revision, &v.Created, &v.Author, &v.ContentType, &deleted, &v.Size,
			&v.Digest, &v.Sandbox, &v.Commit,
		}
		if content {
			into = append(into, &v.Content)
		}
		err := r.Scan(into...)
		v.Version, v.Revision, v.Deleted = uint64(version), uint64(revision), deleted != 0
		all = append(all, v)
		return err
	})
	return all, err
}

// GetStateVersion returns a version of a document, with its content, and whether it is there; version 0 is the
// newest.
func (db *DB) GetStateVersion(ctx context.Context, owner, agent, name string, version uint64) (StateVersion, bool, error) {
	return only(db.stateRows(ctx, true, stateVersions+`WHERE owner = ? AND agent = ? AND name = ? AND version = CASE ? WHEN 0 THEN
(SELECT version FROM state_documents WHERE owner = ? AND agent = ? AND name = ?) ELSE ? END`,
		owner, agent, name, int64(version), owner, agent, name, int64(version)))
}

// StateHead returns the newest version of a document without its content, and whether there is one.
func (db *DB) StateHead(ctx context.Context, owner, agent, name string) (StateVersion, bool, error) {
	return only(db.stateRows(ctx, false, stateVersions+"WHERE owner = ? AND agent = ? AND name = ? ORDER BY version DESC LIMIT 1", owner, agent, name))
}

// StateDocuments returns at most limit documents of an agent, by name, at their newest version and without
// content: those whose name begins with prefix and comes after one. Deleted ones only where they are asked for.
func (db *DB) StateDocuments(ctx context.Context, owner, agent, prefix, after string, deleted bool, limit int) ([]StateVersion, error) {
	return db.stateRows(ctx, false, ` FROM state_documents d JOIN state_versions v USING (owner, agent, revision)
WHERE d.owner = ? AND d.agent = ? AND d.name >= ? AND d.name < ? AND d.name > ? AND d.deleted <= ? ORDER BY d.name LIMIT ?`,
		owner, agent, prefix, above(prefix), after, flag(deleted), limit)
}

// above is greater than every valid UTF-8 text that begins with prefix.
func above(prefix string) string { return prefix + "\U0010FFFF" }

// StateHistory returns at most limit versions of a document below one, the newest first and without content.
func (db *DB) StateHistory(ctx context.Context, owner, agent, name string, below uint64, limit int) ([]StateVersion, error) {
	return db.stateRows(ctx, false, stateVersions+"WHERE owner = ? AND agent = ? AND name = ? AND version < ? ORDER BY version DESC LIMIT ?",
		owner, agent, name, int64(below), limit)
}

// StateSince returns at most limit versions of an agent's documents after a revision, in order and without
// content: of the document called name, or of those whose name begins with prefix.
func (db *DB) StateSince(ctx context.Context, owner, agent, name, prefix string, after uint64, limit int) ([]StateVersion, error) {
	if name != "" {
		return db.stateRows(ctx, false, stateVersions+"WHERE owner = ? AND agent = ? AND name = ? AND revision > ? ORDER BY version LIMIT ?",
			owner, agent, name, int64(after), limit)
	}
	return db.stateRows(ctx, false, stateVersions+`WHERE owner = ? AND agent = ? AND revision > ? AND name >= ? AND name < ? ORDER BY revision LIMIT ?`,
		owner, agent, int64(after), prefix, above(prefix), limit)
}

// StateOutdated returns at most limit documents with the newest of their versions that were followed by another
// before a time, as the agent's settings say; now is the time.
func (db *DB) StateOutdated(ctx context.Context, now int64, limit int) ([]StateVersion, error) {
	return db.stateRows(ctx, false, ` FROM state_agents a JOIN state_versions v USING (owner, agent) WHERE a.keep_for > 0 AND EXISTS (
SELECT 1 FROM state_versions n WHERE n.owner = v.owner AND n.agent = v.agent AND n.name = v.name AND n.version = v.version + 1
AND n.created < ? - a.keep_for) ORDER BY v.owner, v.agent, v.name, v.version DESC LIMIT ?`, now, limit)
}

// StateDeleted returns at most limit documents whose deletion came before a time.
func (db *DB) StateDeleted(ctx context.Context, before int64, limit int) ([]StateVersion, error) {
	return db.stateRows(ctx, false, ` FROM state_documents d JOIN state_versions v USING (owner, agent, revision)
WHERE d.deleted = 1 AND created < ? LIMIT ?`, before, limit)
}

// StateLinks returns the commits that kept versions name, and of each one document whose newest version names it,
// or "".
func (db *DB) StateLinks(ctx context.Context) (map[string]string, error) {
	all := make(map[string]string)
	err := db.each(ctx, `SELECT v.target, ifnull(max(d.agent || '/' || d.name), '') FROM state_versions v
LEFT JOIN state_documents d ON d.owner = v.owner AND d.agent = v.agent AND d.revision = v.revision
WHERE v.target <> '' GROUP BY v.target`, nil, func(r scanner) error {
		var commit, document string
		err := r.Scan(&commit, &document)
		all[commit] = document
		return err
	})
	return all, err
}
