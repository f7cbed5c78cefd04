CREATE TABLE builds (
	id      TEXT PRIMARY KEY,
	owner   TEXT NOT NULL,
	name    TEXT NOT NULL, -- the template's
	state   TEXT NOT NULL,
	created INTEGER NOT NULL,
	target  TEXT NOT NULL, -- the commit that came of it, or ""
	body    BLOB NOT NULL
) WITHOUT ROWID, STRICT;

CREATE INDEX builds_by_name ON builds (owner, name, created DESC);

CREATE TABLE build_steps (
	key    TEXT PRIMARY KEY, -- digest of all that decides what the step gives
	target TEXT NOT NULL,    -- the commit that it gave
	used   INTEGER NOT NULL,
	body   BLOB NOT NULL
) WITHOUT ROWID, STRICT;

CREATE INDEX build_steps_by_target ON build_steps (target);
