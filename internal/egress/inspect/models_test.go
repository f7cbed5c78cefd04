package inspect

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/secret"
)

const modelHost = "models.example.com"

// grant is a route of the sandbox to a provider on modelHost.
func grant(family secret.Family, change ...func(*RoutePart)) RoutePart {
	r := RoutePart{RouteGrant: secret.RouteGrant{
		Route: secret.Route{ID: "rte_" + string(family), Provider: string(family), Family: family, BaseURL: "https://" + modelHost, Secret: "sec_model"},
		Token: "token-of-" + string(family), Key: secret.NewValue([]byte(value(9))), KeyVersion: 3,
	}}
	if family == secret.OpenAI {
		r.BaseURL += "/v1"
	}
	for _, f := range change {
		f(&r)
	}
	return r
}

// provider answers as a model provider does, in both families' ways.
func provider(g *got) http.HandlerFunc {
	return g.handler(func(w http.ResponseWriter, r *http.Request) {
		body := g.last().body
		stream := strings.Contains(body, `"stream":true`)
		switch {
		case strings.Contains(body, "ECHO"):
			fmt.Fprintf(w, `{"error":"bad key %s %s"}`, r.Header.Get("X-Api-Key"), r.Header.Get("Authorization"))
		case strings.HasSuffix(r.URL.Path, "/messages") && stream:
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprint(w, "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":10,\"cache_read_input_tokens\":5,\"output_tokens\":1}}}\n\n")
			w.(http.Flusher).Flush()
			fmt.Fprint(w, "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"text\":\"hi\"}}\n\n")
			fmt.Fprint(w, "event: message_delta\ndata: {\"type\":\"message_delta\",\"usage\":{\"output_tokens\":20}}\n\n")
		case strings.HasSuffix(r.URL.Path, "/messages"):
			fmt.Fprint(w, `{"content":[{"text":"hi"}],"usage":{"input_tokens":7,"output_tokens":3}}`)
		case strings.HasSuffix(r.URL.Path, "/chat/completions") && stream:
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprint(w, "data: {\"choices\":[{\"delta\":{\"content\":\"hi\"}}]}\n\n")
			w.(http.Flusher).Flush()
			if strings.Contains(body, `"include_usage":true`) {
				fmt.Fprint(w, "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":11,\"completion_tokens\":4}}\n\n")
			}
			fmt.Fprint(w, "data: [DONE]\n\n")
		case strings.HasSuffix(r.URL.Path, "/responses") && stream:
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprint(w, "event: response.completed\r\ndata: {\"type\":\"response.completed\",\"response\":{\"usage\":{\"input_tokens\":6,\"output_tokens\":2}}}\r\n\r\n")
		default:
			fmt.Fprint(w, `{"choices":[{"message":{"content":"hi"}}],"usage":{"prompt_tokens":5,"completion_tokens":2}}`)
		}
	})
}

func (w *world) model(t *testing.T, path, body string, header ...string) (int, string) {
	t.Helper()
	method := "POST"
	if body == "" {
		method = "GET"
	}
	resp, text := send(t, w.client(false), method, "http://"+secret.ModelHost+"/models/"+path, body, header...)
	return resp.StatusCode, text
}

func TestModelRoutes(t *testing.T) {
	for _, c := range []struct {
		name, path, body string
		header           []string
		sentTo           string // path at the provider
		in, out          int64
		answer           string
	}{
		{"anthropic", "anthropic/v1/messages?beta=true", `{"model":"m","max_tokens":100}`, []string{"X-Api-Key", "token-of-anthropic", "Anthropic-Version", "2023-06-01"}, "/v1/messages?beta=true", 7, 3, `"hi"`},
		{"anthropic by bearer", "anthropic/v1/messages", `{"model":"m"}`, []string{"Authorization", "Bearer token-of-anthropic"}, "/v1/messages", 7, 3, `"hi"`},
		{"anthropic stream", "anthropic/v1/messages", `{"model":"m","stream":true}`, []string{"X-Api-Key", "token-of-anthropic"}, "/v1/messages", 15, 20, "content_block_delta"},
		{"openai", "openai/v1/chat/completions", `{"model":"m"}`, []string{"Authorization", "Bearer token-of-openai"}, "/v1/chat/completions", 5, 2, `"hi"`},
		{"openai stream", "openai/v1/chat/completions", `{"model":"m","stream":true}`, []string{"Authorization", "Bearer token-of-openai"}, "/v1/chat/completions", 11, 4, "[DONE]"},
		{"openai stream that tells", "openai/v1/chat/completions", `{"model":"m","stream":true,"stream_options":{"include_usage":true}}`, []string{"Authorization", "Bearer token-of-openai"}, "/v1/chat/completions", 11, 4, "prompt_tokens"},
		{"openai responses", "openai/v1/responses", `{"model":"m","stream":true}`, []string{"Authorization", "Bearer token-of-openai"}, "/v1/responses", 6, 2, "response.completed"},
		{"without the version", "openai/chat/completions", `{"model":"m"}`, []string{"Authorization", "Bearer token-of-openai"}, "/v1/chat/completions", 5, 2, `"hi"`},
		{"models", "openai/v1/models", "", []string{"Authorization", "Bearer token-of-openai"}, "/v1/models", 0, 0, `"hi"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			var g got
			w.server(modelHost, 443, modelHost, provider(&g))
			w.configure(nil, grant(secret.Anthropic), grant(secret.OpenAI))
			status, text := w.model(t, c.path, c.body, append(c.header, "Cookie", "a=b")...)
			r := g.last()
			if status != 200 || !strings.Contains(text, c.answer) || r.uri != c.sentTo || r.host != modelHost {
				t.Fatalf("%d %s; the provider got %s", status, text, r.text())
			}
			key := map[bool]string{true: r.header.Get("X-Api-Key"), false: r.header.Get("Authorization")}[strings.HasPrefix(c.name, "anthropic")]
			if strings.TrimPrefix(key, "Bearer ") != value(9) || strings.Contains(r.text(), "token-of") || r.header.Get("Cookie") != "" {
				t.Errorf("the provider got %s", r.text())
			}
			if c.name == "openai stream" && strings.Contains(text, "prompt_tokens") {
				t.Errorf("the client sees what we asked for: %s", text)
			}
			e := w.await(egress.EventModel)
			if len(e) != 1 || e[0].TokensIn != c.in || e[0].TokensOut != c.out || e[0].Estimated || e[0].Status != 200 || e[0].Secret != "sec_model" || e[0].Version != 3 {
				t.Errorf("events %+v", e)
			}
		})
	}
}

func TestModelRefusals(t *testing.T) {
	past := func(r *RoutePart) { r.Expires = time.Now().Add(-time.Second) }
	models := func(r *RoutePart) { r.Models = []string{"small-*", "one"} }
	keyless := func(r *RoutePart) { r.Key = secret.Value{} }
	ok := []string{"Authorization", "Bearer token-of-openai"}
	for _, c := range []struct {
		name, path, body string
		header           []string
		change           func(*RoutePart)
		want             int
	}{
		{"no token", "openai/v1/chat/completions", `{}`, nil, nil, 403},
		{"a wrong token", "openai/v1/chat/completions", `{}`, []string{"Authorization", "Bearer token-of-opena"}, nil, 403},
		{"another route's token", "openai/v1/chat/completions", `{}`, []string{"Authorization", "Bearer token-of-anthropic"}, nil, 403},
		{"the key itself", "openai/v1/chat/completions", `{}`, []string{"Authorization", "Bearer " + value(9)}, nil, 403},
		{"a token that has ended", "openai/v1/chat/completions", `{}`, ok, past, 403},
		{"no such provider", "other/v1/chat/completions", `{}`, ok, nil, 404},
		{"files", "openai/v1/files", `{}`, ok, nil, 404},
		{"an organisation's keys", "openai/v1/organization/admin_api_keys", "", ok, nil, 404},
		{"out of the path", "openai/v1/models/%2e%2e/files", "", ok, nil, 404},
		{"dots", "openai/v1/models/../files", "", ok, nil, 404},
		{"another model", "openai/v1/chat/completions", `{"model":"large"}`, ok, models, 403},
		{"another model, twice", "openai/v1/chat/completions", `{"model":"one","model":"large"}`, ok, models, 403},
		{"no model", "openai/v1/chat/completions", `{}`, ok, models, 403},
		{"a model in other letters", "openai/v1/chat/completions", `{"model":"one","MODEL":"large"}`, ok, models, 400},
		{"in the background", "openai/v1/responses", `{"background":true}`, ok, nil, 400},
		{"no JSON", "openai/v1/chat/completions", `hello`, ok, nil, 400},
		{"no key", "openai/v1/chat/completions", `{}`, ok, keyless, 502},
		{"WebSocket", "openai/v1/responses", "", append([]string{"Connection", "Upgrade", "Upgrade", "websocket"}, ok...), nil, 426},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			var g got
			w.server(modelHost, 443, modelHost, provider(&g))
			r := grant(secret.OpenAI)
			if c.change != nil {
				c.change(&r)
			}
			w.configure(nil, r, grant(secret.Anthropic))
			status, text := w.model(t, c.path, c.body, c.header...)
			var shape struct {
				Error struct{ Message, Type string }
			}
			if err := json.Unmarshal([]byte(text), &shape); err != nil || status != c.want || !strings.HasPrefix(shape.Error.Message, "casemate: ") || g.count() != 0 {
				t.Errorf("%d %s; the provider got %+v", status, text, g.reqs)
			}
			if strings.Contains(text, value(9)) {
				t.Errorf("the key is told: %s", text)
			}
		})
	}
	// Which model is asked for is what the provider reads, too: of two, the one that was judged.
	w := newWorld(t)
	var g got
	w.server(modelHost, 443, modelHost, provider(&g))
	w.configure(nil, grant(secret.OpenAI, models))
	if status, _ := w.model(t, "openai/v1/chat/completions", `{"model":"large","model":"small-1"}`, ok...); status != 200 || g.last().body != `{"model":"small-1"}` {
		t.Errorf("%d; the provider got %s", status, g.last().body)
	}
}

func TestModelKeyDoesNotComeBack(t *testing.T) {
	w := newWorld(t)
	var g got
	w.server(modelHost, 443, modelHost, provider(&g))
	w.configure(nil, grant(secret.Anthropic))
	if status, text := w.model(t, "anthropic/v1/messages", `{"say":"ECHO"}`, "X-Api-Key", "token-of-anthropic"); status != 200 || readable(text, value(9)) || !strings.Contains(text, "bad key ***") {
		t.Errorf("%d %s", status, text)
	}
}

func TestModelBudgets(t *testing.T) {
	ask := func(w *world, body string) int {
		status, _ := w.model(w.t.(*testing.T), "openai/v1/chat/completions", body, "Authorization", "Bearer token-of-openai")
		return status
	}
	start := func(change func(*RoutePart)) (*world, *got) {
		w := newWorld(t)
		g := &got{}
		w.server(modelHost, 443, modelHost, provider(g))
		w.configure(nil, grant(secret.OpenAI, change))
		return w, g
	}
	small := `{"max_tokens":1}`
	w, g := start(func(r *RoutePart) { r.Budget.Requests = 2 })
	if a, b, c := ask(w, small), ask(w, small), ask(w, small); a != 200 || b != 200 || c != 403 || g.count() != 2 {
		t.Errorf("requests: %d, %d, %d", a, b, c)
	}
	// A change of the configuration is no new budget; a new gateway is told what was used.
	w.configure(nil, grant(secret.OpenAI, func(r *RoutePart) { r.Budget.Requests = 2 }))
	if a := ask(w, small); a != 403 {
		t.Errorf("after a change: %d", a)
	}
	w, _ = start(func(r *RoutePart) { r.Budget.Requests, r.Spent.Requests = 2, 2 })
	if a := ask(w, small); a != 403 {
		t.Errorf("in a new gateway: %d", a)
	}
	w, g = start(func(r *RoutePart) { r.Budget.Tokens = 16 })
	if a, b, c, d := ask(w, `{"max_tokens":1000}`), ask(w, small), ask(w, small), ask(w, small); a != 403 || b != 200 || c != 200 || d != 403 || g.count() != 2 {
		t.Errorf("tokens: %d, %d, %d, %d", a, b, c, d)
	}
}

// Money: of a million tokens those of input cost 1 unit, those of output 2, so that a request of the provider's 5 and 2
// costs 9 millionths.
func TestModelMoney(t *testing.T) {
	w := newWorld(t)
	g := &got{}
	w.server(modelHost, 443, modelHost, provider(g))
	limits := func(r *RoutePart) { r.Budget = secret.Budget{Cost: 30, PriceIn: 1_000_000, PriceOut: 2_000_000} }
	w.configure(nil, grant(secret.OpenAI, limits))
	ask := func(body string) (int, string) {
		return w.model(t, "openai/v1/chat/completions", body, "Authorization", "Bearer token-of-openai")
	}
	for _, dear := range []string{
		`{"max_tokens":20}`, `{"max_tokens":4,"n":5}`, `{"max_tokens":4,"n":5.0}`, `{}`,
		`{"max_tokens":1,"max_completion_tokens":20}`, `{"max_tokens":2e1}`,
	} { // what it may cost is more than there is
		if status, text := ask(dear); status != 403 || !strings.Contains(text, "could cost more") {
			t.Errorf("%s: %d %s", dear, status, text)
		}
	}
	for i, want := range []int{200, 200, 200, 403} {
		if status, text := ask(`{"max_tokens":1}`); status != want {
			t.Errorf("request %d: %d %s", i, status, text)
		}
	}
	// The twin: without prices the same requests pass.
	w.configure(nil, grant(secret.OpenAI))
	if status, text := ask(`{"max_tokens":20}`); status != 200 || g.count() != 4 {
		t.Errorf("without a budget: %d %s, %d requests", status, text, g.count())
	}
}

// TestLeavingEarlyIsNotFree: a client that leaves before the provider tells what was used.
func TestLeavingEarlyIsNotFree(t *testing.T) {
	w := newWorld(t)
	gone := make(chan struct{})
	w.server(modelHost, 443, modelHost, func(rw http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		rw.Header().Set("Content-Type", "text/event-stream")
		for {
			if _, err := fmt.Fprintf(rw, "data: {\"choices\":[{\"delta\":{\"content\":%q}}]}\n\n", strings.Repeat("x", 4000)); err != nil || r.Context().Err() != nil {
				close(gone)
				return
			}
			rw.(http.Flusher).Flush()
		}
	})
	w.configure(nil, grant(secret.OpenAI))
	req, _ := http.NewRequestWithContext(t.Context(), "POST", "http://"+secret.ModelHost+"/models/openai/v1/chat/completions", strings.NewReader(`{"stream":true}`))
	req.Header.Set("Authorization", "Bearer token-of-openai")
	resp, err := w.client(false).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.ReadFull(resp.Body, make([]byte, 20_000))
	_ = resp.Body.Close()
	select {
	case <-gone:
	case <-time.After(time.Minute):
		t.Fatal("the provider still sends")
	}
	if e := w.await(egress.EventModel); len(e) != 1 || !e[0].Estimated || e[0].TokensOut < 20_000/bytesPerToken/2 {
		t.Errorf("events %+v", e)
	}
}

// TestModelBodiesAreBounded: large requests of a sandbox hold a bounded part of the gateway's memory, also where they were
// compressed and are small on the wire; it is there again when they are through, and another sandbox has its own.
func TestModelBodiesAreBounded(t *testing.T) {
	h := &holds{most: maxHeld, mostAll: maxHeldAll}
	zeroes := func(n int) io.Reader { return io.LimitReader(neverEnding{}, int64(n)) }
	var leases []*lease
	defer func() {
		for _, l := range leases {
			l.end()
		}
	}()
	read := func(sandbox string, n int) error {
		l := &lease{h: h, sandbox: sandbox}
		leases = append(leases, l)
		_, err := readHeld(zeroes(n), l)
		return err
	}
	if err := read("one", maxModelBody+1); !errors.Is(err, errTooLong) {
		t.Errorf("a body that is too long: %v", err)
	}
	leases[0].end()
	if err := read("one", 30<<20); err != nil {
		t.Error(err)
	}
	if err := read("one", 30<<20); !errors.Is(err, errHeld) {
		t.Errorf("a second one at once: %v", err)
	}
	if err := read("two", 30<<20); err != nil {
		t.Errorf("another sandbox: %v", err)
	}
	for _, l := range leases {
		l.end()
	}
	if h.all != 0 || len(h.of) != 0 {
		t.Errorf("held afterwards: %d, %v", h.all, h.of)
	}
	if err := read("one", 30<<20); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}

type neverEnding struct{}

// Read implements io.Reader.
func (neverEnding) Read(p []byte) (int, error) { return len(p), nil }

func TestModelBodyMayBeCompressed(t *testing.T) {
	w := newWorld(t)
	var g got
	w.server(modelHost, 443, modelHost, provider(&g))
	w.configure(nil, grant(secret.Anthropic))
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	_, _ = io.WriteString(z, `{"model":"m"}`)
	_ = z.Close()
	if status, text := w.model(t, "anthropic/v1/messages", b.String(), "X-Api-Key", "token-of-anthropic", "Content-Encoding", "gzip"); status != 200 || g.last().body != `{"model":"m"}` || g.last().header.Get("Content-Encoding") != "" {
		t.Errorf("%d %s; the provider got %s", status, text, g.last().text())
	}
}

func TestWant(t *testing.T) {
	w := newWorld(t)
	w.configure([]secret.Credential{cred(1, bindTo(secret.Bearer, "Authorization"))}, grant(secret.Anthropic))
	for _, c := range []struct {
		box  string
		t    egress.Target
		want egress.Want
	}{
		{boxID, egress.Target{Name: apiHost, Port: 443}, egress.Look},
		{boxID, egress.Target{Name: apiHost, Port: 8443}, egress.Pass},
		{boxID, egress.Target{Name: "x." + apiHost, Port: 443}, egress.Pass},
		{boxID, egress.Target{Name: otherHost, Port: 443}, egress.Pass},
		{boxID, egress.Target{Name: secret.ModelHost, Port: 0}, egress.Answer},
		{boxID, egress.Target{Name: secret.ModelHost, Port: 80}, egress.Answer},
		{boxID, egress.Target{Name: secret.ModelHost, Port: 22}, egress.Pass},
		{"box2", egress.Target{Name: secret.ModelHost, Port: 80}, egress.Pass},
		{"box2", egress.Target{Name: apiHost, Port: 443}, egress.Pass},
	} {
		if got := w.in.Want(c.box, c.t); got != c.want {
			t.Errorf("%s %+v: %v", c.box, c.t, got)
		}
	}
}

func FuzzMeter(f *testing.F) {
	f.Add([]byte("data: {\"usage\":{\"input_tokens\":1}}\n\ndata: x\n\n"), true, true)
	f.Add([]byte(`{"usage":{"prompt_tokens":1e30}}`), false, false)
	f.Fuzz(func(t *testing.T, b []byte, events, drop bool) {
		m := &meter{lease: &lease{h: &holds{most: maxHeld, mostAll: maxHeldAll}}, src: io.NopCloser(bytes.NewReader(b)), events: events, dropUsage: drop && events}
		out, err := io.ReadAll(m)
		if err != nil || len(out) > len(b) || !m.dropUsage && !bytes.Equal(out, b) {
			t.Fatalf("%q became %q, %v", b, out, err)
		}
		if u := m.used(0); u.in < 0 || u.out < 0 {
			t.Fatalf("%+v", u)
		}
	})
}
