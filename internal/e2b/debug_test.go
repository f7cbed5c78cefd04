package e2b

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// TestDebugMode: one sandbox for all requests, without a key; a new one when it has ended; nothing for pages.
func TestDebugMode(t *testing.T) {
	h := newHarness(t)
	srv := httptest.NewServer(h.api.Debug(envdPort))
	defer srv.Close()
	h.url = srv.URL
	if a := h.send("GET", "/health", "", to("debug_sandbox_id", envdPort)...); a.status != 204 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	for range 3 {
		if a := h.send("POST", "/process.Process/List", "{}", to("debug_sandbox_id", envdPort)...); a.status != 200 {
			t.Errorf("%d %s", a.status, a.body)
		}
	}
	alive := h.manager.Alive()
	if len(alive) != 1 || !strings.Contains(h.envd.last(), alive[0]+" "+debugOwner) {
		t.Fatalf("%v, the agent was asked %q", alive, h.envd.last())
	}
	h.refused(h.send("GET", "/files?path=/a", "", "Origin", "http://localhost:3000"), 403, "no pages")
	h.refused(h.send("GET", "/files?path=/a", "", "Host", "rebound.test:49983"), 403, "no pages")
	h.refused(h.send("POST", "/init", "{}"), 404, "no such path")
	if _, err := h.manager.Pause(t.Context(), server(), alive[0]); err != nil {
		t.Fatal(err)
	}
	if a := h.send("GET", "/envs", ""); a.status != http.StatusOK {
		t.Errorf("of a paused one: %d %s", a.status, a.body)
	}
	if _, err := h.manager.Delete(t.Context(), server(), alive[0]); err != nil {
		t.Fatal(err)
	}
	if a := h.send("GET", "/envs", ""); a.status != http.StatusOK {
		t.Errorf("after its end: %d %s", a.status, a.body)
	}
	if again := h.manager.Alive(); len(again) != 1 || again[0] == alive[0] {
		t.Errorf("%v", again)
	}
}
