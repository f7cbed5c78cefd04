CREATE TABLE model_usage (
	sandbox    TEXT NOT NULL,
	provider   TEXT NOT NULL,
	requests   INTEGER NOT NULL,
	tokens_in  INTEGER NOT NULL,
	tokens_out INTEGER NOT NULL,
	PRIMARY KEY (sandbox, provider)
) WITHOUT ROWID, STRICT;
