package portproxy

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"strings"
	"testing"

	"casemate.dev/internal/sandbox"
)

// machine dials one server whatever it is asked for.
type machine struct{ addr string }

// DialPort implements Dialer.
func (m machine) DialPort(ctx context.Context, _ sandbox.Principal, _ string, _ int) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, "tcp", m.addr)
}

// ask sends one request through a proxy to app.
func ask(t *testing.T, app http.Handler, target Target, header http.Header) *http.Response {
	t.Helper()
	inside := httptest.NewServer(app)
	t.Cleanup(inside.Close)
	p := New(machine{inside.Listener.Addr().String()})
	t.Cleanup(p.Close)
	outside := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { p.Serve(w, r, target) }))
	t.Cleanup(outside.Close)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, outside.URL+"/asked", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header = header
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = resp.Body.Close() })
	return resp
}

// TestOwnOrigin: with a host name of its own an application keeps its cookies and redirects, and
// still is shown no credential of ours. The twin is the request itself, which carries them all.
func TestOwnOrigin(t *testing.T) {
	secrets := http.Header{
		"X-Api-Key": {"e2b_00ff"}, "X-Access-Token": {"envd-token"}, "E2b-Traffic-Access-Token": {"traffic-token"},
		"Authorization": {"Bearer csm_key"}, "Cookie": {"app=1"}, "E2b-Sandbox-Id": {"someid"}, "X-Forwarded-Prefix": {"/lie"},
	}
	app := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Set-Cookie", "app=2; domain=e2b.test; Path=/; DOMAIN = .test ;Secure")
		w.Header().Set("Location", "/next")
		b, _ := httputil.DumpRequest(r, false)
		_, _ = w.Write(b)
	})
	resp := ask(t, app, Target{Sandbox: "box", Port: 80, Path: "/a%2Fb", Host: "mask.test:80"}, secrets.Clone()) //nolint:bodyclose // by ask
	b, _ := io.ReadAll(resp.Body)
	for _, hidden := range []string{"e2b_00ff", "envd-token", "traffic-token", "csm_key", "someid", "/lie"} {
		if strings.Contains(string(b), hidden) {
			t.Errorf("the application sees %q:\n%s", hidden, b)
		}
	}
	for _, want := range []string{"GET /a%2Fb HTTP/1.1", "Host: mask.test:80", "Cookie: app=1"} {
		if !strings.Contains(string(b), want) {
			t.Errorf("the application misses %q:\n%s", want, b)
		}
	}
	if resp.Header.Get("Set-Cookie") != "app=2; Path=/;Secure" || resp.Header.Get("Location") != "/next" || resp.Header.Get("Content-Security-Policy") != "" {
		t.Errorf("answer %v", resp.Header)
	}
}

func TestTLSInside(t *testing.T) {
	inside := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, r.Host)
	}))
	defer inside.Close()
	p := New(machine{inside.Listener.Addr().String()})
	defer p.Close()
	w := httptest.NewRecorder()
	p.Serve(w, httptest.NewRequest(http.MethodGet, "/", nil), Target{Sandbox: "box", Port: 443, Path: "/", Host: "x.test", TLS: true})
	if w.Code != http.StatusOK || w.Body.String() != "x.test" {
		t.Errorf("%d %q", w.Code, w.Body)
	}
}

func TestRedirectsStayBelowThePrefix(t *testing.T) {
	const prefix = "/v1/sandboxes/box/ports/80"
	target := &Target{Prefix: prefix, Host: "localhost:80"}
	for in, want := range map[string]string{
		"/login?x":                 prefix + "/login?x",
		"http://localhost:80/a":    prefix + "/a",
		"https://localhost:80":     prefix + "/",
		"http://localhost:80?q":    prefix + "/?q",
		"http://localhost:8000/a":  "http://localhost:8000/a",
		"http://localhost:80.evil": "http://localhost:80.evil",
		"//evil.test/":             "//evil.test/",
		"next":                     "next",
	} {
		if got := target.outside(in); got != want {
			t.Errorf("Location %q becomes %q, want %q", in, got, want)
		}
	}
}
