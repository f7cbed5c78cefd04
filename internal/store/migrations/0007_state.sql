-- What an agent's documents are, beside their versions. Its counter only grows, so that a watch can be taken up again.
CREATE TABLE state_agents (
	owner         TEXT NOT NULL,
	agent         TEXT NOT NULL,
	revision      INTEGER NOT NULL, -- of the newest version of any of its documents
	removed       INTEGER NOT NULL, -- the highest revision that is no longer there
	bytes         INTEGER NOT NULL, -- of all versions that are kept
	keep_versions INTEGER NOT NULL, -- 0: the default, -1: all
	keep_for      INTEGER NOT NULL, -- nanoseconds; 0: for ever
	PRIMARY KEY (owner, agent)
) WITHOUT ROWID, STRICT;

-- The newest version of each document, the removal of one included.
CREATE TABLE state_documents (
	owner    TEXT NOT NULL,
	agent    TEXT NOT NULL,
	name     TEXT NOT NULL,
	version  INTEGER NOT NULL,
	revision INTEGER NOT NULL,
	deleted  INTEGER NOT NULL,
	PRIMARY KEY (owner, agent, name)
) WITHOUT ROWID, STRICT;

-- With a row id: contents are large, and what is searched by must not lie between them.
CREATE TABLE state_versions (
	owner        TEXT NOT NULL,
	agent        TEXT NOT NULL,
	name         TEXT NOT NULL,
	version      INTEGER NOT NULL, -- dense per document, from 1
	revision     INTEGER NOT NULL,
	created      INTEGER NOT NULL,
	author       TEXT NOT NULL,
	content_type TEXT NOT NULL,
	deleted      INTEGER NOT NULL,
	size         INTEGER NOT NULL,
	digest       BLOB NOT NULL, -- SHA-256 of the content
	sandbox      TEXT NOT NULL,
	target       TEXT NOT NULL, -- a commit's id, or ""
	content      BLOB NOT NULL
) STRICT;

CREATE UNIQUE INDEX state_versions_by_revision ON state_versions (owner, agent, revision);
CREATE UNIQUE INDEX state_versions_by_name ON state_versions (owner, agent, name, version);
CREATE INDEX state_versions_by_target ON state_versions (target) WHERE target <> '';
