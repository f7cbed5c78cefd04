package journal

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"hash"

	"casemate.dev/internal/store"
)

// MaxBody is how many bytes of a body are kept. Of a longer one the hash covers all, and its beginning
// is kept.
const MaxBody = 64 << 10

// SaltSize is the length of a body's salt in bytes.
const SaltSize = 32

// Body is content that an event speaks of and does not hold: arguments, input, output. The event holds a
// hash of it behind a random salt, so that the content can be erased later and the event's proof holds on;
// and from the hash alone nothing can be guessed.
//
// In the event's facts it stands as a Ref.
type Body struct {
	By   Observer
	Name string // of the fact
	// Size is the whole length in bytes.
	Size int64
	// Data is what is kept; nil where it was erased or is not at hand.
	Data []byte
	// Salt goes before the content into the hash; nil where it was erased.
	Salt []byte

	ref Ref
}

// Ref stands for a body among an event's facts. Its hashes are SHA-256 of salt and content, in hex.
type Ref struct {
	// Body is the hash of the whole; "": the body is empty.
	Body  string `json:"body,omitempty"`
	Bytes int64  `json:"bytes"`
	// Kept is set where only that much of the beginning is kept, and Head is the hash of that.
	Kept int64  `json:"kept,omitempty"`
	Head string `json:"head,omitempty"`
}

// Keeper takes content as it comes, and makes a body of it. The zero value is ready. It is not safe for
// concurrent use.
type Keeper struct {
	salt  []byte
	whole hash.Hash
	head  []byte
	size  int64
}

// Write implements io.Writer. It never fails.
func (k *Keeper) Write(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	if k.whole == nil {
		k.salt = make([]byte, SaltSize)
		_, _ = rand.Read(k.salt) // never fails
		k.whole = sha256.New()
		k.whole.Write(k.salt)
	}
	k.whole.Write(p)
	k.size += int64(len(p))
	if room := MaxBody - len(k.head); room > 0 {
		k.head = append(k.head, p[:min(room, len(p))]...)
	}
	return len(p), nil
}

// Size is how many bytes were written.
func (k *Keeper) Size() int64 { return k.size }

func (k *Keeper) body(o Observer, name string) Body {
	b := Body{By: o, Name: name, Size: k.size, Salt: k.salt, Data: k.head, ref: Ref{Bytes: k.size}}
	if k.size == 0 {
		return b
	}
	b.ref.Body = hex.EncodeToString(k.whole.Sum(nil))
	if int64(len(k.head)) < k.size {
		b.ref.Kept, b.ref.Head = int64(len(k.head)), HashBody(k.salt, k.head)
	}
	return b
}

// HashBody is the hash that stands in an event for a body.
func HashBody(salt, data []byte) string {
	h := sha256.New()
	h.Write(salt)
	h.Write(data)
	return hex.EncodeToString(h.Sum(nil))
}

// WithBody returns a copy of e that speaks of content: among o's facts name is its Ref. Add a body to an
// observer's facts after With.
func (e Event) WithBody(o Observer, name string, content []byte) Event {
	var k Keeper
	_, _ = k.Write(content)
	return e.WithKept(o, name, &k)
}

// WithKept is WithBody for content that came in pieces.
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

// withMember adds a member to a JSON object.
func withMember(object json.RawMessage, name string, value []byte) json.RawMessage {
	out := appendString([]byte{'{'}, name)
	out = append(append(out, ':'), value...)
	if len(object) > len("{}") {
		return append(append(out, ','), object[1:]...)
	}
	return append(out, '}')
}

// writes are the rows of an event's bodies.
func (e Event) bodyWrites() []store.Write {
	var out []store.Write
	for _, b := range e.Bodies {
		if b.Size > 0 {
			out = append(out, store.AddBody(store.Body{
				Sandbox: e.Sandbox, Seq: e.Seq, Name: string(b.By) + "." + b.Name, Size: b.Size, Salt: b.Salt, Data: b.Data,
			}))
		}
	}
	return out
}

// AsRef reads a fact as a body's Ref; false where it is none.
func AsRef(fact json.RawMessage) (Ref, bool) {
	var members map[string]json.RawMessage
	if len(fact) == 0 || fact[0] != '{' || json.Unmarshal(fact, &members) != nil {
		return Ref{}, false
	}
	if members["body"] == nil || members["bytes"] == nil {
		return Ref{}, false
	}
	var r Ref
	return r, json.Unmarshal(fact, &r) == nil && len(r.Body) == hex.EncodedLen(sha256.Size)
}
