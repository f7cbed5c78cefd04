package server

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"sync/atomic"
)

// heapRoom is how much is allocated between two garbage collections at least. Go's own measure is as much as is
// in use, which is little here: 10 MB, some 400 short calls. A collection takes 5 ms of both processors of a small
// machine, so it met one call in a hundred; with this it meets one in five hundred.
const heapRoom = 48 << 20

// roomyHeap sees to it that heapRoom holds until stop is called. GOGC in the environment has precedence.
func roomyHeap() (stop func()) {
	if os.Getenv("GOGC") != "" {
		return func() {}
	}
	h := newHeap()
	h.adjust()
	h.again()
	return func() { h.over.Store(true) }
}

// heap adjusts the collector after each collection.
type heap struct {
	over    atomic.Bool
	percent int
	sample  []metrics.Sample
}

func newHeap() *heap {
	return &heap{percent: 100, sample: []metrics.Sample{{Name: "/gc/heap/live:bytes"}}}
}

// again has adjust called after the next collection: what nothing refers to is cleaned up then.
func (h *heap) again() {
	runtime.AddCleanup(new(*heap), func(h *heap) {
		if !h.over.Load() {
			h.adjust()
			h.again()
		}
	}, h)
}

// adjust sets the percentage of growth that comes nearest to heapRoom, and at least Go's own.
func (h *heap) adjust() {
	metrics.Read(h.sample)
	live := int64(1)
	if v := h.sample[0].Value; v.Kind() == metrics.KindUint64 {
		live = max(live, int64(v.Uint64()))
	}
	percent := int(max(100, min(heapRoom*100/live, 1000)))
	// To set it stops all goroutines for a moment: only where it matters.
	if percent > h.percent*5/4 || percent < h.percent*4/5 {
		h.percent = percent
		debug.SetGCPercent(percent)
	}
}
