package rootfs

import (
	"fmt"
	"os"
	"slices"
	"testing"
	"time"
)

// BenchmarkCommit commits a sandbox that has changed 10 of 100,000 committed files, and tells beside the time of
// the whole how long it stood still.
func BenchmarkCommit(b *testing.B) {
	s := open(b, Config{Mechanism: byBtrfs, ImageBytes: 2 << 30})
	id, p := plan(b, s, Request{DiskBytes: 1 << 30})
	const files, changed = 100_000, 10
	at := func(i int) string { return fmt.Sprintf("%s/%d/%d", p.Upper, i/1000, i) }
	for i := range files {
		if i%1000 == 0 {
			if err := os.Mkdir(fmt.Sprintf("%s/%d", p.Upper, i/1000), 0o755); err != nil {
				b.Fatal(err)
			}
		}
		if err := os.WriteFile(at(i), []byte("some text"), 0o644); err != nil {
			b.Fatal(err)
		}
	}
	commit(b, s, id, p)
	var still, whole []time.Duration
	for n := 0; b.Loop(); n++ {
		for i := range changed {
			if err := os.WriteFile(at((n*7919+i*9973)%files), fmt.Appendf(nil, "other text %d", n), 0o644); err != nil {
				b.Fatal(err)
			}
		}
		begun := time.Now()
		var held time.Time
		hold := func() error { held = time.Now(); return nil }
		release := func() error { still = append(still, time.Since(held)); return nil }
		if _, err := s.Commit(b.Context(), id, p, hold, release); err != nil {
			b.Fatal(err)
		}
		whole = append(whole, time.Since(begun))
	}
	slices.Sort(still)
	slices.Sort(whole)
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	b.ReportMetric(ms(whole[len(whole)/2]), "whole-p50-ms")
	b.ReportMetric(ms(still[len(still)/2]), "still-p50-ms")
	b.ReportMetric(ms(still[len(still)*9/10]), "still-p90-ms")
}
