package watch

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"sync"
	"time"

	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/keeper"
)

// The times over which calls that are the same are counted, not told one by one: the first, doubled as long as they go on,
// up to the last.
const (
	firstWindow = time.Second
	lastWindow  = time.Minute
)

// mostTold is how many different calls of one kind of a sandbox are told apart at a time.
const mostTold = 512

// notes are what was seen of one sandbox lately, so that repeats are counted.
type notes struct {
	seen map[string]*repeat
	told map[isolation.CallKind]int // how many of each kind are in seen
}

type repeat struct {
	event  isolation.CallEvent
	more   int
	until  time.Time
	window time.Duration
}

// key is what makes two calls the same.
func key(e isolation.CallEvent) string {
	return strings.Join(append(slices.Concat(e.Argv, e.Args), string(e.Kind), e.Call, e.Command, e.Target, e.Process, e.Note), "\x00")
}

// note tells of a call, or counts it. The caller holds the box's mu.
func (k *process) note(b *box, e isolation.CallEvent, now time.Time) {
	n := &b.notes
	if n.seen == nil {
		n.seen, n.told = map[string]*repeat{}, map[isolation.CallKind]int{}
	}
	id := key(e)
	r := n.seen[id]
	if r == nil && (n.told[e.Kind] >= mostTold || e.Kind == isolation.CallAttempt && e.Reaction == "" && !b.distinct.take(now)) {
		// So many different ones that they are only counted, by kind and call.
		e = isolation.CallEvent{Sandbox: e.Sandbox, Time: e.Time, Kind: e.Kind, Call: e.Call, Errno: e.Errno, Reaction: e.Reaction, Note: "many different ones"}
		id = key(e)
		r = n.seen[id]
	}
	if r != nil && e.Reaction == "" {
		r.more++
		return
	}
	if r == nil {
		n.told[e.Kind]++
	}
	n.seen[id] = &repeat{event: e, until: now.Add(firstWindow), window: firstWindow}
	k.by(b, now.Add(firstWindow))
	k.events.add(e)
}

// flush tells of repeats whose time is over, of all of them where the sandbox has ended, and returns in how long the next
// is due; 0: none is.
func (n *notes) flush(now time.Time, all bool, tell func(isolation.CallEvent)) time.Duration {
	var next time.Duration
	for id, r := range n.seen {
		left := r.until.Sub(now)
		if left > 0 && !all {
			if next == 0 || left < next {
				next = left
			}
			continue
		}
		if r.more == 0 {
			delete(n.seen, id)
			n.told[r.event.Kind]--
			continue
		}
		e := r.event
		e.Time, e.Count, e.PID, e.Reaction = now, r.more, 0, ""
		tell(e)
		r.more = 0
		r.window = min(2*r.window, lastWindow)
		r.until = now.Add(r.window)
	}
	return next
}

// The bounds of what waits for a server that is away: of all sandboxes, of one, and of one answer.
const (
	keepEvents = 16384
	keepPerBox = 2048
	answerSize = 96 << 10
)

// events keeps events until the server has recorded them.
type events struct {
	mu      sync.Mutex // guards the fields below
	list    []isolation.CallEvent
	first   uint64         // number of the first in list
	held    map[string]int // how many of each sandbox are in list
	dropped map[string]int // how many of each sandbox were not kept
	more    chan struct{}  // closed when there are more
}

func newEvents() *events {
	return &events{first: 1, held: map[string]int{}, dropped: map[string]int{}, more: make(chan struct{})}
}

func (v *events) add(e isolation.CallEvent) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.list) >= keepEvents || v.held[e.Sandbox] >= keepPerBox && e.Reaction == "" {
		v.dropped[e.Sandbox] += max(e.Count, 1)
		return
	}
	v.keepLocked(e)
}

func (v *events) keepLocked(e isolation.CallEvent) {
	v.list = append(v.list, e)
	v.held[e.Sandbox]++
	close(v.more)
	v.more = make(chan struct{})
}

// after returns events after a number, once there are some. What comes before is forgotten: the server has it.
func (v *events) after(ctx context.Context, n uint64) (keeper.Events, error) {
	for {
		v.mu.Lock()
		v.forgetLocked(n)
		if len(v.list) > 0 {
			out := v.batchLocked()
			v.mu.Unlock()
			return out, nil
		}
		more := v.more
		v.mu.Unlock()
		select {
		case <-more:
		case <-ctx.Done():
			return keeper.Events{}, ctx.Err()
		}
	}
}

func (v *events) forgetLocked(n uint64) {
	if n >= v.first {
		gone := min(n-v.first+1, uint64(len(v.list)))
		for _, e := range v.list[:gone] {
			if v.held[e.Sandbox]--; v.held[e.Sandbox] == 0 {
				delete(v.held, e.Sandbox)
			}
		}
		v.list = v.list[gone:]
		v.first += gone
	}
	for id, count := range v.dropped {
		if len(v.list) >= keepEvents || v.held[id] >= keepPerBox {
			continue
		}
		delete(v.dropped, id)
		v.keepLocked(isolation.CallEvent{
			Sandbox: id, Time: time.Now(), Kind: isolation.CallGap, Count: count, Note: "more system calls than could be kept until they were recorded",
		})
	}
	if len(v.list) == 0 {
		v.list = nil
	}
}

// batchLocked returns as many events as an answer can hold.
func (v *events) batchLocked() keeper.Events {
	size, n := 0, 0
	for _, e := range v.list {
		text, _ := json.Marshal(e) // plain data: can't fail
		if size += len(text) + 1; n > 0 && size > answerSize {
			break
		}
		n++
	}
	return keeper.Events{Events: slices.Clone(v.list[:n]), Last: v.first + uint64(n) - 1}
}
