package inspect

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/egress/rules"
	"casemate.dev/internal/secret"
	"casemate.dev/internal/testenv"
)

// The names of the fake internet.
const (
	apiHost   = "api.example.com"
	otherHost = "other.example.net"
	boxID     = "box1"
)

// value is a secret that stands nowhere in the repository.
func value(n int) string { return fmt.Sprintf("v%d-%s/+end", n, strings.Repeat("Zq9", 8)) }

// world is an Inspector between clients and servers, without a network between them: what the gateway
// does, a test does by hand.
type world struct {
	t     testing.TB
	in    *Inspector
	ca    []byte // of the Inspector, PEM
	web   *authority
	ctx   context.Context //nolint:containedctx // the gateway's life
	roots []byte

	mu     sync.Mutex
	hosts  map[string]string // name:port → address of a server
	events []egress.Event
	keep   bool // content of requests and answers
	judge  func(rules.HTTP) rules.Verdict
	asked  []rules.HTTP
	wg     sync.WaitGroup
}

func newWorld(t testing.TB) *world {
	t.Helper()
	w := &world{t: t, in: New(), hosts: map[string]string{}}
	cert, key, err := NewAuthority("test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	w.ca = cert
	webCert, webKey, err := NewAuthority("the web", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if w.web, err = openAuthority(webCert, webKey); err != nil {
		t.Fatal(err)
	}
	w.roots = webCert
	private, err := Shared{CertPEM: cert, KeyPEM: key, RootsPEM: webCert}.Private()
	if err != nil {
		t.Fatal(err)
	}
	if err := w.in.Setup(private); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background()) //nolint:usetesting // ends before the test's own, so that what it serves ends
	w.ctx = ctx
	t.Cleanup(w.wg.Wait)
	t.Cleanup(cancel)
	return w
}

// server starts a server under a name; certFor is what its certificate is for, "" without TLS.
func (w *world) server(name string, port int, certFor string, h http.HandlerFunc) *httptest.Server {
	w.t.Helper()
	s := httptest.NewUnstartedServer(h)
	s.Config.ErrorLog = discardLog()
	if certFor != "" {
		leaf, err := w.web.leaf(certFor)
		if err != nil {
			w.t.Fatal(err)
		}
		s.TLS = &tls.Config{Certificates: []tls.Certificate{*leaf}, NextProtos: []string{"h2", "http/1.1"}}
		s.EnableHTTP2 = true
		s.StartTLS()
	} else {
		s.Start()
	}
	w.t.Cleanup(s.Close)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.hosts[fmt.Sprintf("%s:%d", name, port)] = s.Listener.Addr().String()
	return s
}

// configure gives the sandbox credentials and routes.
func (w *world) configure(creds []secret.Credential, routes ...RoutePart) {
	w.t.Helper()
	p, err := Part(creds, routes)
	if err != nil {
		w.t.Fatal(err)
	}
	if err := w.in.Configure(boxID, p); err != nil {
		w.t.Fatal(err)
	}
}

// cred is a credential with one binding.
func cred(n int, b secret.Binding) secret.Credential {
	if len(b.Hosts) == 0 {
		b.Hosts = []string{apiHost}
	}
	return secret.Credential{
		Secret: fmt.Sprintf("sec_%d", n), Name: fmt.Sprintf("secret%d", n), Version: 1, Placeholder: placeholder(n),
		Value: secret.NewValue([]byte(value(n))), Bindings: []secret.Binding{b},
	}
}

func placeholder(n int) string { return fmt.Sprintf("csm-placeholder-%d-0123456789abcdefghij", n) }

func (w *world) dial(_ context.Context, addr string) (net.Conn, error) {
	w.mu.Lock()
	at := w.hosts[addr]
	w.mu.Unlock()
	if at == "" {
		return nil, fmt.Errorf("nothing at %s", addr)
	}
	return net.Dial("tcp", at)
}

// connect is a connection of the sandbox to a target, as the gateway hands it over.
func (w *world) connect(target egress.Target, overTLS bool) net.Conn {
	w.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		w.t.Fatal(err)
	}
	defer l.Close()
	client, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		w.t.Fatal(err)
	}
	server, err := l.Accept()
	if err != nil {
		w.t.Fatal(err)
	}
	f := &egress.Flow{
		Sandbox: boxID, Target: target, Client: server,
		Judge: func(q rules.HTTP) rules.Verdict {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.asked = append(w.asked, q)
			if w.judge != nil {
				return w.judge(q)
			}
			return rules.Verdict{Allow: true, Code: rules.Allowed}
		},
		Dial: func(ctx context.Context) (net.Conn, error) {
			return w.dial(ctx, fmt.Sprintf("%s:%d", target.Name, target.Port))
		},
		DialTo: func(ctx context.Context, name string, port uint16, _ bool) (net.Conn, error) {
			return w.dial(ctx, fmt.Sprintf("%s:%d", name, port))
		},
		Event: func(e egress.Event) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.events = append(w.events, e)
		},
		Keep: w.keep,
	}
	if overTLS {
		f.Hello = &egress.Hello{ServerName: target.Name}
	}
	w.wg.Go(func() { _ = w.in.Serve(w.ctx, f) })
	return client
}

// client is an HTTP client inside the sandbox.
func (w *world) client(h2 bool) *http.Client {
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(w.ca)
	protocols := new(http.Protocols)
	protocols.SetHTTP1(!h2)
	protocols.SetHTTP2(h2)
	dial := func(overTLS bool) func(context.Context, string, string) (net.Conn, error) {
		return func(_ context.Context, _, addr string) (net.Conn, error) {
			host, port, err := net.SplitHostPort(addr)
			if err != nil {
				return nil, err
			}
			var n uint16
			_, _ = fmt.Sscan(port, &n)
			return w.connect(egress.Target{Name: host, Port: n}, overTLS), nil
		}
	}
	tr := &http.Transport{Protocols: protocols, DisableCompression: true, TLSClientConfig: &tls.Config{RootCAs: pool}}
	tr.DialContext = dial(false)
	tr.DialTLSContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		raw, err := dial(true)(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		host, _, _ := net.SplitHostPort(addr)
		protos := []string{"http/1.1"}
		if h2 {
			protos = []string{"h2"}
		}
		c := tls.Client(raw, &tls.Config{RootCAs: pool, ServerName: host, NextProtos: protos})
		return c, c.HandshakeContext(ctx)
	}
	w.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: time.Minute, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// tlsTo is a TLS connection inside the sandbox, for what no client would send.
func (w *world) tlsTo(host string) *tls.Conn {
	w.t.Helper()
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(w.ca)
	c := tls.Client(w.connect(egress.Target{Name: host, Port: 443}, true), &tls.Config{RootCAs: pool, ServerName: host, NextProtos: []string{"http/1.1"}})
	if err := c.HandshakeContext(w.t.Context()); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	return c
}

func (w *world) seen(t egress.EventType) []egress.Event {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []egress.Event
	for _, e := range w.events {
		if e.Type == t {
			out = append(out, e)
		}
	}
	return out
}

// await is seen once there is one.
func (w *world) await(t egress.EventType) []egress.Event {
	w.t.Helper()
	var all []egress.Event
	testenv.Eventually(w.t, time.Minute, "event "+string(t), func() bool { all = w.seen(t); return len(all) > 0 })
	return all
}
