package gateway

import (
	"context"
	"sync"
	"time"

	"casemate.dev/internal/egress"
)

// keepEvents is how many events wait for a server that is away, and keepContent how many bytes of content with them, of
// all sandboxes and of one. Nobody waits for the server: content that there is no room for is left out.
const (
	keepEvents     = 16384
	keepContent    = 64 << 20
	keepContentOne = 8 << 20
	whyWaiting     = "the server was away for too long, or took the events before it too slowly"
)

// events keeps events until the server has recorded them.
type events struct {
	mu      sync.Mutex // guards the fields below
	list    []egress.Event
	first   uint64         // number of the first in list
	dropped map[string]int // how many were left out, by sandbox
	// used is what was used of model providers beyond what is kept: it counts against a budget, so it is summed up and
	// never left out.
	used map[usedKey]*egress.Event
	// content is how many bytes of it the events in list hold, by sandbox, and all of them together.
	content map[string]int
	all     int
	more    chan struct{} // closed when there are more
}

type usedKey struct{ sandbox, provider, secret string }

func newEvents() *events {
	return &events{first: 1, dropped: map[string]int{}, used: map[usedKey]*egress.Event{}, content: map[string]int{}, more: make(chan struct{})}
}

// emit keeps an event for the server.
func (g *Gateway) emit(e egress.Event) {
	e.Time = time.Now()
	g.stats.events.Add(1)
	v := g.events
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.list) >= keepEvents {
		v.beyond(e)
		return
	}
	v.list = append(v.list, v.withRoom(e))
	close(v.more)
	v.more = make(chan struct{})
}

// withRoom counts an event's content, or leaves it out where there is no room. The caller holds mu.
func (v *events) withRoom(e egress.Event) egress.Event {
	n := e.Content()
	if n == 0 {
		return e
	}
	if v.all+n > keepContent || v.content[e.Sandbox]+n > keepContentOne {
		return e.WithoutContent(whyWaiting)
	}
	v.all += n
	v.content[e.Sandbox] += n
	return e
}

// forget lets go of the first n events. The caller holds mu.
func (v *events) forget(n uint64) {
	for i, e := range v.list[:n] {
		if c := e.Content(); c > 0 {
			v.all -= c
			if v.content[e.Sandbox] -= c; v.content[e.Sandbox] == 0 {
				delete(v.content, e.Sandbox)
			}
		}
		v.list[i] = egress.Event{} // its content goes now, and not when the list is copied
	}
	v.list = v.list[n:]
	v.first += n
	if len(v.list) == 0 {
		v.list = nil
	}
}

// beyond takes an event for which there is no room. The caller holds mu.
func (v *events) beyond(e egress.Event) {
	if e.Type != egress.EventModel {
		v.dropped[e.Sandbox]++
		return
	}
	k := usedKey{e.Sandbox, e.Provider, e.Secret}
	if t := v.used[k]; t != nil {
		addTo(t, e)
		return
	}
	e.Conn, e.Method, e.Path, e.Status, e.Count = 0, "", "", 0, times(e)
	e.Bodies, e.Unfinished, e.NotKept, e.Began = nil, nil, "", time.Time{}
	v.used[k] = &e
}

// caughtUp puts what there was no room for behind the rest, now that there is some. The caller holds mu.
func (v *events) caughtUp() {
	for _, e := range v.used {
		v.list = append(v.list, *e)
	}
	for sandbox, n := range v.dropped {
		v.list = append(v.list, egress.Event{
			Sandbox: sandbox, Time: time.Now(), Type: egress.EventDropped, Count: n, Note: "the server was away for too long, and took these events too late",
		})
	}
	clear(v.used)
	clear(v.dropped)
}

// waiting returns the number of the last event that waits for the server, 0 where none does. What is summed up of a sandbox
// is among them.
func (g *Gateway) waiting(sandbox string) uint64 {
	if s, err := g.find(sandbox); err == nil {
		s.flush()
	}
	v := g.events
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.list) == 0 {
		return 0
	}
	return v.first + uint64(len(v.list)) - 1
}

// batch is how many events are handed over at once, with so many bytes of content at most unless it is one event's.
const (
	batch        = 256
	batchContent = 2 << 20
)

// nextLocked returns the events that are handed over next. The caller holds mu.
func (v *events) nextLocked() []egress.Event {
	n, bytes := 0, 0
	for n < min(len(v.list), batch) {
		if bytes += v.list[n].Content(); bytes > batchContent && n > 0 {
			break
		}
		n++
	}
	return append([]egress.Event(nil), v.list[:n]...)
}

// Events returns events after number after, once there are some, and the number of the last of them. What
// comes before after is forgotten: the server has it.
func (g *Gateway) Events(ctx context.Context, after uint64) ([]egress.Event, uint64, error) {
	v := g.events
	for {
		v.mu.Lock()
		if after >= v.first {
			v.forget(min(after-v.first+1, uint64(len(v.list))))
		}
		if len(v.list) < keepEvents {
			v.caughtUp()
		}
		if len(v.list) > 0 {
			out := v.nextLocked()
			last := v.first + uint64(len(out)) - 1
			v.mu.Unlock()
			return out, last, nil
		}
		more := v.more
		v.mu.Unlock()
		select {
		case <-more:
		case <-ctx.Done():
			return nil, after, ctx.Err()
		}
	}
}
