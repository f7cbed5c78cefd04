package server

import (
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync"
	"testing"

	"casemate.dev/client"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/otlp"
	"casemate.dev/internal/trace"
)

// scrape reads figures without a key.
func scrape(t *testing.T, url string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// checkFormat holds a page against Prometheus's text format and naming conventions
// (https://prometheus.io/docs/instrumenting/exposition_formats/, …/practices/naming/): every sample stands behind the help and the
// type of its figure, each figure is there once, counters end in _total, and no name has a unit that is no base unit.
func checkFormat(t *testing.T, page string) {
	t.Helper()
	sample := regexp.MustCompile(`^([a-z_]+?)(_bucket|_sum|_count)?(\{([a-z_]+="([^"\\]|\\.)*",?)+\})? ([0-9.e+-]+|\+Inf)$`)
	seen := map[string]bool{}
	name, kind := "", ""
	for line := range strings.Lines(page) {
		line = strings.TrimSuffix(line, "\n")
		words := strings.SplitN(line, " ", 4)
		switch {
		case strings.HasPrefix(line, "# HELP ") && len(words) == 4:
			if name, kind = words[2], ""; seen[name] || !strings.HasSuffix(words[3], ".") {
				t.Errorf("a figure twice, or its help is no sentence: %s", line)
			}
			seen[name] = true
		case strings.HasPrefix(line, "# TYPE ") && len(words) == 4 && words[2] == name:
			if kind = words[3]; (kind == "counter") != strings.HasSuffix(name, "_total") || kind == "histogram" != strings.HasSuffix(name, "_duration_seconds") {
				t.Errorf("the name does not fit the type: %s", line)
			}
			for _, unit := range []string{"_ms", "_milliseconds", "_minutes", "_kb", "_mb", "_mib", "_us", "_nanoseconds"} {
				if strings.Contains(name, unit) {
					t.Errorf("%s has a unit that is no base unit", name)
				}
			}
		default:
			m := sample.FindStringSubmatch(line)
			if m == nil || m[1] != name || kind == "" || (m[2] != "") != (kind == "histogram") {
				t.Errorf("no sample of %s %s: %s", kind, name, line)
			}
		}
	}
}

func TestMetricsListener(t *testing.T) {
	cfg := newPlace(t).config()
	cfg.MetricsListen = "127.0.0.1:0"
	s := start(t, cfg)
	c := s.unix(t)
	sb, err := c.Sandboxes.Create(t.Context(), &client.CreateRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Processes.Execute(t.Context(), sb.GetId(), &client.ProcessSpec{Argv: []string{"true"}}, nil); err != nil {
		t.Fatal(err)
	}
	addr := s.MetricsAddr().String()
	status, page := scrape(t, "http://"+addr+"/metrics")
	if status != http.StatusOK {
		t.Fatalf("%d %s", status, page)
	}
	for _, want := range []string{
		`casemate_sandboxes{state="running"} 1`, `casemate_sandboxes{state="paused"} 0`,
		`casemate_sandbox_start_duration_seconds_count{isolation="fake"} 1`,
		`casemate_processes_ended_total{end="exited"} 1`, `casemate_processes 0`,
		`casemate_request_duration_seconds_count{method="casemate.v1.ProcessService/Execute",code="ok"} 1`,
		`casemate_journal_gaps_total 0`, `casemate_database_size_bytes{file="casemate.db"} `, `casemate_build_info{version="`,
		`process_open_fds `, `process_start_time_seconds 1.`, `process_resident_memory_bytes `, `process_cpu_seconds_total `, `go_goroutines `,
	} {
		if !strings.Contains(page, want) {
			t.Errorf("%s is not in\n%s", want, page)
		}
	}
	checkFormat(t, page)
	// Whatever is in a label has few values: no sandbox, no key.
	if id := regexp.MustCompile(`[a-z0-9]{20}`).FindString(regexp.MustCompile(`(?m)^#.*$|[a-z]+_[a-z_]+`).ReplaceAllString(page, "")); id != "" {
		t.Errorf("the figures hold what may be an id: %s", id)
	}
	if strings.Contains(page, sb.GetId()) {
		t.Error("the figures name a sandbox")
	}
	for _, path := range []string{"/-/metrics", "/v1/sandboxes", "/-/health", "/"} {
		if status, body := scrape(t, "http://"+addr+path); status != http.StatusNotFound {
			t.Errorf("%s on the listener for figures: %d %s", path, status, body)
		}
	}
	for _, a := range s.Addrs() {
		if a.String() == addr {
			t.Error("it is told of as an address of the API")
		}
		if status, body := scrape(t, "http://"+a.String()+"/-/metrics"); status != http.StatusUnauthorized {
			t.Errorf("without a key: %d %s", status, body)
		}
	}
}

// attribute returns the text of a span's attribute.
func attribute(s otlp.Span, key string) string {
	for _, a := range s.Attributes {
		if a.Key == key {
			return *a.Value.String
		}
	}
	return ""
}

func e2bKey(t *testing.T, c *client.Client) string {
	t.Helper()
	_, secret, err := c.System.CreateKey(t.Context(), &client.CreateKeyRequest{Name: "e2b", E2B: true})
	if err != nil {
		t.Fatal(err)
	}
	return secret
}

// e2bCall makes a call of E2B's protocol, by POST where there is a body, and returns the answer's.
func e2bCall(t *testing.T, s running, path, body string, header ...string) []byte {
	t.Helper()
	method := http.MethodGet
	if body != "" {
		method = http.MethodPost
	}
	req, err := http.NewRequestWithContext(t.Context(), method, "http://"+s.Addrs()[0].String()+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// e2bBox is a sandbox as E2B's create answers.
type e2bBox struct{ SandboxID, EnvdAccessToken string }

func e2bSandbox(t *testing.T, s running, key string) (box e2bBox) {
	t.Helper()
	b := e2bCall(t, s, "/v2/sandboxes", `{"templateID":"base"}`, "X-API-Key", key)
	if err := json.Unmarshal(b, &box); err != nil || box.SandboxID == "" {
		t.Fatalf("%v: %s", err, b)
	}
	return box
}

// TestTraces: calls reach a collector as spans, under the caller's trace, and tell nothing of what they were about.
func TestTraces(t *testing.T) {
	var mu sync.Mutex
	var spans []otlp.Span
	var raw strings.Builder
	collector := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		var m otlp.Traces
		if err == nil {
			err = json.Unmarshal(b, &m)
		}
		if err != nil {
			t.Error(err)
		}
		mu.Lock()
		defer mu.Unlock()
		raw.Write(b)
		for _, rs := range m.ResourceSpans {
			for _, ss := range rs.ScopeSpans {
				spans = append(spans, ss.Spans...)
			}
		}
	}))
	defer collector.Close()
	cfg := newPlace(t).config()
	var err error
	if cfg.Trace, err = trace.FromEnv(func(string) string { return "" }, collector.URL); err != nil {
		t.Fatal(err)
	}
	s := start(t, cfg)
	c := s.unix(t)
	sb, err := c.Sandboxes.Create(t.Context(), &client.CreateRequest{Env: map[string]string{"TOKEN": "s3cret-value"}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Processes.Execute(t.Context(), sb.GetId(), &client.ProcessSpec{Argv: []string{"echo", "s3cret-argument"}, Dir: "/tmp"}, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Sandboxes.Get(t.Context(), "no-such-sandbox"); err == nil {
		t.Fatal("a sandbox that there is not")
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+s.Addrs()[0].String()+"/v1/version", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	e2b := e2bKey(t, c)
	box := e2bSandbox(t, s, e2b)
	_ = e2bCall(t, s, "/sandboxes/"+box.SandboxID, "", "X-API-Key", e2b, "Traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b8-01")
	_ = e2bCall(t, s, "/filesystem.Filesystem/Stat", `{"path":"/s3cret"}`, "E2b-Sandbox-Id", box.SandboxID, "E2b-Sandbox-Port", "49983", "X-Access-Token", box.EnvdAccessToken)
	// A stranger's call has none.
	_ = e2bCall(t, s, "/filesystem.Filesystem/ListDir", `{"path":"/"}`, "E2b-Sandbox-Id", box.SandboxID, "E2b-Sandbox-Port", "49983")
	if status, body := scrape(t, "http://"+s.Addrs()[0].String()+"/v1/sandboxes"); status != http.StatusUnauthorized {
		t.Fatalf("%d %s", status, body)
	}
	if err := s.stop(); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	defer mu.Unlock()
	byName, starts := map[string]otlp.Span{}, map[string]otlp.Span{}
	for _, one := range spans {
		byName[one.Name] = one
		if one.Name == "sandbox.start" {
			starts[one.ParentSpanID] = one
		}
	}
	create, version, missing := byName["casemate.v1.SandboxService/CreateSandbox"], byName["casemate.v1.SystemService/GetVersion"], byName["casemate.v1.SandboxService/GetSandbox"]
	if version.TraceID != "4bf92f3577b34da6a3ce929d0e0e4736" || version.ParentSpanID != "00f067aa0ba902b7" {
		t.Errorf("the caller's trace is not taken up: %+v", version)
	}
	for _, one := range []otlp.Span{create, byName["POST /v2/sandboxes"]} {
		if step := starts[one.SpanID]; one.SpanID == "" || step.TraceID != one.TraceID {
			t.Errorf("the steps of a create: %+v in %+v", step, one)
		}
	}
	if attribute(missing, "error.type") != "not_found" || missing.Status.Code != 0 {
		t.Errorf("a call for what there is not: %+v", missing)
	}
	if _, ok := byName["casemate.v1.ProcessService/Execute"]; !ok {
		t.Errorf("no span of a process: %v", byName)
	}
	for _, name := range []string{"casemate.v1.SandboxService/ListSandboxes", "filesystem.Filesystem/ListDir"} {
		if one, ok := byName[name]; ok {
			t.Errorf("a stranger's call: %+v", one)
		}
	}
	detail, stat := byName["GET /sandboxes/{id}"], byName["filesystem.Filesystem/Stat"]
	if detail.ParentSpanID != "00f067aa0ba902b8" || attribute(detail, "http.route") != "/sandboxes/{id}" || attribute(detail, "casemate.code") != "ok" {
		t.Errorf("a call of E2B's: %+v", detail)
	}
	if attribute(stat, "error.type") != "not_found" || attribute(stat, "rpc.method") != "Stat" {
		t.Errorf("a call of E2B's into a sandbox: %+v", stat)
	}
	for _, secret := range []string{"s3cret", "echo", "/tmp", sb.GetId(), "TOKEN", "no-such-sandbox", box.SandboxID, e2b} {
		if strings.Contains(raw.String(), secret) {
			t.Errorf("spans hold %q", secret)
		}
	}
}

// TestMetricsAddressInUse: the error names the flag that helps.
func TestMetricsAddressInUse(t *testing.T) {
	taken, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = taken.Close() }()
	cfg := newPlace(t).config()
	cfg.MetricsListen = taken.Addr().String()
	_, err = New(t.Context(), cfg)
	if _, hint := errs.PublicText(err); !errs.Is(err, errs.FailedPrecondition) || !strings.Contains(hint, "--metrics-listen") {
		t.Errorf("%v, hint %q", err, hint)
	}
}
