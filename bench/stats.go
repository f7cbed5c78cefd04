package bench

import (
	"slices"
	"time"
)

// Stats sums up durations, in milliseconds.
type Stats struct {
	P50 float64 `json:"p50"`
	P95 float64 `json:"p95"`
	P99 float64 `json:"p99"`
	// Mean is the arithmetic mean.
	Mean float64 `json:"mean,omitempty"`
	// Rate is how many a second, where that was measured.
	Rate float64 `json:"rate,omitempty"`
	N    int     `json:"n"`

	sorted []time.Duration // what was summed up
}

func summarize(all []time.Duration) Stats {
	if len(all) == 0 {
		return Stats{}
	}
	sorted := slices.Sorted(slices.Values(all))
	var sum time.Duration
	for _, d := range sorted {
		sum += d
	}
	return Stats{
		P50: milliseconds(quantile(sorted, 0.50)), P95: milliseconds(quantile(sorted, 0.95)), P99: milliseconds(quantile(sorted, 0.99)),
		Mean: milliseconds(sum / time.Duration(len(sorted))), N: len(sorted), sorted: sorted,
	}
}

// oneByOne is summarize for what one client did, one after the other: how many a second it got is the mean's other side.
func oneByOne(all []time.Duration) Stats {
	s := summarize(all)
	if s.Mean > 0 {
		s.Rate = 1000 / s.Mean
	}
	return s
}

// with returns one for the durations of both; their rates are weighted by what they took.
func (s Stats) with(o Stats) Stats {
	if s.N == 0 {
		return o
	}
	both := summarize(slices.Concat(s.sorted, o.sorted))
	if s.Rate > 0 && o.Rate > 0 {
		both.Rate = float64(both.N) / (float64(s.N)/s.Rate + float64(o.N)/o.Rate)
	}
	return both
}

// quantile returns the smallest value that at least that share of the sorted values do not exceed.
func quantile(sorted []time.Duration, q float64) time.Duration {
	i := int(q*float64(len(sorted))+0.999999) - 1
	return sorted[min(max(i, 0), len(sorted)-1)]
}

func milliseconds(d time.Duration) float64 {
	return float64(d.Round(time.Microsecond)) / float64(time.Millisecond)
}

// once is a Stats of a single duration.
func once(d time.Duration) Stats {
	return Stats{P50: milliseconds(d), P95: milliseconds(d), P99: milliseconds(d), Mean: milliseconds(d), N: 1}
}
