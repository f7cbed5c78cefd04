package gateway

import (
	"io"
	"testing"

	"casemate.dev/internal/egress/rules"
	"casemate.dev/internal/testenv/world"
)

func TestHTTPByName(t *testing.T) {
	w := world.New(t)
	seen := serveHTTP(w, t, world.Web+":80", "hello")
	w.Name("allowed.test", world.Web)
	w.Name("denied.test", world.Web)
	b := newBox(t, newGateway(t, nil), "one", policyOf(t, "allow allowed.test"))
	r, err := b.client().Get("http://allowed.test/path")
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(r.Body)
	_ = r.Body.Close()
	if string(body) != "hello" {
		t.Errorf("body %q", body)
	}
	if got := seen.All(); len(got) != 1 || got[0] != "GET allowed.test/path" {
		t.Errorf("server saw %v", got)
	}
	b.refusedName(t, "denied.test")
	b.refused(rules.NoRule)
}

func (b *box) refusedName(t *testing.T, name string) {
	t.Helper()
	m, err := b.resolve(name, 1)
	if err != nil {
		t.Fatal(err)
	}
	if len(m.Answer) != 0 || m.Rcode != 3 {
		t.Errorf("%s: %v", name, m)
	}
}
