package policy

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"casemate.dev/internal/clock"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/id"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/store"
)

// The shapes of secrets. Both hold 256 random bits.
const (
	nativePrefix = "csm_"
	e2bPrefix    = "e2b_"
)

// FirstKeyFile is the file in the keys directory that holds the secret of the first key.
const FirstKeyFile = "admin.key"

// The bounds of the cache of valid keys. cacheFor is how long a key that another process revoked is
// still taken; one that this process revokes ends at once.
const (
	cacheFor  = time.Second
	cacheSize = 1024
)

// maxName bounds a key's name.
const maxName = 100

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

// Keys are the API keys of a server, stored hashed. Several processes may work on the same data
// directory: SQLite serialises their writes, so that a tool can make a key beside a running server.
// Methods are safe for concurrent use.
type Keys struct {
	db    *store.DB
	clock clock.Clock

	// mu guards the field below.
	mu    sync.Mutex
	cache map[[sha256.Size]byte]cached
}

type cached struct {
	principal sandbox.Principal
	until     time.Time
}

// NewKeys returns the keys in db. A nil clock is the system's.
func NewKeys(db *store.DB, c clock.Clock) *Keys {
	if c == nil {
		c = clock.New()
	}
	return &Keys{db: db, clock: c, cache: make(map[[sha256.Size]byte]cached)}
}

// Create makes a key and returns its secret, which is stored hashed and can't be shown again.
// InvalidArgument: the name is too long or holds control characters.
func (k *Keys) Create(_ context.Context, o KeyOptions) (Key, string, error) {
	if err := checkName(o.Name); err != nil {
		return Key{}, "", err
	}
	secret := newSecret(o.E2B)
	key, err := k.add(o, secret)
	if err != nil {
		return Key{}, "", err
	}
	return key, secret, nil
}

func (k *Keys) add(o KeyOptions, secret string) (Key, error) {
	hash := sha256.Sum256([]byte(secret))
	key := Key{ID: id.New(id.Key), Name: o.Name, Admin: o.Admin, CreatedAt: k.clock.Now().UTC()}
	err := k.db.Write(store.AddAPIKey(store.APIKey{
		ID: key.ID, Name: key.Name, Hash: hash[:], Admin: key.Admin, Created: key.CreatedAt.UnixNano(),
	}))
	if err != nil {
		return Key{}, fmt.Errorf("store key: %w", err)
	}
	return key, nil
}

func checkName(name string) error {
	if len(name) > maxName {
		return errs.New(errs.InvalidArgument, "cannot create key: name has %d bytes, limit %d", len(name), maxName)
	}
	if strings.ContainsFunc(name, func(r rune) bool { return r < 0x20 || r == 0x7f || r == '\ufffd' }) {
		return errs.New(errs.InvalidArgument, "cannot create key: name holds control characters")
	}
	return nil
}

func newSecret(e2b bool) string {
	b := random()
	if e2b {
		return e2bPrefix + hex.EncodeToString(b)
	}
	return nativePrefix + strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(b))
}

// List returns all keys, also revoked ones, the oldest first.
func (k *Keys) List(ctx context.Context) ([]Key, error) {
	rows, err := k.db.APIKeys(ctx)
	if err != nil {
		return nil, fmt.Errorf("list keys: %w", err)
	}
	all := make([]Key, len(rows))
	for i, r := range rows {
		all[i] = keyOf(r)
	}
	return all, nil
}

func keyOf(r store.APIKey) Key {
	k := Key{ID: r.ID, Name: r.Name, Admin: r.Admin, CreatedAt: time.Unix(0, r.Created).UTC()}
	if r.Revoked != 0 {
		k.RevokedAt = time.Unix(0, r.Revoked).UTC()
	}
	return k
}

// Revoke ends a key's validity. Idempotent. What the key's principal owns lives on.
func (k *Keys) Revoke(ctx context.Context, keyID string) (Key, error) {
	if err := k.db.Write(store.RevokeAPIKey(keyID, k.clock.Now().UnixNano())); err != nil {
		return Key{}, fmt.Errorf("revoke key: %w", err)
	}
	k.mu.Lock()
	clear(k.cache)
	k.mu.Unlock()
	row, ok, err := k.db.GetAPIKey(ctx, keyID)
	if err != nil {
		return Key{}, fmt.Errorf("read key: %w", err)
	}
	if !ok {
		return Key{}, errs.New(errs.NotFound, "no key %q", keyID).WithHint("casemate keys list shows them")
	}
	return keyOf(row), nil
}

// Valid reports whether there is a key of this id that was not revoked: what was signed for a key is worth nothing
// any more when the key is.
func (k *Keys) Valid(ctx context.Context, keyID string) (bool, error) {
	row, ok, err := k.db.GetAPIKey(ctx, keyID)
	if err != nil {
		return false, fmt.Errorf("read key: %w", err)
	}
	return ok && row.Revoked == 0, nil
}

// Authenticate returns whom a secret belongs to; Unauthenticated where it is no valid key. A key
// that another process revoked is taken for up to a second longer.
//
// The secret is looked up by its hash: how long that takes may tell about hashes in the store, but
// nothing about a secret that has one, since SHA-256 can't be steered towards a given prefix cheaply
// enough for 256 random bits to be found.
func (k *Keys) Authenticate(ctx context.Context, secret string) (sandbox.Principal, error) {
	if len(secret) > 256 {
		return sandbox.Principal{}, unauthenticated()
	}
	hash := sha256.Sum256([]byte(secret))
	now := k.clock.Now()
	k.mu.Lock()
	c, ok := k.cache[hash]
	k.mu.Unlock()
	if ok && now.Before(c.until) {
		return c.principal, nil
	}
	row, ok, err := k.db.APIKeyByHash(ctx, hash[:])
	if err != nil {
		return sandbox.Principal{}, fmt.Errorf("look up key: %w", err)
	}
	if !ok || row.Revoked != 0 {
		return sandbox.Principal{}, unauthenticated()
	}
	p := sandbox.Principal{ID: row.ID, Admin: row.Admin}
	k.mu.Lock()
	if len(k.cache) >= cacheSize {
		clear(k.cache)
	}
	k.cache[hash] = cached{principal: p, until: now.Add(cacheFor)}
	k.mu.Unlock()
	return p, nil
}

func unauthenticated() error {
	return errs.New(errs.Unauthenticated, "no valid API key").
		WithHint("set CASEMATE_API_KEY, or make a key with: casemate keys create")
}

// First makes the first key, an admin's, unless there was ever one, and writes its secret to
// FirstKeyFile in dir, readable by the owner only. It returns the file's path, and "" where there
// was nothing to do.
func (k *Keys) First(ctx context.Context, dir string) (string, error) {
	rows, err := k.db.APIKeys(ctx)
	if err != nil {
		return "", fmt.Errorf("list keys: %w", err)
	}
	if len(rows) > 0 {
		return "", nil
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", fmt.Errorf("make keys directory: %w", err)
	}
	// The file first: a key without it would be a first key that nobody knows, and no other follows.
	path, secret := filepath.Join(dir, FirstKeyFile), newSecret(false)
	if err := WriteSecret(path, secret); err != nil {
		return "", fmt.Errorf("write first key: %w", err)
	}
	if _, err := k.add(KeyOptions{Name: "first", Admin: true}, secret); err != nil {
		return "", err
	}
	return path, nil
}

// KeptSecret returns the 32 random bytes of a file in dir, which it makes where it is missing. It is
// for what a server derives tokens from: they stay the same as long as the file does.
func KeptSecret(dir, name string) ([]byte, error) {
	path := filepath.Join(dir, name)
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err = os.MkdirAll(dir, 0o700); err == nil {
			text = []byte(hex.EncodeToString(random()))
			err = WriteSecret(path, string(text))
		}
	}
	if err != nil {
		return nil, fmt.Errorf("keep secret: %w", err)
	}
	secret, err := hex.DecodeString(strings.TrimSpace(string(text)))
	if err != nil || len(secret) != secretSize {
		return nil, errs.New(errs.FailedPrecondition, "%s holds no secret", path).
			WithHint("remove the file: a new one is made, and the tokens derived from it change")
	}
	return secret, nil
}

// secretSize is how many random bytes a secret holds.
const secretSize = 32

func random() []byte {
	var b [secretSize]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand.Read
	return b[:]
}

// WriteSecret writes a file that only its owner ever could open: a new one, renamed over an old one
// that may have had another mode or be a link.
func WriteSecret(path, secret string) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".key-*") // mode 0600
	if err != nil {
		return err
	}
	_, err = f.WriteString(secret + "\n")
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}
