package gateway

import (
	"sync"
	"time"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/egress/rules"
)

// How many events of one sandbox stand alone: a second, and at once after a quiet time. A sandbox decides how
// many there are, and must not fill the host's disk with them; what is beyond is summed up by target.
const (
	eventRate  = 50
	eventBurst = 1000
	// maxSums bounds the sums of one sandbox; the rest is one sum more.
	maxSums = 100
)

// How much content of its requests and answers goes with a sandbox's events: bytes a second, and at once after a quiet
// time. What is kept of all sandboxes is bounded too, and the oldest goes first: one must not drive the others' out.
const (
	contentRate  = 64 << 10
	contentBurst = 64 << 20
	whyTooMuch   = "the sandbox's requests and answers hold more content than is kept of one sandbox in so short a time"
)

// sumKey is what events are summed up by. Secrets and providers stay apart in every sum, since somebody counts by
// them; a sandbox has no more of them than it was given.
type sumKey struct {
	kind     egress.EventType
	proto    rules.Proto
	target   string
	code     rules.Code
	note     string
	secret   string
	version  uint64
	provider string
}

// quota holds a sandbox's events to a rate.
type quota struct {
	mu   sync.Mutex // guards the fields below
	left float64
	room float64 // for content
	at   time.Time
	sums map[sumKey]*egress.Event
}

func newQuota() *quota {
	return &quota{left: eventBurst, room: contentBurst, at: time.Now(), sums: map[sumKey]*egress.Event{}}
}

// emit keeps an event for the server, or sums it up.
func (s *sandbox) emit(e egress.Event) {
	e.Sandbox = s.id
	q := s.quota
	q.mu.Lock()
	now := time.Now()
	passed := now.Sub(q.at).Seconds()
	q.left = min(q.left+passed*eventRate, eventBurst)
	q.room = min(q.room+passed*contentRate, contentBurst)
	q.at = now
	alone := q.left >= 1
	if alone {
		q.left--
		e = q.withRoom(e)
	} else {
		q.sum(e)
	}
	q.mu.Unlock()
	if alone {
		s.gw.emit(e)
	}
}

// withRoom takes the room that an event's content needs, or leaves the content out. The caller holds mu.
func (q *quota) withRoom(e egress.Event) egress.Event {
	n := float64(e.Content())
	if n > q.room {
		return e.WithoutContent(whyTooMuch)
	}
	q.room -= n
	return e
}

// sum adds an event to the sum of its kind. The caller holds mu.
func (q *quota) sum(e egress.Event) {
	e.Bodies, e.Unfinished, e.NotKept = nil, nil, ""
	k := sumKey{kind: e.Type, proto: e.Proto, target: e.Target, note: e.Note, secret: e.Secret, version: e.Version, provider: e.Provider}
	if e.Verdict != nil {
		k.code = e.Verdict.Code
	}
	t := q.sums[k]
	if t == nil && len(q.sums) >= maxSums {
		k = sumKey{kind: e.Type, secret: e.Secret, version: e.Version, provider: e.Provider}
		t = q.sums[k]
		e.Proto, e.Target, e.Verdict, e.Note = "", "", nil, ""
	}
	if t == nil {
		e.Conn, e.Dialed, e.Via, e.Method, e.Path, e.Status = 0, "", "", "", "", 0
		e.Count = times(e)
		q.sums[k] = &e
		return
	}
	addTo(t, e)
}

// times is how many events one is. A refusal's count is of all that were alike so far, and it is one of them.
func times(e egress.Event) int {
	if e.Type == egress.EventRefused {
		return 1
	}
	return max(e.Count, 1)
}

// addTo adds an event to a sum.
func addTo(sum *egress.Event, e egress.Event) {
	sum.Count += times(e)
	sum.Sent += e.Sent
	sum.Recv += e.Recv
	sum.TokensIn += e.TokensIn
	sum.TokensOut += e.TokensOut
	sum.Estimated = sum.Estimated || e.Estimated
	if sum.Model != e.Model {
		sum.Model = "" // of several
	}
}

// flush keeps the sums for the server.
func (s *sandbox) flush() {
	s.quota.mu.Lock()
	sums := s.quota.sums
	if len(sums) > 0 {
		s.quota.sums = map[sumKey]*egress.Event{}
	}
	s.quota.mu.Unlock()
	for _, e := range sums {
		s.gw.emit(*e)
	}
}
