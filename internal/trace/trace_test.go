package trace

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"casemate.dev/internal/otlp"
	"casemate.dev/internal/testenv"
)

// collector takes spans over OTLP.
type collector struct {
	*httptest.Server
	mu       sync.Mutex
	spans    []otlp.Span
	resource map[string]string
	header   http.Header
	paths    []string
}

func newCollector(t *testing.T) *collector {
	c := &collector{}
	c.Server = httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		var m otlp.Traces
		if err == nil {
			err = json.Unmarshal(b, &m)
		}
		if err != nil {
			t.Error(err)
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		c.header, c.paths = r.Header, append(c.paths, r.URL.Path)
		for _, rs := range m.ResourceSpans {
			c.resource = map[string]string{}
			for _, a := range rs.Resource.Attributes {
				c.resource[a.Key] = *a.Value.String
			}
			for _, ss := range rs.ScopeSpans {
				c.spans = append(c.spans, ss.Spans...)
			}
		}
	}))
	t.Cleanup(c.Close)
	return c
}

// tracer makes one by variables, as KEY=VALUE.
func tracer(t *testing.T, endpoint string, env ...string) *Tracer {
	t.Helper()
	cfg, err := FromEnv(getenv(env), endpoint)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Version, cfg.Instance = "v-test", "server-1"
	tr := New(cfg)
	t.Cleanup(tr.Close)
	return tr
}

func getenv(env []string) func(string) string {
	all := map[string]string{}
	for _, e := range env {
		k, v, _ := strings.Cut(e, "=")
		all[k] = v
	}
	return func(k string) string { return all[k] }
}

const parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

func TestSpansArrive(t *testing.T) {
	c := newCollector(t)
	tr := tracer(t, "", "OTEL_EXPORTER_OTLP_ENDPOINT="+c.URL, "OTEL_EXPORTER_OTLP_HEADERS=authorization=Bearer%20t,x=y",
		"OTEL_SERVICE_NAME=mine", "OTEL_RESOURCE_ATTRIBUTES=team=blue,service.name=other,service.version=v2")
	ctx, span := tr.Begin(t.Context(), http.Header{"Traceparent": {parent}}, "casemate.v1.SandboxService/CreateSandbox", time.Now())
	now := time.Now()
	Step(ctx, "sandbox.start", now.Add(-time.Millisecond), now)
	span.End("unavailable", true)
	_, alone := tr.Begin(t.Context(), http.Header{}, "casemate.v1.SandboxService/GetSandbox", time.Now())
	alone.End("ok", false)
	tr.Close()
	want := map[string]string{"service.name": "mine", "service.version": "v2", "service.instance.id": "server-1", "team": "blue"}
	if !maps.Equal(c.resource, want) || c.header.Get("Authorization") != "Bearer t" || c.paths[0] != "/v1/traces" {
		t.Errorf("resource %v, header %v, paths %v", c.resource, c.header, c.paths)
	}
	if len(c.spans) != 3 {
		t.Fatalf("%d spans: %+v", len(c.spans), c.spans)
	}
	step, call, other := c.spans[0], c.spans[1], c.spans[2]
	if call.TraceID != "4bf92f3577b34da6a3ce929d0e0e4736" || call.ParentSpanID != "00f067aa0ba902b7" || call.Kind != otlp.KindServer || call.Status.Code != otlp.StatusError {
		t.Errorf("the call: %+v", call)
	}
	if step.TraceID != call.TraceID || step.ParentSpanID != call.SpanID || step.Name != "sandbox.start" || step.Kind != otlp.KindInternal {
		t.Errorf("the step: %+v", step)
	}
	if len(other.TraceID) != 32 || len(other.SpanID) != 16 || other.ParentSpanID != "" || other.Status.Code != 0 || other.TraceID == call.TraceID {
		t.Errorf("a call that begins a trace: %+v", other)
	}
	if sent, dropped := tr.Counts(); sent != 3 || dropped != 0 {
		t.Errorf("%d sent, %d lost", sent, dropped)
	}
}

// TestOff: without a collector there is nothing, and all of it may be called.
func TestOff(t *testing.T) {
	for _, env := range [][]string{nil, {"OTEL_EXPORTER_OTLP_ENDPOINT=http://c:4318", "OTEL_SDK_DISABLED=true"}, {"OTEL_EXPORTER_OTLP_ENDPOINT=http://c:4318", "OTEL_TRACES_EXPORTER=none"}} {
		tr := tracer(t, "", env...)
		if tr != nil {
			t.Fatalf("%v: there is one", env)
		}
		ctx, span := tr.Begin(t.Context(), nil, "x/y", time.Now())
		if ctx != t.Context() || span != nil {
			t.Errorf("%v: a span", env)
		}
		span.End("ok", false)
		Step(ctx, "s", time.Now(), time.Now())
		tr.Close()
	}
	if n := testing.AllocsPerRun(100, func() {
		ctx, span := (*Tracer)(nil).Begin(context.Background(), nil, "x/y", time.Now())
		Step(ctx, "s", time.Time{}, time.Time{})
		span.End("ok", false)
	}); n > 0 {
		t.Errorf("off costs %v allocations", n)
	}
}

func TestSampling(t *testing.T) {
	c := newCollector(t)
	unsampled := strings.TrimSuffix(parent, "01") + "00"
	for _, tt := range []struct {
		sampler, arg, parent string
		want                 bool
	}{
		{"", "", "", true},
		{"", "", parent, true},
		{"", "", unsampled, false},
		{"always_on", "", unsampled, true},
		{"always_off", "", parent, false},
		{"parentbased_always_off", "", "", false},
		{"parentbased_always_off", "", parent, true},
		{"traceidratio", "0", parent, false},
		{"traceidratio", "1", unsampled, true},
		{"parentbased_traceidratio", "0", parent, true},
		{"traceidratio", "0.6", parent, false}, // 0xce929d0e0e4736 of 2^56 is 0.8...
	} {
		tr := tracer(t, c.URL, "OTEL_TRACES_SAMPLER="+tt.sampler, "OTEL_TRACES_SAMPLER_ARG="+tt.arg)
		h := http.Header{}
		if tt.parent != "" {
			h.Set("Traceparent", tt.parent)
		}
		_, span := tr.Begin(t.Context(), h, "x/y", time.Now())
		if got := span != nil; got != tt.want {
			t.Errorf("%+v: %v", tt, got)
		}
	}
}

func TestParents(t *testing.T) {
	for h, want := range map[string]bool{
		parent:                      true,
		"01" + parent[2:] + "-more": true,
		"":                          false,
		"ff" + parent[2:]:           false,
		parent + "-more":            false,
		"01" + parent[2:] + "more":  false,
		strings.ToUpper(parent):     false,
		strings.Replace(parent, "4bf92f3577b34da6a3ce929d0e0e4736", strings.Repeat("0", 32), 1): false,
		strings.Replace(parent, "00f067aa0ba902b7", strings.Repeat("0", 16), 1):                 false,
		strings.Replace(parent, "-", "_", 1):                                                    false,
		"garbage":                                                                               false,
	} {
		if _, _, _, ok := parseParent(h); ok != want {
			t.Errorf("%q: %v", h, ok)
		}
	}
}

func FuzzParseParent(f *testing.F) {
	f.Add(parent)
	f.Fuzz(func(t *testing.T, h string) {
		trace, span, _, ok := parseParent(h)
		if ok && (len(trace) != 32 || len(span) != 16 || !lowerHex(trace+span)) {
			t.Errorf("%q: %q %q", h, trace, span)
		}
	})
}

func TestBadSettings(t *testing.T) {
	for _, env := range [][]string{
		{"OTEL_EXPORTER_OTLP_ENDPOINT=localhost:4318"},
		{"OTEL_EXPORTER_OTLP_ENDPOINT=http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL=grpc"},
		{"OTEL_EXPORTER_OTLP_ENDPOINT=http://c", "OTEL_TRACES_SAMPLER=sometimes"},
		{"OTEL_EXPORTER_OTLP_ENDPOINT=http://c", "OTEL_TRACES_SAMPLER=traceidratio", "OTEL_TRACES_SAMPLER_ARG=NaN"},
	} {
		if _, err := FromEnv(getenv(env), ""); err == nil {
			t.Errorf("%v is taken", env)
		}
	}
}

// TestCollectorAway: a collector that can't be reached holds nobody up; what does not fit is dropped and counted.
func TestCollectorAway(t *testing.T) {
	tr := tracer(t, "http://127.0.0.1:1")
	tr.collector.Pause = time.Millisecond
	for i := range maxWaiting + 3*sendAt {
		_, span := tr.Begin(t.Context(), http.Header{}, fmt.Sprint("x/", i), time.Now())
		span.End("ok", false)
	}
	tr.Close()
	testenv.Eventually(t, time.Minute, "all are counted", func() bool {
		sent, dropped := tr.Counts()
		return sent == 0 && dropped == maxWaiting+3*sendAt
	})
}

func BenchmarkOff(b *testing.B) {
	ctx := context.Background()
	for b.Loop() {
		_, span := (*Tracer)(nil).Begin(ctx, nil, "x/y", time.Now())
		span.End("ok", false)
	}
}
