package e2b

import (
	"net/http"
	"slices"
	"strings"
	"testing"

	"casemate.dev/internal/sandbox"
)

func TestFork(t *testing.T) {
	h := newHarness(t)
	s := h.create(`"metadata":{"k":"v"},"envVars":{"X":"1"}`)
	path := "/sandboxes/" + s.SandboxID
	h.refused(h.call("POST", path+"/fork", `{"count":0}`), 400, "Count must be at least 1")
	h.refused(h.call("POST", path+"/fork", `{"count":101}`), 400, "Count cannot be greater than 100")
	a := h.call("POST", path+"/fork", `{"count":3,"timeout":60}`)
	var all []forkResult
	if a.into(t, &all); a.status != http.StatusCreated || len(all) != 3 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	seen := []string{s.SandboxID}
	for _, f := range all {
		if f.Sandbox == nil || slices.Contains(seen, f.Sandbox.SandboxID) || f.Sandbox.EnvdAccessToken == s.EnvdAccessToken {
			t.Fatalf("%+v", f)
		}
		seen = append(seen, f.Sandbox.SandboxID)
		if d := h.detail(f.Sandbox.SandboxID); d.Metadata["k"] != "v" || d.TemplateID != s.TemplateID {
			t.Errorf("%+v", d)
		}
		res, err := h.manager.Execute(t.Context(), sandbox.Principal{ID: "local", Admin: true}, f.Sandbox.SandboxID,
			sandbox.ProcessSpec{Argv: []string{"env"}}, sandbox.RunOptions{})
		if env := string(res.Stdout); err != nil || !strings.Contains(env, "X=1\n") || !strings.Contains(env, "E2B_SANDBOX_ID="+f.Sandbox.SandboxID+"\n") {
			t.Errorf("environment %q, %v", env, err)
		}
	}
	h.call("POST", path+"/pause", "")
	h.refused(h.call("POST", path+"/fork", `{}`), 409, "cannot be forked while in 'paused' state")
	if a := h.call("GET", "/snapshots", ""); strings.TrimSpace(a.body) != "[]" {
		t.Errorf("a fork shows as a snapshot: %s", a.body)
	}
}

func TestSnapshots(t *testing.T) {
	h := newHarness(t)
	s := h.create(`"envVars":{"X":"1"}`)
	path := "/sandboxes/" + s.SandboxID
	take := func(body string) (out snapshotJSON) {
		t.Helper()
		a := h.call("POST", path+"/snapshots", body)
		if a.into(t, &out); a.status != http.StatusCreated {
			t.Fatalf("%d %s", a.status, a.body)
		}
		return out
	}
	bare, named := take(`{}`), take(`{"name":"team/web:v2"}`)
	if !strings.HasPrefix(bare.SnapshotID, "cmt_") || !strings.HasSuffix(bare.SnapshotID, ":default") || len(bare.Names) != 0 {
		t.Errorf("%+v", bare)
	}
	if named.SnapshotID != "casemate/web:v2" || !slices.Equal(named.Names, []string{"casemate/web:v2"}) {
		t.Errorf("%+v", named)
	}
	h.refused(h.call("POST", path+"/snapshots", `{"name":"No Name"}`), 400, "Invalid name")
	for query, want := range map[string][]string{
		"":                                {named.SnapshotID, bare.SnapshotID},
		"?sandboxID=" + s.SandboxID:       {named.SnapshotID, bare.SnapshotID},
		"?sandboxID=aaaaaaaaaaaaaaaaaaaa": {},
		"?name=web":                       {named.SnapshotID},
		"?name=other/web:v2":              {named.SnapshotID},
		"?name=web:v1":                    {},
		"?name=" + bare.SnapshotID:        {bare.SnapshotID},
		"?limit=1":                        {named.SnapshotID},
	} {
		a := h.call("GET", "/snapshots"+query, "")
		var page []snapshotJSON
		a.into(t, &page)
		got := []string{}
		for _, one := range page {
			got = append(got, one.SnapshotID)
		}
		if a.status != http.StatusOK || !slices.Equal(got, want) {
			t.Errorf("%q: %v, want %v", query, got, want)
		}
		if next := a.header.Get("X-Next-Token"); (next != "") != (query == "?limit=1") {
			t.Errorf("%q: next token %q", query, next)
		}
	}
	h.call("DELETE", path, "")
	for _, ref := range []string{bare.SnapshotID, named.SnapshotID, "web:v2"} {
		a := h.call("POST", "/v2/sandboxes", `{"templateID":"`+ref+`"}`)
		var made sandboxJSON
		if a.into(t, &made); a.status != http.StatusCreated || !strings.HasPrefix(made.TemplateID, "cmt_") {
			t.Errorf("%s: %d %s", ref, a.status, a.body)
		}
	}
	h.refused(h.send("POST", "/v2/sandboxes", `{"templateID":"web:v2"}`, "X-API-Key", h.other), 404, "not found")
	h.refused(h.send("DELETE", "/templates/web:v2", "", "X-API-Key", h.other), 404, "not found")
	for _, id := range []string{"casemate%2Fweb:v2", bare.SnapshotID} {
		if a := h.call("DELETE", "/templates/"+id, ""); a.status != http.StatusNoContent {
			t.Errorf("delete %s: %d %s", id, a.status, a.body)
		}
		h.refused(h.call("DELETE", "/templates/"+id, ""), 404, "not found")
	}
}

func TestPauseWithoutMemory(t *testing.T) {
	h := newHarness(t)
	s := h.create(`"timeout":300,"envVars":{"X":"1"}`)
	path := "/sandboxes/" + s.SandboxID
	for _, way := range []string{path + "/connect", "/v2" + path + "/connect", path + "/resume"} {
		if a := h.call("POST", path+"/pause", `{"memory":false}`); a.status != http.StatusNoContent {
			t.Fatalf("%d %s", a.status, a.body)
		}
		h.refused(h.call("POST", path+"/pause", `{"memory":false}`), 409, "is already paused")
		if d := h.detail(s.SandboxID); d.State != "paused" {
			t.Errorf("%+v", d)
		}
		a := h.call("POST", way, `{"timeout":60}`)
		var again sandboxJSON
		if a.into(t, &again); a.status != http.StatusCreated || again.EnvdAccessToken != s.EnvdAccessToken {
			t.Errorf("%s: %d %s", way, a.status, a.body)
		}
	}
	// One that was paused with memory starts anew where that is asked for.
	p, err := h.manager.StartProcess(t.Context(), sandbox.Principal{ID: "local", Admin: true}, s.SandboxID,
		sandbox.ProcessSpec{Argv: []string{"sleep", "60"}}, "")
	if err != nil {
		t.Fatal(err)
	}
	h.call("POST", path+"/pause", `{}`)
	if a := h.call("POST", "/v2"+path+"/connect", `{"memory":false}`); a.status != http.StatusCreated {
		t.Errorf("%d %s", a.status, a.body)
	}
	got, err := h.manager.GetProcess(t.Context(), sandbox.Principal{ID: "local", Admin: true}, s.SandboxID, p.ID)
	if err != nil || got.End != sandbox.EndSandboxStopped {
		t.Errorf("%+v, %v", got, err)
	}
	made := h.create(`"autoPause":true,"autoPauseMemory":false`)
	if d := h.detail(made.SandboxID); d.Lifecycle.OnTimeout != "pause" {
		t.Errorf("%+v", d)
	}
}
