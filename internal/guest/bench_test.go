package guest_test

import (
	"fmt"
	"io"
	"slices"
	"testing"
	"time"

	"casemate.dev/internal/guestwire"
)

// BenchmarkRunTrue is the guest's part of a process's whole life: dial, start, output, end.
func BenchmarkRunTrue(b *testing.B) {
	r := newRunner(b, setup{})
	layout, open := scope(b, "true") // one for all: it is empty again each time
	n := 0
	var took []time.Duration
	defer func() {
		slices.Sort(took)
		b.ReportMetric(float64(took[len(took)/10].Microseconds()), "p10-us")
		b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-us")
	}()
	for b.Loop() {
		n++
		begun := time.Now()
		_, s, err := r.Run(b.Context(), guestwire.RunProcess{
			Start:  guestwire.StartProcess{ID: fmt.Sprint(n), Argv: []string{"/usr/bin/true"}, Scope: layout},
			Output: guestwire.OutputRequest{Follow: true},
		}, open)
		if err != nil {
			b.Fatal(err)
		}
		for err == nil {
			_, err = s.Next()
		}
		if err != io.EOF {
			b.Fatal(err)
		}
		s.Close()
		took = append(took, time.Since(begun))
	}
}

func BenchmarkCall(b *testing.B) {
	r := newRunner(b, setup{})
	for b.Loop() {
		if _, err := r.Get(b.Context(), "none"); err == nil {
			b.Fatal("it is there")
		}
	}
}

func BenchmarkOutputThroughput(b *testing.B) {
	r := newRunner(b, setup{})
	const size = 256 << 20
	b.SetBytes(size)
	n := 0
	for b.Loop() {
		n++
		_, s, err := r.Run(b.Context(), guestwire.RunProcess{
			Start:  guestwire.StartProcess{ID: fmt.Sprint(n), Argv: []string{"head", "-c", fmt.Sprint(size), "/dev/zero"}, Hold: true},
			Output: guestwire.OutputRequest{Follow: true, Hold: true},
		}, nil)
		if err != nil {
			b.Fatal(err)
		}
		for err == nil {
			_, err = s.Next()
		}
		s.Close()
	}
}
