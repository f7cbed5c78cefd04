package mcp_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"casemate.dev/client"
	"casemate.dev/internal/mcp"
	"casemate.dev/internal/testenv"
)

const patience = 2 * time.Minute

// TestSessionHasOneSandbox: the first tools make it, at once or not, and the end of the session takes
// it away; so over both transports.
func TestSessionHasOneSandbox(t *testing.T) {
	h := newHarness(t)
	stdio, left := h.overStdio(nil, nil)
	for name, p := range map[string]*peer{"stdio": stdio, "http": h.overHTTP(h.key(), nil)} {
		if _, err := p.ListTools(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		if n := len(h.boxes()); n != 0 {
			t.Errorf("%s: %d sandboxes before any was needed", name, n)
		}
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() { p.call("run_command", object{"command": "echo x >> log"}) })
		}
		wg.Wait()
		if text, _ := p.call("read_file", object{"path": "log"}); strings.Count(text, "x\n") != 8 {
			t.Errorf("%s: the log holds %q", name, text)
		}
		all := h.boxes()
		if len(all) != 1 || all[0].GetLabels()["mcp-client"] != "tester" || all[0].GetExpiresAt() != nil || all[0].GetIdle() == nil {
			t.Errorf("%s: %v", name, all)
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		testenv.Eventually(t, patience, name+": the session's sandbox is gone", func() bool { return len(h.boxes()) == 0 })
	}
	if err := testenv.Receive(t, "the session ends", left); err != nil {
		t.Errorf("stdio: %v", err)
	}
}

// TestSessionAfterItsSandboxWentAway: a limit or a person ended it; the next tool says so once, and
// then there is a new one.
func TestSessionAfterItsSandboxWentAway(t *testing.T) {
	h := newHarness(t)
	p, _ := h.overStdio(nil, nil)
	_, r := p.call("run_command", object{"command": "true"})
	first := r["sandbox"].(string)
	if _, err := h.admin.Sandboxes.Delete(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	contains(t, p.refused("run_command", object{"command": "true"}), "gone", "call again")
	if _, r = p.call("run_command", object{"command": "true"}); r["sandbox"] == first {
		t.Error("it is the same")
	}
	// Asked to delete its own, it makes a fresh one without a word.
	p.call("delete_sandbox", object{"sandbox": r["sandbox"]})
	p.call("run_command", object{"command": "true"})
	if n := len(h.boxes()); n != 1 {
		t.Errorf("%d sandboxes", n)
	}
}

// TestGivenSandboxStays: --sandbox.
func TestGivenSandboxStays(t *testing.T) {
	h := newHarness(t)
	sb, err := h.admin.Sandboxes.Create(t.Context(), &client.CreateRequest{Name: "mine"})
	if err != nil {
		t.Fatal(err)
	}
	p, left := h.overStdio(func(c *mcp.Config) { c.Sandbox = "mine" }, nil)
	contains(t, p.InitializeResult().Instructions, "stays afterwards")
	if _, r := p.call("run_command", object{"command": "true"}); r["sandbox"] != sb.GetId() {
		t.Errorf("it ran in %v", r["sandbox"])
	}
	_ = p.Close()
	if err := testenv.Receive(t, "the session ends", left); err != nil {
		t.Error(err)
	}
	if n := len(h.boxes()); n != 1 {
		t.Errorf("%d sandboxes are left", n)
	}
}

// running reports whether a sandbox has a process that runs.
func (h *harness) running() bool {
	for _, sb := range h.boxes() {
		all, err := h.admin.Processes.List(h.Context(), sb.GetId())
		if err != nil {
			h.Fatal(err)
		}
		for _, p := range all {
			if p.GetEnd() == "" {
				return true
			}
		}
	}
	return false
}

// TestCancelKills: a client that gives up leaves nothing running, over both transports.
func TestCancelKills(t *testing.T) {
	h := newHarness(t)
	stdio, _ := h.overStdio(nil, nil)
	for name, p := range map[string]*peer{"stdio": stdio, "http": h.overHTTP(h.key(), nil)} {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			r, err := p.CallTool(ctx, &sdk.CallToolParams{Name: "run_command", Arguments: object{"command": "sleep 600 & sleep 600", "timeout_seconds": 3600}})
			if err == nil {
				err = fmt.Errorf("no error: %+v", r.Content)
			}
			done <- err
		}()
		testenv.Eventually(t, patience, name+": it runs", func() bool { return len(done) > 0 || h.running() })
		cancel()
		if err := testenv.Receive(t, "the call ends", done); !errors.Is(err, context.Canceled) {
			t.Errorf("%s: the call ended with %v", name, err)
		}
		testenv.Eventually(t, patience, name+": it is dead", func() bool { return !h.running() })
		if text, _ := p.call("run_command", object{"command": "echo still here"}); !strings.HasPrefix(text, "still here") {
			t.Errorf("%s: %s", name, text)
		}
	}
}

// TestProgress: a client that asks hears every second what a command printed last.
func TestProgress(t *testing.T) {
	h := newHarness(t)
	heard := make(chan *sdk.ProgressNotificationParams, 16)
	o := &sdk.ClientOptions{ProgressNotificationHandler: func(ctx context.Context, r *sdk.ProgressNotificationClientRequest) {
		select {
		case heard <- r.Params:
		default: // enough was heard
		}
	}}
	p := h.overHTTP(h.key(), o)
	params := &sdk.CallToolParams{Name: "run_command", Arguments: object{"command": "echo step one; sleep 600", "timeout_seconds": 600}}
	params.SetProgressToken("t1")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = p.CallTool(ctx, params) // it is canceled once it has told
	}()
	defer func() { cancel(); <-done }()
	for limit := time.After(patience); ; {
		select {
		case n := <-heard:
			if n.ProgressToken != "t1" || n.Progress <= 0 || n.Total != 600 {
				t.Errorf("progress %+v", n)
			}
			if n.Message == "step one" { // the first may come before it
				return
			}
		case <-limit:
			t.Fatal("no progress that tells what was printed")
		}
	}
}

// TestDeleteEndsWhatRuns: a client that ends its session over HTTP does not wait for its commands.
func TestDeleteEndsWhatRuns(t *testing.T) {
	h := newHarness(t)
	key := h.key()
	p := h.overHTTP(key, nil)
	go func() {
		_, _ = p.CallTool(t.Context(), &sdk.CallToolParams{Name: "run_command", Arguments: object{"command": "sleep 600", "timeout_seconds": 3600}})
	}()
	testenv.Eventually(t, patience, "it runs", h.running)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodDelete, h.url+"/mcp", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+key)
	req.Header.Set("Mcp-Session-Id", p.ID())
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusNoContent {
		t.Errorf("DELETE: %d", resp.StatusCode)
	}
	testenv.Eventually(t, patience, "the sandbox is gone", func() bool { return len(h.boxes()) == 0 })
}

// TestServerStops: it ends sessions and what they run, and is not held up by them.
func TestServerStops(t *testing.T) {
	h := newHarness(t)
	p := h.overHTTP(h.key(), nil)
	ended := make(chan error, 1)
	go func() {
		_, err := p.CallTool(t.Context(), &sdk.CallToolParams{Name: "run_command", Arguments: object{"command": "sleep 600", "timeout_seconds": 3600}})
		ended <- err
	}()
	testenv.Eventually(t, patience, "it runs", h.running)
	begin := time.Now()
	h.stop()
	if took := time.Since(begin); took > patience {
		t.Errorf("it took %v", took)
	}
	select {
	case <-ended: // an error, or a result that says so
	case <-time.After(patience):
		t.Error("the call hangs")
	}
}

// TestHTTPGuard: VULNERABILITY a tool server on loopback that any page, program or log can use.
// ATTACK SCENARIO pages that rebind a name or fetch across origins, requests without a key or with one
// in the address, and a second user with the id of the first one's session. VERIFIES each is refused.
func TestHTTPGuard(t *testing.T) {
	h := newHarness(t)
	key := h.key()
	p := h.overHTTP(key, nil)
	p.call("write_file", object{"path": "secret", "text": "s"})
	session := p.ID()
	if session == "" {
		t.Fatal("the session has no id")
	}
	const ping = `{"jsonrpc":"2.0","id":1,"method":"ping"}`
	for _, tt := range []struct {
		name, method, query string
		header              map[string]string
		host                string
		status              int
		says                string
	}{
		{name: "the client itself", header: map[string]string{"Authorization": "Bearer " + key, "Mcp-Session-Id": session}, status: 200},
		{name: "the other header", header: map[string]string{"X-Api-Key": key, "Mcp-Session-Id": session}, status: 200},
		{name: "no key", status: 401, says: "casemate keys create"},
		{name: "no key, with a session", header: map[string]string{"Mcp-Session-Id": session}, status: 401},
		{name: "a wrong key", header: map[string]string{"Authorization": "Bearer csm_wrong"}, status: 401},
		{name: "another scheme", header: map[string]string{"Authorization": "Basic " + key}, status: 401},
		{name: "a key in the address", query: "?api_key=" + key, status: 400, says: "header"},
		{name: "a key in both", query: "?api_key=" + key, header: map[string]string{"Authorization": "Bearer " + key}, status: 400},
		{name: "a rebound name", host: "evil.test", header: map[string]string{"Authorization": "Bearer " + key}, status: 403, says: "host name"},
		{name: "another page", header: map[string]string{"Authorization": "Bearer " + key, "Origin": "http://evil.test"}, status: 403, says: "origin"},
		{name: "a page without an origin", header: map[string]string{"Authorization": "Bearer " + key, "Origin": "null"}, status: 403},
		{name: "another's session", header: map[string]string{"Authorization": "Bearer " + h.key(), "Mcp-Session-Id": session}, status: 403},
		{name: "another ends it", method: "DELETE", header: map[string]string{"Authorization": "Bearer " + h.key(), "Mcp-Session-Id": session}, status: 403},
		{name: "no such session", header: map[string]string{"Authorization": "Bearer " + key, "Mcp-Session-Id": "nobody"}, status: 404},
	} {
		method := tt.method
		if method == "" {
			method = "POST"
		}
		req, err := http.NewRequestWithContext(t.Context(), method, h.url+"/mcp"+tt.query, strings.NewReader(ping))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Accept", "application/json, text/event-stream")
		for k, v := range tt.header {
			req.Header.Set(k, v)
		}
		if tt.host != "" {
			req.Host = tt.host
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body := make([]byte, 1024)
		n, _ := resp.Body.Read(body)
		_ = resp.Body.Close()
		if resp.StatusCode != tt.status || !strings.Contains(string(body[:n]), tt.says) {
			t.Errorf("%s: %d %s", tt.name, resp.StatusCode, body[:n])
		}
		if tt.status == 401 && !strings.HasPrefix(resp.Header.Get("WWW-Authenticate"), "Bearer") {
			t.Errorf("%s: it does not say how to show who asks", tt.name)
		}
	}
	if text, _ := p.call("read_file", object{"path": "secret"}); text != "s" {
		t.Errorf("the session suffered: %q", text)
	}
}

// TestKeysAreJudged: a tool can do what its caller's key may, and nothing more.
func TestKeysAreJudged(t *testing.T) {
	h := newHarness(t)
	mine, other := h.overHTTP(h.key(), nil), h.overHTTP(h.key(), nil)
	mine.call("create_sandbox", object{"name": "mine"})
	contains(t, other.refused("run_command", object{"sandbox": "mine", "command": "true"}), "not_found")
	if text, _ := other.call("list_sandboxes", nil); strings.Contains(text, "mine") {
		t.Errorf("another key's sandbox shows: %s", text)
	}
	contains(t, other.refused("delete_sandbox", object{"sandbox": "mine"}), "not_found")

	// A key that is revoked ends its sessions' power at once.
	key, secret, err := h.admin.System.CreateKey(t.Context(), &client.CreateKeyRequest{Name: "short"})
	if err != nil {
		t.Fatal(err)
	}
	p := h.overHTTP(secret, nil)
	p.call("run_command", object{"command": "true"})
	if _, err := h.admin.System.RevokeKey(t.Context(), key.GetId()); err != nil {
		t.Fatal(err)
	}
	if r, err := p.CallTool(t.Context(), &sdk.CallToolParams{Name: "run_command", Arguments: object{"command": "true"}}); err == nil {
		t.Errorf("a revoked key runs commands: %v", r)
	}
}
