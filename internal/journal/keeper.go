package journal

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"hash"

	"casemate.dev/internal/journal/bundle"
)

// Keeper is a body as it comes: it hashes what is written to it, and keeps its beginning and its end, up to MaxBody
// bytes together. It is not safe for concurrent use.
type Keeper struct {
	salt []byte
	sum  hash.Hash
	most int
	size int64
	head []byte
	tail []byte // the newest bytes behind head; more than is kept, now and then
}

// NewKeeper returns an empty one. Without content nothing but hash and length is kept.
func NewKeeper(content bool) *Keeper {
	k := &Keeper{salt: make([]byte, SaltSize), sum: sha256.New()}
	_, _ = rand.Read(k.salt) // never fails
	k.sum.Write(k.salt)
	if content {
		k.most = MaxBody
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

// body returns what is kept, with its reference.
func (k *Keeper) body(o Observer, name string) Body {
	b := Body{By: o, Name: name, Size: k.size, ref: bundle.Ref{Bytes: k.size}}
	if k.size == 0 {
		return b
	}
	tail := k.tail[max(0, len(k.tail)-k.most/2):]
	b.Salt = k.salt
	b.Data = append(append(make([]byte, 0, len(k.head)+len(tail)), k.head...), tail...)
	b.ref.Body = hexSum(k.sum)
	switch kept := int64(len(b.Data)); {
	case kept == 0:
		b.ref.Hashed = true
	case kept < k.size:
		b.ref.Kept, b.ref.Tail, b.ref.Head = kept, int64(len(tail)), bundle.HashBody(k.salt, b.Data)
	}
	return b
}

// WithKept returns a copy of e that speaks of the content that k was given: among o's facts name is its bundle.Ref. k must
// not be written to any more. Add a body to an observer's facts after With.
func (e Event) WithKept(o Observer, name string, k *Keeper) Event {
	b := k.body(o, name)
	e.Bodies = append(e.Bodies[:len(e.Bodies):len(e.Bodies)], b)
	ref, _ := json.Marshal(b.ref) // of strings and numbers
	facts := make(map[Observer]json.RawMessage, len(e.Facts)+1)
	for observer, f := range e.Facts {
		facts[observer] = f
	}
	facts[o] = withMember(facts[o], name, ref)
	e.Facts = facts
	return e
}
