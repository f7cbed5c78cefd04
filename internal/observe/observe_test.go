package observe

import (
	"net/http"
	"strings"
	"sync"
	"testing"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/metrics"
)

func figures(c *Calls) string {
	p := &metrics.Page{}
	c.Write(p)
	return p.String()
}

func TestCalls(t *testing.T) {
	c := New(nil)
	if figures(c) != "" {
		t.Error("figures of no calls")
	}
	m := c.Method("GET /things/{id}")
	if c.Method("GET /things/{id}") != m {
		t.Error("one name, two methods")
	}
	c.Method("x.Unused/Call")
	one, two, three := m.Begin(), m.Begin(), m.Begin()
	one.End(OK)
	one.End(Failed(errs.Internal)) // counts for nothing
	two.End(OfStatus(http.StatusNotFound))
	func() {
		defer func() { _ = recover() }()
		defer three.End(Aborted())
		panic("cut off")
	}()
	four := m.Begin()
	page := figures(c)
	for _, want := range []string{
		`_count{method="GET /things/{id}",code="ok"} 1`, `_count{method="GET /things/{id}",code="not_found"} 1`,
		`_count{method="GET /things/{id}",code="canceled"} 1`, `casemate_requests_active{method="GET /things/{id}"} 1`,
	} {
		if !strings.Contains(page, want+"\n") {
			t.Errorf("%s is not in\n%s", want, page)
		}
	}
	if strings.Contains(page, "internal") || strings.Contains(page, "Unused") {
		t.Errorf("what was not is in\n%s", page)
	}
	four.End(OK)
	none := Call{}
	if ctx := none.Admit(t.Context(), nil); ctx != t.Context() {
		t.Error("a call that is counted nowhere has a span")
	}
	none.End(OK)
}

// Every kind of error has an outcome of its own, and comes back from the status that it is answered with, or as one that
// is answered alike.
func TestOutcomes(t *testing.T) {
	seen := map[string]bool{}
	for _, m := range errs.Table() {
		o := Failed(m.Kind)
		if o.String() != m.Code || seen[o.String()] {
			t.Errorf("%s: %s", m.Code, o)
		}
		seen[o.String()] = true
		back := OfStatus(m.HTTP)
		if errs.Kind(back-1).Map().HTTP != m.HTTP { //nolint:gosec // small
			t.Errorf("%d is %s, and of %s", m.HTTP, back, m.Code)
		}
	}
	for status, want := range map[int]string{
		0: "ok", 101: "ok", 200: "ok", 304: "ok", 400: "invalid_argument", 418: "invalid_argument", 500: "internal", 502: "unavailable", 507: "resource_exhausted", 599: "internal",
	} {
		if got := OfStatus(status).String(); got != want {
			t.Errorf("%d is %s, want %s", status, got, want)
		}
	}
	for o, want := range map[Outcome]bool{OK: false, Failed(errs.Internal): true, Failed(errs.NotFound): false, Failed(errs.Unavailable): true} {
		if o.faults() != want {
			t.Errorf("%s: the server's fault %v", o, !want)
		}
	}
}

func TestConcurrent(t *testing.T) {
	c := New(nil)
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 500 {
				call := c.Method("a.B/C").Begin()
				call.End(OK)
				_ = figures(c)
			}
		})
	}
	all.Wait()
	if page := figures(c); !strings.Contains(page, `code="ok"} 4000`+"\n") || !strings.Contains(page, `casemate_requests_active{method="a.B/C"} 0`) {
		t.Error(page)
	}
}
