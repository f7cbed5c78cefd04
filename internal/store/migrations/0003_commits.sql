CREATE TABLE commits (
	id      TEXT PRIMARY KEY,
	owner   TEXT NOT NULL,
	sandbox TEXT NOT NULL, -- that it was made of
	parent  TEXT NOT NULL, -- a commit's id, or ""
	layer   TEXT NOT NULL, -- the root file system's
	created INTEGER NOT NULL,
	body    BLOB NOT NULL
) WITHOUT ROWID, STRICT;

CREATE INDEX commits_by_age ON commits (created DESC, id);

CREATE TABLE commit_tags (
	owner  TEXT NOT NULL,
	name   TEXT NOT NULL,
	target TEXT NOT NULL, -- a commit's id
	moved  INTEGER NOT NULL,
	PRIMARY KEY (owner, name)
) WITHOUT ROWID, STRICT;

CREATE INDEX commit_tags_by_target ON commit_tags (target);
