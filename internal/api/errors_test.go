package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"casemate.dev/client"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation/fake"
	"casemate.dev/internal/sandbox"
)

// TestCauseStaysPrivate injects a host path and a secret into the cause of an internal error: no
// protocol shows them; the answer carries an id instead, under which the log has the cause.
func TestCauseStaysPrivate(t *testing.T) {
	const secret = "/srv/private/of-the-host token=hunter2"
	h := newHarness(t)
	h.fake.SetFaults(fake.Faults{FailAt: fake.StepRoot, Err: fmt.Errorf("mount %s: %w", secret, errors.New("boom"))})
	h2c := new(http.Protocols)
	h2c.SetUnencryptedHTTP2(true)
	create := step{method: "SandboxService/CreateSandbox", rest: "POST /v1/sandboxes", body: `{}`}
	m := methodOf(t, create.method)
	answers := map[string]func() string{
		"plain JSON": func() string { _, _, b := h.call("POST", "/casemate.v1."+create.method, `{}`); return b },
		"REST":       func() string { _, _, b := h.call("POST", "/v1/sandboxes", `{}`); return b },
		"gRPC": func() string {
			_, err := callRPC(&http.Client{Transport: &http.Transport{Protocols: h2c}}, connect.WithGRPC())(t, h, create, m)
			return fmt.Sprint(err)
		},
	}
	for name, ask := range answers {
		t.Run(name, func(t *testing.T) {
			answer := ask()
			if strings.Contains(answer, "private") || strings.Contains(answer, "hunter2") {
				t.Errorf("the cause shows: %s", answer)
			}
			at := strings.Index(answer, errPrefix)
			if at < 0 {
				t.Fatalf("no error id in %s", answer)
			}
			id := answer[at : at+len(errPrefix)+20]
			if log := h.log.String(); !strings.Contains(log, id) || !strings.Contains(log, secret) {
				t.Errorf("the log lacks %s or its cause:\n%s", id, log)
			}
		})
	}
}

const errPrefix = "err_"

// TestPanicIsAnInternalError: a fault of ours in one request answers that request, and the log has the
// trace.
func TestPanicIsAnInternalError(t *testing.T) {
	h := newHarness(t, func(c *Config) {
		c.BuildTemplate = func(context.Context, string, bool, func(string, float64, string)) (sandbox.Template, error) {
			panic("secret detail")
		}
	})
	status, _, body := h.call("POST", "/v1/templates/base/build", "", "Authorization", "Bearer "+h.admin)
	if status != http.StatusInternalServerError || !strings.Contains(body, errPrefix) || strings.Contains(body, "secret") {
		t.Errorf("twin: %d %s", status, body)
	}
	c, err := client.New(h.url, h.admin)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, err = c.System.BuildTemplate(t.Context(), "base", false, func(*client.BuildProgress) {})
	var e *client.Error
	if !errors.As(err, &e) || e.Kind != client.Internal || e.ID == "" || strings.Contains(e.Message, "secret") {
		t.Errorf("RPC: %#v", err)
	}
	if log := h.log.String(); !strings.Contains(log, "secret detail") || !strings.Contains(log, "errors_test.go") {
		t.Errorf("the log lacks the panic or its trace: %s", log)
	}
}

// TestErrorsByKind is the table kind → status, for REST; Connect and gRPC carry the kind as a detail.
func TestErrorsByKind(t *testing.T) {
	h := newHarness(t)
	for _, row := range errs.Table() {
		if row.Kind == errs.Internal {
			continue // has its own test
		}
		t.Run(row.Code, func(t *testing.T) {
			h.fake.SetFaults(fake.Faults{FailAt: fake.StepRoot, Err: errs.New(row.Kind, "told %s", row.Code).WithHint("do this")})
			status, header, body := h.call("POST", "/v1/sandboxes", `{}`)
			var p problem
			if err := json.Unmarshal([]byte(body), &p); err != nil {
				t.Fatalf("%v in %s", err, body)
			}
			if status != row.HTTP || p.Code != row.Code || header.Get(headerKind) != row.Code || p.Hint != "do this" || !strings.Contains(p.Message, row.Code) {
				t.Errorf("REST: status %d, %s; want %d, %s", status, body, row.HTTP, row.Code)
			}
			c, err := client.New(h.url, h.user)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			_, err = c.Sandboxes.Create(t.Context(), &client.CreateRequest{})
			var e *client.Error
			if !errors.As(err, &e) || string(e.Kind) != row.Code || e.Hint != "do this" {
				t.Errorf("client: %#v", err)
			}
		})
	}
}

// TestWrongRequests: what nobody serves, and what can't be read, is told in one shape.
func TestWrongRequests(t *testing.T) {
	h := newHarness(t)
	box := h.box()
	tests := []struct {
		name, method, path, body string
		status                   int
		code                     string
	}{
		{"no such path", "GET", "/v1/nothing", "", 404, "not_found"},
		{"outside of everything", "GET", "/nothing", "", 404, "not_found"},
		{"wrong method", "DELETE", "/v1/sandboxes", "", 405, "invalid_argument"},
		{"not JSON", "POST", "/v1/sandboxes", "{", 400, "invalid_argument"},
		{"wrong type", "POST", "/v1/sandboxes", `{"labels": 3}`, 400, "invalid_argument"},
		{"no sandbox", "GET", "/v1/sandboxes/nosuchsandboxatall", "", 404, "not_found"},
		{"no process", "GET", "/v1/sandboxes/" + box + "/processes/none", "", 404, "not_found"},
		{"nothing to execute", "POST", "/v1/sandboxes/" + box + "/execute", `{}`, 400, "invalid_argument"},
		{"nothing to run", "POST", "/v1/sandboxes/" + box + "/run", `{}`, 400, "invalid_argument"},
		{"run without JSON", "POST", "/v1/sandboxes/" + box + "/run", `x`, 400, "invalid_argument"},
		{"bad signal", "POST", "/v1/sandboxes/" + box + "/processes/none/signal", `{"signal":"NOSUCH"}`, 400, "invalid_argument"},
		{"bad offset", "GET", "/v1/sandboxes/" + box + "/processes/none/output?offset=x", "", 400, "invalid_argument"},
		{"bad wait", "GET", "/v1/sandboxes/" + box + "/processes/none/output?wait=x", "", 400, "invalid_argument"},
		{"bad limit", "GET", "/v1/sandboxes/" + box + "/processes/none/output?limit=-1", "", 400, "invalid_argument"},
		{"no file named", "GET", "/v1/sandboxes/" + box + "/files", "", 400, "invalid_argument"},
		{"no such file", "GET", "/v1/sandboxes/" + box + "/files?path=/none", "", 404, "not_found"},
		{"directory", "GET", "/v1/sandboxes/" + box + "/files?path=/", "", 412, "failed_precondition"},
		{"bad mode", "PUT", "/v1/sandboxes/" + box + "/files?path=x&mode=9", "x", 400, "invalid_argument"},
		{"bad label", "GET", "/v1/sandboxes?label=x", "", 400, "invalid_argument"},
		{"bad depth", "GET", "/v1/sandboxes/" + box + "/files/list?path=/&depth=-1", "", 400, "invalid_argument"},
		{"no such parameter", "GET", "/v1/sandboxes/" + box + "/files/list?path=/&bogus=1", "", 400, "invalid_argument"},
		{"a body where none goes", "GET", "/v1/sandboxes/" + box + "/files/list?path=/", `{"path": "/"}`, 400, "invalid_argument"},
		{"own path", "GET", "/-/nothing", "", 404, "not_found"},
		{"own method", "POST", "/-/health", "{}", 400, "invalid_argument"},
		{"long idempotency key", "POST", "/v1/sandboxes", `{}`, 400, "invalid_argument"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			header := []string{}
			if tt.name == "long idempotency key" {
				header = []string{"Idempotency-Key", strings.Repeat("x", 300)}
			}
			status, h, body := h.call(tt.method, tt.path, tt.body, header...)
			var p problem
			if err := json.Unmarshal([]byte(body), &p); err != nil {
				t.Fatalf("status %d, not JSON: %q", status, body)
			}
			if status != tt.status || p.Code != tt.code || p.Message == "" || !strings.HasPrefix(h.Get("Content-Type"), "application/json") {
				t.Errorf("status %d %s; want %d %s", status, body, tt.status, tt.code)
			}
		})
	}
}

// TestStrangersGetNothing: without a key, and with a wrong one, every path but the open ones answers
// 401, in the right shape for each protocol.
func TestStrangersGetNothing(t *testing.T) {
	h := newHarness(t)
	box := h.box()
	for _, s := range steps() {
		s.rest = strings.NewReplacer("${box}", box, "${key}", "key_x", "${start}", "1").Replace(s.rest)
		if s.method == "SystemService/GetVersion" || s.method == "TrustService/GetAuthority" {
			continue
		}
		for _, key := range []string{"", "Bearer csm_wrong", "Basic eDp5"} {
			if s.rest != "" {
				verb, path, _ := strings.Cut(s.rest, " ")
				if status, _, body := h.call(verb, path, "", "Authorization", key); status != http.StatusUnauthorized || !strings.Contains(body, `"code":"unauthenticated"`) {
					t.Errorf("%s with %q: %d %s", s.rest, key, status, body)
				}
			}
			m := methodOf(t, s.method)
			if m.IsStreamingServer() || m.IsStreamingClient() {
				continue
			}
			if status, _, body := h.call("POST", "/casemate.v1."+s.method, `{}`, "Authorization", key); status != http.StatusUnauthorized || !strings.Contains(body, `"unauthenticated"`) {
				t.Errorf("%s with %q: %d %s", s.method, key, status, body)
			}
		}
	}
	for _, r := range Routes() {
		path := strings.NewReplacer("{sandbox}", box, "{process}", "p", "{name}", "base").Replace(r.Path)
		if status, _, body := h.call(r.Method, path, "", "Authorization", ""); status != http.StatusUnauthorized {
			t.Errorf("%s %s: %d %s", r.Method, path, status, body)
		}
	}
	for _, path := range []string{"/v1/sandboxes/" + box + "/ports/80/", "/-/metrics"} {
		if status, _, body := h.call("GET", path, "", "Authorization", ""); status != http.StatusUnauthorized {
			t.Errorf("GET %s: %d %s", path, status, body)
		}
	}
}

// TestOthersSandboxesDoNotExist: another key's sandbox answers as one that is not there (E10).
func TestOthersSandboxesDoNotExist(t *testing.T) {
	h := newHarness(t)
	sb, err := h.manager.Create(t.Context(), sandbox.Principal{ID: "key_of_another"}, sandbox.Spec{}, sandbox.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, rest := range []string{"GET /v1/sandboxes/X", "DELETE /v1/sandboxes/X", "POST /v1/sandboxes/X/execute", "GET /v1/sandboxes/X/files?path=/etc/passwd", "GET /v1/sandboxes/X/events/stream", "GET /v1/sandboxes/X/ports/80/"} {
		verb, path, _ := strings.Cut(rest, " ")
		body := ""
		if verb == "POST" {
			body = `{"process":{"argv":["true"]}}`
		}
		status, _, there := h.call(verb, strings.Replace(path, "X", sb.ID, 1), body)
		_, _, absent := h.call(verb, strings.Replace(path, "X", "nosuchsandboxatallxx", 1), body)
		if status != http.StatusNotFound || there != strings.ReplaceAll(absent, "nosuchsandboxatallxx", sb.ID) {
			t.Errorf("%s: %d %s; absent: %s", rest, status, there, absent)
		}
	}
}

// TestUnreadable: a body that is no message of the schema, also for one unknown field, is refused with what
// is wrong in it, and not carried out as if it were empty.
func TestUnreadable(t *testing.T) {
	h := newHarness(t)
	for body, says := range map[string]string{`{"memory_limitt": 1}`: `memory_limitt`, `{"labels":`: "unexpected EOF", `[]`: "unexpected token"} {
		for name, path := range map[string]string{"plain JSON": "/casemate.v1.SandboxService/CreateSandbox", "REST": "/v1/sandboxes"} {
			for _, typ := range []string{"application/json", "application/json; charset=utf-8"} {
				status, _, answer := h.call("POST", path, body, "Content-Type", typ)
				var p struct{ Code, Message string }
				if err := json.Unmarshal([]byte(answer), &p); err != nil {
					t.Errorf("%s: %v in %s", name, err, answer)
				}
				if status != http.StatusBadRequest || p.Code != "invalid_argument" || !strings.Contains(p.Message, says) || strings.Contains(p.Message, "code") {
					t.Errorf("%s, %s: %d %s", name, typ, status, answer)
				}
			}
		}
	}
	if _, _, list := h.call("GET", "/v1/sandboxes", ""); strings.Contains(list, `"id"`) {
		t.Errorf("made all the same: %s", list)
	}
	if status, _, answer := h.call("POST", "/v1/sandboxes", ""); status != http.StatusOK {
		t.Errorf("twin: no body is no field: %d %s", status, answer)
	}
}

// TestUnreadableQuery: what no field can hold is the caller's fault, and the answer says what it is.
func TestUnreadableQuery(t *testing.T) {
	h := newHarness(t)
	for path, says := range map[string]string{
		"/v1/sandboxes?bogus=1":             `no parameter \"bogus\"`,
		"/v1/sandboxes?pageSize=1&a.b=1":    `no parameter \"a.b\"`,
		"/v1/sandboxes/x/processes?bogus=1": `no parameter \"bogus\"`,
		"/v1/sandboxes?pageSize=many":       "page_size",
		"/v1/sandboxes?label=%ff":           "UTF-8",
		"/v1/sandboxes/%ff":                 "UTF-8",
	} {
		status, _, answer := h.call("GET", path, "")
		if status != http.StatusBadRequest || !strings.Contains(answer, `"code":"invalid_argument"`) || !strings.Contains(answer, says) {
			t.Errorf("%s: %d %s", path, status, answer)
		}
	}
}
