package server

import (
	"runtime"
	"runtime/debug"
	"testing"
)

func TestHeapHasRoom(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(100))
	runtime.GC()
	h := newHeap()
	h.adjust()
	small := h.percent
	if small <= 100 {
		t.Errorf("a small heap may grow by %d %%", small)
	}
	big := make([]byte, 4*heapRoom)
	runtime.GC()
	h.adjust()
	if h.percent != 100 {
		t.Errorf("a heap of %d MB may grow by %d %%", len(big)>>20, h.percent)
	}
	clear(big)
}
