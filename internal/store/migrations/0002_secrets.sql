CREATE TABLE secrets (
	id      TEXT PRIMARY KEY,
	owner   TEXT NOT NULL, -- '' is the server
	name    TEXT NOT NULL,
	created INTEGER NOT NULL,
	version INTEGER NOT NULL,
	used    INTEGER NOT NULL,
	body    BLOB NOT NULL,
	UNIQUE (owner, name)
) WITHOUT ROWID, STRICT;

CREATE TABLE secret_versions (
	secret  TEXT NOT NULL,
	version INTEGER NOT NULL,
	created INTEGER NOT NULL,
	sealed  BLOB NOT NULL, -- empty: destroyed, or kept elsewhere
	PRIMARY KEY (secret, version)
) WITHOUT ROWID, STRICT;
