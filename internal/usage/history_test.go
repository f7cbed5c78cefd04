package usage

import (
	"context"
	"errors"
	"testing"
	"time"

	"casemate.dev/internal/clock"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/testenv"
)

// machine is a Source whose sandboxes use one processor each, on a clock that the test sets.
type machine struct {
	ids   []string
	now   time.Time
	began time.Time
}

// Alive implements Source.
func (m *machine) Alive() []string { return m.ids }

// Usage implements Source.
func (m *machine) Usage(_ context.Context, p sandbox.Principal, ref string) (sandbox.Usage, error) {
	if ref == "gone" || !p.Admin {
		return sandbox.Usage{}, errors.New("not found")
	}
	return sandbox.Usage{CPU: m.now.Sub(m.began), MemoryBytes: 1, CacheBytes: 2, DiskBytes: 3}, nil
}

// Now implements clock.Clock.
func (m *machine) Now() time.Time { return m.now }

// AfterFunc implements clock.Clock.
func (m *machine) AfterFunc(time.Duration, func()) clock.Timer { panic("no timers here") }

func TestRange(t *testing.T) {
	m := &machine{ids: []string{"a", "gone"}, now: time.Unix(1000, 0), began: time.Unix(990, 0)}
	h := New(Config{Source: m, Clock: m})
	for range 10 {
		if n := h.Look(t.Context()); n != 2 {
			t.Fatalf("%d sandboxes", n)
		}
		m.now = m.now.Add(5 * time.Second)
	}
	for _, c := range []struct{ from, to, n, before int64 }{
		{0, 9999, 10, 0}, {1010, 1020, 3, 1005}, {1011, 1014, 0, 1010}, {0, 999, 0, 0}, {2000, 3000, 0, 1045},
	} {
		before, ok, in := h.Range("a", time.Unix(c.from, 0), time.Unix(c.to, 0))
		if int64(len(in)) != c.n || ok != (c.before > 0) || ok && before.At.Unix() != c.before {
			t.Errorf("%d to %d: %d samples after %v", c.from, c.to, len(in), before)
		}
	}
	if _, ok, in := h.Range("gone", time.Unix(0, 0), m.now); ok || in != nil {
		t.Error("samples of a sandbox that could not be measured")
	}
	m.ids = nil
	h.Look(t.Context())
	if _, _, in := h.Range("a", time.Unix(0, 0), m.now); in != nil {
		t.Error("a sandbox that ended is remembered")
	}
}

// TestLongLives: a day is covered from its beginning to its end, in bounded space.
func TestLongLives(t *testing.T) {
	m := &machine{ids: []string{"a"}, now: time.Unix(1000, 0), began: time.Unix(1000, 0)}
	h := New(Config{Source: m, Clock: m})
	for range 24 * 3600 / 5 {
		h.Look(t.Context())
		m.now = m.now.Add(5 * time.Second)
	}
	_, _, in := h.Range("a", time.Unix(0, 0), m.now)
	if len(in) < maxSamples/2 || len(in) > maxSamples || in[0].At.Unix() != 1000 || m.now.Sub(in[len(in)-1].At) > 10*time.Minute {
		t.Fatalf("%d samples from %v to %v of %v", len(in), in[0].At, in[len(in)-1].At, m.now)
	}
	apart := in[1].At.Sub(in[0].At)
	for i := 1; i < len(in); i++ {
		if got := in[i].At.Sub(in[i-1].At); got != apart {
			t.Fatalf("samples %d are %v apart, others %v", i, got, apart)
		}
		if cores := float64(in[i].CPU-in[i-1].CPU) / float64(in[i].At.Sub(in[i-1].At)); cores != 1 {
			t.Fatalf("%v processors", cores)
		}
	}
}

// TestRunEnds with its context.
func TestRunEnds(t *testing.T) {
	m := &machine{ids: []string{"a"}, now: time.Unix(1000, 0), began: time.Unix(1000, 0)}
	h := New(Config{Source: m, Clock: m, Every: time.Millisecond})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		h.Run(ctx)
	}()
	testenv.Eventually(t, 5*time.Second, "a look", func() bool {
		_, _, in := h.Range("a", time.Unix(0, 0), time.Unix(2000, 0))
		return len(in) > 0
	})
	cancel()
	testenv.Receive(t, "it ends", done)
}
