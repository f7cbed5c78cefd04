package e2b

import (
	"encoding/json"
	"io"
	"strings"
	"testing"
	"time"
)

// lines reads an answer's lines; none of them is empty, and all is ASCII.
func lines(t testing.TB, body string) []map[string]any {
	t.Helper()
	var out []map[string]any
	for l := range strings.Lines(body) {
		var m map[string]any
		if err := json.Unmarshal([]byte(l), &m); err != nil {
			t.Fatalf("line %q: %v", l, err)
		}
		for _, c := range []byte(l) {
			if c >= 0x80 {
				t.Fatalf("line %q is not ASCII", l)
			}
		}
		out = append(out, m)
	}
	return out
}

func (h *harness) execute(s sandboxJSON, body string) []map[string]any {
	h.t.Helper()
	a := h.send("POST", "/execute", body, to(s.SandboxID, interpreterPort, "X-Access-Token", s.EnvdAccessToken)...)
	if a.status != 200 {
		h.t.Fatalf("execute %s: %d %s", body, a.status, a.body)
	}
	return lines(h.t, a.body)
}

func kinds(all []map[string]any) string {
	var out []string
	for _, m := range all {
		out = append(out, m["type"].(string))
	}
	return strings.Join(out, " ")
}

func TestInterpreterExecutes(t *testing.T) {
	h := newHarness(t)
	s := h.create("")
	got := h.execute(s, `{"code":"print h\u00e9\u6f22\ud83d\ude00\nwarn oh\nset x 'quoted'\nget x"}`)
	if kinds(got) != "stdout stderr result number_of_executions end_of_execution" {
		t.Fatalf("said %v", got)
	}
	if got[0]["text"] != "hé漢😀\n" || got[1]["text"] != "oh\n" || got[0]["timestamp"] == "" {
		t.Errorf("output %v", got[:2])
	}
	if got[2]["text"] != "quoted" || got[2]["is_main_result"] != true || got[3]["execution_count"] != 1.0 {
		t.Errorf("result %v, count %v", got[2], got[3])
	}
	got = h.execute(s, `{"code":"raise ValueError no good","language":"Py"}`)
	if kinds(got) != "error number_of_executions end_of_execution" || got[0]["name"] != "ValueError" || got[0]["value"] != "no good" {
		t.Errorf("said %v", got)
	}
	got = h.execute(s, `{"code":"line {\"main\":false,\"data\":{\"image/png\":\"aGk=\",\"chart\":{\"type\":\"line\"},\"dataframe\":{\"a\":[1]},\"x/y\":\"z\"}}"}`)
	if got[0]["png"] != "aGk=" || got[0]["chart"].(map[string]any)["type"] != "line" || got[0]["data"] == nil || got[0]["extra"].(map[string]any)["x/y"] != "z" {
		t.Errorf("result %v", got[0])
	}
}

func TestInterpreterContexts(t *testing.T) {
	h := newHarness(t)
	s := h.create("")
	at := to(s.SandboxID, interpreterPort)
	type context struct{ ID, Language, CWD string }
	list := func() []context {
		var all []context
		a := h.send("GET", "/contexts", "", at...)
		if err := json.Unmarshal([]byte(a.body), &all); err != nil || a.status != 200 {
			t.Fatalf("list: %d %s", a.status, a.body)
		}
		return all
	}
	if all := list(); len(all) != 2 || all[0].Language != "python" || all[1].Language != "javascript" {
		t.Errorf("before anything: %v", all)
	}
	var made context
	a := h.send("POST", "/contexts", `{"language":"python"}`, at...)
	if err := json.Unmarshal([]byte(a.body), &made); err != nil || made.CWD != "/home/user" {
		t.Fatalf("create: %s", a.body)
	}
	h.execute(s, `{"code":"set x 1","context_id":"`+made.ID+`"}`)
	if got := h.execute(s, `{"code":"get x","context_id":"`+made.ID+`"}`); got[0]["text"] != "1" {
		t.Errorf("x is %v", got[0])
	}
	if got := h.execute(s, `{"code":"get x"}`); got[0]["name"] != "NameError" {
		t.Errorf("another context's x: %v", got[0])
	}
	if all := list(); len(all) != 3 || all[2].ID != made.ID {
		t.Errorf("list %v", all)
	}
	if a := h.send("POST", "/contexts/"+made.ID+"/restart", "", at...); a.status != 200 || strings.TrimSpace(a.body) != "null" {
		t.Errorf("restart: %d %s", a.status, a.body)
	}
	if got := h.execute(s, `{"code":"get x","context_id":"`+made.ID+`"}`); got[0]["name"] != "NameError" {
		t.Errorf("x after a restart: %v", got[0])
	}
	if a := h.send("DELETE", "/contexts/"+made.ID, "", at...); a.status != 200 {
		t.Errorf("delete: %d %s", a.status, a.body)
	}
	for _, path := range []string{"POST /contexts/" + made.ID + "/restart", "DELETE /contexts/" + made.ID} {
		method, url, _ := strings.Cut(path, " ")
		if a := h.send(method, url, "", at...); a.status != 404 || !strings.Contains(a.body, "Context "+made.ID+" not found") {
			t.Errorf("%s: %d %s", path, a.status, a.body)
		}
	}
}

func TestInterpreterRefuses(t *testing.T) {
	h := newHarness(t)
	s := h.create("")
	with := func(token string) []string { return to(s.SandboxID, interpreterPort, "X-Access-Token", token) }
	for _, tt := range []struct {
		body, token string
		status      int
		text        string
	}{
		{`{"code":"1+1"}`, "", 401, "access token"},
		{`{"code":"1+1"}`, "wrong", 401, "access token"},
		{`{"code":"1+1","context_id":"a","language":"python"}`, s.EnvdAccessToken, 400, "Only one of context_id or language can be provided"},
		{`{"code":"1+1","context_id":"nope"}`, s.EnvdAccessToken, 404, "Context nope not found"},
		{`{"code":"1+1","language":"cobol"}`, s.EnvdAccessToken, 400, "cobol"},
		{`{`, s.EnvdAccessToken, 422, "JSON"},
	} {
		if a := h.send("POST", "/execute", tt.body, with(tt.token)...); a.status != tt.status || !strings.Contains(a.body, tt.text) {
			t.Errorf("%s: %d %s", tt.body, a.status, a.body)
		}
	}
	if a := h.send("GET", "/health", "", to(s.SandboxID, interpreterPort)...); a.status != 200 || strings.TrimSpace(a.body) != `"OK"` {
		t.Errorf("health: %d %s", a.status, a.body)
	}
	closed := h.create(`"network":{"allowPublicTraffic":false}`)
	if a := h.send("GET", "/contexts", "", to(closed.SandboxID, interpreterPort)...); a.status != 403 {
		t.Errorf("contexts of a sandbox that is not public: %d %s", a.status, a.body)
	}
}

// TestInterpreterIsInterrupted: who leaves holds up nobody.
func TestInterpreterIsInterrupted(t *testing.T) {
	h := newHarness(t)
	s := h.create("")
	at := to(s.SandboxID, interpreterPort, "X-Access-Token", s.EnvdAccessToken)
	h.execute(s, `{"code":"set x 1"}`)
	resp, err := h.open("POST", "/execute", `{"code":"print go\nsleep 600000"}`, at...)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(resp.Body, make([]byte, 10)); err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	done := make(chan []map[string]any, 1)
	go func() { done <- h.execute(s, `{"code":"get x"}`) }()
	select {
	case got := <-done:
		if got[0]["text"] != "1" {
			t.Errorf("x is %v", got[0])
		}
	case <-time.After(time.Minute):
		t.Fatal("the next run waits for one whose caller has left")
	}
}

func TestInterpreterComesBack(t *testing.T) {
	h := newHarness(t)
	s := h.create("")
	got := h.execute(s, `{"code":"set x 1\ndie 11"}`)
	if kinds(got) != "error unexpected_end_of_execution" || !strings.Contains(got[0]["value"].(string), "segmentation fault") {
		t.Errorf("said %v", got)
	}
	if got := h.execute(s, `{"code":"1+1"}`); got[0]["text"] != "2" {
		t.Errorf("after its end: %v", got)
	}
}
