package spawn_test

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/walls"
)

// BenchmarkStart measures /bin/true from the call of Start to its being reaped, beside the standard
// library's fork and exec without any walls, in turns.
func BenchmarkStart(b *testing.B) {
	for _, c := range []struct {
		name  string
		walls guestwire.Walls
		scope bool
	}{
		{"none", noWalls(), false},
		{"locked", profile(b, isolation.Locked, walls.Options{OpenFiles: 4096}, false), false},
		{"standard", profile(b, isolation.Standard, walls.Options{OpenFiles: 4096}, false), false},
		{"locked-scope", profile(b, isolation.Locked, walls.Options{OpenFiles: 4096}, false), true},
	} {
		b.Run(c.name, func(b *testing.B) {
			s := script{Walls: c.walls, Bench: 1000}
			var files []*os.File
			if c.scope {
				dir := group(b, filepath.Join(mounted(b, "freezer"), unique(b)))
				s.Files, files = []string{"tasks"}, []*os.File{open(b, dir+"/tasks", os.O_WRONLY)}
			}
			var spawner, plain []int64
			for b.Loop() {
				r := inGuest(b, s, files...)
				spawner, plain = append(spawner, r.Spawner...), append(plain, r.Plain...)
			}
			b.ReportMetric(0, "ns/op") // of a thousand starts and a guest: says nothing
			b.ReportMetric(quantile(spawner, 50), "p50-µs")
			b.ReportMetric(quantile(spawner, 99), "p99-µs")
			b.ReportMetric(quantile(plain, 50), "plain-p50-µs")
			b.ReportMetric(quantile(plain, 99), "plain-p99-µs")
		})
	}
}

func quantile(ns []int64, percent int) float64 {
	slices.Sort(ns)
	return float64(ns[len(ns)*percent/100]) / 1e3
}
