package server

import (
	"context"
	"errors"
	"fmt"

	"casemate.dev/internal/clock"
	"casemate.dev/internal/policy"
	"casemate.dev/internal/store"
)

// CreateKey makes an API key in a data directory, whether or not a server runs on it, and returns
// the key's id and its secret. A running server takes the key from its next request on.
func CreateKey(ctx context.Context, dataDir, name string, admin, e2b bool) (keyID, secret string, err error) {
	db, err := store.Open(store.Config{Dir: dataDir, Shared: true})
	if err != nil {
		return "", "", fmt.Errorf("open store: %w", err)
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	key, secret, err := policy.NewKeys(db, clock.New()).Create(ctx, policy.KeyOptions{Name: name, Admin: admin, E2B: e2b})
	return key.ID, secret, err
}
