package gateway

import (
	"context"
	"sync"
	"time"

	"casemate.dev/internal/egress"
)

// keepEvents is how many events wait for a server that is away.
const keepEvents = 16384

// events keeps events until the server has recorded them.
type events struct {
	mu      sync.Mutex // guards the fields below
	list    []egress.Event
	first   uint64 // number of the first in list
	dropped int
	more    chan struct{} // closed when there are more
}

func newEvents() *events { return &events{first: 1, more: make(chan struct{})} }

// emit keeps an event for the server.
func (g *Gateway) emit(e egress.Event) {
	e.Time = time.Now()
	g.stats.events.Add(1)
	v := g.events
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.list) >= keepEvents {
		v.dropped++
		return
	}
	v.list = append(v.list, e)
	close(v.more)
	v.more = make(chan struct{})
}

// batch is how many events are handed over at once.
const batch = 256

// Events returns events after number after, once there are some, and the number of the last of them. What
// comes before after is forgotten: the server has it.
func (g *Gateway) Events(ctx context.Context, after uint64) ([]egress.Event, uint64, error) {
	v := g.events
	for {
		v.mu.Lock()
		if after >= v.first {
			n := min(after-v.first+1, uint64(len(v.list)))
			v.list = v.list[n:]
			v.first += n
			if len(v.list) == 0 {
				v.list = nil
			}
		}
		if v.dropped > 0 && len(v.list) < keepEvents {
			v.list = append(v.list, egress.Event{Time: time.Now(), Type: egress.EventDropped, Count: v.dropped})
			v.dropped = 0
		}
		if len(v.list) > 0 {
			out := append([]egress.Event(nil), v.list[:min(len(v.list), batch)]...)
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
