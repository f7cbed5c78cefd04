package api

import (
	"testing"

	"casemate.dev/client"
)

// BenchmarkVersion is a call that does nothing: the price of HTTP, Connect and the gate.
func BenchmarkVersion(b *testing.B) {
	h := newHarness(b)
	c, err := client.New(h.url, h.user)
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	b.ReportAllocs()
	for b.Loop() {
		if _, err := c.System.Version(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkExecute is a whole process on the fake backend: what all layers but the kernel's add.
func BenchmarkExecute(b *testing.B) {
	h := newHarness(b)
	box := h.box()
	c, err := client.New(h.url, h.user)
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	spec := &client.ProcessSpec{Argv: []string{"true"}}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := c.Processes.Execute(b.Context(), box, spec, nil); err != nil {
			b.Fatal(err)
		}
	}
}
