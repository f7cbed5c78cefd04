ALTER TABLE commits ADD COLUMN merged TEXT NOT NULL DEFAULT ''; -- the other parent of a merge, or ""
ALTER TABLE commits ADD COLUMN digest TEXT NOT NULL DEFAULT ''; -- of its files; "": nobody has asked for it

CREATE TABLE commits_gone ( -- what is left of a commit that was removed: from where to where history goes
	id      TEXT PRIMARY KEY,
	owner   TEXT NOT NULL,
	sandbox TEXT NOT NULL,
	parent  TEXT NOT NULL,
	merged  TEXT NOT NULL,
	created INTEGER NOT NULL
) WITHOUT ROWID, STRICT;
