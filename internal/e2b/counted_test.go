package e2b

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/metrics"
	"casemate.dev/internal/testenv"
)

func (h *harness) figures() string {
	p := &metrics.Page{}
	h.api.cfg.Calls.Write(p)
	return p.String()
}

// Requests of both planes are counted by their routes, and by nothing that somebody chose.
func TestRequestsAreCounted(t *testing.T) {
	h := newHarness(t)
	s := h.create("")
	token := []string{"X-Access-Token", s.EnvdAccessToken}
	h.call("GET", "/sandboxes/"+s.SandboxID, "")
	h.call("GET", "/sandboxes/nosuch", "")
	h.call("GET", "/sandboxes/nosuch", "", "X-API-Key", "")
	h.call("GET", "/volumes/of-a-path-that-is-not-served", "")
	h.send("GET", "/files?path=/s3cret", "", to(s.SandboxID, envdPort, token...)...)
	h.send("GET", "/files?path=/s3cret", "", to(s.SandboxID, envdPort)...)
	h.send("POST", "/process.Process/List", "{}", to(s.SandboxID, envdPort, token...)...)
	h.send("POST", "/process.Process/Chosen", "{}", to(s.SandboxID, envdPort, token...)...)
	h.send("GET", "/chosen", "", to(s.SandboxID, interpreterPort, token...)...)
	h.send("GET", "/contexts", "", to(s.SandboxID, interpreterPort, token...)...)
	h.send("GET", "/chosen", "", to(s.SandboxID, 8000)...)
	page := h.figures()
	for _, want := range []string{
		`method="POST /v2/sandboxes",code="ok"} 1`, `method="GET /sandboxes/{id}",code="ok"} 1`,
		`method="GET /sandboxes/{id}",code="not_found"} 1`, `method="GET /sandboxes/{id}",code="unauthenticated"} 1`,
		`method="GET :49983/files",code="ok"} 1`, `method="GET :49983/files",code="unauthenticated"} 1`,
		`method="process.Process/List",code="ok"} 1`, `method="GET :49999/contexts",code="ok"} 1`, `method="HTTP :port",code="failed_precondition"} 1`,
	} {
		if !strings.Contains(page, "casemate_request_duration_seconds_count{"+want+"\n") {
			t.Errorf("%s is not in\n%s", want, page)
		}
	}
	for _, no := range []string{"hosen", "s3cret", "nosuch", s.SandboxID, "not-served"} {
		if strings.Contains(page, no) {
			t.Errorf("%s is in\n%s", no, page)
		}
	}
}

// A stream is under way while it is open, and one that is cut off has ended for the figures too.
func TestStreamsAreCounted(t *testing.T) {
	h := newHarness(t)
	s := h.create("")
	resp, err := h.open("GET", "/files?stream", "", to(s.SandboxID, envdPort, "X-Access-Token", s.EnvdAccessToken)...)
	if err != nil {
		t.Fatal(err)
	}
	first := make([]byte, len("begun"))
	if _, err := io.ReadFull(resp.Body, first); err != nil || string(first) != "begun" {
		t.Fatalf("%q, %v", first, err)
	}
	if page := h.figures(); !strings.Contains(page, `casemate_requests_active{method="GET :49983/files"} 1`) {
		t.Errorf("an open stream: %s", page)
	}
	if a := h.call("DELETE", "/sandboxes/"+s.SandboxID, ""); a.status != http.StatusNoContent {
		t.Fatalf("%d %s", a.status, a.body)
	}
	if _, err := io.ReadAll(resp.Body); err == nil {
		t.Error("the stream looks whole")
	}
	_ = resp.Body.Close()
	testenv.Eventually(t, time.Minute, "the stream has ended", func() bool {
		page := h.figures()
		return strings.Contains(page, `casemate_requests_active{method="GET :49983/files"} 0`) &&
			strings.Contains(page, `casemate_request_duration_seconds_count{method="GET :49983/files",code="canceled"} 1`)
	})
}

// goneWriter is one whose reader has left.
type goneWriter struct{ http.ResponseWriter }

func (goneWriter) FlushError() error { return io.ErrClosedPipe }

// What the writer below says of a reader that has left reaches whoever streams.
func TestCountedTellsThatTheReaderHasLeft(t *testing.T) {
	c := &counted{ResponseWriter: goneWriter{httptest.NewRecorder()}}
	if err := http.NewResponseController(c).Flush(); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("flush: %v", err)
	}
	if c.status != http.StatusOK {
		t.Errorf("status %d", c.status)
	}
}
