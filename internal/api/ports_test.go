package api

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coder/websocket"

	"casemate.dev/client"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/testenv"
)

// inside is a portManager whose one sandbox is this machine: port 80 reaches app, others nothing.
type inside struct {
	addr  string
	dials atomic.Int32
}

// Get implements portManager.
func (i *inside) Get(_ context.Context, p sandbox.Principal, id string) (sandbox.Sandbox, error) {
	if p.ID == "" || id != "box" {
		return sandbox.Sandbox{}, errs.New(errs.NotFound, "no sandbox %q", id)
	}
	return sandbox.Sandbox{ID: "box"}, nil
}

// DialPort implements portManager.
func (i *inside) DialPort(ctx context.Context, _ sandbox.Principal, _ string, port int) (net.Conn, error) {
	if port != 80 {
		return nil, errs.New(errs.Unavailable, "connection refused")
	}
	i.dials.Add(1)
	return (&net.Dialer{}).DialContext(ctx, "tcp", i.addr)
}

// newPorts starts a server whose sandbox "box" runs app on port 80.
func newPorts(t *testing.T, app http.Handler) (*harness, *inside) {
	t.Helper()
	h := newHarness(t)
	srv := httptest.NewServer(app)
	t.Cleanup(srv.Close)
	in := &inside{addr: srv.Listener.Addr().String()}
	h.api.ports.inside = in
	return h, in
}

const portURL = "/v1/sandboxes/box/ports/80"

// dumper answers with the request as it arrived.
func dumper(w http.ResponseWriter, r *http.Request) {
	b, _ := httputil.DumpRequest(r, true)
	_, _ = w.Write(b)
}

// TestEchoServerInsideSeesNoKey has a twin in it: the same request sent without the proxy, which
// strips nothing, shows the key.
func TestEchoServerInsideSeesNoKey(t *testing.T) {
	h, in := newPorts(t, http.HandlerFunc(dumper))
	_, _, seen := h.call("POST", portURL+"/a%2Fb//c?x=1&y=;", "the body", "X-API-Key", h.user, "Authorization", "Bearer "+h.user, "Cookie", "session=abc",
		"E2B-Traffic-Access-Token", "tok", "Origin", h.url, "X-Forwarded-For", "6.6.6.6")
	for _, secret := range []string{h.user, "session=abc", "tok", "6.6.6.6"} {
		if strings.Contains(seen, secret) {
			t.Errorf("the application sees %q:\n%s", secret, seen)
		}
	}
	for _, want := range []string{"POST /a%2Fb//c?x=1&y=; ", "the body", "Host: localhost:80", "Origin: http://localhost:80", "X-Forwarded-Prefix: " + portURL} {
		if !strings.Contains(seen, want) {
			t.Errorf("the application misses %q:\n%s", want, seen)
		}
	}

	conn, err := in.DialPort(t.Context(), sandbox.Principal{}, "box", 80)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	_, _ = fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nConnection: close\r\n\r\n", h.user)
	unstripped, err := io.ReadAll(conn)
	if err != nil || !strings.Contains(string(unstripped), h.user) {
		t.Errorf("without the proxy the application should see the key: %v\n%s", err, unstripped)
	}
}

// TestApplicationsOwnAuthorization passes where the key comes in another header.
func TestApplicationsOwnAuthorization(t *testing.T) {
	h, _ := newPorts(t, http.HandlerFunc(dumper))
	_, _, seen := h.call("GET", portURL+"/", "", "X-API-Key", h.user, "Authorization", "Bearer app-token")
	if !strings.Contains(seen, "Authorization: Bearer app-token") || strings.Contains(seen, h.user) {
		t.Errorf("the application sees:\n%s", seen)
	}
}

func TestAnswersFromInsideCantActForTheOrigin(t *testing.T) {
	h, _ := newPorts(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Set-Cookie", "a=b; Path=/")
		w.Header().Set("Clear-Site-Data", `"*"`)
		w.Header().Set("Strict-Transport-Security", "max-age=1")
		w.Header().Set("Service-Worker-Allowed", "/")
		w.Header().Set("Content-Security-Policy", "default-src 'self'")
		w.WriteHeader(http.StatusTeapot)
	}))
	status, header, _ := h.call("GET", portURL+"/", "")
	for _, name := range []string{"Set-Cookie", "Clear-Site-Data", "Strict-Transport-Security", "Service-Worker-Allowed"} {
		if got := header.Get(name); got != "" {
			t.Errorf("%s: %s came out", name, got)
		}
	}
	if got := strings.Join(header["Content-Security-Policy"], " | "); status != http.StatusTeapot || got != "default-src 'self' | sandbox" {
		t.Errorf("status %d, policies %q", status, got)
	}
}

func TestPortsStreamBothWays(t *testing.T) {
	h, _ := newPorts(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rc := http.NewResponseController(w)
		_ = rc.EnableFullDuplex()
		w.Header().Set("Content-Type", "text/event-stream")
		lines := bufio.NewScanner(r.Body)
		for lines.Scan() {
			_, _ = fmt.Fprintf(w, "data: %s\n\n", lines.Text())
			_ = rc.Flush()
		}
	}))
	pr, pw := io.Pipe()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, h.url+portURL+"/", pr)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-API-Key", h.user)
	answer := make(chan *http.Response, 1)
	go func() {
		resp, err := http.DefaultClient.Do(req) //nolint:bodyclose // closed by who takes it
		if err != nil {
			t.Error(err)
		}
		answer <- resp
	}()
	_, _ = io.WriteString(pw, "one\n")
	resp := testenv.Receive(t, "the answer begins", answer)
	defer func() { _ = resp.Body.Close() }()
	events := bufio.NewReader(resp.Body)
	// Each event must come before the next line is sent: nothing waits in a buffer.
	for _, next := range []string{"two\n", "three\n", ""} {
		line, err := events.ReadString('\n')
		if err != nil || !strings.HasPrefix(line, "data: ") {
			t.Fatalf("%q, %v", line, err)
		}
		_, _ = events.ReadString('\n')
		if next == "" {
			_ = pw.Close()
			break
		}
		_, _ = io.WriteString(pw, next)
	}
	if rest, err := io.ReadAll(events); err != nil || len(rest) != 0 {
		t.Errorf("rest %q, %v", rest, err)
	}
}

func TestPortsWebSocket(t *testing.T) {
	h, _ := newPorts(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "" {
			t.Error("the key came through")
		}
		c, err := websocket.Accept(w, r, nil) // checks that Origin and Host agree
		if err != nil {
			return
		}
		kind, b, err := c.Read(r.Context())
		if err == nil {
			_ = c.Write(r.Context(), kind, append([]byte("echo "), b...))
		}
		_ = c.Close(websocket.StatusNormalClosure, "")
	}))
	dial := func(origin string) (*websocket.Conn, *http.Response, error) {
		return websocket.Dial(t.Context(), h.url+portURL+"/ws", &websocket.DialOptions{
			HTTPHeader: http.Header{"Authorization": {"Bearer " + h.user}, "Origin": {origin}},
		})
	}
	c, _, err := dial(h.url) //nolint:bodyclose // an upgraded connection has none
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Write(t.Context(), websocket.MessageText, []byte("hi")); err != nil {
		t.Fatal(err)
	}
	if _, b, err := c.Read(t.Context()); err != nil || string(b) != "echo hi" {
		t.Errorf("read %q, %v", b, err)
	}
	_ = c.CloseNow()
	//nolint:bodyclose // the package has read it
	if _, resp, err := dial("http://evil.test"); err == nil || resp.StatusCode != http.StatusForbidden {
		t.Errorf("a page of another site opened a WebSocket: %v", err)
	}
}

func TestClosedPortTellsWhatToDo(t *testing.T) {
	h, _ := newPorts(t, http.HandlerFunc(dumper))
	status, header, body := h.call("GET", "/v1/sandboxes/box/ports/81/", "")
	if status != http.StatusBadGateway || !strings.Contains(body, "port 81") || !strings.Contains(body, `"hint":"start a server`) || header.Get("Content-Type") != "application/json" {
		t.Errorf("%d %v %s", status, header, body)
	}
	if status, _, body := h.call("GET", "/v1/sandboxes/other/ports/80/", ""); status != http.StatusNotFound {
		t.Errorf("no such sandbox: %d %s", status, body)
	}
}

func TestRedirectsStayBelowThePort(t *testing.T) {
	h, _ := newPorts(t, http.RedirectHandler("/next", http.StatusFound))
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, h.url+portURL+"/", nil)
	req.Header.Set("X-API-Key", h.user)
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if got := resp.Header.Get("Location"); got != portURL+"/next" {
		t.Errorf("Location %q", got)
	}
}

func TestPortWithoutSlashRedirects(t *testing.T) {
	h, _ := newPorts(t, http.HandlerFunc(dumper))
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, h.url+portURL+"?x=1", nil)
	req.Header.Set("X-API-Key", h.user)
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if got := resp.Header.Get("Location"); resp.StatusCode != http.StatusPermanentRedirect || got != portURL+"/?x=1" {
		t.Errorf("%d %q", resp.StatusCode, got)
	}
}

// TestPortConnectionsAreKept: an agent that is asked often is not dialled each time. A call may come before the
// connection of the one before it is free again.
func TestPortConnectionsAreKept(t *testing.T) {
	h, in := newPorts(t, http.HandlerFunc(dumper))
	for range 20 {
		if status, _, body := h.call("GET", portURL+"/", ""); status != http.StatusOK {
			t.Fatalf("%d %s", status, body)
		}
	}
	if n := in.dials.Load(); n > 10 {
		t.Errorf("dialled %d times for 20 calls", n)
	}
}

// TestTunnel: the client's Dial gives the port's bytes, half-closing included.
func TestTunnel(t *testing.T) {
	h := newHarness(t)
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		b, _ := io.ReadAll(c) // until the other side has closed its half
		_, _ = c.Write(append([]byte("got "), b...))
		_ = c.Close()
	}()
	h.api.ports.inside = &inside{addr: l.Addr().String()}
	c, err := client.New(h.url, h.user)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	conn, err := c.Ports.Dial(t.Context(), "box", 80)
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	_, _ = io.WriteString(conn, "this")
	_ = conn.(interface{ CloseWrite() error }).CloseWrite() //nolint:forcetypeassert // TCP has it
	if b, err := io.ReadAll(conn); err != nil || string(b) != "got this" {
		t.Errorf("read %q, %v", b, err)
	}
	if _, err := c.Ports.Dial(t.Context(), "box", 81); client.KindOf(err) != client.Unavailable {
		t.Errorf("dial of a closed port: %v", err)
	}
}

// TestPortThroughTheManager is the whole way, with the fake backend's HTTP server inside.
func TestPortThroughTheManager(t *testing.T) {
	h := newHarness(t)
	box := h.box()
	h.start(box, "srv", "http-server", "8080")
	if _, _, body := h.call("GET", "/v1/sandboxes/"+box+"/processes/srv/output?wait=10s", ""); !strings.Contains(body, "listening") {
		t.Fatalf("server: %s", body)
	}
	status, _, seen := h.call("GET", "/v1/sandboxes/"+box+"/ports/8080/x", "")
	if status != http.StatusOK || !strings.Contains(seen, "GET /x HTTP/1.1") || strings.Contains(seen, h.user) {
		t.Errorf("%d %s", status, seen)
	}
	if status, _, body := h.call("GET", "/v1/sandboxes/"+box+"/ports/8081/", ""); status != http.StatusBadGateway {
		t.Errorf("closed port: %d %s", status, body)
	}
}
