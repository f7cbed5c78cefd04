// Package content hashes content as it passes by and keeps its beginning and its end: what an event speaks of and does not
// hold.
//
// What belongs here: what is kept of content, and its hash. What does not: where it is kept, which packages journal and
// store know, and whose content is worth it.
package content

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"hash"

	"casemate.dev/internal/journal/bundle"
)

// Most is how many bytes of a content are kept. Of a longer one the hash covers all, and its beginning and its end are
// kept, half of Most of each.
const Most = 64 << 10

// SaltSize is the length of a salt in bytes.
const SaltSize = 32

// Kept is content as it is kept: what goes from one process to another, and into the store.
type Kept struct {
	// Hash is that of the whole behind the salt, as bundle.HashBody makes it; "": the content is empty.
	Hash string `json:"hash,omitempty"`
	// Size is the whole length in bytes.
	Size int64 `json:"size"`
	// Salt goes before the content into the hash.
	Salt []byte `json:"salt,omitempty"`
	// Data is what is kept; none where only the hash is. Where it is less than Size, the last Tail bytes of it are the end
	// of the content.
	Data []byte `json:"data,omitempty"`
	Tail int64  `json:"tail,omitempty"`
}

// Ref is what stands for it among an event's facts.
func (k Kept) Ref() bundle.Ref {
	r := bundle.Ref{Body: k.Hash, Bytes: k.Size}
	switch kept := int64(len(k.Data)); {
	case k.Size == 0:
	case kept == 0:
		r.Hashed = true
	case kept < k.Size:
		r.Kept, r.Tail, r.Head = kept, k.Tail, bundle.HashBody(k.Salt, k.Data)
	}
	return r
}

// WithoutData returns what is left where the content itself is not to be kept.
func (k Kept) WithoutData() Kept {
	k.Data, k.Tail = nil, 0
	return k
}

// Check reports what another process made and what can't be.
func (k Kept) Check() error {
	kept := int64(len(k.Data))
	sum, err := hex.DecodeString(k.Hash)
	switch {
	case k.Size == 0:
		if k.Hash != "" || kept > 0 || k.Tail != 0 {
			return errors.New("it is of no length and not empty")
		}
		return nil
	case k.Size < 0 || err != nil || len(sum) != sha256.Size || len(k.Salt) != SaltSize:
		return errors.New("it has no length, hash or salt that can be")
	case kept > k.Size || kept > Most || k.Tail < 0 || k.Tail > kept || (kept == k.Size || kept == 0) && k.Tail != 0:
		return errors.New("what is kept of it is more than can be")
	case kept == k.Size && bundle.HashBody(k.Salt, k.Data) != k.Hash:
		return errors.New("its hash is of something else")
	}
	return nil
}

// Keeper is content as it comes: it hashes what is written to it, and keeps its beginning and its end, up to Most bytes
// together. It is not safe for concurrent use.
type Keeper struct {
	salt []byte
	sum  hash.Hash
	most int
	size int64
	head []byte
	tail []byte // the newest bytes behind head; more than is kept, now and then
}

// NewKeeper returns an empty one. Without keep nothing but hash and length is kept.
func NewKeeper(keep bool) *Keeper {
	k := &Keeper{salt: make([]byte, SaltSize), sum: sha256.New()}
	_, _ = rand.Read(k.salt) // never fails
	k.sum.Write(k.salt)
	if keep {
		k.most = Most
	}
	return k
}

// Write takes more of the content. It never fails.
func (k *Keeper) Write(p []byte) (int, error) {
	k.sum.Write(p)
	k.size += int64(len(p))
	rest := p
	half := k.most / 2
	if room := half - len(k.head); room > 0 {
		n := min(room, len(rest))
		k.head = append(k.head, rest[:n]...)
		rest = rest[n:]
	}
	if len(rest) > half {
		k.tail, rest = k.tail[:0], rest[len(rest)-half:]
	}
	if len(k.tail)+len(rest) > 2*half { // moved once for each half that came
		k.tail = append(k.tail[:0], k.tail[len(k.tail)-half:]...)
	}
	k.tail = append(k.tail, rest...)
	return len(p), nil
}

// Size is how much was written.
func (k *Keeper) Size() int64 { return k.size }

// Forget lets go of what was kept, and goes on with the hash alone.
func (k *Keeper) Forget() { k.most, k.head, k.tail = 0, nil, nil }

// Kept returns what is kept. Nothing may be written any more.
func (k *Keeper) Kept() Kept {
	out := Kept{Size: k.size}
	if k.size == 0 {
		return out
	}
	tail := k.tail[max(0, len(k.tail)-k.most/2):]
	out.Hash, out.Salt = hex.EncodeToString(k.sum.Sum(nil)), k.salt
	out.Data = append(append(make([]byte, 0, len(k.head)+len(tail)), k.head...), tail...)
	if kept := int64(len(out.Data)); kept > 0 && kept < k.size {
		out.Tail = int64(len(tail))
	}
	return out
}
