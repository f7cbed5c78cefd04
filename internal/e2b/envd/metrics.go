package envd

import (
	"encoding/json"
	"math"
	"net/http"
	"slices"
	"strings"
	"time"

	"casemate.dev/internal/sandbox"
)

// metrics is the answer of /metrics.
type metrics struct {
	Time        int64   `json:"ts"`
	CPUCount    int     `json:"cpu_count"`
	CPUUsed     float64 `json:"cpu_used_pct"`
	MemTotalMiB int64   `json:"mem_total_mib"`
	MemUsedMiB  int64   `json:"mem_used_mib"`
	MemTotal    int64   `json:"mem_total"`
	MemUsed     int64   `json:"mem_used"`
	MemCache    int64   `json:"mem_cache"`
	DiskUsed    int64   `json:"disk_used"`
	DiskTotal   int64   `json:"disk_total"`
}

// measured is how long the use of CPUs is looked at.
const measured = 100 * time.Millisecond

// serveMetrics serves GET of /metrics.
func (h *Handler) serveMetrics(w http.ResponseWriter, r *http.Request, c *call) error {
	ctx := r.Context()
	sb, err := h.m.Get(ctx, c.p, c.sandbox)
	if err != nil {
		return err
	}
	before, err := h.m.Usage(ctx, c.p, c.sandbox)
	if err != nil {
		return err
	}
	begin := time.Now()
	select {
	case <-time.After(measured):
	case <-ctx.Done():
		return ctx.Err()
	}
	after, err := h.m.Usage(ctx, c.p, c.sandbox)
	if err != nil {
		return err
	}
	limits := sb.Spec.Limits
	cpus := max(int(math.Ceil(limits.CPUs)), 1)
	used := 100 * float64(after.CPU-before.CPU) / float64(time.Since(begin)) / float64(cpus)
	writeJSON(w, metrics{
		Time: time.Now().Unix(), CPUCount: cpus, CPUUsed: math.Round(100*min(max(used, 0), 100)) / 100,
		MemTotalMiB: limits.MemoryBytes >> 20, MemUsedMiB: after.MemoryBytes >> 20,
		MemTotal: limits.MemoryBytes, MemUsed: after.MemoryBytes, MemCache: after.CacheBytes,
		DiskUsed: after.DiskBytes, DiskTotal: limits.DiskBytes,
	})
	return nil
}

func writeJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	out, _ := json.Marshal(v) // plain data: can't fail
	_, _ = w.Write(append(out, '\n'))
}

// serveEnvs serves GET of /envs: the variables that every process inside has. A sandbox's environment is
// not kept outside it, since values may be secrets; so a process inside tells.
func (h *Handler) serveEnvs(w http.ResponseWriter, r *http.Request, c *call) error {
	res, err := h.m.Execute(r.Context(), c.p, c.sandbox, sandbox.ProcessSpec{Argv: []string{"env", "-0"}}, sandbox.RunOptions{})
	if err != nil {
		return err
	}
	if res.Process.End != sandbox.EndExited || res.Process.Code != 0 {
		return statusf(http.StatusInternalServerError, "cannot read the environment: env ended with %s", endEvent(res.Process).GetStatus())
	}
	own := []string{"PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "_", "SHLVL"}
	envs := map[string]string{}
	for v := range strings.SplitSeq(string(res.Stdout), "\x00") {
		if name, value, ok := strings.Cut(v, "="); ok && !slices.Contains(own, name) && name != "CASEMATE_PROCESS" {
			envs[name] = value
		}
	}
	writeJSON(w, envs)
	return nil
}
