package sandbox

import (
	"context"
	"time"

	"golang.org/x/sync/errgroup"

	"casemate.dev/internal/journal"
)

// What sandboxes use is recorded as events of type usage.metered: each says what the kernel has counted of processor time
// since the instance began, and how much memory was held since the event before. Memory has no such counter. It is
// read now and then, by whoever looks (every few seconds the server does), and between two readings the mean of both
// counts.

// How far events of one sandbox are apart.
const (
	// meterEvery is the most, so that little is unknown of a sandbox that is lost with the server.
	meterEvery = 5 * time.Minute
	// meterAsked is the least where somebody asks for what was used.
	meterAsked = 10 * time.Second
)

// meterWhy says what a reading is for, and so whether it is recorded.
type meterWhy int

const (
	meterTick  meterWhy = iota // somebody looked: recorded every meterEvery
	meterAsk                   // somebody asks what was used: recorded every meterAsked
	meterLeave                 // the server goes
	meterLast                  // the instance is about to go
)

// gauge sums up the memory that a sandbox holds.
type gauge struct {
	since time.Time // what is summed up, or from when on
	at    time.Time // of the last reading
	bytes int64     // at that time
	read  bool      // there was one
	told  bool      // something was recorded
	area  int64     // byte-milliseconds between since and at
}

func newGauge(now time.Time) gauge {
	now = wall(now).Truncate(time.Millisecond)
	return gauge{since: now, at: now}
}

// add takes a reading.
func (g *gauge) add(now time.Time, bytes int64) {
	now = wall(now).Truncate(time.Millisecond)
	if g.since.IsZero() || now.Before(g.at) { // the clock was set back: what lies between counts as nothing
		g.since, g.at = now, now
	}
	before := g.bytes
	if !g.read {
		before = bytes
	}
	g.area += (before + bytes) / 2 * now.Sub(g.at).Milliseconds()
	g.at, g.bytes, g.read = now, bytes, true
}

// take returns what was summed up, in byte-seconds, and over which time, and begins anew. What is less than a byte-second
// stays for the next time.
func (g *gauge) take() (byteSeconds, overMS int64) {
	byteSeconds, overMS = g.area/1000, g.at.Sub(g.since).Milliseconds()
	g.area, g.since = g.area%1000, g.at
	return byteSeconds, overMS
}

// meteredFacts are the kernel's facts of usage.metered.
//
//casemate:facts kernel usage.metered
type meteredFacts struct {
	// CPUUS is the processor time, in microseconds, that was counted for the sandbox since it was started or resumed from
	// the disk, the guest's and a runtime's own included.
	CPUUS       int64 `json:"cpu_us"`
	MemoryBytes int64 `json:"memory_bytes"` // what counted against its limit, at this moment
}

// heldFacts are the server's facts of usage.metered.
//
//casemate:facts server usage.metered
type heldFacts struct {
	// MemoryByteSeconds is the memory that it held, by for how long, in the last OverMS.
	MemoryByteSeconds int64 `json:"memory_byte_seconds"`
	OverMS            int64 `json:"over_ms"`        // since the event before, or since its start
	Last              bool  `json:"last,omitempty"` // its processes were about to be taken down
}

// meter reads what a sandbox has used, and records it where it is time to. One that can't be read is left out.
func (m *Manager) meter(ctx context.Context, b *box, why meterWhy) {
	if b.inst.now() == nil {
		return
	}
	ctx, cancel := m.brief(ctx)
	defer cancel()
	u, err := b.inst.Usage(ctx)
	m.metered(b, u, err, why)
}

// metered takes a reading of what a sandbox has used. err is that of the reading: what the host's kernel said is there all the
// same, where it was the guest who could not answer.
func (m *Manager) metered(b *box, u Usage, err error, why meterWhy) {
	if err != nil && u.CPU == 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.sb.State == Stopped { // read before the end, and late: nothing comes behind that event
		return
	}
	now := m.clock.Now()
	b.gauge.add(now, u.MemoryBytes)
	passed := b.gauge.at.Sub(b.gauge.since)
	if why == meterTick && passed < meterEvery || why == meterAsk && b.gauge.told && passed < meterAsked {
		return
	}
	b.gauge.told = true
	held := heldFacts{Last: why == meterLast}
	held.MemoryByteSeconds, held.OverMS = b.gauge.take()
	e := event(journal.UsageMetered, "", held).
		With(journal.Kernel, meteredFacts{CPUUS: u.CPU.Microseconds(), MemoryBytes: u.MemoryBytes})
	e.Sandbox = b.id
	m.journal.Post(e)
}

// meterAll records what sandboxes have used until now.
func (m *Manager) meterAll(ctx context.Context, boxes []*box) {
	var g errgroup.Group
	g.SetLimit(adopters)
	for _, b := range boxes {
		if b.alive() {
			g.Go(func() error {
				m.meter(ctx, b, meterLeave)
				return nil
			})
		}
	}
	_ = g.Wait()
}

// alive reports whether a sandbox runs or is paused.
func (b *box) alive() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.sb.State == Running || b.sb.State == Paused
}
