package gateway

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// meter counts bytes one way and holds them to a rate.
type meter struct {
	total atomic.Int64
	rate  atomic.Int64 // bytes a second; 0: no limit

	mu   sync.Mutex // guards the field below
	next time.Time  // when the next byte may pass
}

func newMeter() *meter { return &meter{} }

func (m *meter) setRate(r int64) { m.rate.Store(max(r, 0)) }

// credit is how long a quiet sandbox may save up.
const credit = 100 * time.Millisecond

// wait counts n bytes and returns when they may pass.
func (m *meter) wait(ctx context.Context, n int) error {
	m.total.Add(int64(n))
	rate := m.rate.Load()
	if rate == 0 {
		return nil
	}
	now := time.Now()
	m.mu.Lock()
	if m.next.Before(now.Add(-credit)) {
		m.next = now.Add(-credit)
	}
	m.next = m.next.Add(time.Duration(float64(n) / float64(rate) * float64(time.Second)))
	pause := m.next.Sub(now)
	m.mu.Unlock()
	if pause <= 0 {
		return nil
	}
	t := time.NewTimer(pause)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
