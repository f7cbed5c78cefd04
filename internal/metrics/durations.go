package metrics

import (
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// bounds returns the upper bounds of a histogram's buckets.
func bounds() [numBounds]time.Duration {
	return [numBounds]time.Duration{
		500 * time.Microsecond, time.Millisecond, 2500 * time.Microsecond, 5 * time.Millisecond, 10 * time.Millisecond,
		25 * time.Millisecond, 50 * time.Millisecond, 100 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond,
		time.Second, 2500 * time.Millisecond, 5 * time.Second, 10 * time.Second, 30 * time.Second,
	}
}

const numBounds = 15

// Durations is a histogram of how long something took. The zero value is empty; it is safe for concurrent use and takes no
// lock.
type Durations struct {
	counts [numBounds + 1]atomic.Uint64
	sum    atomic.Int64 // nanoseconds
}

// Observe counts one.
func (d *Durations) Observe(took time.Duration) {
	at := numBounds
	for i, bound := range bounds() {
		if took <= bound {
			at = i
			break
		}
	}
	d.counts[at].Add(1)
	d.sum.Add(int64(took))
}

// Series is one histogram of a figure, with its labels.
type Series struct {
	durations *Durations
	labels    string
}

// OfDurations returns a series; labels are names and values in turns.
func OfDurations(d *Durations, labels ...string) Series {
	return Series{durations: d, labels: join(labels)}
}

// Histogram writes how long something took, in seconds; its name ends in _seconds.
func (p *Page) Histogram(name, help string, all ...Series) {
	if len(all) == 0 {
		return
	}
	p.head(name, help, "histogram")
	slices.SortFunc(all, func(a, b Series) int { return strings.Compare(a.labels, b.labels) })
	for _, s := range all {
		before := s.labels
		if before != "" {
			before += ","
		}
		count := uint64(0)
		for i, bound := range bounds() {
			count += s.durations.counts[i].Load()
			p.line(name+"_bucket", before+`le="`+number(bound.Seconds())+`"`, float64(count))
		}
		count += s.durations.counts[numBounds].Load()
		p.line(name+"_bucket", before+`le="+Inf"`, float64(count))
		p.line(name+"_sum", s.labels, time.Duration(s.durations.sum.Load()).Seconds())
		p.line(name+"_count", s.labels, float64(count))
	}
}

// Counts counts by some key, of which there are few. The zero value is empty; it is safe for concurrent use.
type Counts[K comparable] struct {
	// mu guards the field below.
	mu sync.Mutex
	n  map[K]uint64
}

// Add counts n more of k.
func (c *Counts[K]) Add(k K, n uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.n == nil {
		c.n = make(map[K]uint64)
	}
	c.n[k] += n
}

// Samples returns what was counted, with the labels of each key.
func (c *Counts[K]) Samples(labels func(K) []string) []Sample {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := make([]Sample, 0, len(c.n))
	for k, n := range c.n {
		out = append(out, Of(float64(n), labels(k)...))
	}
	return out
}
