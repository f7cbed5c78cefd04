// Package trace tells an OpenTelemetry collector what the server's calls took, as spans over OTLP.
//
// What belongs here: spans of calls and of steps within them, W3C's traceparent, and sending in the background. What does not:
// what happened in sandboxes; that is the journal's. A span has the names of methods and steps, codes and times; never an
// argument, a path, a name that somebody chose, or content.
//
// A nil Tracer is one that is off, and costs nothing.
package trace

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"casemate.dev/internal/otlp"
)

// The bounds of what waits to be sent.
const (
	// maxWaiting is how many spans wait at most; what comes then is dropped, and counted.
	maxWaiting = 4096
	// sendEvery is how long one waits at most, and sendAt how many are sent at once.
	sendEvery = 5 * time.Second
	sendAt    = otlp.SpansPerRequest
	// sendTime bounds one attempt to send, with its repetitions.
	sendTime = 30 * time.Second
	// closeTime bounds how long Close waits for what is left.
	closeTime = 5 * time.Second
)

// scope is the part of the source that spans are of.
const scope = "casemate.dev/server"

// Tracer makes spans and sends them. Its methods are safe for concurrent use, and do nothing on a nil Tracer.
type Tracer struct {
	collector otlp.Collector
	transport *http.Transport // the collector's
	resource  []otlp.Attribute
	sample    sampler
	log       *slog.Logger

	waiting chan otlp.Span
	flush   chan struct{} // closed by Close
	closing sync.Once
	sending sync.WaitGroup
	cancel  context.CancelFunc
	dropped atomic.Uint64
	sent    atomic.Uint64
}

// New returns a tracer; nil where cfg names no collector.
func New(cfg Config) *Tracer {
	if cfg.Endpoint == "" {
		return nil
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	ctx, cancel := context.WithCancel(context.Background())
	transport := &http.Transport{Proxy: http.ProxyFromEnvironment, MaxIdleConns: 1, IdleConnTimeout: time.Minute, ForceAttemptHTTP2: true}
	t := &Tracer{
		collector: otlp.Collector{URL: cfg.Endpoint, Header: cfg.Header, Client: &http.Client{Timeout: sendTime, Transport: transport}},
		transport: transport, resource: cfg.resource(), sample: cfg.sample, log: cfg.Log,
		waiting: make(chan otlp.Span, maxWaiting), flush: make(chan struct{}), cancel: cancel,
	}
	t.sending.Go(func() { t.run(ctx) })
	return t
}

// Close sends what is left, as far as the collector takes it within 5 seconds. Spans that end later are lost.
func (t *Tracer) Close() {
	if t == nil {
		return
	}
	t.closing.Do(func() {
		timer := time.AfterFunc(closeTime, t.cancel)
		close(t.flush)
		t.sending.Wait()
		timer.Stop()
		t.cancel()
		t.transport.CloseIdleConnections()
	})
}

// Counts returns how many spans were sent, and how many were lost.
func (t *Tracer) Counts() (sent, dropped uint64) {
	if t == nil {
		return 0, 0
	}
	return t.sent.Load(), t.dropped.Load()
}

// run sends spans until Close.
func (t *Tracer) run(ctx context.Context) {
	tick := time.NewTicker(sendEvery)
	defer tick.Stop()
	var batch []otlp.Span
	for {
		over := false
		select {
		case s := <-t.waiting:
			if batch = append(batch, s); len(batch) < sendAt {
				continue
			}
		case <-tick.C:
		case <-t.flush:
			over = true
			for more := true; more; {
				select {
				case s := <-t.waiting:
					batch = append(batch, s)
				default:
					more = false
				}
			}
		}
		t.send(ctx, batch)
		batch = nil
		if over {
			return
		}
	}
}

// send hands spans to the collector; those that it does not take are lost. Where one request fails, the rest isn't tried.
func (t *Tracer) send(ctx context.Context, batch []otlp.Span) {
	if len(batch) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, sendTime)
	defer cancel()
	left := len(batch)
	for some := range slices.Chunk(batch, otlp.SpansPerRequest) {
		requests, err := otlp.Encode(t.resource, scope, some)
		var refused int64
		if err == nil {
			refused, err = t.collector.Send(ctx, requests)
		}
		if err != nil {
			t.log.Warn("spans could not be sent", "spans", left, "error", err)
			t.dropped.Add(uint64(left))
			return
		}
		refused = min(max(refused, 0), int64(len(some))) // the collector's word
		t.dropped.Add(uint64(refused))
		t.sent.Add(uint64(int64(len(some)) - refused))
		left -= len(some)
	}
}

// Span is one that has begun. A nil Span is one that nobody wants.
type Span struct {
	t      *Tracer
	trace  string
	id     string
	parent string
	name   string
	kind   int
	began  time.Time
}

// spanKey is where a context has the Span of its call.
type spanKey struct{}

// Begin begins the span of a call that came with a header at a moment, and returns a context in which Step adds to it. The
// name is "service/method" of an RPC, "METHOD route" of plain HTTP. The caller calls End.
func (t *Tracer) Begin(ctx context.Context, h http.Header, name string, began time.Time) (context.Context, *Span) {
	if t == nil {
		return ctx, nil
	}
	s := &Span{t: t, name: name, kind: otlp.KindServer, began: began}
	sampled, known := false, false
	if s.trace, s.parent, sampled, known = parseParent(h.Get("Traceparent")); !known {
		s.trace = newID(16)
	}
	if !t.sample.wants(s.trace, known, sampled) {
		return ctx, nil
	}
	s.id = newID(8)
	return context.WithValue(ctx, spanKey{}, s), s
}

// End ends the span of a call: code is its outcome, "ok" or the kind of its error, and fault says that the server is at fault.
func (s *Span) End(code string, fault bool) {
	if s == nil {
		return
	}
	out := s.span(s.name, s.id, s.parent, s.began, time.Now())
	if method, route, plain := strings.Cut(s.name, " "); plain {
		out.Attributes = []otlp.Attribute{otlp.Text("http.request.method", method), otlp.Text("http.route", route)}
	} else {
		service, method, _ := strings.Cut(s.name, "/")
		out.Attributes = []otlp.Attribute{otlp.Text("rpc.system", "connect_rpc"), otlp.Text("rpc.service", service), otlp.Text("rpc.method", method)}
	}
	out.Attributes = append(out.Attributes, otlp.Text("casemate.code", code))
	if code != "ok" {
		out.Attributes = append(out.Attributes, otlp.Text("error.type", code))
	}
	if fault {
		out.Status.Code = otlp.StatusError
	}
	s.t.emit(out)
}

// Step adds a span to that of the call in ctx: something that was done for it between two moments.
func Step(ctx context.Context, name string, from, to time.Time) {
	s, ok := ctx.Value(spanKey{}).(*Span)
	if !ok {
		return
	}
	out := s.span(name, newID(8), s.id, from, to)
	out.Kind, out.Attributes = otlp.KindInternal, []otlp.Attribute{}
	s.t.emit(out)
}

func (s *Span) span(name, id, parent string, from, to time.Time) otlp.Span {
	return otlp.Span{
		TraceID: s.trace, SpanID: id, ParentSpanID: parent, Name: name, Kind: s.kind, Start: otlp.Nanos(from), End: otlp.Nanos(to),
	}
}

func (t *Tracer) emit(s otlp.Span) {
	select {
	case t.waiting <- s:
	default:
		t.dropped.Add(1)
	}
}

// newID returns a random id of so many bytes, in hex.
func newID(size int) string {
	b := make([]byte, size)
	_, _ = rand.Read(b) // never fails
	return hex.EncodeToString(b)
}

// parseParent reads a traceparent of W3C's Trace Context, version 00 or one that begins like it
// (https://www.w3.org/TR/trace-context/#traceparent-header).
func parseParent(h string) (trace, span string, sampled, ok bool) {
	const length = 2 + 1 + 32 + 1 + 16 + 1 + 2
	if len(h) < length || h[2] != '-' || h[35] != '-' || h[52] != '-' {
		return "", "", false, false
	}
	version, trace, span, flags := h[:2], h[3:35], h[36:52], h[53:55]
	if !lowerHex(version+trace+span+flags) || version == "ff" || version == "00" && len(h) != length || len(h) > length && h[length] != '-' ||
		strings.Trim(trace, "0") == "" || strings.Trim(span, "0") == "" {
		return "", "", false, false
	}
	bits, _ := hex.DecodeString(flags)
	return trace, span, bits[0]&1 != 0, true
}

func lowerHex(s string) bool { return strings.Trim(s, "0123456789abcdef") == "" }

// sampler decides which calls get a span.
type sampler struct {
	// byParent follows what the caller's span decided, where there is one.
	byParent bool
	// share of those that begin here, by their id: the same everywhere.
	share float64
}

func (s sampler) wants(trace string, known, sampled bool) bool {
	if known && s.byParent {
		return sampled
	}
	if s.share >= 1 {
		return true
	}
	// As the SDKs have it: the last 7 bytes of the id as a number below 2^56.
	n, err := strconv.ParseUint(trace[18:], 16, 64)
	return err == nil && float64(n) < s.share*(1<<56)
}
