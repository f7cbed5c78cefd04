package api

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/metrics"
	"casemate.dev/internal/trace"
)

// numOutcomes is more than the kinds of errors that there are, and one for calls without any.
const numOutcomes = 32

// calls counts the calls of one method, and how long they took. Those of a stream take as long as it is open.
type calls struct {
	active atomic.Int64
	took   [numOutcomes]atomic.Pointer[metrics.Durations] // by kind, the first for calls that succeeded; nil: there was none
}

// of returns the histogram of calls that ended so.
func (c *calls) of(err error) *metrics.Durations {
	at := &c.took[outcome(err)]
	if d := at.Load(); d != nil {
		return d
	}
	at.CompareAndSwap(nil, &metrics.Durations{})
	return at.Load()
}

// call is one that is under way.
type call struct {
	m     *method
	began time.Time
	span  *trace.Span
}

// begin counts a call and begins its span; the caller calls end. A method that the schema does not know is counted nowhere,
// and a call that is not admitted has no span: strangers send nothing to the collector, nor add to anybody's trace.
func (g *gate) begin(ctx context.Context, m *method, h http.Header, admitted bool) (context.Context, call) {
	c := call{m: m, began: time.Now()}
	if m == nil {
		return ctx, c
	}
	m.calls.active.Add(1)
	if admitted {
		ctx, c.span = g.api.cfg.Tracer.Begin(ctx, h, m.name)
	}
	return ctx, c
}

func (c call) end(err error) {
	if c.m == nil {
		return
	}
	c.m.calls.active.Add(-1)
	c.m.calls.of(err).Observe(time.Since(c.began))
	if c.span != nil {
		at := outcome(err)
		c.span.End(codeOf(at), faults(at))
	}
}

// faults reports whether a call that ended so is the server's fault.
func faults(outcome int) bool {
	switch errs.Kind(outcome - 1) { //nolint:gosec // small
	case errs.Internal, errs.Unavailable, errs.DeadlineExceeded:
		return outcome > 0
	}
	return false
}

// outcome is the place of a call's end in calls.
func outcome(err error) int {
	if err == nil {
		return 0
	}
	kind := errs.KindOf(err)
	if ready := (*connect.Error)(nil); errors.As(err, &ready) { // of Connect itself: a message that can't be read
		kind = errs.FromGRPC(int(ready.Code()))
	}
	return 1 + min(int(kind), numOutcomes-2)
}

// codeOf is the word for a place in calls, as answers have it.
func codeOf(outcome int) string {
	if outcome == 0 {
		return "ok"
	}
	return errs.Kind(outcome - 1).String() //nolint:gosec // small
}

// mayMeasure says whether a request may read the server's figures.
func mayMeasure(r *http.Request) error {
	c := callerOf(r.Context())
	if c.err != nil {
		return c.err
	}
	if !c.principal.Admin || c.principal.Sandbox != "" {
		return errs.New(errs.PermissionDenied, "the server's numbers need an admin key")
	}
	return nil
}

// ServeMetrics writes the server's figures in Prometheus's text format. Who may read them is the caller's to know.
func (a *API) ServeMetrics(w http.ResponseWriter, _ *http.Request) {
	p := &metrics.Page{}
	var took []metrics.Series
	var active []metrics.Sample
	for _, procedure := range slices.Sorted(maps.Keys(a.gate.methods)) {
		m := a.gate.methods[procedure]
		used := false
		for i := range m.calls.took {
			if d := m.calls.took[i].Load(); d != nil {
				used = true
				took = append(took, metrics.OfDurations(d, "method", m.name, "code", codeOf(i)))
			}
		}
		if n := m.calls.active.Load(); used || n > 0 {
			active = append(active, metrics.Of(float64(n), "method", m.name))
		}
	}
	p.Histogram("casemate_request_duration_seconds", "How long calls of the native API took, streams while they were open, by method and outcome.", took...)
	p.Gauge("casemate_requests_active", "Calls of the native API under way.", active...)
	if a.cfg.Metrics != nil {
		a.cfg.Metrics(p)
	}
	w.Header().Set("Content-Type", metrics.ContentType)
	w.Header().Set("Cache-Control", "no-store")
	_, _ = w.Write([]byte(p.String()))
}
