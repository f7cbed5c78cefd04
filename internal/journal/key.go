package journal

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/mod/sumdb/note"

	"casemate.dev/internal/durable"
	"casemate.dev/internal/errs"
)

// The files of a journal's key in the keys directory: the private one has mode 0600.
const (
	KeyFile       = "journal.key"
	PublicKeyFile = "journal.pub"
)

// Key signs a journal's checkpoints (Ed25519, https://c2sp.org/signed-note). It prints as its public
// half.
type Key struct {
	signer   note.Signer
	verifier note.Verifier
	public   string
}

// String is the public key: its name, a short hash and the key.
func (k Key) String() string { return k.public }

// parseKey reads a signer's key as note.GenerateKey writes it, PRIVATE+KEY+name+hash+key, where key is the
// algorithm's number and an Ed25519 seed. The public half follows from that.
func parseKey(text string) (Key, error) {
	signer, err := note.NewSigner(text)
	if err != nil {
		return Key{}, err
	}
	data, err := base64.StdEncoding.DecodeString(strings.SplitN(text, "+", 5)[4])
	if err != nil || len(data) != 1+ed25519.SeedSize {
		return Key{}, errors.New("the key has a wrong length")
	}
	public, ok := ed25519.NewKeyFromSeed(data[1:]).Public().(ed25519.PublicKey)
	if !ok {
		return Key{}, errors.New("the key is of another kind")
	}
	k := Key{signer: signer}
	if k.public, err = note.NewEd25519VerifierKey(signer.Name(), public); err != nil {
		return Key{}, err
	}
	k.verifier, err = note.NewVerifier(k.public)
	return k, err
}

// LoadKey reads the key in dir, or makes one with that name. The directory must not be the data directory:
// who can change the record must not be able to sign it.
func LoadKey(dir, name string) (Key, error) {
	path := filepath.Join(dir, KeyFile)
	private, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return makeKey(dir, name)
	}
	if err != nil {
		return Key{}, fmt.Errorf("read the journal's key: %w", err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm()&0o077 != 0 {
		return Key{}, errs.New(errs.FailedPrecondition, "others may read the journal's key %s", path).WithHint("chmod 600 it, or remove it, and a new one is made")
	}
	k, err := parseKey(string(bytes.TrimSpace(private)))
	if err != nil {
		return Key{}, errs.New(errs.FailedPrecondition, "%s holds no key of a journal", path).
			WithHint("restore it from a backup, or remove it: a new one is made, which can't vouch for what the old one signed")
	}
	// The public one is for people; it follows from the other.
	return k, os.WriteFile(filepath.Join(dir, PublicKeyFile), []byte(k.public+"\n"), 0o644) //nolint:gosec // it is public
}

func makeKey(dir, name string) (Key, error) {
	private, _, err := note.GenerateKey(rand.Reader, name)
	if err != nil {
		return Key{}, fmt.Errorf("make the journal's key: %w", err)
	}
	if err := durable.Replace(filepath.Join(dir, KeyFile), []byte(private+"\n")); err != nil {
		return Key{}, fmt.Errorf("make the journal's key: %w", err)
	}
	return LoadKey(dir, name)
}
