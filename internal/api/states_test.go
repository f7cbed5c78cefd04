package api

import (
	"net/http"
	"strings"
	"testing"

	"casemate.dev/client"
	"casemate.dev/internal/sandbox"
)

// TestDocumentContent: the twins carry the content as it is, and conditions as HTTP has them.
func TestDocumentContent(t *testing.T) {
	h := newHarness(t)
	const path = "/v1/state/helper/content?name=memory/facts"
	for _, tt := range []struct {
		name, method, path, body string
		header                   []string
		status                   int
		etag, contains           string
	}{
		{"nothing there", "GET", path, "", nil, 404, "", "not_found"},
		{"a new one", "PUT", path, "one", []string{"If-None-Match", "*", "Content-Type", "text/plain"}, 200, `"1"`, `"size":"3"`},
		{"read", "GET", path, "", nil, 200, `"1"`, "one"},
		{"not new", "PUT", path, "{", []string{"If-None-Match", "*"}, 409, "", "conflict"},
		{"its version", "PUT", path, "two", []string{"If-Match", `"1"`, "Content-Type", "text/plain"}, 200, `"2"`, ""},
		{"an old version", "PUT", path, "{", []string{"If-Match", `"1"`}, 409, "", "conflict"},
		{"a weak tag", "PUT", path, "x", []string{"If-Match", `W/"2"`}, 400, "", "is no version"},
		{"a condition of reads", "PUT", path, "x", []string{"If-None-Match", `"2"`}, 400, "", "does not go with a write"},
		{"unchanged", "GET", path, "", []string{"If-None-Match", `"2"`}, 304, `"2"`, ""},
		{"changed", "GET", path, "", []string{"If-None-Match", `"1"`}, 200, `"2"`, "two"},
		{"old", "GET", path + "&version=1", "", nil, 200, `"1"`, "one"},
		{"no number", "GET", path + "&version=x", "", nil, 400, "", "is no number"},
		{"not JSON", "PUT", path, "{", []string{"Content-Type", "application/json"}, 400, "", "is no JSON"},
		{"what curl says", "PUT", path, "three", []string{"Content-Type", "application/x-www-form-urlencoded"}, 200, `"3"`, `"contentType":"text/plain"`},
		{"too large", "PUT", path, strings.Repeat("x", 8<<20+1), []string{"Content-Type", "text/plain"}, 413, "", "limit 8388608"},
		{"no name", "GET", "/v1/state/helper/content", "", nil, 400, "", "has no name"},
		{"another's", "GET", path + "&owner=local", "", nil, 403, "", "permission_denied"},
		{"no key", "GET", path, "", []string{"Authorization", ""}, 401, "", ""},
		{"no agent", "GET", "/v1/state/-/content?name=x", "", nil, 400, "", "no agent's name"},
	} {
		status, header, body := h.call(tt.method, tt.path, tt.body, tt.header...)
		flat := strings.NewReplacer(`": "`, `":"`).Replace(body)
		if status != tt.status || tt.etag != "" && header.Get("Etag") != tt.etag || !strings.Contains(flat, tt.contains) {
			t.Errorf("%s: %d, etag %s, %.200s", tt.name, status, header.Get("Etag"), body)
		}
		if status == 200 && tt.method == http.MethodGet && (header.Get("Content-Security-Policy") != "sandbox" || !strings.HasPrefix(header.Get("Content-Disposition"), "attachment")) {
			t.Errorf("%s: a browser might run it: %v", tt.name, header)
		}
	}
}

// TestWatchedDocuments: a watch over plain HTTP is taken up where it broke off, as browsers do.
func TestWatchedDocuments(t *testing.T) {
	h := newHarness(t)
	for _, name := range []string{"a", "b", "c/d"} {
		if status, _, body := h.call("PUT", "/v1/state/helper/content?name="+name, name, "Content-Type", "text/plain"); status != 200 {
			t.Fatal(body)
		}
	}
	var got []string
	for last := ""; len(got) < 3; {
		_, events := readSSE(t, h, "/v1/state/helper/watch?content=true", func(e sseEvent) bool { return e.id == "" }, "Last-Event-Id", last)
		e := events[len(events)-1]
		last = e.id
		got = append(got, e.id+" "+e.event)
		if !strings.Contains(e.data, `"sha256"`) {
			t.Errorf("item %s", e.data)
		}
	}
	if s := strings.Join(got, ", "); s != "1 set, 2 set, 3 set" {
		t.Errorf("watched %s", s)
	}
	if status, _, body := h.call("GET", "/v1/state/helper/watch?after=99", ""); status != 400 {
		t.Errorf("after what is to come: %d, %s", status, body)
	}
}

// TestDocumentsOverRPC goes through the client.
func TestDocumentsOverRPC(t *testing.T) {
	h := newHarness(t)
	c, err := client.New(h.url, h.user)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx := t.Context()
	for range 3 {
		if _, err := c.State.Update(ctx, "helper", "sum", func(d *client.Document) ([]byte, error) {
			return append(d.GetContent(), 'x'), nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	d, err := c.State.Get(ctx, &client.GetDocumentRequest{Agent: "helper", Name: "sum"})
	if err != nil || d.GetVersion() != 3 || string(d.GetContent()) != "xxx" {
		t.Fatalf("%v, %v", d, err)
	}
	none := uint64(0)
	_, err = c.State.Set(ctx, &client.SetDocumentRequest{Agent: "helper", Name: "sum", ExpectedVersion: &none})
	if client.KindOf(err) != client.Conflict {
		t.Errorf("expecting none: %v", err)
	}
	if d, err = c.State.Patch(ctx, &client.PatchDocumentRequest{Agent: "helper", Name: "json", Patch: `{"a":1}`}); err != nil || d.GetVersion() != 1 {
		t.Errorf("%v, %v", d, err)
	}
	page, err := c.State.List(ctx, &client.ListDocumentsRequest{Agent: "helper", PageSize: 1})
	if err != nil || len(page.GetDocuments()) != 1 || page.GetNextPageToken() == "" || page.GetRevision() != 4 {
		t.Errorf("%v, %v", page, err)
	}
	if all, err := c.State.Versions(ctx, &client.ListVersionsRequest{Agent: "helper", Name: "sum"}); err != nil || len(all) != 3 {
		t.Errorf("%v, %v", all, err)
	}
	seen := 0
	err = c.State.Watch(ctx, &client.WatchDocumentsRequest{Agent: "helper", After: 1}, nil, func(m *client.WatchedDocument) error {
		if seen++; m.GetDocument().GetRevision() == 4 {
			return errEnough
		}
		return nil
	})
	if err != errEnough || seen != 3 { //nolint:errorlint // as it was given
		t.Errorf("watched %d, %v", seen, err)
	}
	if d, err = c.State.Delete(ctx, &client.DeleteDocumentRequest{Agent: "helper", Name: "json", Forget: true}); err != nil || d.GetVersion() != 1 {
		t.Errorf("%v, %v", d, err)
	}
	if a, err := c.State.SetRetention(ctx, &client.SetRetentionRequest{Agent: "helper", Retention: &client.Retention{Versions: 5}}); err != nil || a.GetRetention().GetVersions() != 5 || a.GetDocuments() != 1 {
		t.Errorf("%v, %v", a, err)
	}
	if all, next, err := c.State.Agents(ctx, &client.ListAgentsRequest{}); err != nil || len(all) != 1 || next != "" {
		t.Errorf("%v, %q, %v", all, next, err)
	}
}

// TestLinkedCommitStays: what a document's newest version names can't be deleted, and what any kept version names is
// not collected.
func TestLinkedCommitStays(t *testing.T) {
	h := newHarness(t)
	c, err := client.New(h.url, h.user)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx, box := t.Context(), h.box()
	var commits []string
	for range 2 {
		made, err := c.Commits.Create(ctx, &client.CommitRequest{Sandbox: box})
		if err != nil {
			t.Fatal(err)
		}
		commits = append(commits, made.GetId())
		d, err := c.State.Set(ctx, &client.SetDocumentRequest{Agent: "helper", Name: "plan", Sandbox: box, Commit: made.GetId()})
		if err != nil || d.GetCommit() != made.GetId() || d.GetSandbox() != box {
			t.Fatalf("%v, %v", d, err)
		}
	}
	if _, err := c.Sandboxes.Delete(ctx, box); err != nil {
		t.Fatal(err)
	}
	collect := func() int {
		t.Helper()
		got, err := h.manager.Collect(ctx, sandbox.Principal{ID: "local", Admin: true}, sandbox.CollectOptions{Dry: true, OlderThan: 1})
		if err != nil {
			t.Fatal(err)
		}
		return len(got.Commits)
	}
	if n := collect(); n != 0 {
		t.Errorf("%d linked commits would go", n)
	}
	if _, err := c.Commits.Delete(ctx, commits[1]); client.KindOf(err) != client.FailedPrecondition || !strings.Contains(err.Error(), "helper/plan") {
		t.Errorf("delete the newest's commit: %v", err)
	}
	if _, err := c.Commits.Delete(ctx, commits[0]); err != nil {
		t.Errorf("delete an old version's commit: %v", err)
	}
	if _, err := c.State.Delete(ctx, &client.DeleteDocumentRequest{Agent: "helper", Name: "plan", Forget: true}); err != nil {
		t.Fatal(err)
	}
	if n := collect(); n != 1 {
		t.Errorf("%d commits would go, want 1", n)
	}
	if _, err := c.Commits.Delete(ctx, commits[1]); err != nil {
		t.Errorf("delete the commit: %v", err)
	}
}
