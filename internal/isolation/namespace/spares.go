package namespace

import (
	"errors"
	"slices"
	"sync"
	"time"

	"casemate.dev/internal/linux/cgroup"
)

// spares are guests that wait for their launch. Making namespaces and executing the guest is most of
// a start, and needs nothing that only the caller knows.
type spares struct {
	wg sync.WaitGroup

	mu      sync.Mutex // guards the fields below
	ready   []*guest
	next    *ahead // what a runtime is started with ahead; nil: none is
	inReach bool   // of the keeper, as the last start was
	making  bool
	stopped bool
	stop    chan struct{} // closed with stopped
}

// stopping returns a channel that is closed when no more spares are wanted.
func (s *spares) stopping() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stop
}

// take returns a waiting guest, which may not be alive any more, or nil: in reach of the keeper or not, and one whose runtime
// is the one that is wanted, else one that has none.
func (s *spares) take(want *ahead, inReach bool) *guest {
	fits := func(g *guest) bool { return g.inReach == inReach && want != nil && g.ahead.same(want) }
	plain := func(g *guest) bool { return g.inReach == inReach && g.ahead == nil }
	if g := s.takeFirst(fits); g != nil {
		return g
	}
	return s.takeFirst(plain)
}

// takeFirst returns the first waiting guest that fits, or nil.
func (s *spares) takeFirst(fits func(*guest) bool) *guest {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := slices.IndexFunc(s.ready, fits)
	if at < 0 {
		return nil
	}
	g := s.ready[at]
	s.ready = slices.Delete(s.ready, at, at+1)
	return g
}

// expect says what the next start is likely to want; nil says nothing about its runtime.
func (s *spares) expect(next *ahead, inReach bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.inReach = inReach
	if next != nil {
		s.next = next
	}
}

// stale takes out a guest that is not what is expected any more, or nil.
func (s *spares) stale() *guest {
	return s.takeFirst(func(g *guest) bool { return g.inReach != s.inReach || g.ahead != nil && !g.ahead.same(s.next) })
}

// lackLocked says what is to be made: a guest with a runtime, one without, or nothing.
func (b *Backend) lackLocked() (next *ahead, any bool) {
	s := &b.spares
	plain, all := 0, 0
	for _, g := range s.ready {
		if g.inReach != s.inReach {
			continue
		}
		if all++; g.ahead == nil {
			plain++
		}
	}
	if plain < b.cfg.Spares {
		return nil, true
	}
	if b.cfg.Spares > 0 && s.next != nil && all == plain {
		return s.next, true
	}
	return nil, false
}

// Spares returns how many guests wait for their launch, and how many are wanted.
func (b *Backend) Spares() (ready, wanted int) {
	b.spares.mu.Lock()
	defer b.spares.mu.Unlock()
	wanted = max(b.cfg.Spares, 0)
	if wanted > 0 && b.spares.next != nil {
		wanted++
	}
	return len(b.spares.ready), wanted
}

// refillDelay keeps the making of spares out of the way of the start that used one up, and of what its
// caller does next.
const refillDelay = 10 * time.Millisecond

// takeGuest returns a spare, or starts a guest.
func (b *Backend) takeGuest(limits cgroup.Limits, want *ahead, inReach bool) (*guest, error) {
	for {
		g := b.spares.take(want, inReach)
		if g == nil {
			return b.startGuest(limits, inReach)
		}
		if g.proc.Alive() {
			return g, nil
		}
		b.logError("discard spare", b.discard(g))
	}
}

// refill brings the spares up to their number in the background, one after the other: a burst of
// starts must not compete with more than one of them.
func (b *Backend) refill() {
	s := &b.spares
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, lacking := b.lackLocked(); s.making || s.stopped || !lacking {
		return
	}
	s.making = true
	s.wg.Go(func() {
		select {
		case <-time.After(refillDelay):
			b.makeSpares()
		case <-s.stopping():
		}
	})
}

func (b *Backend) makeSpares() {
	s := &b.spares
	for {
		if g := s.stale(); g != nil {
			b.logError("discard spare", b.discard(g))
		}
		s.mu.Lock()
		next, lacking := b.lackLocked()
		inReach := s.inReach
		if !lacking || s.stopped {
			s.making = false
			s.mu.Unlock()
			return
		}
		s.mu.Unlock()
		g, err := b.makeSpare(next, inReach)
		s.mu.Lock()
		if err == nil && !s.stopped {
			s.ready = append(s.ready, g)
			g = nil
		}
		if err != nil && next != nil {
			s.next = nil // until the next start
		}
		stop := err != nil || s.stopped
		if stop {
			s.making = false
		}
		s.mu.Unlock()
		b.logError("make spare", err)
		if g != nil {
			b.logError("discard spare", b.discard(g))
		}
		if stop {
			return
		}
	}
}

// makeSpare makes a guest that waits, with a runtime if there is one to start ahead.
func (b *Backend) makeSpare(next *ahead, inReach bool) (*guest, error) {
	g, err := b.startGuest(groupLimits(b.cfg.SpareLimits), inReach)
	if err != nil || next == nil {
		return g, err
	}
	if err := b.startAhead(g, next); err != nil {
		return nil, errors.Join(err, b.discard(g))
	}
	return g, nil
}

// discard ends a guest that was not launched, and frees all that it had.
func (b *Backend) discard(g *guest) error {
	if err := b.endGuest(g); err != nil {
		return err // its ids are not free while anything runs with them
	}
	var err error
	if g.group != nil {
		err = b.removeGroup(g.group)
	}
	b.ids.release(g.first)
	b.unknown(g.name)
	return err
}

// stopSpares ends them, and no new ones are made.
func (b *Backend) stopSpares() {
	s := &b.spares
	s.mu.Lock()
	if !s.stopped {
		s.stopped = true
		close(s.stop)
	}
	s.mu.Unlock()
	s.wg.Wait()
	every := func(*guest) bool { return true }
	for g := s.takeFirst(every); g != nil; g = s.takeFirst(every) {
		b.logError("discard spare", b.discard(g))
	}
}
