package store

import "context"

// PutSetting sets a setting of the server.
func PutSetting(name, value string) Write {
	return Func(func(tx *Tx) error {
		return tx.exec("INSERT OR REPLACE INTO settings (name, value) VALUES (?, ?)", name, value)
	})
}

// Setting returns a setting, and "" where it was never set.
func (db *DB) Setting(ctx context.Context, name string) (string, error) {
	var v string
	_, err := db.first(ctx, "SELECT value FROM settings WHERE name = ?", []any{name}, &v)
	return v, err
}

// SettingOr returns a setting; where it was never set, it is set to value first. Of several callers
// at once, also in other processes, all get the same.
func (db *DB) SettingOr(ctx context.Context, name, value string) (string, error) {
	v, err := db.Setting(ctx, name)
	if err != nil || v != "" {
		return v, err
	}
	if err := db.Write(Func(func(tx *Tx) error {
		return tx.exec("INSERT OR IGNORE INTO settings (name, value) VALUES (?, ?)", name, value)
	})); err != nil {
		return "", err
	}
	return db.Setting(ctx, name)
}
