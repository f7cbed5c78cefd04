package e2b

import (
	"bufio"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/e2b/envd"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/testenv"
)

// to returns the headers by which the SDKs name a port of a sandbox.
func to(sandboxID string, port int, more ...string) []string {
	return append([]string{"E2b-Sandbox-Id", sandboxID, "E2b-Sandbox-Port", strconv.Itoa(port)}, more...)
}

// isOutage checks the answer where something can't be reached.
func isOutage(t *testing.T, a answer, status int, sandboxID, text string) {
	t.Helper()
	var o outage
	a.into(t, &o)
	if a.status != status || o.Code != status || o.SandboxID != sandboxID || o.Message != text {
		t.Errorf("%d %s, want %d %q", a.status, a.body, status, text)
	}
}

const gone502 = "The sandbox was not found"

func TestAgentNeedsItsToken(t *testing.T) {
	h := newHarness(t)
	s, other := h.create(""), h.create("")
	for name, c := range map[string]struct {
		method, path string
		header       []string
		status       int
		text         string
	}{
		"health is open":         {"GET", "/health", nil, 204, ""},
		"the token":              {"POST", "/process.Process/List", []string{"X-Access-Token", s.EnvdAccessToken}, 200, ""},
		"no token":               {"POST", "/process.Process/List", nil, 401, textNoToken},
		"another's token":        {"POST", "/process.Process/List", []string{"X-Access-Token", other.EnvdAccessToken}, 401, textNoToken},
		"the API key":            {"POST", "/process.Process/List", []string{"X-API-Key", h.key}, 401, textNoToken},
		"files without":          {"GET", "/files?path=/a", nil, 401, "missing signature query parameter"},
		"files with a wrong one": {"GET", "/files?path=/a", []string{"X-Access-Token", "x"}, 401, textWrongToken},
		"files with the token":   {"GET", "/files?path=/a", []string{"X-Access-Token", s.EnvdAccessToken}, 200, ""},
		"a bad signature":        {"GET", "/files?path=/a&signature=v1_x", nil, 401, "invalid signature"},
		"health by POST":         {"POST", "/health", nil, 401, textNoToken},
		"the agent's own routes": {"POST", "/init", []string{"X-Access-Token", s.EnvdAccessToken}, 404, "no such path"},
	} {
		t.Run(name, func(t *testing.T) {
			a := h.send(c.method, c.path, "", to(s.SandboxID, envdPort, c.header...)...)
			if a.status != c.status || !strings.Contains(a.body, c.text) {
				t.Errorf("%d %s, want %d %q", a.status, a.body, c.status, c.text)
			}
		})
	}
	p, err := h.api.cfg.Keys.Authenticate(t.Context(), h.key)
	if err != nil {
		t.Fatal(err)
	}
	h.send("GET", "/envs", "", to(s.SandboxID+"-clientid", envdPort, "X-Access-Token", s.EnvdAccessToken)...)
	if got, want := h.envd.last(), "GET /envs "+s.SandboxID+" "+p.ID; got != want {
		t.Errorf("the agent was asked %q, want %q", got, want)
	}
}

// TestSignedLinks: without headers, the signature names the sandbox.
func TestSignedLinks(t *testing.T) {
	h := newHarness(t)
	h.create("")
	s := h.create("")
	h.create("")
	link := func(path, op, user, exp string) string {
		q := url.Values{"path": {path}, "signature": {envd.Sign(path, op, user, s.EnvdAccessToken, exp)}}
		if user != "" {
			q.Set("username", user)
		}
		if exp != "" {
			q.Set("signature_expiration", exp)
		}
		return "/files?" + q.Encode()
	}
	soon, before := strconv.FormatInt(time.Now().Unix()+60, 10), strconv.FormatInt(time.Now().Unix()-60, 10)
	for _, c := range []struct {
		method, path string
		status       int
		text         string
	}{
		{"GET", link("hello.txt", "read", "", ""), 200, "begun"},
		{"GET", link("/a b/ü", "read", "root", soon), 200, "begun"},
		{"POST", link("hello.txt", "write", "", soon), 200, "begun"},
		{"POST", link("hello.txt", "read", "", soon), 401, `{"code":401,"message":"invalid signature"}`},
		{"GET", link("hello.txt", "read", "", before), 401, `{"code":401,"message":"signature is already expired"}`},
		{"GET", "/files?path=hello.txt", 401, `{"code":401,"message":"missing signature query parameter"}`},
		{"DELETE", link("hello.txt", "read", "", ""), 401, ""},
	} {
		if a := h.send(c.method, c.path, ""); a.status != c.status || !strings.HasPrefix(a.body, c.text) {
			t.Errorf("%s %s: %d %s, want %d %s", c.method, c.path, a.status, a.body, c.status, c.text)
		}
	}
	if got := h.envd.last(); !strings.Contains(got, "POST /files "+s.SandboxID) {
		t.Errorf("the agent was asked %q", got)
	}
	h.call("DELETE", "/sandboxes/"+s.SandboxID, "")
	if a := h.send("GET", link("hello.txt", "read", "", ""), ""); a.status != 401 {
		t.Errorf("of a sandbox that is gone: %d %s", a.status, a.body)
	}
}

func TestWhatCantBeReached(t *testing.T) {
	h := newHarness(t)
	s := h.create("")
	isOutage(t, h.send("GET", "/health", "", to("iunknown", envdPort)...), 502, "iunknown", gone502)
	isOutage(t, h.send("GET", "/", "", to(s.SandboxID, 8080)...), 502, s.SandboxID, "The sandbox is running but port is not open")
	if a := h.send("GET", "/", "", to(s.SandboxID, 8080, "Accept", "text/html")...); a.status != 502 || !strings.HasPrefix(a.header.Get("Content-Type"), "text/html") {
		t.Errorf("a browser gets %d %s", a.status, a.body)
	}
	for _, bad := range []string{"8080.e2b.test", "0-abc.e2b.test", "99999-abc.e2b.test", "8080-a_b.e2b.test", "www.e2b.test:8443"} {
		h.refused(h.send("GET", "/v2/sandboxes", "", "Host", bad, "X-API-Key", h.key), 400, "Invalid host")
	}
	// What SDKs make of a domain alone.
	if a := h.call("GET", "/v2/sandboxes", "", "Host", "api.e2b.test:8443"); a.status != 200 {
		t.Errorf("api.<domain>: %d %s", a.status, a.body)
	}
	if a := h.send("GET", "/health", "", append(to(s.SandboxID, envdPort), "Host", "sandbox.e2b.test")...); a.status != 204 {
		t.Errorf("sandbox.<domain>: %d %s", a.status, a.body)
	}
	for _, bad := range [][]string{to("NOT.ONE", 80), to(s.SandboxID, 0), to(s.SandboxID, 65536), {"E2b-Sandbox-Id", s.SandboxID}} {
		h.refused(h.send("GET", "/", "", bad...), 400, "Invalid sandbox")
	}
	h.call("POST", "/sandboxes/"+s.SandboxID+"/pause", "")
	isOutage(t, h.send("GET", "/health", "", to(s.SandboxID, envdPort)...), 502, s.SandboxID, gone502)
	h.call("DELETE", "/sandboxes/"+s.SandboxID, "")
	isOutage(t, h.send("GET", "/health", "", to(s.SandboxID, envdPort)...), 502, s.SandboxID, gone502)
}

// TestStreamsAreCut: a pause or an end leaves no answer that looks whole.
func TestStreamsAreCut(t *testing.T) {
	h := newHarness(t)
	s := h.create("")
	for _, end := range []string{"POST /sandboxes/ID/pause", "DELETE /sandboxes/ID"} {
		h.call("POST", "/v2/sandboxes/"+s.SandboxID+"/connect", "")
		resp, err := h.open("GET", "/envs?stream", "", to(s.SandboxID, envdPort, "X-Access-Token", s.EnvdAccessToken)...)
		if err != nil {
			t.Fatal(err)
		}
		in := bufio.NewReader(resp.Body)
		if b, err := in.Peek(5); err != nil || string(b) != "begun" {
			t.Fatalf("%q, %v", b, err)
		}
		method, path, _ := strings.Cut(end, " ")
		h.call(method, strings.Replace(path, "ID", s.SandboxID, 1), "")
		if b, err := io.ReadAll(in); err == nil {
			t.Errorf("%s: the stream ended as if it were whole: %q", end, b)
		}
		_ = resp.Body.Close()
	}
}

// serve starts the fake's HTTP server inside a sandbox, which answers with the request that it got.
func (h *harness) serve(sandboxID string) {
	h.t.Helper()
	_, err := h.manager.StartProcess(h.t.Context(), server(), sandboxID, sandbox.ProcessSpec{ID: "srv", Argv: []string{"http-server", "8080"}}, "")
	if err != nil {
		h.t.Fatal(err)
	}
	testenv.Eventually(h.t, 10*time.Second, "port 8080", func() bool {
		ports, err := h.manager.Ports(h.t.Context(), server(), sandboxID)
		return err == nil && len(ports) == 1
	})
}

func TestPorts(t *testing.T) {
	h := newHarness(t)
	s := h.create("")
	h.serve(s.SandboxID)
	name := "8080-" + s.SandboxID + ".e2b.test:8443"
	a := h.send("GET", "/x?y=1", "", "Host", name, "X-API-Key", h.key, "X-Access-Token", s.EnvdAccessToken, "Cookie", "mine=1")
	if a.status != 200 || !strings.Contains(a.body, "GET /x?y=1 HTTP/1.1") || !strings.Contains(a.body, "Host: "+name) {
		t.Errorf("by host: %d %s", a.status, a.body)
	}
	for _, secret := range []string{h.key, s.EnvdAccessToken} {
		if strings.Contains(a.body, secret) {
			t.Errorf("the application sees a credential:\n%s", a.body)
		}
	}
	if !strings.Contains(a.body, "mine=1") {
		t.Errorf("on a host name of its own the application misses its cookie:\n%s", a.body)
	}
	if a := h.send("GET", "/", "", "Host", "8080-"+s.SandboxID+".localhost"); a.status != 200 {
		t.Errorf("below localhost: %d %s", a.status, a.body)
	}
	a = h.send("GET", "/files", "", to(s.SandboxID, 8080, "Cookie", "session=1")...)
	if a.status != 200 || !strings.Contains(a.body, "GET /files") || strings.Contains(a.body, "session=1") || a.header.Get("Content-Security-Policy") != "sandbox" {
		t.Errorf("by header: %d %v %s", a.status, a.header, a.body)
	}
	// A host name wins: what runs inside can't send its visitors elsewhere.
	other := h.create("")
	if a := h.send("GET", "/", "", append(to(other.SandboxID, 9), "Host", name)...); a.status != 200 {
		t.Errorf("host and header: %d %s", a.status, a.body)
	}
}

// TestPortsThatSpeakTLS: a port named in httpsPorts is called with TLS, which the application here does not speak.
func TestPortsThatSpeakTLS(t *testing.T) {
	h := newHarness(t)
	for ports, want := range map[string]int{"8080": 502, "9000": 200} {
		s := h.create(`"network":{"httpsPorts":[` + ports + `]}`)
		h.serve(s.SandboxID)
		if a := h.send("GET", "/", "", to(s.SandboxID, 8080)...); a.status != want {
			t.Errorf("with httpsPorts %s: %d %s", ports, a.status, a.body)
		}
	}
}

func TestTrafficToken(t *testing.T) {
	h := newHarness(t)
	s := h.create(`"network":{"allowPublicTraffic":false,"maskRequestHost":"custom.test:${PORT}"}`)
	h.serve(s.SandboxID)
	if s.TrafficAccessToken == nil {
		t.Fatal("no token")
	}
	const secured = "Sandbox is secured with traffic access token. "
	isOutage(t, h.send("GET", "/", "", to(s.SandboxID, 8080)...), 403, s.SandboxID, secured+"Token header 'e2b-traffic-access-token' is missing")
	isOutage(t, h.send("GET", "/", "", to(s.SandboxID, 8080, "E2b-Traffic-Access-Token", s.EnvdAccessToken)...), 403, s.SandboxID,
		secured+"Provided token in header 'e2b-traffic-access-token' is invalid")
	a := h.send("GET", "/", "", to(s.SandboxID, 8080, "E2b-Traffic-Access-Token", *s.TrafficAccessToken)...)
	if a.status != 200 || !strings.Contains(a.body, "Host: custom.test:8080") || strings.Contains(a.body, *s.TrafficAccessToken) {
		t.Errorf("%d %s", a.status, a.body)
	}
	if a := h.send("GET", "/health", "", to(s.SandboxID, envdPort)...); a.status != 204 {
		t.Errorf("the agent needs no such token: %d %s", a.status, a.body)
	}
	var d detailJSON
	h.call("POST", "/v2/sandboxes/"+s.SandboxID+"/connect", "").into(t, &d)
	if a := h.call("POST", "/v2/sandboxes/"+s.SandboxID+"/connect", ""); !strings.Contains(a.body, *s.TrafficAccessToken) {
		t.Errorf("connect gives another token: %s", a.body)
	}
}

// TestAutoResume: a call wakes the sandbox, but only by whoever could use it.
func TestAutoResume(t *testing.T) {
	h := newHarness(t)
	s := h.create(`"timeout":60,"autoPause":true,"autoResume":{"enabled":true},"network":{"allowPublicTraffic":false}`)
	h.serve(s.SandboxID)
	if !h.detail(s.SandboxID).Lifecycle.AutoResume {
		t.Error("not told")
	}
	h.call("POST", "/sandboxes/"+s.SandboxID+"/pause", "")
	for _, c := range [][]string{to(s.SandboxID, 8080), to(s.SandboxID, envdPort)} {
		if a := h.send("POST", "/process.Process/List", "", c...); a.status != 403 && a.status != 401 {
			t.Errorf("%d %s", a.status, a.body)
		}
	}
	isOutage(t, h.send("GET", "/health", "", to(s.SandboxID, envdPort)...), 502, s.SandboxID, gone502)
	if got := h.detail(s.SandboxID).State; got != "paused" {
		t.Fatalf("a stranger woke it: %s", got)
	}
	before := time.Now()
	if a := h.send("GET", "/", "", to(s.SandboxID, 8080, "E2b-Traffic-Access-Token", *s.TrafficAccessToken)...); a.status != 200 {
		t.Errorf("%d %s", a.status, a.body)
	}
	if d := h.detail(s.SandboxID); d.State != "running" || d.EndAt.Before(before.Add(59*time.Second)) || time.Until(d.EndAt) > time.Minute {
		t.Errorf("%s until %s", d.State, d.EndAt)
	}
}

func TestClaims(t *testing.T) {
	h := newHarness(t)
	for path, want := range map[string]bool{
		"/sandboxes": true, "/v2/sandboxes/x/connect": true, "/files": true, "/health": true, "/process.Process/Start": true, "/filesystem.Filesystem/Stat": true,
		"/templates/aliases/x": true, "/v3/templates": true, "/teams": true,
		"/v1/sandboxes": false, "/casemate.v1.SandboxService/GetSandbox": false, "/-/health": false, "/": false, "/sandboxes2": false, "/v2/other": false,
	} {
		r, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://127.0.0.1:7433"+path, nil)
		if got := h.api.Claims(r); got != want {
			t.Errorf("Claims(%s) = %v", path, got)
		}
	}
	for host, want := range map[string]bool{
		"8080-abcdefghijklmnopqrst.e2b.test:8443": true, "8080-abcdefghijklmnopqrst.E2B.test": true, "80-abcdefghijklmnopqrst.localhost": true,
		"8080-abcdefghijklmnopqrst.evil.test": false, "e2b.test": false, "8080-abc.x.e2b.test": false, "127.0.0.1": false,
		"0-abc.e2b.test": true, "8080.e2b.test": true, "api.e2b.test": false, "sandbox.e2b.test": false, "8080.localhost": false,
	} {
		r, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://x/v1/x", nil)
		r.Host = host
		if got := h.api.Claims(r); got != want {
			t.Errorf("Claims(Host: %s) = %v", host, got)
		}
	}
}

// FuzzRoutes: whatever names a sandbox, nothing panics and nothing but JSON of ours comes back.
func FuzzRoutes(f *testing.F) {
	f.Add("GET", "/files?signature=x&path=%2F", "8080-abc.e2b.test", "abc", "80")
	f.Add("POST", "/v2/sandboxes?metadata=%25", "localhost", "", "")
	h := newHarness(f)
	f.Fuzz(func(t *testing.T, method, target, host, name, port string) {
		u, err := url.Parse(target)
		if err != nil || u.Host != "" || u.Scheme != "" {
			return
		}
		r, err := http.NewRequestWithContext(t.Context(), method, "http://x"+u.RequestURI(), nil)
		if err != nil {
			return
		}
		r.Host = host
		r.Header.Set(headerSandbox, name)
		r.Header.Set(headerPort, port)
		if !h.api.Claims(r) {
			return
		}
		w := &discardWriter{header: http.Header{}}
		h.api.ServeHTTP(w, r)
		if w.status >= 400 && !json.Valid(w.body) {
			t.Errorf("%s %s %s: %d %q", method, target, host, w.status, w.body)
		}
	})
}

// discardWriter keeps an answer.
type discardWriter struct {
	header http.Header
	status int
	body   []byte
}

// Header implements http.ResponseWriter.
func (w *discardWriter) Header() http.Header { return w.header }

// WriteHeader implements http.ResponseWriter.
func (w *discardWriter) WriteHeader(status int) { w.status = status }

// Write implements http.ResponseWriter.
func (w *discardWriter) Write(b []byte) (int, error) {
	w.body = append(w.body, b...)
	return len(b), nil
}
