package journal

import (
	"encoding/json"

	"casemate.dev/internal/journal/content"
	"casemate.dev/internal/store"
)

// MaxBody is how many bytes of a body are kept.
const MaxBody = content.Most

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
	// Data is what is kept; nil where it was erased or is not at hand. Where it is less than Size, the last Tail bytes of
	// it are the end of the content.
	Data []byte
	Tail int64
	// Salt goes before the content into the hash; nil where it was erased.
	Salt []byte
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
				Sandbox: e.Sandbox, Seq: e.Seq, Name: string(b.By) + "." + b.Name, Time: e.Time.UnixNano(),
				Size: b.Size, Salt: b.Salt, Data: b.Data,
			}))
		}
	}
	return out
}
