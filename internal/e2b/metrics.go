package e2b

import (
	"context"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/usage"
)

// sampleWindow is how long the processor's use is watched for one figure.
const sampleWindow = 100 * time.Millisecond

// maxSampled is how many sandboxes one call may ask about.
const maxSampled = 100

// metricJSON is what a sandbox uses at one moment.
type metricJSON struct {
	Timestamp     time.Time `json:"timestamp"`
	TimestampUnix int64     `json:"timestampUnix"`
	CPUCount      int       `json:"cpuCount"`
	CPUUsedPct    float64   `json:"cpuUsedPct"`
	MemUsed       int64     `json:"memUsed"`
	MemTotal      int64     `json:"memTotal"`
	MemCache      int64     `json:"memCache"`
	DiskUsed      int64     `json:"diskUsed"`
	DiskTotal     int64     `json:"diskTotal"`
}

// metrics answers with what a sandbox used in a range of time, the oldest sample first. Where the range
// reaches to now and nothing is known yet, it is measured.
func (a *API) metrics(c call) error {
	s, err := a.alive(c)
	if err != nil {
		return err
	}
	now := time.Now()
	start, err := unixTime(c.r.URL.Query().Get("start"), time.Time{})
	if err != nil {
		return err
	}
	end, err := unixTime(c.r.URL.Query().Get("end"), now)
	if err != nil {
		return err
	}
	if c.r.URL.Query().Get("end") != "" && end.Before(start) {
		return fail(http.StatusBadRequest, "Error when parsing request: start must not be after end")
	}
	// Whole seconds name their whole length.
	before, ok, samples := a.cfg.Usage.Range(s.ID, start, end.Truncate(time.Second).Add(time.Second-1))
	if !ok {
		before = usage.Sample{At: s.StartedAt}
	}
	out := make([]metricJSON, 0, len(samples))
	for _, u := range samples {
		out = append(out, metricOf(s, before, u))
		before = u
	}
	const slack = 5 * time.Second // E2B's samples are that far apart
	if len(out) == 0 && !start.After(now.Add(slack)) && !end.Before(now.Add(-slack)) {
		for _, m := range a.sample(c, []sandbox.Sandbox{s}) {
			out = append(out, m)
		}
	}
	return c.json(http.StatusOK, out)
}

// metricOf is what a sandbox used at a sample's time, and of processors since the one before.
func metricOf(s sandbox.Sandbox, before, u usage.Sample) metricJSON {
	count := cpus(s)
	pct := 0.0
	if d := u.At.Sub(before.At); d > 0 {
		pct = math.Round(10000*float64(u.CPU-before.CPU)/float64(d)/float64(count)) / 100
	}
	return metricJSON{
		Timestamp: u.At.UTC(), TimestampUnix: u.At.Unix(), CPUCount: count, CPUUsedPct: min(max(pct, 0), 100),
		MemUsed: u.MemoryBytes, MemTotal: s.Spec.Limits.MemoryBytes, MemCache: u.CacheBytes,
		DiskUsed: u.DiskBytes, DiskTotal: s.Spec.Limits.DiskBytes,
	}
}

func unixTime(v string, other time.Time) (time.Time, error) {
	if v == "" {
		return other, nil
	}
	n, err := strconv.ParseInt(v, 10, 64)
	if err != nil {
		return other, fail(http.StatusBadRequest, "Error when parsing request: %q is no Unix time", v)
	}
	return time.Unix(n, 0), nil
}

func (a *API) manyMetrics(c call) error {
	var ids []string
	for _, list := range c.r.URL.Query()["sandbox_ids"] {
		for _, name := range strings.Split(list, ",") {
			if name = sandboxID(name); name != "" {
				ids = append(ids, name)
			}
		}
	}
	if len(ids) > maxSampled {
		return fail(http.StatusBadRequest, "Too many sandboxes requested, maximum is %d", maxSampled)
	}
	var all []sandbox.Sandbox
	for _, name := range ids {
		s, err := a.cfg.Manager.Get(c.r.Context(), c.p, name)
		if errs.Is(err, errs.NotFound) || errs.Is(err, errs.InvalidArgument) || err == nil && s.ID != name {
			continue
		}
		if err != nil {
			return err
		}
		all = append(all, s)
	}
	return c.json(http.StatusOK, map[string]any{"sandboxes": a.sample(c, all)})
}

// sample measures what sandboxes use now. Those that are gone by now are left out.
func (a *API) sample(c call, all []sandbox.Sandbox) map[string]metricJSON {
	out := make(map[string]metricJSON, len(all))
	if len(all) == 0 {
		return out
	}
	before := make(map[string]usage.Sample, len(all))
	for _, s := range all {
		if u, err := a.cfg.Usage.Measure(c.r.Context(), s.ID); err == nil {
			before[s.ID] = u
		}
	}
	pauseFor(c.r.Context(), sampleWindow)
	for _, s := range all {
		if u, err := a.cfg.Usage.Measure(c.r.Context(), s.ID); err == nil && !before[s.ID].At.IsZero() {
			out[s.ID] = metricOf(s, before[s.ID], u)
		}
	}
	return out
}

func pauseFor(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
