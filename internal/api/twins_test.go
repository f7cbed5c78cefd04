package api

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/testenv"
)

// sseEvent is one server-sent event as a browser sees it.
type sseEvent struct{ id, event, data string }

// readSSE reads events until f says stop or the stream ends.
func readSSE(t *testing.T, h *harness, path string, f func(sseEvent) bool, header ...string) (http.Header, []sseEvent) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, h.url+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-API-Key", h.user)
	req.Header.Set("Accept", "text/event-stream")
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	var all []sseEvent
	var e sseEvent
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 4<<20)
	for lines.Scan() {
		switch line := lines.Text(); {
		case line == "" && e != (sseEvent{}):
			all = append(all, e)
			if !f(e) {
				return resp.Header, all
			}
			e = sseEvent{}
		case strings.HasPrefix(line, "id: "):
			e.id = line[4:]
		case strings.HasPrefix(line, "event: "):
			e.event = line[7:]
		case strings.HasPrefix(line, "data: "):
			e.data = line[6:]
		case strings.HasPrefix(line, ": keep-alive"):
			if !f(sseEvent{event: "keep-alive"}) {
				return resp.Header, all
			}
		}
	}
	return resp.Header, all
}

func always(sseEvent) bool { return true }

func (h *harness) start(box, id string, argv ...string) {
	h.t.Helper()
	b, _ := json.Marshal(map[string]any{"process": map[string]any{"id": id, "argv": argv, "stdin": true}})
	if status, _, body := h.call("POST", "/v1/sandboxes/"+box+"/processes", string(b)); status != http.StatusOK {
		h.t.Fatalf("start: %d %s", status, body)
	}
}

func (h *harness) input(box, id, text string, end bool) {
	h.t.Helper()
	b, _ := json.Marshal(map[string]any{"data": []byte(text), "close": end})
	if status, _, body := h.call("POST", "/v1/sandboxes/"+box+"/processes/"+id+"/input", string(b)); status != http.StatusOK {
		h.t.Fatalf("input: %d %s", status, body)
	}
}

// TestOutputResumesAsServerSentEvents: a browser that lost its connection sends the last id it saw,
// and gets the rest and the end.
func TestOutputResumesAsServerSentEvents(t *testing.T) {
	h := newHarness(t)
	box := h.box()
	h.start(box, "p", "cat")
	path := "/v1/sandboxes/" + box + "/processes/p/output"
	h.input(box, "p", "first ", false)
	var last string
	_, _ = readSSE(t, h, path, func(e sseEvent) bool { last = e.id; return e.event != "output" })
	if last != "6" {
		t.Fatalf("the first piece has id %q, want 6", last)
	}
	h.input(box, "p", "second", true)
	header, events := readSSE(t, h, path, always, "Last-Event-ID", last)
	if ct := header.Get("Content-Type"); ct != "text/event-stream" {
		t.Errorf("Content-Type %q", ct)
	}
	var text, kinds strings.Builder
	for _, e := range events {
		var it outputItem
		_ = json.Unmarshal([]byte(e.data), &it)
		if it.Text != nil && e.event == "output" {
			text.WriteString(*it.Text)
		}
		kinds.WriteString(e.event + " ")
	}
	if text.String() != "second" || !strings.HasSuffix(kinds.String(), "ended ") {
		t.Errorf("resumed with %q, events %s", text.String(), kinds.String())
	}
	if e := events[len(events)-1]; e.id != "12" || !strings.Contains(compact([]byte(e.data)), `"end":"exited"`) {
		t.Errorf("last event %+v", e)
	}
}

func TestSilentStreamsShowThatTheyStand(t *testing.T) {
	h := newHarness(t)
	box := h.box()
	h.start(box, "p", "cat")
	alive := 0
	_, _ = readSSE(t, h, "/v1/sandboxes/"+box+"/processes/p/output", func(e sseEvent) bool {
		if e.event == "keep-alive" {
			alive++
		}
		return alive < 3
	})
	if alive != 3 {
		t.Errorf("%d keep-alives, want 3", alive)
	}
}

// TestLongPoll: nothing there, then a piece; the answer tells where to go on.
func TestLongPoll(t *testing.T) {
	h := newHarness(t)
	box := h.box()
	h.start(box, "p", "cat")
	path := "/v1/sandboxes/" + box + "/processes/p/output"
	if status, _, body := h.call("GET", path, ""); status != 200 || body != `{"type":"more","next":0}`+"\n" {
		t.Errorf("nothing there: %d %s", status, body)
	}
	began := time.Now()
	if status, _, body := h.call("GET", path+"?wait=300ms", ""); status != 200 || !strings.Contains(body, `{"type":"more","next":0}`) || time.Since(began) < 300*time.Millisecond {
		t.Errorf("waited %v for nothing: %d %s", time.Since(began), status, body)
	}
	answer := make(chan string, 1)
	go func() {
		_, _, body := h.call("GET", path+"?wait=30", "")
		answer <- body
	}()
	h.input(box, "p", "hi\xff", true)
	// Keep-alives may stand before the piece.
	got := strings.ReplaceAll(testenv.Receive(t, "the answer comes", answer), `{"type":"keep_alive"}`+"\n", "")
	if !strings.Contains(got, `{"type":"output","stream":"stdout","offset":0,"next":3,"base64":"aGn/"}`) {
		t.Errorf("a piece that is no UTF-8: %s", got)
	}
	if _, _, body := h.call("GET", path+"?offset=3&wait=30", ""); !strings.Contains(compact([]byte(strings.TrimSpace(body))), `"end":"exited"`) {
		t.Errorf("past the end: %s", body)
	}
}

func TestRawOutput(t *testing.T) {
	h := newHarness(t)
	box := h.box()
	h.start(box, "p", "sh", "-c", "echo out; echo err >&2; exit 4")
	path := "/v1/sandboxes/" + box + "/processes/p/output"
	if status, _, body := h.call("GET", "/v1/sandboxes/"+box+"/processes/p/wait?timeout=10s", ""); status != 200 || !strings.Contains(body, "exited") {
		t.Fatalf("wait: %d %s", status, body)
	}
	status, header, body := h.call("GET", path+"?stream=stderr", "", "Accept", octetStream)
	if status != 200 || body != "err\n" || header.Get(headerNext) != "8" || header.Get(headerEnd) != "exited" || header.Get(headerCode) != "4" {
		t.Errorf("stderr: %d %q %v", status, body, header)
	}
	if status, header, body = h.call("GET", path+"?limit=2", "", "Accept", octetStream); status != 200 || len(body) != 2 || header.Get(headerNext) != "2" || header.Get(headerEnd) != "" {
		t.Errorf("limited: %d %q %v", status, body, header)
	}
}

func TestRunTwin(t *testing.T) {
	h := newHarness(t)
	box := h.box()
	status, header, body := h.call("POST", "/v1/sandboxes/"+box+"/run", `{"process":{"argv":["sh","-c","echo hi; exit 3"]}}`)
	lines := strings.Split(strings.TrimSpace(body), "\n")
	if status != 200 || header.Get("Content-Type") != typeLines || len(lines) != 3 {
		t.Fatalf("%d %v %s", status, header, body)
	}
	for i, want := range []string{`"type":"started"`, `"text":"hi\n"`, `"code":3`} {
		if !strings.Contains(compact([]byte(lines[i])), want) {
			t.Errorf("line %d is %s, want %s", i, lines[i], want)
		}
	}
}

func TestFollowEventsTwin(t *testing.T) {
	h := newHarness(t)
	box := h.box()
	path := "/v1/sandboxes/" + box + "/events"
	var ids []string
	_, _ = readSSE(t, h, path, func(e sseEvent) bool {
		if e.id != "" {
			ids = append(ids, e.id)
		}
		return len(ids) < 2
	})
	if strings.Join(ids, " ") != "1 2" {
		t.Fatalf("ids %v", ids)
	}
	_, events := readSSE(t, h, path+"/stream", func(e sseEvent) bool { return e.id == "" }, "Last-Event-ID", "1")
	if len(events) == 0 || events[len(events)-1].id != "2" {
		t.Errorf("resumed with %v", events)
	}
}

// TestStreamErrorIsAnItem: what goes wrong after the first item can't be a status any more.
func TestDrainEndsStreams(t *testing.T) {
	h := newHarness(t)
	box := h.box()
	h.start(box, "p", "cat")
	h.input(box, "p", "hi", false)
	drained := false
	_, events := readSSE(t, h, "/v1/sandboxes/"+box+"/processes/p/output", func(e sseEvent) bool {
		if !drained && e.event == "output" {
			drained = true
			h.api.Drain()
		}
		return true
	})
	if e := events[len(events)-1]; e.event != "error" || !strings.Contains(e.data, "unavailable") {
		t.Errorf("last event %+v", e)
	}
	if status, _, body := h.call("GET", "/-/health", ""); status != http.StatusServiceUnavailable {
		t.Errorf("health: %d %s", status, body)
	}
}

func TestFileContent(t *testing.T) {
	h := newHarness(t)
	path := "/v1/sandboxes/" + h.box() + "/files?path=notes/" + "%C3%BC.txt"
	if status, _, body := h.call("PUT", path+"&parents=true&mode=600", "hello there"); status != 200 || !strings.Contains(compact([]byte(body)), `"mode":384`) {
		t.Fatalf("PUT: %d %s", status, body)
	}
	status, header, body := h.call("GET", path, "")
	if status != 200 || body != "hello there" || header.Get("Content-Length") != "11" {
		t.Errorf("GET: %d %q %v", status, body, header)
	}
	for name, want := range map[string]string{
		"Content-Type": octetStream, "X-Content-Type-Options": "nosniff", "Content-Security-Policy": "sandbox",
		"Content-Disposition": `attachment; filename="_.txt"; filename*=UTF-8''%C3%BC.txt`, "Accept-Ranges": "bytes",
	} {
		if got := header.Get(name); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	etag := header.Get("Etag")
	if status, _, body = h.call("GET", path, "", "If-None-Match", etag); status != 304 || body != "" {
		t.Errorf("unchanged: %d %q", status, body)
	}
	if status, header, body = h.call("GET", path, "", "Range", "bytes=6-8"); status != 206 || body != "the" || header.Get("Content-Range") != "bytes 6-8/11" {
		t.Errorf("range: %d %q %v", status, body, header)
	}
	if status, header, _ = h.call("GET", path, "", "Range", "bytes=99-"); status != 416 || header.Get("Content-Range") != "bytes */11" {
		t.Errorf("range past the end: %d %v", status, header)
	}
	if status, header, body = h.call("HEAD", path, ""); status != 200 || body != "" || header.Get("Content-Length") != "11" {
		t.Errorf("HEAD: %d %q %v", status, body, header)
	}
	if status, _, body = h.call("PUT", path+"&append=true", "!"); status != 200 {
		t.Errorf("append: %d %s", status, body)
	}
	if _, _, body = h.call("GET", path, ""); body != "hello there!" {
		t.Errorf("after append: %q", body)
	}
	if status, _, _ = h.call("GET", path, "", "If-None-Match", etag); status != 200 {
		t.Errorf("changed, and its old ETag still matches")
	}
}

func TestWatchTwin(t *testing.T) {
	h := newHarness(t)
	box := h.box()
	wrote := false
	_, events := readSSE(t, h, "/v1/sandboxes/"+box+"/files/watch?path=.&recursive=true", func(e sseEvent) bool {
		if e.event == "ready" {
			wrote = true
			h.call("PUT", "/v1/sandboxes/"+box+"/files?path=new", "x")
		}
		return e.event == "ready" || e.event == "keep-alive"
	})
	if !wrote || !strings.Contains(events[len(events)-1].data, "/new") {
		t.Errorf("events %v", events)
	}
}

func TestBuildTwin(t *testing.T) {
	h := newHarness(t)
	status, _, body := h.call("POST", "/v1/templates/base/build", "", "Authorization", "Bearer "+h.admin)
	if status != 200 || !strings.Contains(body, `"line":"unpacking base"`) || !strings.Contains(compact([]byte(strings.Split(body, "\n")[1])), `"type":"built"`) {
		t.Errorf("%d %s", status, body)
	}
	if status, _, body = h.call("POST", "/v1/templates/base/build", ""); status != http.StatusForbidden {
		t.Errorf("without an admin key: %d %s", status, body)
	}
}

// TestIdempotencyKey: the same key and body give the same answer, another body is a conflict, and a
// process runs once, whichever way it is started.
func TestIdempotencyKey(t *testing.T) {
	h := newHarness(t)
	_, _, first := h.call("POST", "/v1/sandboxes", `{"labels":{"a":"b"}}`, "Idempotency-Key", "k1")
	_, _, again := h.call("POST", "/v1/sandboxes", `{"labels":{"a":"b"}}`, "Idempotency-Key", "k1")
	if idOf(t, first) != idOf(t, again) {
		t.Errorf("two sandboxes: %s and %s", first, again)
	}
	if status, _, body := h.call("POST", "/v1/sandboxes", `{"labels":{"a":"c"}}`, "Idempotency-Key", "k1"); status != http.StatusConflict || !strings.Contains(body, `"conflict"`) {
		t.Errorf("other body: %d %s", status, body)
	}
	box := idOf(t, first)
	body := `{"process":{"argv":["sh","-c","echo x >>once; cat once"]}}`
	for i, path := range []string{"/execute", "/processes", "/run"} {
		var answers []string
		for range 3 {
			status, _, answer := h.call("POST", "/v1/sandboxes/"+box+path, body, "Idempotency-Key", fmt.Sprint("p", i))
			if status != 200 {
				t.Fatalf("%s: %d %s", path, status, answer)
			}
			answers = append(answers, answer)
		}
		h.call("POST", "/v1/sandboxes/"+box+"/execute", `{"process":{"argv":["sleep","0.05"]}}`)
		_, _, got := h.call("GET", "/v1/sandboxes/"+box+"/files?path=once", "")
		if got != strings.Repeat("x\n", i+1) {
			t.Errorf("after three calls of %s the file holds %q; answers %v", path, got, answers)
		}
	}
}

func idOf(t *testing.T, body string) string {
	t.Helper()
	var j struct{ ID string }
	if err := json.Unmarshal([]byte(body), &j); err != nil || j.ID == "" {
		t.Fatalf("no id in %s", body)
	}
	return j.ID
}

func TestMetrics(t *testing.T) {
	h := newHarness(t)
	h.box()
	h.call("GET", "/v1/sandboxes", "")
	h.call("GET", "/v1/sandboxes/none", "")
	if status, _, body := h.call("GET", "/-/metrics", ""); status != http.StatusForbidden {
		t.Errorf("without an admin key: %d %s", status, body)
	}
	_, header, body := h.call("GET", "/-/metrics", "", "Authorization", "Bearer "+h.admin)
	for _, want := range []string{
		`casemate_request_duration_seconds_count{method="casemate.v1.SandboxService/ListSandboxes",code="ok"} 1`,
		`casemate_request_duration_seconds_count{method="casemate.v1.SandboxService/GetSandbox",code="not_found"} 1`,
		`casemate_requests_active{method="casemate.v1.SandboxService/ListSandboxes"} 0`,
	} {
		if !strings.Contains(body, want) {
			t.Errorf("metrics lack %s:\n%s", want, body)
		}
	}
	if !strings.HasPrefix(header.Get("Content-Type"), "text/plain") {
		t.Errorf("Content-Type %q", header.Get("Content-Type"))
	}
}
