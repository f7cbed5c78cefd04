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

// sumKey is what events are summed up by.
type sumKey struct {
	kind   egress.EventType
	proto  rules.Proto
	target string
	code   rules.Code
	note   string
}

// quota holds a sandbox's events to a rate.
type quota struct {
	mu   sync.Mutex // guards the fields below
	left float64
	at   time.Time
	sums map[sumKey]*egress.Event
}

func newQuota() *quota {
	return &quota{left: eventBurst, at: time.Now(), sums: map[sumKey]*egress.Event{}}
}

// emit keeps an event for the server, or sums it up.
func (s *sandbox) emit(e egress.Event) {
	e.Sandbox = s.id
	q := s.quota
	q.mu.Lock()
	now := time.Now()
	q.left = min(q.left+now.Sub(q.at).Seconds()*eventRate, eventBurst)
	q.at = now
	alone := q.left >= 1
	if alone {
		q.left--
	} else {
		q.sum(e)
	}
	q.mu.Unlock()
	if alone {
		s.gw.emit(e)
	}
}

// sum adds an event to the sum of its kind. The caller holds mu.
func (q *quota) sum(e egress.Event) {
	k := sumKey{kind: e.Type, proto: e.Proto, target: e.Target, note: e.Note}
	if e.Verdict != nil {
		k.code = e.Verdict.Code
	}
	t := q.sums[k]
	if t == nil && len(q.sums) >= maxSums {
		k = sumKey{kind: e.Type}
		t = q.sums[k]
		e.Proto, e.Target, e.Verdict, e.Note = "", "", nil, ""
	}
	if t == nil {
		e.Conn, e.Dialed, e.Via, e.Method, e.Path, e.Status = 0, "", "", "", "", 0
		e.Count = 1
		q.sums[k] = &e
		return
	}
	t.Count++
	t.Sent += e.Sent
	t.Recv += e.Recv
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
