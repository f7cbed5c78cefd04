package e2b

import (
	"context"
	"net/http"
	"strconv"
	"strings"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/sandbox"
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

// metrics answers with what a sandbox uses now, if the range that is asked for reaches that far: no
// history is kept.
func (a *API) metrics(c call) error {
	s, err := a.alive(c)
	if err != nil {
		return err
	}
	const slack = 5 * time.Second // E2B's own samples are that far apart
	now := time.Now()
	start, err := unixTime(c.r.URL.Query().Get("start"), time.Time{})
	if err != nil {
		return err
	}
	end, err := unixTime(c.r.URL.Query().Get("end"), now)
	if err != nil {
		return err
	}
	out := []metricJSON{}
	if !start.After(now.Add(slack)) && !end.Before(now.Add(-slack)) {
		for _, m := range a.sample(c, []sandbox.Sandbox{s}) {
			out = append(out, m)
		}
	}
	return c.json(http.StatusOK, out)
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

// sample reads what sandboxes use. Those that are gone by now are left out.
func (a *API) sample(c call, all []sandbox.Sandbox) map[string]metricJSON {
	out := make(map[string]metricJSON, len(all))
	if len(all) == 0 {
		return out
	}
	before := make(map[string]time.Duration, len(all))
	began := time.Now()
	for _, s := range all {
		if u, err := a.cfg.Manager.Usage(c.r.Context(), c.p, s.ID); err == nil {
			before[s.ID] = u.CPU
		}
	}
	pauseFor(c.r.Context(), sampleWindow)
	for _, s := range all {
		cpu, ok := before[s.ID]
		u, err := a.cfg.Manager.Usage(c.r.Context(), c.p, s.ID)
		if !ok || err != nil {
			continue
		}
		now := time.Now()
		count := cpus(s)
		used := 100 * float64(u.CPU-cpu) / float64(now.Sub(began)) / float64(count)
		out[s.ID] = metricJSON{
			Timestamp: now.UTC(), TimestampUnix: now.Unix(), CPUCount: count, CPUUsedPct: min(max(used, 0), 100),
			MemUsed: u.MemoryBytes, MemTotal: s.Spec.Limits.MemoryBytes, DiskUsed: u.DiskBytes, DiskTotal: s.Spec.Limits.DiskBytes,
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
