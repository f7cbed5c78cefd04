package api

import (
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/sandbox"
)

const levelError = slog.LevelError

func attr(key, value string) slog.Attr { return slog.String(key, value) }

// counter counts calls without a lock.
type counter struct {
	total, failed atomic.Uint64
	active        atomic.Int64
}

func (c *counter) begin() {
	c.total.Add(1)
	c.active.Add(1)
}

func (c *counter) end(failed bool) {
	c.active.Add(-1)
	if failed {
		c.failed.Add(1)
	}
}

// stats is what the server tells about itself beyond its calls.
type stats struct{ started time.Time }

func newStats() *stats { return &stats{started: time.Now()} }

// serveOwn serves the server's own paths. Health is for anyone; numbers need a key.
func (a *API) serveOwn(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		a.writeError(w, r, errs.New(errs.InvalidArgument, "%s takes GET only", r.URL.Path))
		return
	}
	switch r.URL.Path {
	case "/-/health":
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		if a.draining.Err() != nil {
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = w.Write([]byte(`{"status":"draining"}` + "\n"))
			return
		}
		_, _ = w.Write([]byte(`{"status":"ok"}` + "\n"))
	case "/-/metrics":
		if err := a.writeMetrics(w, a.identify(w, r)); err != nil {
			a.writeError(w, r, err)
		}
	default:
		a.writeError(w, r, errNoRoute(r))
	}
}

// writeMetrics writes Prometheus's text format.
func (a *API) writeMetrics(w http.ResponseWriter, r *http.Request) error {
	c := callerOf(r.Context())
	if c.err != nil {
		return c.err
	}
	if !c.principal.Admin {
		return errs.New(errs.PermissionDenied, "the server's numbers need an admin key")
	}
	states, err := a.countStates(r)
	if err != nil {
		return err
	}
	var b strings.Builder
	b.WriteString("# HELP casemate_sandboxes Sandboxes by state.\n# TYPE casemate_sandboxes gauge\n")
	for _, s := range []sandbox.State{sandbox.Starting, sandbox.Running, sandbox.Paused, sandbox.Stopping} {
		fmt.Fprintf(&b, "casemate_sandboxes{state=%q} %d\n", s, states[s])
	}
	rows := []struct {
		name, kind, help string
		value            func(*counter) int64
	}{
		{"casemate_requests_total", "counter", "Requests by method.", func(c *counter) int64 { return int64(c.total.Load()) }},                      //nolint:gosec // a count
		{"casemate_requests_failed_total", "counter", "Requests that ended in an error.", func(c *counter) int64 { return int64(c.failed.Load()) }}, //nolint:gosec // a count
		{"casemate_requests_active", "gauge", "Requests under way.", func(c *counter) int64 { return c.active.Load() }},
	}
	for _, row := range rows {
		fmt.Fprintf(&b, "# HELP %s %s\n# TYPE %s %s\n", row.name, row.help, row.name, row.kind)
		for _, procedure := range slices.Sorted(maps.Keys(a.gate.methods)) {
			if m := a.gate.methods[procedure]; m.calls.total.Load() > 0 {
				fmt.Fprintf(&b, "%s{method=%q} %d\n", row.name, strings.TrimPrefix(procedure, "/"), row.value(&m.calls))
			}
		}
	}
	a.writeGatewayMetrics(&b)
	fmt.Fprintf(&b, "# HELP casemate_uptime_seconds Seconds since the server started.\n# TYPE casemate_uptime_seconds gauge\ncasemate_uptime_seconds %.0f\n",
		time.Since(a.stats.started).Seconds())
	w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	_, _ = w.Write([]byte(b.String()))
	return nil
}

// writeGatewayMetrics writes what the gateway process says of itself, while it runs.
func (a *API) writeGatewayMetrics(b *strings.Builder) {
	s, ok := a.cfg.Manager.NetworkStats()
	if !ok {
		return
	}
	for _, row := range []struct {
		name, kind, help string
		value            int64
	}{
		{"casemate_gateway_sandboxes", "gauge", "Sandboxes with a network.", int64(s.Sandboxes)},
		{"casemate_gateway_open", "gauge", "Connections of sandboxes that are open.", s.Open},
		{"casemate_gateway_connections_total", "counter", "Connections that the gateway process was asked for.", s.Connections},
		{"casemate_gateway_refused_total", "counter", "What it refused.", s.Refused},
		{"casemate_gateway_sent_bytes_total", "counter", "Bytes out of sandboxes.", s.Sent},
		{"casemate_gateway_received_bytes_total", "counter", "Bytes into sandboxes.", s.Received},
		{"casemate_gateway_heap_bytes", "gauge", "Memory that the gateway process uses.", s.HeapBytes},
	} {
		fmt.Fprintf(b, "# HELP %s %s\n# TYPE %s %s\n%s %d\n", row.name, row.help, row.name, row.kind, row.name, row.value)
	}
}

// countStates counts the sandboxes that have not stopped.
func (a *API) countStates(r *http.Request) (map[sandbox.State]int, error) {
	out := make(map[sandbox.State]int)
	q := sandbox.Query{PageSize: 1000}
	for {
		page, next, err := a.cfg.Manager.List(r.Context(), callerOf(r.Context()).principal, q)
		if err != nil {
			return nil, err
		}
		for _, s := range page {
			out[s.State]++
		}
		if next == "" {
			return out, nil
		}
		q.PageToken = next
	}
}

// serveReflection serves gRPC's reflection to whoever has a key.
func (a *API) serveReflection(w http.ResponseWriter, r *http.Request) {
	if err := callerOf(r.Context()).err; err != nil {
		a.writeError(w, r, err)
		return
	}
	a.reflect.ServeHTTP(w, r)
}
