package cgroup

import (
	"context"
	"fmt"
	"testing"
	"time"

	"casemate.dev/internal/id"
)

func benchHierarchy(b *testing.B) *Hierarchy {
	b.Helper()
	h, err := Open("b" + id.Sandbox()[:12])
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := h.RemoveAll(ctx); err != nil {
			b.Error(err)
		}
		_ = h.Close()
	})
	return h
}

func BenchmarkCreate(b *testing.B) {
	h := benchHierarchy(b)
	for b.Loop() {
		g, err := h.Create(id.Sandbox(), Limits{MemoryBytes: 1 << 30, CPUs: 1.8, Pids: 512})
		if err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		if err := g.Remove(context.Background()); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}

func BenchmarkRemove(b *testing.B) {
	h := benchHierarchy(b)
	for b.Loop() {
		b.StopTimer()
		g, err := h.Create(id.Sandbox(), Limits{MemoryBytes: 1 << 30, CPUs: 1.8, Pids: 512})
		if err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
		if err := g.Remove(context.Background()); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkScope(b *testing.B) {
	h := benchHierarchy(b)
	g, err := h.Create(id.Sandbox(), Limits{})
	if err != nil {
		b.Fatal(err)
	}
	i := 0
	for b.Loop() {
		i++
		s, err := g.NewScope(fmt.Sprintf("prc_%d", i))
		if err != nil {
			b.Fatal(err)
		}
		if err := s.Close(); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkInGuest(b *testing.B) {
	h := benchHierarchy(b)
	g, err := h.Create(id.Sandbox(), Limits{})
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if err := g.InGuest(func(int) error { return nil }); err != nil {
			b.Fatal(err)
		}
	}
}
