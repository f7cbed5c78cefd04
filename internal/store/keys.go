package store

import "context"

// APIKey is one row of api_keys.
type APIKey struct {
	ID      string
	Name    string
	Hash    []byte // SHA-256 of the secret
	Admin   bool
	Created int64 // Unix nanoseconds
	Revoked int64 // 0: valid
}

const addAPIKey = "INSERT INTO api_keys (id, name, hash, admin, created, revoked) VALUES (?, ?, ?, ?, ?, 0)"

// AddAPIKey adds a key. AlreadyExists: its id or secret is taken.
func AddAPIKey(k APIKey) Write {
	return Func(func(tx *Tx) error { return tx.exec(addAPIKey, k.ID, k.Name, k.Hash, flag(k.Admin), k.Created) })
}

// RevokeAPIKey ends a key's validity; a key that is revoked keeps its time.
func RevokeAPIKey(id string, at int64) Write {
	return Func(func(tx *Tx) error {
		return tx.exec("UPDATE api_keys SET revoked = ? WHERE id = ? AND revoked = 0", at, id)
	})
}

func flag(b bool) int64 {
	if b {
		return 1
	}
	return 0
}

const apiKeyColumns = "SELECT id, name, hash, admin, created, revoked FROM api_keys "

func (db *DB) apiKeys(ctx context.Context, where string, args ...any) ([]APIKey, error) {
	var all []APIKey
	err := db.each(ctx, apiKeyColumns+where, args, func(r scanner) error {
		var k APIKey
		err := r.Scan(&k.ID, &k.Name, &k.Hash, &k.Admin, &k.Created, &k.Revoked)
		all = append(all, k)
		return err
	})
	return all, err
}

// APIKeys returns all keys, also revoked ones, the oldest first.
func (db *DB) APIKeys(ctx context.Context) ([]APIKey, error) {
	return db.apiKeys(ctx, "ORDER BY created, id")
}

// GetAPIKey returns a key by its id and whether there is one.
func (db *DB) GetAPIKey(ctx context.Context, id string) (APIKey, bool, error) {
	return firstKey(db.apiKeys(ctx, "WHERE id = ?", id))
}

// APIKeyByHash returns a key by the hash of its secret and whether there is one.
func (db *DB) APIKeyByHash(ctx context.Context, hash []byte) (APIKey, bool, error) {
	return firstKey(db.apiKeys(ctx, "WHERE hash = ?", hash))
}

func firstKey(all []APIKey, err error) (APIKey, bool, error) {
	if err != nil || len(all) == 0 {
		return APIKey{}, false, err
	}
	return all[0], true, nil
}
