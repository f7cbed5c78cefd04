package store

import "context"

// Answered is one row of idempotency: a request that was taken, and the id of what it made.
type Answered struct {
	Principal string
	Scope     string
	Key       string
	Request   []byte // SHA-256 of the request
	Answer    string
	Created   int64 // Unix nanoseconds
}

const putAnswered = `INSERT OR REPLACE INTO idempotency (principal, scope, key, request, answer, created)
VALUES (?, ?, ?, ?, ?, ?)`

// PutAnswered remembers a request.
func PutAnswered(a Answered) Write {
	return Func(func(tx *Tx) error {
		return tx.exec(putAnswered, a.Principal, a.Scope, a.Key, a.Request, a.Answer, a.Created)
	})
}

// ForgetAnswered forgets one request, so that it may be tried again.
func ForgetAnswered(principal, scope, key string) Write {
	return Func(func(tx *Tx) error {
		return tx.exec("DELETE FROM idempotency WHERE principal = ? AND scope = ? AND key = ?", principal, scope, key)
	})
}

// ForgetAnsweredBefore forgets requests that were taken before a time.
func ForgetAnsweredBefore(created int64) Write {
	return Func(func(tx *Tx) error { return tx.exec("DELETE FROM idempotency WHERE created < ?", created) })
}

const getAnswered = `SELECT principal, scope, key, request, answer, created FROM idempotency
WHERE principal = ? AND scope = ? AND key = ?`

// GetAnswered returns a remembered request and whether there is one.
func (db *DB) GetAnswered(ctx context.Context, principal, scope, key string) (Answered, bool, error) {
	var a Answered
	ok, err := db.first(ctx, getAnswered, []any{principal, scope, key},
		&a.Principal, &a.Scope, &a.Key, &a.Request, &a.Answer, &a.Created)
	return a, ok, err
}
