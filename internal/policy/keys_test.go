package policy

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/clock"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/store"
)

// fakeClock stands still unless told otherwise.
type fakeClock struct{ now time.Time }

func (c *fakeClock) Now() time.Time { return c.now }

func (c *fakeClock) AfterFunc(d time.Duration, f func()) clock.Timer { panic("no timers here") }

func openKeys(t testing.TB, dir string, shared bool) (*Keys, *fakeClock) {
	t.Helper()
	db, err := store.Open(store.Config{Dir: dir, Shared: shared})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	c := &fakeClock{now: time.Unix(1_800_000_000, 0)}
	return NewKeys(db, c), c
}

func TestKeyLife(t *testing.T) {
	k, _ := openKeys(t, t.TempDir(), false)
	ctx := t.Context()
	key, secret, err := k.Create(ctx, KeyOptions{Name: "ci", Admin: true})
	if err != nil {
		t.Fatal(err)
	}
	other, e2b, err := k.Create(ctx, KeyOptions{E2B: true})
	if err != nil {
		t.Fatal(err)
	}
	if !regexp.MustCompile(`^csm_[a-z2-7]{52}$`).MatchString(secret) || !regexp.MustCompile(`^e2b_[0-9a-f]{64}$`).MatchString(e2b) {
		t.Errorf("secrets %q and %q", secret, e2b)
	}
	if p, err := k.Authenticate(ctx, secret); err != nil || p != (sandbox.Principal{ID: key.ID, Admin: true}) {
		t.Errorf("authenticate: %+v, %v", p, err)
	}
	if p, err := k.Authenticate(ctx, e2b); err != nil || p != (sandbox.Principal{ID: other.ID}) {
		t.Errorf("authenticate: %+v, %v", p, err)
	}
	for _, wrong := range []string{"", "csm_", secret + "x", strings.ToUpper(secret), secret[:len(secret)-1], strings.Repeat("a", 1<<20)} {
		if _, err := k.Authenticate(ctx, wrong); !errs.Is(err, errs.Unauthenticated) {
			t.Errorf("authenticate %.60q: %v", wrong, err)
		}
	}
	for range 2 { // idempotent, and keeps the time
		revoked, err := k.Revoke(ctx, key.ID)
		if err != nil || !revoked.RevokedAt.Equal(k.clock.Now()) {
			t.Errorf("revoke: %+v, %v", revoked, err)
		}
	}
	if _, err := k.Authenticate(ctx, secret); !errs.Is(err, errs.Unauthenticated) {
		t.Errorf("a revoked key: %v", err)
	}
	if _, err := k.Revoke(ctx, "key_nobody"); !errs.Is(err, errs.NotFound) {
		t.Errorf("revoke a key that is not there: %v", err)
	}
	if all, err := k.List(ctx); err != nil || len(all) != 2 || all[0].RevokedAt.IsZero() == all[1].RevokedAt.IsZero() {
		t.Errorf("list: %+v, %v", all, err)
	}
}

func TestCreateRefusesBadNames(t *testing.T) {
	k, _ := openKeys(t, t.TempDir(), false)
	for _, name := range []string{strings.Repeat("n", maxName+1), "a\nb", "\x1b[2J"} {
		if _, _, err := k.Create(t.Context(), KeyOptions{Name: name}); !errs.Is(err, errs.InvalidArgument) {
			t.Errorf("name %q: %v", name, err)
		}
	}
}

func TestSecretsAreNotStored(t *testing.T) {
	dir := t.TempDir()
	k, _ := openKeys(t, dir, false)
	_, secret, err := k.Create(t.Context(), KeyOptions{})
	if err != nil {
		t.Fatal(err)
	}
	files, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		b, err := os.ReadFile(filepath.Join(dir, f.Name()))
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(b, []byte(secret)) || bytes.Contains(b, []byte(secret[len(nativePrefix):])) {
			t.Errorf("%s holds the secret", f.Name())
		}
	}
}

func TestToolRevokesBesideAServer(t *testing.T) {
	dir := t.TempDir()
	server, now := openKeys(t, dir, false)
	tool, _ := openKeys(t, dir, true)
	key, secret, err := tool.Create(t.Context(), KeyOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := server.Authenticate(t.Context(), secret); err != nil {
		t.Errorf("the server does not know the tool's key: %v", err)
	}
	if _, err := tool.Revoke(t.Context(), key.ID); err != nil {
		t.Fatal(err)
	}
	now.now = now.now.Add(cacheFor)
	if _, err := server.Authenticate(t.Context(), secret); !errs.Is(err, errs.Unauthenticated) {
		t.Errorf("the server takes a key that the tool revoked: %v", err)
	}
}

func TestCacheIsBounded(t *testing.T) {
	k, _ := openKeys(t, t.TempDir(), false)
	_, secret, err := k.Create(t.Context(), KeyOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range cacheSize {
		k.cache[[32]byte{byte(i), byte(i >> 8), 1}] = cached{}
	}
	if _, err := k.Authenticate(t.Context(), secret); err != nil || len(k.cache) != 1 {
		t.Errorf("cache of %d, %v", len(k.cache), err)
	}
	for range 10 {
		_, _ = k.Authenticate(t.Context(), "csm_wrong")
	}
	if len(k.cache) != 1 {
		t.Errorf("wrong secrets fill the cache: %d", len(k.cache))
	}
}

func TestFirstKey(t *testing.T) {
	k, _ := openKeys(t, t.TempDir(), false)
	dir := filepath.Join(t.TempDir(), "keys")
	path, err := k.First(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if p, err := k.Authenticate(t.Context(), strings.TrimSpace(string(b))); err != nil || !p.Admin {
		t.Errorf("the first key: %+v, %v", p, err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if again, err := k.First(t.Context(), dir); err != nil || again != "" {
		t.Errorf("a second first key: %q, %v", again, err)
	}
	if files, err := os.ReadDir(dir); err != nil || len(files) != 1 {
		t.Errorf("files %v, %v", files, err)
	}
}

// TestFirstKeyFollowsNoLink: an attacker who may write into the keys directory must not choose which
// file is overwritten.
func TestFirstKeyFollowsNoLink(t *testing.T) {
	k, _ := openKeys(t, t.TempDir(), false)
	dir, victim := t.TempDir(), filepath.Join(t.TempDir(), "victim")
	if err := os.WriteFile(victim, []byte("precious"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(victim, filepath.Join(dir, FirstKeyFile)); err != nil {
		t.Fatal(err)
	}
	if _, err := k.First(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(victim); err != nil || string(b) != "precious" {
		t.Errorf("the victim now holds %q, %v", b, err)
	}
}

func BenchmarkAuthenticate(b *testing.B) {
	k, _ := openKeys(b, b.TempDir(), false)
	_, secret, err := k.Create(b.Context(), KeyOptions{})
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := k.Authenticate(b.Context(), secret); err != nil {
			b.Fatal(err)
		}
	}
}

// TestKeptSecret: the secret stays, only its owner reads it, and what is no secret is refused.
func TestKeptSecret(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "keys")
	first, err := KeptSecret(dir, "e2b.key")
	if err != nil || len(first) != secretSize {
		t.Fatalf("%x, %v", first, err)
	}
	if again, err := KeptSecret(dir, "e2b.key"); err != nil || !bytes.Equal(first, again) {
		t.Errorf("again %x, %v", again, err)
	}
	if other, err := KeptSecret(dir, "other.key"); err != nil || bytes.Equal(first, other) {
		t.Errorf("another is %x, %v", other, err)
	}
	path := filepath.Join(dir, "e2b.key")
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if err := os.WriteFile(path, []byte("00ff"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := KeptSecret(dir, "e2b.key"); !errs.Is(err, errs.FailedPrecondition) {
		t.Errorf("a short one: %v", err)
	}
}
