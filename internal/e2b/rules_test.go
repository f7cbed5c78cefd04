package e2b

import (
	"slices"
	"strings"
	"testing"

	"casemate.dev/internal/isolation/fake"
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
