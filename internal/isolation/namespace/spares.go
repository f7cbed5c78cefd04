package namespace

import (
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

// take returns a waiting guest that is alive, or nil.
func (s *spares) take() *guest {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.ready) == 0 {
		return nil
	}
	g := s.ready[0]
	s.ready = s.ready[1:]
	return g
}

// Spares returns how many guests wait for their launch, and how many are wanted.
func (b *Backend) Spares() (ready, wanted int) {
	b.spares.mu.Lock()
	defer b.spares.mu.Unlock()
	return len(b.spares.ready), max(b.cfg.Spares, 0)
}

// refillDelay keeps the making of spares out of the way of the start that used one up, and of what its
// caller does next.
const refillDelay = 10 * time.Millisecond

// takeGuest returns a spare, or starts a guest.
func (b *Backend) takeGuest(limits cgroup.Limits) (*guest, error) {
	for {
		g := b.spares.take()
		if g == nil {
			return b.startGuest(limits)
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
	if s.making || s.stopped || len(s.ready) >= b.cfg.Spares {
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
		g, err := b.startGuest(groupLimits(b.cfg.SpareLimits))
		s.mu.Lock()
		if err == nil && !s.stopped {
			s.ready = append(s.ready, g)
			g = nil
		}
		if err != nil || s.stopped || len(s.ready) >= b.cfg.Spares {
			s.making = false
			s.mu.Unlock()
			b.logError("make spare", err)
			if g != nil {
				b.logError("discard spare", b.discard(g))
			}
			return
		}
		s.mu.Unlock()
	}
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
	for g := s.take(); g != nil; g = s.take() {
		b.logError("discard spare", b.discard(g))
	}
}
