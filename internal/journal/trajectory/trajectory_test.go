package trajectory

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal/bundle"
	"casemate.dev/internal/otlp"
)

// record is a bundle of events, given as the leaf holds them but for sandbox, seq and time; "body NAME CONTENT" is content
// of the event before.
func record(t *testing.T, lines ...string) io.Reader {
	t.Helper()
	var b bytes.Buffer
	put := func(l bundle.Line) {
		if err := l.Write(&b); err != nil {
			t.Fatal(err)
		}
	}
	put(bundle.Line{Bundle: &bundle.Header{Version: bundle.Version, Origin: "casemate.test/log", Sandbox: "box", Key: "k"}})
	put(bundle.Line{Checkpoint: "note"})
	seq := int64(0)
	for _, l := range lines {
		if rest, ok := strings.CutPrefix(l, "body "); ok {
			name, data, _ := strings.Cut(rest, " ")
			put(bundle.Line{Body: &bundle.Body{Seq: uint64(seq), Name: name, Salt: []byte("salt"), Data: []byte(data)}})
			continue
		}
		seq++
		leaf := 10 * seq
		at := time.Date(2026, 1, 1, 0, 0, int(seq), 0, time.UTC).Format(time.RFC3339Nano)
		put(bundle.Line{Leaf: &leaf, Event: json.RawMessage(fmt.Sprintf(`{"sandbox":"box","seq":%d,"time":%q,%s}`, seq, at, l))})
	}
	return &b
}

func read(t *testing.T) *Story {
	t.Helper()
	s, err := Read(record(t,
		`"type":"sandbox.created","actor":"key_a","facts":{"server":{"template":"base","isolation":"namespace"}}`,
		`"type":"process.started","actor":"key_a","process":"p1","facts":{"server":{"argv":{"body":"ab","bytes":5}},"guest":{"dir":"/home"}}`,
		`body server.argv ["sh","-c","ls"]`,
		`"type":"network.opened","actor":"server","facts":{"server":{"target":"a.test:443"}}`,
		`"type":"network.refused","actor":"server","facts":{"server":{"target":"b.test:443"}}`,
		`"type":"process.ended","actor":"key_a","process":"p1","facts":{"guest":{"end":"exited","code":2},"server":{"duration_ms":3}}`,
		"body guest.stdout listed\n",
		`body guest.stderr not all`,
		`"type":"files.changed","actor":"server","process":"p1","facts":{"server":{"since":1,"created":1,"files":[{"op":"created","path":"/new"}]}}`,
		`"type":"files.changed","actor":"server","facts":{"server":{"since":7,"between":true,"deleted":1}}`,
		`"type":"network.opened","actor":"server","facts":{"server":{"target":"a.test:443"}}`,
		`"type":"run.started","actor":"key_a","facts":{"server":{"run":"r1","context":"python","language":"python"}}`,
		`body server.code 1+1`,
		`"type":"run.ended","actor":"key_a","facts":{"guest":{"end":"completed"},"server":{"run":"r1","context":"python"}}`,
		`"type":"file.written","actor":"key_a","facts":{"server":{"path":"/a","bytes":3}}`,
		`"type":"process.failed","actor":"key_a","process":"p2","facts":{"server":{"error":"no such program"}}`,
		`"type":"process.started","actor":"key_a","process":"p3","facts":{}`,
		`"type":"gap","actor":"server","facts":{"server":{"reason":"the server was killed"}}`,
		`"type":"process.ended","actor":"key_a","process":"p3","facts":{"guest":{"end":"signaled","signal":9},"server":{"end":"oom_killed"}}`,
		`"type":"process.started","actor":"key_a","process":"p4","facts":{}`,
	))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestATIF(t *testing.T) {
	var b bytes.Buffer
	if err := read(t).WriteATIF(&b); err != nil {
		t.Fatal(err)
	}
	var doc atif
	if err := json.Unmarshal(b.Bytes(), &doc); err != nil {
		t.Fatal(err)
	}
	if doc.SchemaVersion != "ATIF-v1.7" || doc.SessionID != "box" || len(doc.Steps) != 7 || doc.FinalMetrics.TotalSteps != 7 {
		t.Fatalf("%s", b.Bytes())
	}
	for i, s := range doc.Steps {
		if _, err := time.Parse(time.RFC3339, s.Timestamp); err != nil || s.StepID != i+1 || s.Source != "agent" && s.Source != "system" {
			t.Errorf("step %+v, %v", s, err)
		}
		if s.Observation != nil && s.Observation.Results[0].SourceCallID != s.ToolCalls[0].ToolCallID {
			t.Errorf("the result of %+v is of %+v", s.ToolCalls, s.Observation)
		}
	}
	p := doc.Steps[1]
	got, _ := json.Marshal(p)
	for _, want := range []string{
		`"function_name":"process"`, `"arguments":{"argv":["sh","-c","ls"],"dir":"/home"}`, `"content":"listed\n\n[stderr]\nnot all"`,
		`"exit":2`, `"net":1`, `"denied":1`, `"log_index":50`, `"oom":false`, `"guest":{"code":2,"end":"exited"}`,
		`"files":{"files":{"created":1,"files":[{"op":"created","path":"/new"}],"since":1},"log":{"event":6,`,
	} {
		if !bytes.Contains(got, []byte(want)) {
			t.Errorf("no %s in %s", want, got)
		}
	}
	if between, _ := json.Marshal(doc.Extra); !bytes.Contains(between, []byte(`"between":[{"files":{"between":true,"deleted":1,"since":7},"log":{"event":7,`)) {
		t.Errorf("between: %s", between)
	}
	if oom, _ := json.Marshal(doc.Steps[5].Observation); !bytes.Contains(oom, []byte(`"oom":true`)) {
		t.Errorf("out of memory: %s", oom)
	}
	if doc.Steps[6].Observation != nil {
		t.Error("an end that is not on record has a result")
	}
}

// collector takes spans as a collector does; what it answers first is given.
type collector struct {
	mu    sync.Mutex
	first []int // statuses, before 200
	asked int
	spans map[string]otlp.Span
	auth  string
}

func (c *collector) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.asked++
	if len(c.first) > 0 {
		status := c.first[0]
		c.first = c.first[1:]
		w.WriteHeader(status)
		return
	}
	var m otlp.Traces
	d := json.NewDecoder(r.Body)
	d.DisallowUnknownFields()
	if err := d.Decode(&m); err != nil || r.URL.Path != "/v1/traces" || r.Header.Get("Content-Type") != "application/json" {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	c.auth = r.Header.Get("Authorization")
	refused := 0
	for _, rs := range m.ResourceSpans {
		for _, ss := range rs.ScopeSpans {
			for _, s := range ss.Spans {
				if len(s.TraceID) != 32 || len(s.SpanID) != 16 || s.Start > s.End {
					refused++
					continue
				}
				c.spans[s.SpanID] = s
			}
		}
	}
	fmt.Fprintf(w, `{"partialSuccess":{"rejectedSpans":"%d"}}`, refused)
}

func TestSpansReachACollector(t *testing.T) {
	c := &collector{first: []int{503, 429}, spans: make(map[string]otlp.Span)}
	s := httptest.NewServer(c)
	defer s.Close()
	for _, content := range []bool{false, true} {
		requests, err := read(t).Spans(content)
		if err != nil {
			t.Fatal(err)
		}
		to := otlp.Collector{URL: s.URL, Header: http.Header{"Authorization": {"Bearer t"}}, Pause: time.Millisecond}
		if n, err := to.Send(t.Context(), requests); n != 0 || err != nil {
			t.Fatalf("%d refused, %v", n, err)
		}
		if len(c.spans) != 6 || c.auth != "Bearer t" { // the second time the same
			t.Fatalf("%d spans", len(c.spans))
		}
		byCall := map[string]otlp.Span{}
		for _, s := range c.spans {
			attributes := map[string]string{}
			for _, a := range s.Attributes {
				if a.Value.String != nil {
					attributes[a.Key] = *a.Value.String
				}
			}
			byCall[attributes["gen_ai.tool.call.id"]] = s
			if _, has := attributes["gen_ai.tool.call.result"]; has != (content && s.ParentSpanID != "") {
				t.Errorf("content %v: %v", content, attributes)
			}
			if s.ParentSpanID != "" && (attributes["gen_ai.operation.name"] != "execute_tool" || !strings.HasPrefix(s.Name, "execute_tool ")) {
				t.Errorf("%s: %v", s.Name, attributes)
			}
		}
		for call, want := range map[string]string{"p1": "exit_2", "p2": "failed", "p3": "oom_killed", "r1": "", "": ""} {
			if got := byCall[call].Status.Message; got != want || (byCall[call].Status.Code == otlp.StatusError) != (want != "") {
				t.Errorf("%s: %+v, want %q", call, byCall[call].Status, want)
			}
		}
	}
	if c.asked != 4 {
		t.Errorf("asked %d times", c.asked)
	}
}

func TestCollectorsThatTakeNothing(t *testing.T) {
	for _, tc := range []struct {
		first []int
		url   string
		kind  errs.Kind
		asked int
	}{
		{[]int{503, 503, 503, 503, 503}, "", errs.Unavailable, 5},
		{[]int{401}, "", errs.PermissionDenied, 1},
		{[]int{404}, "", errs.FailedPrecondition, 1},
		{nil, "localhost:4318", errs.InvalidArgument, 0},
		{nil, "ftp://a", errs.InvalidArgument, 0},
	} {
		c := &collector{first: tc.first, spans: make(map[string]otlp.Span)}
		s := httptest.NewServer(c)
		url := tc.url
		if url == "" {
			url = s.URL + "/v1/traces"
		}
		_, err := otlp.Collector{URL: url, Pause: time.Millisecond}.Send(t.Context(), [][]byte{[]byte(`{}`)})
		s.Close()
		if !errs.Is(err, tc.kind) || c.asked != tc.asked {
			t.Errorf("%v %s: %v, asked %d times", tc.first, tc.url, err, c.asked)
		}
	}
}

func TestWhatIsNoBundle(t *testing.T) {
	for _, text := range []string{"", "{}\n", "hello\n", `{"event":{},"leaf":1}`} {
		if _, err := Read(strings.NewReader(text)); err == nil {
			t.Errorf("%q is a story", text)
		}
	}
}
