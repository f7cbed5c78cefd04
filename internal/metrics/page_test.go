package metrics

import (
	"strings"
	"sync"
	"testing"
	"time"
)

// page is one with a figure of each kind.
func page() *Page {
	p := &Page{}
	var took Durations
	for _, d := range []time.Duration{0, 500 * time.Microsecond, 7 * time.Millisecond, time.Hour} {
		took.Observe(d)
	}
	var c Counts[[2]string]
	c.Add([2]string{"b", `odd"\` + "\n\xff"}, 2)
	c.Add([2]string{"a", ""}, 1)
	c.Add([2]string{"a", ""}, 3)
	p.Gauge("casemate_things", "Things\nthat are.", Of(2.5))
	p.Counter("casemate_done_total", "What was done.", c.Samples(func(k [2]string) []string { return []string{"kind", k[0], "more", k[1]} })...)
	p.Histogram("casemate_took_seconds", "How long.", OfDurations(&took, "of", "x"), OfDurations(&Durations{}))
	p.Gauge("casemate_none", "Left out.")
	return p
}

func TestPage(t *testing.T) {
	const want = `# HELP casemate_things Things\nthat are.
# TYPE casemate_things gauge
casemate_things 2.5
# HELP casemate_done_total What was done.
# TYPE casemate_done_total counter
casemate_done_total{kind="a",more=""} 4
casemate_done_total{kind="b",more="odd\"\\\n�"} 2
# HELP casemate_took_seconds How long.
# TYPE casemate_took_seconds histogram
casemate_took_seconds_bucket{le="0.0005"} 0
`
	got := page().String()
	if !strings.HasPrefix(got, want) {
		t.Errorf("got\n%s", got)
	}
	for _, line := range []string{
		`casemate_took_seconds_bucket{of="x",le="0.0005"} 2`, `casemate_took_seconds_bucket{of="x",le="0.005"} 2`,
		`casemate_took_seconds_bucket{of="x",le="0.01"} 3`, `casemate_took_seconds_bucket{of="x",le="30"} 3`,
		`casemate_took_seconds_bucket{of="x",le="+Inf"} 4`, `casemate_took_seconds_sum{of="x"} 3600.0075`, `casemate_took_seconds_count{of="x"} 4`,
		`casemate_took_seconds_count 0`,
	} {
		if !strings.Contains(got, line+"\n") {
			t.Errorf("%s is not in\n%s", line, got)
		}
	}
	if strings.Contains(got, "casemate_none") {
		t.Error("a figure without a value is there")
	}
}

func TestConcurrent(t *testing.T) {
	var took Durations
	var c Counts[string]
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 1000 {
				took.Observe(time.Millisecond)
				c.Add("k", 1)
			}
		})
	}
	all.Wait()
	p := &Page{}
	p.Histogram("x_seconds", "X.", OfDurations(&took))
	p.Counter("y_total", "Y.", c.Samples(func(k string) []string { return []string{"k", k} })...)
	if s := p.String(); !strings.Contains(s, "x_seconds_count 8000\n") || !strings.Contains(s, `y_total{k="k"} 8000`) {
		t.Error(s)
	}
}

func BenchmarkObserve(b *testing.B) {
	var d Durations
	for b.Loop() {
		d.Observe(3 * time.Millisecond)
	}
}
