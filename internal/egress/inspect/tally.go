package inspect

import (
	"sync"
	"time"

	"casemate.dev/internal/egress"
)

// A connection may carry thousands of requests a second. Those of one kind that come first are told one by
// one, and then so many at a time: what happened stays known, and a sandbox can't fill the journal with it.
// Requests stand alone longer, since what they say stands with them; see package gateway for what bounds those of a sandbox.
const (
	toldSingly   = 50
	toldRequests = 1000
	toldAtOnce   = 100
)

// tally tells what happens on a connection.
type tally struct {
	tell func(egress.Event)

	// mu guards the field below.
	mu   sync.Mutex
	kept map[tallyKey]*tallied
}

// tallyKey is what makes events alike.
type tallyKey struct {
	kind   egress.EventType
	secret string
	status int
	note   string
}

type tallied struct {
	seen int
	last egress.Event
	left int // not told yet
}

// event tells e, or counts it.
func (t *tally) event(e egress.Event) {
	t.mu.Lock()
	k := tallyKey{e.Type, e.Secret, e.Status, e.Note}
	if t.kept == nil {
		t.kept = make(map[tallyKey]*tallied)
	}
	n := t.kept[k]
	if n == nil {
		n = &tallied{}
		t.kept[k] = n
	}
	n.seen++
	alone := toldSingly
	if e.Type == egress.EventRequest {
		alone = toldRequests
	}
	if n.seen > alone {
		e.Bodies, e.Unfinished, e.NotKept, e.Began = nil, nil, "", time.Time{}
		n.left++
		n.last = e
		if n.left < toldAtOnce {
			t.mu.Unlock()
			return
		}
		e.Count, n.left = n.left, 0
	}
	t.mu.Unlock()
	t.tell(e)
}

// close tells what is left.
func (t *tally) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, n := range t.kept {
		if n.left > 0 {
			n.last.Count = n.left
			t.tell(n.last)
		}
	}
	t.kept = nil
}
