-- Content that events speak of, such as arguments and output. The event holds a salted hash of it, so that a row
-- here can be erased without harm to the event's proof.
CREATE TABLE bodies (
	sandbox TEXT NOT NULL,
	seq     INTEGER NOT NULL,
	name    TEXT NOT NULL, -- observer and fact, 'server.argv'
	size    INTEGER NOT NULL, -- of the whole; data may be its beginning
	salt    BLOB NOT NULL,
	data    BLOB NOT NULL,
	PRIMARY KEY (sandbox, seq, name)
) WITHOUT ROWID, STRICT;
