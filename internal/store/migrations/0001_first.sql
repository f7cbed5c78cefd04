-- Times are Unix nanoseconds; 0 stands for "not yet". Bodies are JSON that the owning package reads.

CREATE TABLE settings (
	name  TEXT PRIMARY KEY,
	value TEXT NOT NULL
) WITHOUT ROWID, STRICT;

CREATE TABLE sandboxes (
	id      TEXT PRIMARY KEY,
	state   TEXT NOT NULL,
	owner   TEXT NOT NULL,
	parent  TEXT NOT NULL,
	name    TEXT NOT NULL,
	created INTEGER NOT NULL,
	ended   INTEGER NOT NULL,
	labels  TEXT NOT NULL, -- a JSON object, for the label filter
	body    BLOB NOT NULL
) WITHOUT ROWID, STRICT;

CREATE INDEX sandboxes_by_age ON sandboxes (created DESC, id);
CREATE INDEX sandboxes_by_name ON sandboxes (name, created DESC);
-- Those that are not stopped are few among many, and are what a starting server asks for.
CREATE INDEX sandboxes_alive ON sandboxes (created DESC, id) WHERE state <> 'stopped';

CREATE TABLE processes (
	sandbox TEXT NOT NULL,
	id      TEXT NOT NULL,
	started INTEGER NOT NULL,
	ended   INTEGER NOT NULL,
	body    BLOB NOT NULL,
	PRIMARY KEY (sandbox, id)
) WITHOUT ROWID, STRICT;

CREATE TABLE events (
	sandbox TEXT NOT NULL,
	seq     INTEGER NOT NULL,
	time    INTEGER NOT NULL,
	type    TEXT NOT NULL,
	actor   TEXT NOT NULL,
	process TEXT NOT NULL,
	facts   BLOB NOT NULL,
	PRIMARY KEY (sandbox, seq)
) WITHOUT ROWID, STRICT;

CREATE TABLE idempotency (
	principal TEXT NOT NULL,
	scope     TEXT NOT NULL, -- what kind of request, and on what
	key       TEXT NOT NULL,
	request   BLOB NOT NULL, -- SHA-256 of the request
	answer    TEXT NOT NULL, -- the id of what it made
	created   INTEGER NOT NULL,
	PRIMARY KEY (principal, scope, key)
) WITHOUT ROWID, STRICT;

CREATE INDEX idempotency_by_age ON idempotency (created);

CREATE TABLE api_keys (
	id      TEXT PRIMARY KEY,
	name    TEXT NOT NULL,
	hash    BLOB NOT NULL UNIQUE, -- SHA-256 of the secret
	admin   INTEGER NOT NULL,
	created INTEGER NOT NULL,
	revoked INTEGER NOT NULL
) WITHOUT ROWID, STRICT;
