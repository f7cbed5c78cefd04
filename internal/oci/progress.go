package oci

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// The steps that an operation goes through, as Progress names them.
const (
	StepResolve = "resolve"
	StepFetch   = "fetch"
	StepUnpack  = "unpack"
	StepPack    = "pack"
	StepPush    = "push"
	StepKeep    = "keep"
)

// Progress is how far an operation is.
type Progress struct {
	Step string
	// Done and Total count bytes; a Total of 0 is unknown.
	Done, Total int64
	Layers      []LayerProgress
}

// LayerProgress is how far one layer is.
type LayerProgress struct {
	Digest string
	// Size is that of its archive, of which Fetched and Unpacked bytes are through.
	Size, Fetched, Unpacked int64
	// Present says that it was there before.
	Present bool
}

// tracker is the progress of one operation, which those who share it look at.
type tracker struct {
	// mu guards the fields below.
	mu     sync.Mutex
	step   string
	done   int64
	total  int64
	layers []*layerTrack
}

// layerTrack is one layer's; its fields are counters of their own.
type layerTrack struct {
	digest            string
	size              int64
	fetched, unpacked atomic.Int64
	present           atomic.Bool
}

func (t *tracker) set(step string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.step = step
}

func (t *tracker) count(done, total int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.done, t.total = done, total
}

func (t *tracker) add(digest string, size int64) *layerTrack {
	l := &layerTrack{digest: digest, size: size}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.layers = append(t.layers, l)
	return l
}

// look returns what there is to tell.
func (t *tracker) look() Progress {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := Progress{Step: t.step, Done: t.done, Total: t.total}
	for _, l := range t.layers {
		lp := LayerProgress{Digest: l.digest, Size: l.size, Fetched: l.fetched.Load(), Unpacked: l.unpacked.Load(), Present: l.present.Load()}
		p.Layers = append(p.Layers, lp)
		if t.total == 0 && !lp.Present {
			p.Done += lp.Fetched + lp.Unpacked
		}
	}
	if t.total == 0 {
		for _, l := range p.Layers {
			if !l.Present {
				p.Total += 2 * l.Size
			}
		}
	}
	return p
}

// tellEvery is how often progress is told.
const tellEvery = 100 * time.Millisecond

// tell calls f with the progress of what t points at until stop is called, and once more then.
func tell(ctx context.Context, t *atomic.Pointer[tracker], f func(Progress)) (stop func()) {
	done, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		tick := time.NewTicker(tellEvery)
		defer tick.Stop()
		for {
			f(t.Load().look())
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			case <-done:
				f(t.Load().look())
				return
			}
		}
	}()
	return func() { close(done); <-stopped }
}
