package e2b

import (
	"slices"
	"strings"
	"testing"

	"casemate.dev/internal/isolation/fake"
	"casemate.dev/internal/policy"
	"casemate.dev/internal/secret"
)

// headersOf returns what is put on a sandbox's requests, as "host header value".
func (h *harness) headersOf(sandboxID string) []string {
	h.t.Helper()
	s, err := h.manager.Get(h.t.Context(), server(), sandboxID)
	if err != nil {
		h.t.Fatal(err)
	}
	var out []string
	for _, c := range h.vault.Grants(h.t.Context(), secret.Subject{ID: s.ID, Owner: s.Owner, Template: s.Spec.Template}) {
		b := c.Bindings[0]
		out = append(out, b.Hosts[0]+" "+b.Place.Name+" "+string(c.Value.Reveal()))
	}
	slices.Sort(out)
	return out
}

// TestHeadersOfRules: they are kept as secrets are, replaced by updates, copied to forks, and shown to nobody.
func TestHeadersOfRules(t *testing.T) {
	host := fake.NewHost()
	t.Cleanup(host.Close)
	h := newHarnessIn(t, place{dir: t.TempDir(), host: host, gateway: noGateway{}})
	value := "Bearer " + strings.Repeat("v4L", 8)
	s := h.create(`"network":{"rules":{"api.example.com":[{"transform":{"headers":{"Authorization":"` + value + `","X-Team":"a"}}}],"*.example.org":[]}}`)
	want := []string{"api.example.com Authorization " + value, "api.example.com X-Team a"}
	if got := h.headersOf(s.SandboxID); !slices.Equal(got, want) {
		t.Errorf("headers %q", got)
	}
	path := "/sandboxes/" + s.SandboxID
	if a := h.call("GET", path, ""); strings.Contains(a.body, "v4L") || !strings.Contains(a.body, hidden) {
		t.Errorf("shown: %s", a.body)
	}
	a := h.call("POST", path+"/fork", `{"count":2}`)
	if a.status != 201 || strings.Count(a.body, `"sandboxID"`) != 2 {
		t.Fatalf("fork: %d %s", a.status, a.body)
	}
	for _, piece := range strings.Split(a.body, `"sandboxID":"`)[1:] {
		if got := h.headersOf(piece[:20]); !slices.Equal(got, want) {
			t.Errorf("a fork has %q", got)
		}
	}
	h.refused(h.call("PUT", path+"/network", `{"rules":{"api.example.com":[{"transform":{"headers":{"Host":"x"}}}]}}`), 400, "no header that a secret can stand in")
	h.refused(h.call("PUT", path+"/network", `{"rules":{"api.example.com":[{"transform":{"headers":{"X-A":"a\r\nb"}}}]}}`), 400, "text that a header can carry")
	h.refused(h.call("PUT", path+"/network", `{"rules":{"10.0.0.1":[{"transform":{"headers":{"X-A":"a"}}}]}}`), 400, "is an address")
	if got := h.headersOf(s.SandboxID); !slices.Equal(got, want) {
		t.Errorf("after refused updates: %q", got)
	}
	if a := h.call("PUT", path+"/network", `{"rules":{"b.example.com":[{"transform":{"headers":{"X-B":"bee"}}}]}}`); a.status != 204 {
		t.Errorf("update: %d %s", a.status, a.body)
	}
	if got := h.headersOf(s.SandboxID); !slices.Equal(got, []string{"b.example.com X-B bee"}) {
		t.Errorf("after an update: %q", got)
	}
	if strings.Contains(h.log.String(), "v4L") {
		t.Error("the log tells a value")
	}
}

// TestSecretsInHeaders: secrets are kept and never shown; headers name them, and hold their current values.
func TestSecretsInHeaders(t *testing.T) {
	host := fake.NewHost()
	t.Cleanup(host.Close)
	h := newHarnessIn(t, place{dir: t.TempDir(), host: host, gateway: noGateway{}})
	one, two := strings.Repeat("v4L", 8), strings.Repeat("w5M", 8)
	a := h.call("POST", "/secrets", `{"name":"OpenAI","value":"`+one+`","metadata":{"team":"a"}}`)
	if a.status != 201 || !strings.Contains(a.body, `"name":"openai"`) || !strings.Contains(a.body, `"currentVersion":1`) {
		t.Fatalf("%d %s", a.status, a.body)
	}
	h.refused(h.call("POST", "/secrets", `{"name":"openai","value":"`+two+`"}`), 409, "already")
	h.refused(h.call("POST", "/secrets", `{"name":"sec_x","value":"`+two+`"}`), 400, "sec_")
	h.refused(h.call("POST", "/secrets", `{"name":"short","value":"x"}`), 400, "8 or more")
	s := h.create(`"network":{"rules":{"*.example.com":[{"transform":{"headers":{"Authorization":"Bearer ${e2b.secrets.openai}"}}}],` +
		`"api.example.com":[{"transform":{"headers":{"X-Both":"a=${e2b.secrets.OpenAI};b=${e2b.secrets.later}"}}}]}}`)
	want := []string{"*.example.com Authorization Bearer " + one, "api.example.com X-Both "} // the other is not there yet
	if got := h.headersOf(s.SandboxID); !slices.Equal(got, want) {
		t.Errorf("headers %q", got)
	}
	if a := h.call("GET", "/sandboxes/"+s.SandboxID, ""); strings.Contains(a.body, "v4L") || !strings.Contains(a.body, "Bearer ${e2b.secrets.openai}") || !strings.Contains(a.body, hidden) {
		t.Errorf("shown: %s", a.body)
	}
	if a := h.call("POST", "/secrets/OPENAI", `{"value":"`+two+`"}`); a.status != 200 || !strings.Contains(a.body, `"currentVersion":2`) || !strings.Contains(a.body, `"team":"a"`) {
		t.Errorf("update: %d %s", a.status, a.body)
	}
	if a := h.call("POST", "/secrets", `{"name":"later","value":"`+one+`"}`); a.status != 201 {
		t.Errorf("later: %d %s", a.status, a.body)
	}
	want = []string{"*.example.com Authorization Bearer " + two, "api.example.com X-Both a=" + two + ";b=" + one}
	if got := h.headersOf(s.SandboxID); !slices.Equal(got, want) {
		t.Errorf("after an update: %q", got)
	}
	for _, c := range []struct {
		method, path string
		status       int
	}{{"GET", "openai", 200}, {"DELETE", "later", 204}, {"GET", "later", 404}, {"DELETE", "later", 404}} {
		if a := h.call(c.method, "/secrets/"+c.path, ""); a.status != c.status || strings.Contains(a.body, "w5M") {
			t.Errorf("%s %s: %d %s", c.method, c.path, a.status, a.body)
		}
	}
	// Another key's secrets are not found, and its headers do not get them.
	_, otherKey, err := h.api.cfg.Keys.Create(t.Context(), policy.KeyOptions{})
	if err != nil {
		t.Fatal(err)
	}
	h.refused(h.call("GET", "/secrets/openai", "", "X-API-Key", otherKey), 404, "not found")
	a = h.call("POST", "/v2/sandboxes", `{"templateID":"base","network":{"rules":{"evil.example.net":[{"transform":{"headers":{"X-A":"${e2b.secrets.openai}"}}}]}}}`, "X-API-Key", otherKey)
	_, id, _ := strings.Cut(a.body, `"sandboxID":"`)
	if a.status != 201 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	if got := h.headersOf(id[:20]); !slices.Equal(got, []string{"evil.example.net X-A "}) {
		t.Errorf("another's headers: %q", got)
	}
	if a := h.call("GET", "/secrets?limit=1", ""); a.status != 200 || strings.Contains(a.body, "w5M") || strings.Count(a.body, "secretID") != 1 {
		t.Errorf("list: %d %s", a.status, a.body)
	}
	if strings.Contains(h.log.String(), "v4L") || strings.Contains(h.log.String(), "w5M") {
		t.Error("the log tells a value")
	}
}
