// Package policy says who asks, and what they may do: principals, API keys and pure decisions.
//
// What belongs here: turning a secret into a sandbox.Principal, and deciding from values alone
// whether a principal may use a kind of access. What does not: looking up sandboxes, which package
// sandbox does with the principal it is given.
package policy

import (
	"context"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/store"
)

// Key is an API key without its secret.
type Key struct {
	ID        string
	Name      string
	Admin     bool
	CreatedAt time.Time
	RevokedAt time.Time // zero: valid
}

// KeyOptions shape a new key.
type KeyOptions struct {
	Name  string
	Admin bool
	// E2B makes a key of the shape e2b_<hex>, which E2B's SDKs accept.
	E2B bool
}

// Keys are the API keys of a server.
type Keys struct{ db *store.DB }

// NewKeys returns the keys in db.
func NewKeys(db *store.DB) *Keys { return &Keys{db: db} }

// Create makes a key and returns its secret, which is stored hashed and can't be shown again.
func (k *Keys) Create(ctx context.Context, o KeyOptions) (Key, string, error) {
	return Key{}, "", errs.New(errs.Unsupported, "not built yet")
}

// List returns all keys, also revoked ones, the oldest first.
func (k *Keys) List(ctx context.Context) ([]Key, error) { return nil, nil }

// Revoke ends a key's validity. Idempotent.
func (k *Keys) Revoke(ctx context.Context, id string) (Key, error) { return Key{}, nil }

// Authenticate returns whom a secret belongs to; errs.Unauthenticated where it is no valid key.
func (k *Keys) Authenticate(ctx context.Context, secret string) (sandbox.Principal, error) {
	return sandbox.Principal{}, errs.New(errs.Unauthenticated, "no valid API key")
}

// Local is the principal of the server's own Unix socket, which only its owner can reach.
func Local() sandbox.Principal { return sandbox.Principal{ID: "local", Admin: true} }
