package api

import (
	"context"
	"errors"
	"net/http"

	"connectrpc.com/connect"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/metrics"
	"casemate.dev/internal/observe"
)

// begin counts a call and, where it is admitted, begins its span; the caller ends it with outcome. A method that the schema
// does not know is counted nowhere.
func (m *method) begin(ctx context.Context, h http.Header, admitted bool) (context.Context, observe.Call) {
	if m == nil {
		return ctx, observe.Call{}
	}
	c := m.calls.Begin()
	if admitted {
		ctx = c.Admit(ctx, h)
	}
	return ctx, c
}

// outcome is how a call ended that returned err.
func outcome(err error) observe.Outcome {
	if err == nil {
		return observe.OK
	}
	kind := errs.KindOf(err)
	if ready := (*connect.Error)(nil); errors.As(err, &ready) { // of Connect itself: a message that can't be read
		kind = errs.FromGRPC(int(ready.Code()))
	}
	return observe.Failed(kind)
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
	a.cfg.Calls.Write(p)
	if a.cfg.Metrics != nil {
		a.cfg.Metrics(p)
	}
	w.Header().Set("Content-Type", metrics.ContentType)
	w.Header().Set("Cache-Control", "no-store")
	_, _ = w.Write([]byte(p.String()))
}
