package store

import "context"

// Secret is one row of secrets. Body is JSON of package secret and holds no value.
type Secret struct {
	ID      string
	Owner   string // principal's id; "": the server's
	Name    string
	Created int64 // Unix nanoseconds
	Version uint64
	Used    int64 // when it was last put on a request; 0: never
	Body    []byte
}

// SecretVersion is one row of secret_versions. Sealed is encrypted by package secret; empty where the
// value was destroyed, or never lay here.
type SecretVersion struct {
	Secret  string
	Version uint64
	Created int64
	Sealed  []byte
}

const putSecret = `INSERT INTO secrets (id, owner, name, created, version, used, body) VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET version = excluded.version, body = excluded.body`

// PutSecret adds a secret, or replaces what changes in its life: version and body. AlreadyExists: its
// owner has another of that name.
func PutSecret(s Secret) Write {
	return Func(func(tx *Tx) error {
		return tx.exec(putSecret, s.ID, s.Owner, s.Name, s.Created, int64(s.Version), s.Used, s.Body)
	})
}

// AddSecretVersion adds a version. AlreadyExists: it is there.
func AddSecretVersion(v SecretVersion) Write {
	return Func(func(tx *Tx) error {
		return tx.exec("INSERT INTO secret_versions (secret, version, created, sealed) VALUES (?, ?, ?, ?)",
			v.Secret, int64(v.Version), v.Created, v.Sealed)
	})
}

// DestroySecretVersions overwrites the values of all versions below one.
func DestroySecretVersions(secret string, below uint64) Write {
	return Func(func(tx *Tx) error {
		return tx.exec("UPDATE secret_versions SET sealed = x'' WHERE secret = ? AND version < ?", secret, int64(below))
	})
}

// SecretUsed notes when a secret was last used.
func SecretUsed(secret string, at int64) Write {
	return Func(func(tx *Tx) error {
		return tx.exec("UPDATE secrets SET used = max(used, ?) WHERE id = ?", at, secret)
	})
}

// DeleteSecret removes a secret with all its versions.
func DeleteSecret(secret string) Write {
	return Func(func(tx *Tx) error {
		if err := tx.exec("DELETE FROM secret_versions WHERE secret = ?", secret); err != nil {
			return err
		}
		return tx.exec("DELETE FROM secrets WHERE id = ?", secret)
	})
}

// Secrets returns all secrets, the oldest first.
func (db *DB) Secrets(ctx context.Context) ([]Secret, error) {
	var all []Secret
	err := db.each(ctx, "SELECT id, owner, name, created, version, used, body FROM secrets ORDER BY created, id", nil, func(r scanner) error {
		var s Secret
		var version int64
		err := r.Scan(&s.ID, &s.Owner, &s.Name, &s.Created, &version, &s.Used, &s.Body)
		s.Version = uint64(version)
		all = append(all, s)
		return err
	})
	return all, err
}

// SecretVersions returns the versions of a secret, the newest first.
func (db *DB) SecretVersions(ctx context.Context, secret string) ([]SecretVersion, error) {
	var all []SecretVersion
	const query = "SELECT secret, version, created, sealed FROM secret_versions WHERE secret = ? ORDER BY version DESC"
	err := db.each(ctx, query, []any{secret}, func(r scanner) error {
		var v SecretVersion
		var version int64
		err := r.Scan(&v.Secret, &version, &v.Created, &v.Sealed)
		v.Version = uint64(version)
		all = append(all, v)
		return err
	})
	return all, err
}
