package journal

import (
	"encoding/json"

	"casemate.dev/internal/journal/content"
)

// Keeper is a body as it comes.
type Keeper = content.Keeper

// NewKeeper returns an empty one. Without keep nothing but hash and length is kept.
func NewKeeper(keep bool) *Keeper { return content.NewKeeper(keep) }

// WithKept returns a copy of e that speaks of the content that k was given: among o's facts name is its bundle.Ref. k must
// not be written to any more. Add a body to an observer's facts after With.
func (e Event) WithKept(o Observer, name string, k *Keeper) Event {
	return e.WithContent(o, name, k.Kept())
}

// WithContent is WithKept for content that was kept elsewhere.
func (e Event) WithContent(o Observer, name string, k content.Kept) Event {
	b := Body{By: o, Name: name, Size: k.Size, Data: k.Data, Tail: k.Tail, Salt: k.Salt}
	e.Bodies = append(e.Bodies[:len(e.Bodies):len(e.Bodies)], b)
	ref, _ := json.Marshal(k.Ref()) // of strings and numbers
	facts := make(map[Observer]json.RawMessage, len(e.Facts)+1)
	for observer, f := range e.Facts {
		facts[observer] = f
	}
	facts[o] = withMember(facts[o], name, ref)
	e.Facts = facts
	return e
}
