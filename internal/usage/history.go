// Package usage remembers what sandboxes used, so that somebody can ask for an hour ago.
//
// What belongs here: when to look, and what is kept of it. What does not: measuring, which the Manager's
// backends do, and what an interface makes of the figures.
//
// A history is kept in memory and starts anew with the server. It covers the whole time that a sandbox was
// watched, with fewer samples the longer that is: when it is full, every other one goes.
package usage

import (
	"context"
	"sync"
	"time"

	"casemate.dev/internal/clock"
	"casemate.dev/internal/sandbox"
)

const (
	// maxSamples bounds a sandbox's history; 24 KB.
	maxSamples = 512
	// defaultEvery is how far samples are apart at first.
	defaultEvery = 5 * time.Second
	// perSandbox is the time that a round may take of one processor for each sandbox; with many of them
	// rounds are further apart, so that looking takes at most a few per cent of a processor.
	perSandbox = 10 * time.Millisecond
)

// Source is what is watched; sandbox.Manager is one.
type Source interface {
	// Alive lists the sandboxes that run or are paused.
	Alive() []string
	// Usage reads what one has used so far.
	Usage(ctx context.Context, p sandbox.Principal, ref string) (sandbox.Usage, error)
}

// Sample is what a sandbox had used at a moment.
type Sample struct {
	At time.Time
	// CPU is the time that its processes have had of all processors since it started.
	CPU                                time.Duration
	MemoryBytes, CacheBytes, DiskBytes int64
}

// Config is what New needs.
type Config struct {
	Source Source
	// Every is how far samples are apart at first; 0: 5 s.
	Every time.Duration
	// Clock tells time; nil: the system's.
	Clock clock.Clock
}

// History is what sandboxes used. Its methods are safe for concurrent use.
type History struct {
	cfg Config

	// mu guards the field below.
	mu  sync.Mutex
	all map[string]*series
}

// series is the history of one sandbox.
type series struct {
	samples []Sample
	apart   time.Duration
}

// New returns an empty history. Run fills it.
func New(cfg Config) *History {
	if cfg.Every == 0 {
		cfg.Every = defaultEvery
	}
	if cfg.Clock == nil {
		cfg.Clock = clock.New()
	}
	return &History{cfg: cfg, all: make(map[string]*series)}
}

// Run looks until ctx ends.
func (h *History) Run(ctx context.Context) {
	for {
		n := h.Look(ctx)
		t := time.NewTimer(max(h.cfg.Every, time.Duration(n)*perSandbox))
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return
		}
	}
}

// Look takes one sample of each sandbox, forgets those that are gone, and returns how many there are.
func (h *History) Look(ctx context.Context) int {
	ids := h.cfg.Source.Alive()
	alive := make(map[string]bool, len(ids))
	for _, id := range ids {
		alive[id] = true
		if s, err := h.Measure(ctx, id); err == nil { // it may have ended meanwhile
			h.add(id, s)
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for id := range h.all {
		if !alive[id] {
			delete(h.all, id)
		}
	}
	return len(ids)
}

// Measure takes a sample now, which is not kept.
func (h *History) Measure(ctx context.Context, id string) (Sample, error) {
	u, err := h.cfg.Source.Usage(ctx, sandbox.Principal{ID: "usage", Admin: true}, id)
	return Sample{At: h.cfg.Clock.Now(), CPU: u.CPU, MemoryBytes: u.MemoryBytes, CacheBytes: u.CacheBytes, DiskBytes: u.DiskBytes}, err
}

func (h *History) add(id string, s Sample) {
	h.mu.Lock()
	defer h.mu.Unlock()
	r := h.all[id]
	if r == nil {
		r = &series{apart: h.cfg.Every}
		h.all[id] = r
	}
	if n := len(r.samples); n > 0 && s.At.Sub(r.samples[n-1].At) < r.apart-h.cfg.Every/2 { // timers are not exact
		return
	}
	if len(r.samples) >= maxSamples {
		for i := range maxSamples / 2 {
			r.samples[i] = r.samples[2*i]
		}
		r.samples = r.samples[:maxSamples/2]
		r.apart *= 2
	}
	r.samples = append(r.samples, s)
}

// Range returns the samples from one moment to another, the oldest first, and before them the last one
// that is older, from which the first one's use of processors counts; ok is false where there is none.
func (h *History) Range(id string, from, to time.Time) (before Sample, ok bool, in []Sample) {
	h.mu.Lock()
	defer h.mu.Unlock()
	r := h.all[id]
	if r == nil {
		return Sample{}, false, nil
	}
	for _, s := range r.samples {
		switch {
		case s.At.Before(from):
			before, ok = s, true
		case !s.At.After(to):
			in = append(in, s)
		}
	}
	return before, ok, in
}
