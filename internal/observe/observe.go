// Package observe counts the calls of the server's interfaces, times them, and makes spans of those that were admitted.
//
// What belongs here: one call from its beginning to its end, whichever protocol it came by, and the figures of all. What does
// not: protocols, which say what a call is named and how it ended; figures of anything else; the format of figures (package
// metrics), and what sends spans (package trace).
package observe

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/metrics"
	"casemate.dev/internal/trace"
)

// Outcome is how a call ended.
type Outcome int

// OK is the outcome of a call that succeeded.
const OK Outcome = 0

// numOutcomes is more than the kinds of errors that there are, and one for calls without any.
const numOutcomes = 32

// Failed is the outcome of a call that ended with an error of a kind.
func Failed(k errs.Kind) Outcome { return 1 + min(Outcome(k), numOutcomes-2) }

// OfStatus is the outcome of a call that was answered with a status of HTTP.
func OfStatus(status int) Outcome {
	switch {
	case status < http.StatusBadRequest:
		return OK
	case status == http.StatusBadGateway:
		return Failed(errs.Unavailable)
	case status == http.StatusInsufficientStorage:
		return Failed(errs.ResourceExhausted)
	}
	for _, m := range errs.Table() {
		if m.HTTP == status {
			return Failed(m.Kind)
		}
	}
	if status < http.StatusInternalServerError {
		return Failed(errs.InvalidArgument)
	}
	return Failed(errs.Internal)
}

// String is the word for it, as answers have it: "ok" or the kind of the error.
func (o Outcome) String() string {
	if o == OK {
		return "ok"
	}
	return o.kind().String()
}

func (o Outcome) kind() errs.Kind { return errs.Kind(o - 1) } //nolint:gosec // small

// faults reports whether a call that ended so is the server's fault.
func (o Outcome) faults() bool {
	switch o.kind() {
	case errs.Internal, errs.Unavailable, errs.DeadlineExceeded:
		return true
	}
	return false
}

// Calls are the calls of all interfaces of a server. Its methods are safe for concurrent use.
type Calls struct {
	tracer *trace.Tracer

	// mu guards the field below.
	mu  sync.Mutex
	all map[string]*Method
}

// New returns Calls of which there are none yet. tracer gets their spans; nil: nobody does.
func New(tracer *trace.Tracer) *Calls { return &Calls{tracer: tracer, all: map[string]*Method{}} }

// Method returns the method of a name, the same each time. A name is one of few: of an RPC "service/method", of plain HTTP the
// method and the route, as "GET /sandboxes/{id}"; never a path that somebody asked for.
func (c *Calls) Method(name string) *Method {
	c.mu.Lock()
	defer c.mu.Unlock()
	m := c.all[name]
	if m == nil {
		m = &Method{calls: c, name: name}
		c.all[name] = m
	}
	return m
}

// Write writes the figures.
func (c *Calls) Write(p *metrics.Page) {
	var took []metrics.Series
	var active []metrics.Sample
	for _, m := range c.methods() {
		used := false
		for i := range m.took {
			if d := m.took[i].Load(); d != nil {
				used = true
				took = append(took, metrics.OfDurations(d, "method", m.name, "code", Outcome(i).String()))
			}
		}
		if n := m.active.Load(); used || n > 0 {
			active = append(active, metrics.Of(float64(n), "method", m.name))
		}
	}
	p.Histogram("casemate_request_duration_seconds", "How long calls took, streams while they were open, by method and outcome.", took...)
	p.Gauge("casemate_requests_active", "Calls under way.", active...)
}

// methods returns all in order of their names.
func (c *Calls) methods() []*Method {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := make([]*Method, 0, len(c.all))
	for _, m := range c.all {
		out = append(out, m)
	}
	slices.SortFunc(out, func(a, b *Method) int { return strings.Compare(a.name, b.name) })
	return out
}

// Method counts the calls of one method, and how long they took. Those of a stream take as long as it is open.
type Method struct {
	calls  *Calls
	name   string
	active atomic.Int64
	took   [numOutcomes]atomic.Pointer[metrics.Durations] // by outcome; nil: there was none
}

// Call is one that is under way. The zero value is one that is counted nowhere. It is not safe for concurrent use.
type Call struct {
	m     *Method
	began time.Time
	span  *trace.Span
}

// Aborted is the outcome of a call that nobody answers any more: the caller has left, or a panic cut it off.
func Aborted() Outcome { return Failed(errs.Canceled) }

// Begin counts a call. The caller calls End, at the latest by "defer c.End(observe.Aborted())".
func (m *Method) Begin() Call {
	m.active.Add(1)
	return Call{m: m, began: time.Now()}
}

// Admit begins the span of a call that came with a header, and returns a context in which steps add to it. Only a call that is
// admitted has one: strangers send nothing to the collector, nor add to anybody's trace.
func (c *Call) Admit(ctx context.Context, h http.Header) context.Context {
	if c.m == nil || c.span != nil {
		return ctx
	}
	ctx, c.span = c.m.calls.tracer.Begin(ctx, h, c.m.name, c.began)
	return ctx
}

// End counts how the call ended. What comes after the first End counts for nothing.
func (c *Call) End(o Outcome) {
	if c.m == nil {
		return
	}
	c.m.active.Add(-1)
	at := &c.m.took[o]
	c.m = nil
	if at.Load() == nil {
		at.CompareAndSwap(nil, &metrics.Durations{})
	}
	at.Load().Observe(time.Since(c.began))
	c.span.End(o.String(), o.faults())
}
