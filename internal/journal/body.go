package journal

import (
	"bytes"
	"crypto/rand"
	"encoding/json"

	"casemate.dev/internal/journal/bundle"
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
// In the event's facts it stands as a bundle.Ref.
type Body struct {
	By   Observer
	Name string // of the fact
	// Size is the whole length in bytes.
	Size int64
	// Data is what is kept; nil where it was erased or is not at hand.
	Data []byte
	// Salt goes before the content into the hash; nil where it was erased.
	Salt []byte

	ref bundle.Ref
}

// WithBody returns a copy of e that speaks of content: among o's facts name is its bundle.Ref. Add a body to an
// observer's facts after With.
func (e Event) WithBody(o Observer, name string, content []byte) Event {
	b := makeBody(o, name, content)
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

func makeBody(o Observer, name string, content []byte) Body {
	size := int64(len(content))
	b := Body{By: o, Name: name, Size: size, ref: bundle.Ref{Bytes: size}}
	if size == 0 {
		return b
	}
	b.Salt = make([]byte, SaltSize)
	_, _ = rand.Read(b.Salt) // never fails
	b.Data = bytes.Clone(content[:min(len(content), MaxBody)])
	b.ref.Body = bundle.HashBody(b.Salt, content)
	if kept := int64(len(b.Data)); kept < size {
		b.ref.Kept, b.ref.Head = kept, bundle.HashBody(b.Salt, b.Data)
	}
	return b
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

// bodyWrites are the rows of an event's bodies.
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
