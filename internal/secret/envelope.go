package secret

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"

	"casemate.dev/internal/errs"
)

// The layout of a sealed value, one after the other: format, the master key's id, the value's own key
// sealed with the master key, the value sealed with its own key. Each sealed part is a nonce of 12
// bytes, the ciphertext, and a tag of 16 (NIST SP 800-38D).
const (
	sealedFormat = 1
	keySize      = 32
	keyIDSize    = 8
	sealOverhead = 12 + 16
	wrappedSize  = keySize + sealOverhead
	sealedHead   = 1 + keyIDSize + wrappedSize
)

var errSealed = errors.New("sealed value does not open: it was changed, or belongs to another secret or version")

// sealer seals values with a master key. It is safe for concurrent use.
type sealer struct {
	master cipher.AEAD
	id     [keyIDSize]byte
	// derive is the key for what is derived from the master key and not encrypted with it.
	derive [keySize]byte
}

// newSealer returns a sealer for a master key of 32 bytes. The key itself is not kept: sealing, the
// key's id and derivation each use a key derived from it.
func newSealer(master []byte) (*sealer, error) {
	if len(master) != keySize {
		return nil, fmt.Errorf("master key has %d bytes, not %d", len(master), keySize)
	}
	wrap := subkey(master, "wrap")
	aead, err := newAEAD(wrap[:])
	if err != nil {
		return nil, err
	}
	s := &sealer{master: aead, derive: subkey(master, "derive")}
	id := subkey(master, "id")
	copy(s.id[:], id[:])
	return s, nil
}

// subkey is HKDF-Expand (RFC 5869) for one block: the master key is uniform already.
func subkey(master []byte, purpose string) (out [keySize]byte) {
	m := hmac.New(sha256.New, master)
	m.Write([]byte("casemate secret " + purpose))
	m.Write([]byte{1})
	m.Sum(out[:0])
	return out
}

func newAEAD(key []byte) (cipher.AEAD, error) {
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCMWithRandomNonce(block)
}

// place is the associated data: where a value belongs.
func place(id string, version uint64) []byte {
	b := append([]byte("casemate secret\x00"), id...)
	return binary.BigEndian.AppendUint64(append(b, 0), version)
}

// seal encrypts value for the place that id and version name.
func (s *sealer) seal(id string, version uint64, value []byte) ([]byte, error) {
	var key [keySize]byte
	_, _ = rand.Read(key[:]) // never fails: crypto/rand.Read
	defer clear(key[:])
	own, err := newAEAD(key[:])
	if err != nil {
		return nil, err
	}
	ad := place(id, version)
	out := append([]byte{sealedFormat}, s.id[:]...)
	out = s.master.Seal(out, nil, key[:], ad)
	return own.Seal(out, nil, value, ad), nil
}

// open decrypts what seal made for the same place.
func (s *sealer) open(id string, version uint64, sealed []byte) ([]byte, error) {
	if len(sealed) < sealedHead+sealOverhead || sealed[0] != sealedFormat {
		return nil, errSealed
	}
	if [keyIDSize]byte(sealed[1:]) != s.id {
		return nil, errs.New(errs.FailedPrecondition, "the secret was sealed with another master key").
			WithHint("put the file secrets.key that belongs to this data directory back, or set the secret again")
	}
	ad := place(id, version)
	key, err := s.master.Open(nil, nil, sealed[1+keyIDSize:sealedHead], ad)
	if err != nil {
		return nil, errSealed
	}
	defer clear(key)
	own, err := newAEAD(key)
	if err != nil {
		return nil, err
	}
	value, err := own.Open(nil, nil, sealed[sealedHead:], ad)
	if err != nil {
		return nil, errSealed
	}
	return value, nil
}

// derived returns 32 bytes that only the holder of the master key can make, for one purpose and
// these parts.
func (s *sealer) derived(purpose string, parts ...string) []byte {
	m := hmac.New(sha256.New, s.derive[:])
	for _, p := range append([]string{purpose}, parts...) {
		var n [8]byte
		binary.BigEndian.PutUint64(n[:], uint64(len(p)))
		m.Write(n[:]) // lengths keep ("a", "bc") and ("ab", "c") apart
		m.Write([]byte(p))
	}
	return m.Sum(nil)
}
