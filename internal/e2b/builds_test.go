package e2b

import (
	"archive/tar"
	"bytes"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/id"
	"casemate.dev/internal/policy"
	"casemate.dev/internal/template"
	"casemate.dev/internal/testenv"
)

// TestBuildIDsAreUUIDs: each id has a UUID that leads back to it, and nothing else does.
func TestBuildIDsAreUUIDs(t *testing.T) {
	all := []string{id.Build + strings.Repeat("0", 20), id.Build + strings.Repeat("z", 20), id.Build + strings.Repeat("a", 20)}
	for range 1000 {
		all = append(all, id.New(id.Build))
	}
	for _, b := range all {
		u := buildUUID(b)
		if len(u) != 36 || u[14] != '8' || !strings.Contains("89ab", u[19:20]) || ofUUID(u) != b {
			t.Fatalf("%s is %s, which leads to %s", b, u, ofUUID(u))
		}
	}
	for _, u := range []string{"", "x", "bld_abc", "00000000-0000-0000-0000-000000000000", "ffffffff-ffff-8fff-bfff-ffffffffffff", strings.ToUpper(buildUUID(all[2]))} {
		if got := ofUUID(u); got != "" {
			t.Errorf("%q leads to %s", u, got)
		}
	}
}

// asked is the answer to a request for a build.
type asked struct {
	TemplateID string   `json:"templateID"`
	BuildID    string   `json:"buildID"`
	Tags       []string `json:"tags"`
}

func (h *harness) ask(body string) asked {
	h.t.Helper()
	a := h.call("POST", "/v3/templates", body)
	var out asked
	if a.into(h.t, &out); a.status != http.StatusAccepted {
		h.t.Fatalf("%d %s", a.status, a.body)
	}
	return out
}

func (b asked) path() string { return "/templates/" + b.TemplateID + "/builds/" + b.BuildID }

// build starts a build and waits for its end.
func (h *harness) build(b asked, body string) buildStatusJSON {
	h.t.Helper()
	a := h.call("POST", "/v2"+b.path(), body)
	if a.status != http.StatusAccepted || a.header.Get("Content-Length") != "0" {
		h.t.Fatalf("%d %s %v", a.status, a.body, a.header)
	}
	var out buildStatusJSON
	testenv.Eventually(h.t, time.Minute, "the build is over", func() bool {
		h.call("GET", b.path()+"/status?logsOffset=0", "").into(h.t, &out)
		return out.Status != "building"
	})
	return out
}

func TestBuild(t *testing.T) {
	h := newHarness(t)
	h.roots.mu.Lock()
	h.roots.base = true
	h.roots.mu.Unlock()
	b := h.ask(`{"name":"Team/My-Web:v1","tags":["blue"],"cpuCount":1,"memoryMB":512}`)
	if b.TemplateID != "my-web" || len(b.Tags) != 2 || b.Tags[0] != "v1" || b.Tags[1] != "blue" {
		t.Fatalf("%+v", b)
	}
	var waiting buildStatusJSON
	if h.call("GET", b.path()+"/status", "").into(t, &waiting); waiting.Status != "waiting" || waiting.LogEntries == nil {
		t.Errorf("%+v", waiting)
	}
	h.refused(h.call("POST", "/v2"+b.path(), `{}`), 400, "neither is named")
	h.refused(h.call("POST", "/v2"+b.path(), `{"fromImage":"x","fromTemplate":"base"}`), 400, "not both")
	for auth, want := range map[string]string{
		`{}`: "unknown type", `{"type":"registry","username":"u"}`: "lacks a user or a password", `{"type":"gcp"}`: "lacks a user",
	} {
		h.refused(h.call("POST", "/v2"+b.path(), `{"fromImage":"x","fromImageRegistry":`+auth+`}`), 400, want)
	}
	h.refused(h.call("POST", "/v2"+b.path(), `{"fromImage":"x","fromImageRegistry":{"type":"aws"}}`), 501, "AWS")
	h.refused(h.call("POST", "/v2"+b.path(), `{"fromTemplate":"x","fromImageRegistry":{"type":"registry","username":"u","password":"p"}}`), 400, "goes with fromImage")
	h.refused(h.send("POST", "/v2"+b.path(), `{"fromTemplate":"base"}`, "X-API-Key", h.other), 404, "not found")
	h.refused(h.call("POST", "/v2"+b.path(), `{"fromTemplate":"base","steps":[{"type":"DANCE"}]}`), 400, "unknown")

	done := h.build(b, `{"fromImage":"e2bdev/base:latest","steps":[{"type":"ENV","args":["A","1"]}]}`)
	if done.Status != "ready" || len(done.LogEntries) == 0 {
		t.Fatalf("%+v", done)
	}
	h.refused(h.call("POST", "/v2"+b.path(), `{"fromTemplate":"base"}`), 404, "started already")
	h.refused(h.send("GET", b.path()+"/status", "", "X-API-Key", h.other), 404, "not found")
	var rest buildStatusJSON
	if h.call("GET", fmt.Sprint(b.path(), "/status?logsOffset=", len(done.LogEntries)), "").into(t, &rest); len(rest.LogEntries) != 0 {
		t.Errorf("after the last: %+v", rest.LogEntries)
	}
	if h.call("GET", b.path()+"/status?logsOffset=1&limit=1", "").into(t, &rest); len(rest.LogEntries) != 1 || rest.LogEntries[0] != done.LogEntries[1] {
		t.Errorf("the second: %+v", rest.LogEntries)
	}
	// Only its tags lead to it, until it is given the default one.
	for ref, status := range map[string]int{"my-web:v1": 201, "team/my-web:blue": 201, "my-web": 404, "my-web:red": 404} {
		if a := h.call("POST", "/v2/sandboxes", `{"templateID":"`+ref+`"}`); a.status != status {
			t.Errorf("%s: %d %s", ref, a.status, a.body)
		}
	}
	h.tags(b)
}

// tags moves the tags of a build and looks where they are.
func (h *harness) tags(b asked) {
	t := h.t
	var assigned struct {
		BuildID string   `json:"buildID"`
		Tags    []string `json:"tags"`
	}
	a := h.call("POST", "/templates/tags", `{"target":"my-web:v1","tags":["default","stable"]}`)
	if a.into(t, &assigned); a.status != 201 || assigned.BuildID != b.BuildID || len(assigned.Tags) != 2 {
		t.Errorf("%d %s", a.status, a.body)
	}
	if a := h.call("POST", "/v2/sandboxes", `{"templateID":"my-web"}`); a.status != 201 {
		t.Errorf("by its default tag: %d %s", a.status, a.body)
	}
	h.refused(h.call("POST", "/templates/tags", `{"target":"my-web:v1","tags":[":x"]}`), 400, "Invalid tag")
	h.refused(h.call("POST", "/templates/tags", `{"target":"my-web:v9","tags":["x"]}`), 404, "not found")
	if a := h.call("DELETE", "/templates/tags", `{"name":"my-web","tags":["blue","none"]}`); a.status != 204 {
		t.Errorf("%d %s", a.status, a.body)
	}
	h.refused(h.call("DELETE", "/templates/tags", `{"name":"none","tags":["x"]}`), 404, "not found")
	h.refused(h.call("DELETE", "/templates/tags", `{"name":"my-web","tags":["v1","Default"]}`), 400, "Cannot delete the 'default' tag")
	for _, method := range []string{"POST", "DELETE"} {
		h.refused(h.call(method, "/templates/tags", `{"target":"my-web:v1","name":"my-web","tags":[]}`), 400, "At least one tag is required")
	}
	h.refused(h.call("POST", "/v2/sandboxes", `{"templateID":"my-web:red"}`), 404, "tag 'red' does not exist for template 'my-web'")
	var all []tagJSON
	h.call("GET", "/templates/my-web/tags", "").into(t, &all)
	seen := map[string]bool{}
	for _, tag := range all {
		seen[tag.Tag] = tag.BuildID == b.BuildID
	}
	if len(all) != 3 || !seen["v1"] || !seen["default"] || !seen["stable"] {
		t.Errorf("%+v", all)
	}
	for path, status := range map[string]int{"/templates/aliases/my-web": 200, "/templates/aliases/none": 404, "/templates/aliases/base": 200} {
		if a := h.call("GET", path, ""); a.status != status {
			t.Errorf("%s: %d %s", path, a.status, a.body)
		}
	}
	if a := h.call("GET", "/templates", ""); !strings.Contains(a.body, `"templateID":"my-web"`) || !strings.Contains(a.body, b.BuildID) {
		t.Errorf("list: %s", a.body)
	}
	if a := h.send("GET", "/templates", "", "X-API-Key", h.other); strings.Contains(a.body, "my-web") {
		t.Errorf("another's list: %s", a.body)
	}
	if a := h.call("GET", "/templates/my-web", ""); !strings.Contains(a.body, `"status":"ready"`) {
		t.Errorf("detail: %s", a.body)
	}
	h.refused(h.send("DELETE", "/templates/my-web", "", "X-API-Key", h.other), 404, "not found")
	if a := h.call("DELETE", "/templates/my-web", ""); a.status != 204 {
		t.Errorf("%d %s", a.status, a.body)
	}
	h.refused(h.call("GET", "/templates/my-web", ""), 404, "not found")
}

// TestPublicTemplate: an administrator shares what it built with every key, which may start from it and nothing else.
func TestPublicTemplate(t *testing.T) {
	h := newHarness(t)
	h.roots.mu.Lock()
	h.roots.base = true
	h.roots.mu.Unlock()
	user := h.key
	h.build(h.ask(`{"name":"theirs"}`), `{"fromTemplate":"base","steps":[{"type":"ENV","args":["A","1"]}]}`)
	h.refused(h.call("PATCH", "/v2/templates/theirs", `{"public":true}`), 403, "administrator")
	_, admin, err := h.keys.Create(t.Context(), policy.KeyOptions{Name: "admin", E2B: true, Admin: true})
	if err != nil {
		t.Fatal(err)
	}
	h.key = admin
	b := h.ask(`{"name":"web:v1","tags":["default"]}`)
	h.build(b, `{"fromTemplate":"base","steps":[{"type":"ENV","args":["A","1"]}]}`)
	h.refused(h.send("GET", "/templates/aliases/web", "", "X-API-Key", user), 404, "not found")
	h.refused(h.send("POST", "/v2/sandboxes", `{"templateID":"web"}`, "X-API-Key", user), 404, "not found")
	public := func(want bool) {
		t.Helper()
		var listed []templateJSON
		h.call("GET", "/v2/templates", "").into(t, &listed)
		for _, path := range []string{"/templates/web", "/templates/aliases/web"} {
			var one templateJSON
			h.call("GET", path, "").into(t, &one)
			listed = append(listed, one)
		}
		n := 0
		for _, one := range listed {
			if one.TemplateID == "web" && one.Public == want {
				n++
			}
		}
		if n != 3 {
			t.Errorf("public is not %v everywhere: %+v", want, listed)
		}
	}
	public(false)
	if a := h.call("PATCH", "/v2/templates/web", `{"public":true}`); a.status != 200 || !strings.Contains(a.body, `{"names":["casemate/web"]}`) {
		t.Fatalf("%d %s", a.status, a.body)
	}
	public(true)
	if a := h.call("PATCH", "/templates/web", `{}`); a.status != 200 {
		t.Errorf("nothing to change: %d %s", a.status, a.body)
	}
	public(true)

	h.key = user
	for _, ref := range []string{"web", "team/web:v1"} {
		if a := h.call("POST", "/v2/sandboxes", `{"templateID":"`+ref+`"}`); a.status != 201 {
			t.Errorf("%s: %d %s", ref, a.status, a.body)
		}
	}
	if a := h.call("GET", "/templates/aliases/web", ""); a.status != 200 || !strings.Contains(a.body, `"public":true`) {
		t.Errorf("its alias: %d %s", a.status, a.body)
	}
	done := h.build(h.ask(`{"name":"upon"}`), `{"fromTemplate":"web","steps":[{"type":"ENV","args":["B","1"]}]}`)
	if done.Status != "ready" {
		t.Errorf("a build upon it: %+v", done)
	}
	for _, call := range [][3]string{
		{"PATCH", "/v2/templates/web", `{"public":false}`}, {"DELETE", "/templates/web", ""}, {"GET", "/templates/web/tags", ""}, {"GET", "/templates/web", ""},
	} {
		h.refused(h.call(call[0], call[1], call[2]), 403, "you don't have access to template 'web'")
	}
	h.refused(h.call("POST", "/templates/tags", `{"target":"web","tags":["x"]}`), 404, "not found")
	h.refused(h.call("PATCH", "/v2/templates/none", `{"public":true}`), 404, "not found")

	if a := h.send("PATCH", "/v2/templates/web", `{"public":false}`, "X-API-Key", admin); a.status != 200 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	h.refused(h.call("POST", "/v2/sandboxes", `{"templateID":"web"}`), 404, "not found")
	// One that is removed is not public when it is built again.
	h.key = admin
	h.call("PATCH", "/v2/templates/web", `{"public":true}`)
	if a := h.call("DELETE", "/templates/web", ""); a.status != 204 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	h.build(h.ask(`{"name":"web"}`), `{"fromTemplate":"base","steps":[]}`)
	public(false)
}

// TestBuildLogs: the whole log of a build, by time, direction and level.
func TestBuildLogs(t *testing.T) {
	h := newHarness(t)
	h.roots.mu.Lock()
	h.roots.base = true
	h.roots.mu.Unlock()
	b := h.ask(`{"name":"web"}`)
	if done := h.build(b, `{"fromTemplate":"base","steps":[{"type":"ENV","args":["A","1"]},{"type":"RUN","args":["true"]}]}`); done.Status != "error" { // there is no network here
		t.Fatalf("%+v", done)
	}
	logs := func(query string) (out []buildLogJSON) {
		t.Helper()
		var got struct {
			Logs []buildLogJSON `json:"logs"`
		}
		a := h.call("GET", b.path()+"/logs?"+query, "")
		if a.into(t, &got); a.status != 200 {
			t.Fatalf("%s: %d %s", query, a.status, a.body)
		}
		return got.Logs
	}
	all := logs("")
	back := logs("direction=backward&source=persistent")
	if len(all) < 4 || len(back) != len(all) || back[0] != all[len(all)-1] || back[len(back)-1] != all[0] {
		t.Fatalf("%+v, and back %+v", all, back)
	}
	if some := logs("limit=2"); len(some) != 2 || some[1] != all[1] {
		t.Errorf("two: %+v", some)
	}
	after := fmt.Sprint("cursor=", all[len(all)-1].Timestamp.Add(time.Second).UnixMilli())
	before := fmt.Sprint("cursor=", all[0].Timestamp.Add(-time.Second).UnixMilli())
	if len(logs(after)) != 0 || len(logs(before)) != len(all) || len(logs(after+"&direction=backward")) != len(all) || len(logs(before+"&direction=backward")) != 0 {
		t.Error("a cursor leaves what it should not")
	}
	wrong := logs("level=warn")
	var status, rest buildStatusJSON
	h.call("GET", b.path()+"/status?level=warn", "").into(t, &status)
	h.call("GET", b.path()+"/status?level=warn&logsOffset=1", "").into(t, &rest)
	if len(wrong) != 1 || wrong[0].Level != "error" || len(status.LogEntries) != 1 || status.LogEntries[0] != wrong[0] || len(rest.LogEntries) != 0 {
		t.Errorf("what went wrong: %+v; by status %+v, and after it %+v", wrong, status.LogEntries, rest.LogEntries)
	}
	for _, wrong := range []string{"level=loud", "direction=up", "source=mars", "cursor=x", "limit=-1"} {
		h.refused(h.call("GET", b.path()+"/logs?"+wrong, ""), 400, "")
	}
	h.refused(h.send("GET", b.path()+"/logs", "", "X-API-Key", h.other), 404, "not found")
}

// TestTemplatePages: the builds of a template come in pages.
func TestTemplatePages(t *testing.T) {
	h := newHarness(t)
	h.roots.mu.Lock()
	h.roots.base = true
	h.roots.mu.Unlock()
	want := map[string]bool{}
	for range 3 {
		b := h.ask(`{"name":"web"}`)
		h.build(b, `{"fromTemplate":"base","steps":[]}`)
		want[b.BuildID] = true
	}
	token := ""
	for pages := 1; ; pages++ {
		a := h.call("GET", "/templates/web?limit=2&nextToken="+token, "")
		var got struct {
			Builds []buildJSON `json:"builds"`
		}
		a.into(t, &got)
		for _, b := range got.Builds {
			delete(want, b.BuildID)
		}
		if token = a.header.Get("X-Next-Token"); token == "" {
			if pages != 2 || len(got.Builds) != 1 {
				t.Errorf("%d pages, %d builds on the last", pages, len(got.Builds))
			}
			break
		}
	}
	if len(want) != 0 {
		t.Errorf("not listed: %v", want)
	}
	h.refused(h.call("GET", "/templates/web?nextToken=x", ""), 400, "nextToken")
	h.refused(h.call("GET", "/templates/web?limit=0", ""), 400, "limit")
}

func TestBuildNames(t *testing.T) {
	h := newHarness(t)
	for body, text := range map[string]string{
		`{}`:                              "name is missing",
		`{"name":"a:"}`:                   "Invalid template name",
		`{"name":"a:b:c"}`:                "Invalid template name",
		`{"name":"a","tags":["x:y"]}`:     "Invalid tag",
		`{"name":"a","memoryMB":-1}`:      "must be within",
		`{"name":"a","minFreeDiskMb":-1}`: "must be within",
	} {
		h.refused(h.call("POST", "/v3/templates", body), 400, text)
	}
	h.refused(h.call("POST", "/v3/templates", `{"name":"base"}`), 409, "comes with the server")
	if b := h.ask(`{"alias":"old"}`); b.TemplateID != "old" || len(b.Tags) != 1 || b.Tags[0] != "default" {
		t.Errorf("%+v", b)
	}
}

// TestUploads: the address that is given out takes the files of the one who asked, for that hash, for an hour.
func TestUploads(t *testing.T) {
	h := newHarness(t)
	link := func() (out struct {
		Present bool   `json:"present"`
		URL     string `json:"url"`
	},
	) {
		t.Helper()
		a := h.call("GET", "/templates/web/files/0a1b", "")
		if a.into(t, &out); a.status != http.StatusCreated {
			t.Fatalf("%d %s", a.status, a.body)
		}
		return out
	}
	first := link()
	at, err := url.Parse(first.URL)
	if err != nil || first.Present || !strings.HasPrefix(first.URL, h.url+"/") {
		t.Fatalf("%+v, %v", first, err)
	}
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	if err := w.WriteHeader(&tar.Header{Name: "a", Mode: 0o644, Size: 1, Typeflag: tar.TypeReg}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	for _, change := range []func(q url.Values){
		func(q url.Values) { q.Del("signature") },
		func(q url.Values) { q.Set("owner", "key_other") },
		func(q url.Values) { q.Set("expires", "99999999999") },
	} {
		q := at.Query()
		change(q)
		h.refused(h.send("PUT", at.Path+"?"+q.Encode(), archive.String()), 403, "not one that this server gave")
	}
	h.refused(h.send("PUT", "/templates/web/files/ffff?"+at.RawQuery, archive.String()), 403, "not one that this server gave")
	old := "1"
	late := url.Values{"owner": {at.Query().Get("owner")}, "expires": {old}, "signature": {h.api.tokens.upload(at.Query().Get("owner"), "0a1b", old)}}
	h.refused(h.send("PUT", at.Path+"?"+late.Encode(), archive.String()), 403, "too old")
	h.refused(h.send("PUT", at.RequestURI(), "no archive at all, but text"), 400, "")
	large := h.send("PUT", at.RequestURI(), strings.Repeat("\x00", 4<<20+1))
	if h.refused(large, 413, "more than 4 MiB"); large.header.Get("Retry-After") != "" {
		t.Error("what is too large may be tried again")
	}
	if link().Present {
		t.Error("what was refused is there")
	}
	if a := h.send("PUT", at.RequestURI(), archive.String()); a.status != 200 || a.body != "" {
		t.Fatalf("%d %s", a.status, a.body)
	}
	if !link().Present {
		t.Error("it is not there")
	}
	if a := h.send("GET", "/templates/web/files/0a1b", "", "X-API-Key", h.other); strings.Contains(a.body, `"present":true`) {
		t.Errorf("another's: %s", a.body)
	}
	h.refused(h.call("GET", "/templates/web/files/..%2Fx", ""), 400, "no hash")
}

func TestReasons(t *testing.T) {
	for _, c := range []struct {
		r    template.Reason
		want string
	}{
		{
			template.Reason{Message: `step 1: no such user in the sandbox: "root123"`, Step: "1", Command: "RUN whoami root123"},
			"failed to run command 'whoami': command failed: unauthenticated: invalid username: 'root123'",
		},
		{template.Reason{Message: "step 2: exit code 1: gone", Step: "2", Command: "RUN false"}, "failed to run command 'false': command failed: exit code 1: gone"},
		{template.Reason{Message: "step 3: no file", Hint: "upload it", Step: "3", Command: "COPY a b"}, "no file (upload it)"},
	} {
		if got := reasonText(&c.r); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
}
