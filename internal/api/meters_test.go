package api

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protojson"

	"casemate.dev/internal/journal/bundle"
	"casemate.dev/internal/journal/meter"
	"casemate.dev/internal/sandbox"
	v1 "casemate.dev/proto/casemate/v1"
)

// usage asks over HTTP what was used.
func (h *harness) usage(query string, header ...string) []*v1.MeteredUsage {
	h.t.Helper()
	status, _, body := h.call(http.MethodGet, "/v1/usage"+query, "", header...)
	resp := &v1.ListUsageResponse{}
	if err := protojson.Unmarshal([]byte(body), resp); status != http.StatusOK || err != nil {
		h.t.Fatalf("usage%s: %d %v %s", query, status, err, body)
	}
	return resp.GetUsage()
}

// offline computes what was used from an exported bundle, which is verified.
func (h *harness) offline(box string, p meter.Period) *v1.MeteredUsage {
	h.t.Helper()
	status, _, whole := h.call(http.MethodGet, "/v1/sandboxes/"+box+"/bundle", "")
	if status != http.StatusOK {
		h.t.Fatalf("bundle: %d %s", status, whole)
	}
	record := meter.NewRecord(p)
	r, err := bundle.Verify(strings.NewReader(whole), bundle.Options{Each: func(event json.RawMessage, _ []bundle.Body) {
		var e meter.Event
		if err := json.Unmarshal(event, &e); err != nil {
			h.t.Fatal(err)
		}
		record.Add(e)
	}})
	if problem, bad := r.First(); bad || err != nil {
		h.t.Fatalf("%v %+v", err, problem)
	}
	return meteredMessage(sandbox.Metered{
		Sandbox: box, Name: record.Name, Template: record.Template, Principal: record.Principal, Ended: record.Ended, Usage: record.Usage(),
	})
}

// live does something random in a sandbox, and reports whether it still is there.
func (h *harness) live(r *rand.Rand, box string) bool {
	h.t.Helper()
	path := "/v1/sandboxes/" + box
	do := func(method, path, body string) {
		h.t.Helper()
		if status, _, answer := h.call(method, path, body); status >= http.StatusInternalServerError {
			h.t.Fatalf("%s %s: %d %s", method, path, status, answer)
		}
	}
	switch r.IntN(9) {
	case 0, 1:
		do("POST", path+"/execute", `{"process":{"argv":["echo","hi"]}}`)
	case 2:
		do("POST", path+"/execute", `{"process":{"argv":["sleep","0.01"]}}`)
	case 3:
		do("POST", path+"/processes", fmt.Sprintf(`{"process":{"id":"p%d","argv":["sleep","%v"]}}`, r.IntN(1e9), r.IntN(2)*600))
	case 4:
		do("POST", path+"/code", `{"run":{"language":"python","code":"print hi"}}`)
	case 5:
		do("POST", path+"/pause", `{}`)
	case 6:
		do("POST", path+"/resume", `{}`)
	case 7:
		h.usage("?sandbox=" + box) // which may record a reading
	case 8:
		if r.IntN(3) == 0 {
			do("DELETE", path, "")
			return false
		}
	}
	return true
}

// TestUsageFromBundle: whatever happens in a sandbox, what a bundle of it gives offline is what the server answers, of the
// whole and of any period.
func TestUsageFromBundle(t *testing.T) {
	h := newHarness(t)
	for seed := range uint64(12) {
		r := rand.New(rand.NewPCG(seed, 8))
		began := time.Now()
		box := h.box()
		for range 12 {
			if !h.live(r, box) {
				break
			}
		}
		h.usage("?sandbox=" + box) // what it reads now is in the bundle, and in the answers from here on
		periods := []meter.Period{{}}
		for range 3 {
			a := began.Add(time.Duration(r.Int64N(int64(time.Since(began)) + 1)))
			periods = append(periods, meter.Period{Since: a}, meter.Period{Until: a}, meter.Period{Since: a, Until: a.Add(time.Duration(r.Int64N(int64(time.Second))))})
		}
		for _, p := range periods {
			q := url.Values{"sandbox": {box}}
			if !p.Since.IsZero() {
				q.Set("since", p.Since.UTC().Format(time.RFC3339Nano))
			}
			if !p.Until.IsZero() {
				q.Set("until", p.Until.UTC().Format(time.RFC3339Nano))
			}
			got := h.usage("?" + q.Encode())
			want := h.offline(box, p)
			// Processes may end between the two answers: then they are asked once more.
			if !equalUsage(got, want) {
				got = h.usage("?" + q.Encode())
				want = h.offline(box, p)
			}
			if !equalUsage(got, want) {
				t.Fatalf("seed %d, %v: the server says\n%v\nand its bundle\n%v", seed, p, got, want)
			}
		}
	}
}

func equalUsage(got []*v1.MeteredUsage, want *v1.MeteredUsage) bool {
	if len(got) != 1 {
		return false
	}
	a, aerr := protojson.Marshal(got[0])
	b, berr := protojson.Marshal(want)
	return aerr == nil && berr == nil && cmp.Equal(normal(a), normal(b))
}

// normal takes out the spaces that protojson varies.
func normal(b []byte) string { return strings.ReplaceAll(string(b), " ", "") }

// TestUsageSums: sums by template and principal are those of the sandboxes, a key sees its own alone, and what has ended
// counts on.
func TestUsageSums(t *testing.T) {
	h := newHarness(t)
	var boxes []string
	for range 3 {
		box := h.box()
		boxes = append(boxes, box)
		h.call("POST", "/v1/sandboxes/"+box+"/execute", `{"process":{"argv":["sleep","0.02"]}}`)
		h.call("DELETE", "/v1/sandboxes/"+box, "")
	}
	admin := []string{"Authorization", "Bearer " + h.admin}
	if status, _, body := h.call("POST", "/v1/sandboxes", `{}`, admin...); status != http.StatusOK {
		t.Fatalf("create: %d %s", status, body)
	}
	own := h.usage("")
	if len(own) != len(boxes) {
		t.Fatalf("the key sees %d sandboxes, and made %d", len(own), len(boxes))
	}
	var sum meter.Usage
	for _, u := range own {
		if u.GetExecutionUs() < 0 || u.GetCpuUs() < 0 || !u.GetEnded() || u.GetProcesses() != 1 || u.GetTemplate() != "host" {
			t.Errorf("a sandbox that ran one process: %v", u)
		}
		sum.ExecutionUS += u.GetExecutionUs()
	}
	for _, by := range []string{"template", "principal"} {
		got := h.usage("?by=" + by)
		if len(got) != 1 || got[0].GetSandboxes() != 3 || got[0].GetExecutionUs() != sum.ExecutionUS || got[0].GetSandbox() != "" {
			t.Errorf("by %s: %v", by, got)
		}
		all := h.usage("?by="+by, admin...)
		sandboxes := int64(0)
		for _, u := range all {
			sandboxes += u.GetSandboxes()
		}
		if want := map[string]int{"template": 1, "principal": 2}[by]; len(all) != want || sandboxes != 4 {
			t.Errorf("an admin key by %s: %v", by, all)
		}
	}
	status, _, body := h.call("GET", "/v1/usage?pageSize=2", "")
	page := &v1.ListUsageResponse{}
	if err := protojson.Unmarshal([]byte(body), page); status != http.StatusOK || err != nil || len(page.GetUsage()) != 2 || page.GetNextPageToken() == "" {
		t.Fatalf("a page of 2: %d %v %s", status, err, body)
	}
	if rest := h.usage("?pageSize=2&pageToken=" + page.GetNextPageToken()); len(rest) != 1 {
		t.Errorf("the page behind: %v", rest)
	}
	if past := h.usage("?until=2020-01-01T00:00:00Z"); len(past) != 0 {
		t.Errorf("before anything was: %v", past)
	}
}

func TestUsageRefusals(t *testing.T) {
	h := newHarness(t)
	box := h.box()
	for query, want := range map[string]string{
		"?by=color":                        "use sandbox, template or principal",
		"?sandbox=" + box + "&by=template": "no sum",
		"?sandbox=@server":                 "is no sandbox",
		"?sandbox=nosuchsandbox":           "no sandbox",
		"?since=2026-01-02T00:00:00Z&until=2026-01-01T00:00:00Z": "ends before it begins",
		"?pageSize=5000":           "page_size",
		"?by=template&pageSize=10": "without pages",
		"?pageToken=none":          "page_token",
	} {
		if status, _, body := h.call("GET", "/v1/usage"+query, ""); status < 400 || status >= 500 || !strings.Contains(body, want) {
			t.Errorf("usage%s: %d %s, want %q", query, status, body, want)
		}
	}
	other := h.box()
	if status, _, body := h.call("GET", "/v1/usage?sandbox="+other, "", "Authorization", ""); status != http.StatusUnauthorized {
		t.Errorf("without a key: %d %s", status, body)
	}
}

// TestUsageOfOthers: a key is told nothing of another's sandbox, not even that it is there.
func TestUsageOfOthers(t *testing.T) {
	h := newHarness(t)
	status, _, body := h.call("POST", "/v1/sandboxes", `{}`, "Authorization", "Bearer "+h.admin)
	if status != http.StatusOK {
		t.Fatalf("create: %d %s", status, body)
	}
	box := idOf(t, body)
	if status, _, body := h.call("GET", "/v1/usage?sandbox="+box, ""); status != http.StatusNotFound {
		t.Errorf("another's sandbox: %d %s", status, body)
	}
	if all := h.usage(""); len(all) != 0 {
		t.Errorf("others' sandboxes: %v", all)
	}
	if all := h.usage("?by=principal"); len(all) != 0 {
		t.Errorf("others' sums: %v", all)
	}
}
