-- When a body was recorded and how much of it is kept, so that the oldest can go first. The index holds all that the
-- sum needs.
ALTER TABLE bodies ADD COLUMN time INTEGER NOT NULL DEFAULT 0; -- Unix nanoseconds
ALTER TABLE bodies ADD COLUMN kept INTEGER NOT NULL DEFAULT 0; -- length of data
UPDATE bodies SET kept = length(data),
	time = ifnull((SELECT e.time FROM events e WHERE e.sandbox = bodies.sandbox AND e.seq = bodies.seq), 0);
CREATE INDEX bodies_by_age ON bodies (time, kept);
