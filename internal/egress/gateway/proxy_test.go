package gateway

import (
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/egress/proxy"
	"casemate.dev/internal/egress/rules"
	"casemate.dev/internal/testenv"
	"casemate.dev/internal/testenv/world"
)

// theProxy is where the proxies of these tests listen, and hostAddr where a connection comes from that went past them.
const (
	theProxy = "81.2.69.2:3128"
	hostAddr = "81.2.69.1"
)

// through makes a gateway's connections leave through the proxy of the world.
func through(t *testing.T, g *Gateway, set func(*proxy.Proxy), direct ...string) {
	t.Helper()
	p, err := proxy.Parse("http://" + theProxy)
	if err != nil {
		t.Fatal(err)
	}
	if p.Direct, err = proxy.ParseDirect(direct); err != nil {
		t.Fatal(err)
	}
	if set != nil {
		set(&p)
	}
	g.SetProxy(&p)
}

// comers serves HTTP on addr and tells who came.
func comers(w *world.World, t *testing.T, addr string) *world.Log {
	t.Helper()
	var seen world.Log
	srv := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(out http.ResponseWriter, r *http.Request) {
		host, _, _ := net.SplitHostPort(r.RemoteAddr)
		seen.Add(host + " " + r.Host)
		_, _ = io.WriteString(out, "hello")
	})}
	l := w.Listen(addr)
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { _ = srv.Close() })
	return &seen
}

// get asks for a URL and returns the body, or the error.
func (b *box) get(url string) string {
	c := b.client()
	defer c.CloseIdleConnections()
	r, err := c.Get(url)
	if err != nil {
		return "error"
	}
	defer func() { _ = r.Body.Close() }()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return "error"
	}
	return string(body)
}

// reason is why the last thing with a code was refused.
func (b *box) reason(code rules.Code) string {
	b.t.Helper()
	b.refused(code)
	list, err := b.gw.Refused(b.id, time.Time{})
	if err != nil {
		b.t.Fatal(err)
	}
	last := ""
	for _, r := range list {
		if r.Verdict.Code == code {
			last = r.Verdict.Reason
		}
	}
	return last
}

func wantAll(t *testing.T, what string, got []string, want ...string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%s: %q, want %q", what, got, want)
	}
}

// Connections leave through the proxy, which is asked for the address that was judged, and nothing past it.
func TestProxy(t *testing.T) {
	w := world.New(t)
	seen := comers(w, t, world.Web+":80")
	w.Name("allowed.test", world.Web)
	w.Name("nowhere.test", world.Other)
	p := w.Proxy(theProxy, "user:word")
	g := newGateway(t, nil)
	b := newBox(t, g, "one", policyOf(t, "allow allowed.test", "allow nowhere.test", "allow "+world.Web+":7000"))
	through(t, g, nil)
	if got := b.get("http://allowed.test/"); got != "error" {
		t.Errorf("without credentials: %q", got)
	}
	if got := b.reason(rules.Unreachable); !strings.Contains(got, "asks for credentials") || !strings.Contains(got, theProxy) {
		t.Errorf("reason %q", got)
	}
	through(t, g, func(p *proxy.Proxy) { p.Credentials = []byte("user:wrong") })
	if got := b.get("http://allowed.test/"); got != "error" || !strings.Contains(b.reason(rules.Unreachable), "does not take the credentials") {
		t.Errorf("wrong credentials: %q %q", got, b.reason(rules.Unreachable))
	}
	through(t, g, func(p *proxy.Proxy) { p.Credentials = []byte("user:word") })
	if got := b.get("http://allowed.test/"); got != "hello" {
		t.Fatalf("got %q: %s", got, b.reason(rules.Unreachable))
	}
	if got := b.get("http://nowhere.test/"); got != "error" || !strings.Contains(b.reason(rules.Unreachable), "502") {
		t.Errorf("nobody is there: %q %q", got, b.reason(rules.Unreachable))
	}
	wantAll(t, "the proxy was asked for", p.Seen.All(), world.Web+":80", world.Other+":80")
	if got := seen.All(); len(got) != 1 || strings.HasPrefix(got[0], hostAddr+" ") {
		t.Errorf("the server saw %q", got)
	}
	// A connection is cut by new rules as any other.
	echoServer(w, world.Web+":7000")
	c, err := b.dial("tcp", world.Web+":7000")
	if err != nil {
		t.Fatal(err)
	}
	speak(t, c, "through the proxy")
	if err := g.Configure("one", egress.Policy{}); err != nil {
		t.Fatal(err)
	}
	_ = c.SetReadDeadline(time.Now().Add(time.Minute))
	if _, err := c.Read(make([]byte, 1)); err == nil {
		t.Error("the connection was not cut")
	}
	// The twin: without the proxy it is the host that comes.
	g.SetProxy(nil)
	b = newBox(t, g, "two", policyOf(t, "allow allowed.test"))
	if got := b.get("http://allowed.test/"); got != "hello" {
		t.Fatal(got)
	}
	if got := seen.All(); !strings.HasPrefix(got[len(got)-1], hostAddr+" ") {
		t.Errorf("twin: the server saw %q", got)
	}
}

// A proxy reaches networks that the gateway does not: no private address is asked of it without a rule that names it,
// and a name server that answers differently the next time gains nothing.
func TestProxyPrivate(t *testing.T) {
	w := world.New(t)
	private := comers(w, t, world.Private+":80")
	comers(w, t, world.Web+":80")
	var moved atomic.Bool
	w.NameFunc("rebind.test", func() []string {
		if moved.Load() {
			return []string{world.Private}
		}
		return []string{world.Web}
	})
	w.Name("inside.test", world.Private)
	w.Name("both.test", world.Web, world.Private)
	p := w.Proxy(theProxy, "")
	for _, name := range []string{"rebind.test", "both.test", "new.test", "db", "db.corp"} {
		p.Name(name, world.Private)
	}
	g := newGateway(t, nil)
	b := newBox(t, g, "one", policyOf(t, "allow *", "allow db", "allow *.corp"))
	try := func(byName bool, host string) string {
		t.Helper()
		through(t, g, func(p *proxy.Proxy) { p.ByName = byName })
		return b.get("http://" + host + "/")
	}
	for _, host := range []string{world.Private, world.Metadata, "inside.test"} {
		for _, byName := range []bool{false, true} {
			if got := try(byName, host); got != "error" {
				t.Errorf("%s, by name %v: %q", host, byName, got)
			}
		}
	}
	b.address("rebind.test")
	moved.Store(true)
	try(false, "rebind.test") // with the address of before, or refused: which, the time decides
	if got := try(false, "both.test"); got != "hello" {
		t.Errorf("both.test by address: %q", got)
	}
	for _, target := range p.Seen.All() {
		if target != world.Web+":80" {
			t.Errorf("the proxy was asked for %s", target)
		}
	}
	before := len(p.Seen.All())
	// Where the proxy chooses, none of a name's addresses may be private.
	for _, host := range []string{"both.test", "db", "db.corp"} {
		if got := try(true, host); got != "error" || !strings.Contains(b.reason(rules.SpecialAddress), host) {
			t.Errorf("%s by name: %q, %s", host, got, b.reason(rules.SpecialAddress))
		}
	}
	if got := private.All(); len(got) != 0 {
		t.Errorf("the private server saw %q", got)
	}
	if n := len(p.Seen.All()); n != before {
		t.Errorf("the proxy was asked for %q", p.Seen.All())
	}
	// The twin: it would have connected, as a rule that names the address shows; and a name that is known nowhere but
	// at the proxy leads where the proxy says, which is written down.
	b = newBox(t, g, "two", policyOf(t, "allow *", "allow "+world.Private+":80"))
	for _, c := range []struct {
		byName bool
		host   string
	}{{false, world.Private}, {true, world.Private}, {false, "inside.test"}, {true, "both.test"}, {true, "new.test"}} {
		if got := try(c.byName, c.host); got != "hello" {
			t.Errorf("twin: %s, by name %v: %q", c.host, c.byName, got)
		}
	}
}

// In a network where only the proxy knows names, it is asked for them; what its rules deny is not.
func TestProxyNames(t *testing.T) {
	w := world.New(t)
	seen := comers(w, t, world.Web+":80")
	p := w.Proxy(theProxy, "")
	p.Name("only.test", world.Web)
	p.Name("denied.test", world.Web)
	g := newGateway(t, nil)
	b := newBox(t, g, "one", policyOf(t, "allow only.test", "allow direct.test"))
	through(t, g, nil, "direct.test")
	if m, err := b.resolve("only.test", dns.TypeA); err != nil || m.Rcode != dns.RcodeNameError {
		t.Errorf("by address: %v %v", m, err)
	}
	before := len(w.Asked())
	through(t, g, func(p *proxy.Proxy) { p.ByName = true }, "direct.test")
	b.refusedName(t, "denied.test")
	if m, err := b.resolve("only.test", dns.TypeA); err != nil || len(m.Answer) != 1 {
		t.Errorf("by name: %v %v", m, err)
	}
	if now := w.Asked(); len(now) != before {
		t.Errorf("the name server was asked for %q", now[before:])
	}
	if got := b.get("http://only.test/"); got != "hello" {
		t.Errorf("only.test: %q", got)
	}
	wantAll(t, "the proxy was asked for", p.Seen.All(), "only.test:80")
	// What goes past the proxy is looked up here.
	b.refusedName(t, "direct.test")
	w.Name("direct.test", world.Web)
	testenv.Eventually(t, time.Minute, "the name is looked up again", func() bool {
		m, err := b.resolve("direct.test", dns.TypeA)
		return err == nil && len(m.Answer) == 1
	})
	if got := b.get("http://direct.test/"); got != "hello" {
		t.Errorf("direct.test: %q", got)
	}
	if got := seen.All(); !strings.HasPrefix(got[len(got)-1], hostAddr+" direct.test") {
		t.Errorf("the server saw %q", got)
	}
}

// The host's own networks go past the proxy, by name or by the address that a name leads to; UDP goes past it or
// nowhere.
func TestProxyBypass(t *testing.T) {
	w := world.New(t)
	seen := comers(w, t, world.Web+":80")
	w.Name("near.test", world.Web)
	p := w.Proxy(theProxy, "")
	pc := w.ListenUDP(world.Other + ":123")
	go func() {
		buf := make([]byte, 64)
		for {
			n, from, err := pc.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = pc.WriteTo(buf[:n], from)
		}
	}()
	g := newGateway(t, nil)
	b := newBox(t, g, "one", policyOf(t, "allow near.test", "allow udp://"+world.Other+":123"))
	for _, direct := range []string{"near.test", ".test", world.Web + "/32", "near.test:80"} {
		for _, byName := range []bool{false, true} {
			through(t, g, func(p *proxy.Proxy) { p.ByName = byName }, direct)
			if got := b.get("http://near.test/"); got != "hello" {
				t.Errorf("%s: %q", direct, got)
			}
		}
	}
	for _, line := range seen.All() {
		if !strings.HasPrefix(line, hostAddr+" ") {
			t.Errorf("it came through the proxy: %q", line)
		}
	}
	wantAll(t, "the proxy was asked for", p.Seen.All())
	through(t, g, nil, "near.test:8080")
	if got := b.get("http://near.test/"); got != "hello" || len(p.Seen.All()) != 1 {
		t.Errorf("another port: %q, %q", got, p.Seen.All())
	}
	send := func(tries int) error {
		c, err := b.dial("udp", world.Other+":123")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
		var err2 error
		for range tries { // packets may be lost
			_, _ = c.Write([]byte("x"))
			_ = c.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
			if _, err2 = c.Read(make([]byte, 8)); err2 == nil {
				return nil
			}
		}
		return err2
	}
	if send(20) == nil || !strings.Contains(b.reason(rules.Unreachable), "UDP goes through no proxy") {
		t.Error("UDP went out past the proxy")
	}
	through(t, g, nil, world.Other)
	if err := send(300); err != nil {
		t.Errorf("UDP past the proxy: %v", err)
	}
}

// A proxy that can't be used is not gone around.
func TestProxyFails(t *testing.T) {
	w := world.New(t)
	seen := comers(w, t, world.Web+":80")
	w.Name("allowed.test", world.Web)
	w.Name("proxy.test", "81.2.69.2")
	g := newGateway(t, nil)
	b := newBox(t, g, "one", policyOf(t, "allow allowed.test"))
	want := func(reason string) {
		t.Helper()
		if got := b.get("http://allowed.test/"); got != "error" || !strings.Contains(b.reason(rules.Unreachable), reason) {
			t.Errorf("%s: %q, %s", reason, got, b.reason(rules.Unreachable))
		}
	}
	through(t, g, nil) // nobody listens there
	want("the proxy " + theProxy + " can't be reached: connect: connection refused")
	through(t, g, func(p *proxy.Proxy) { p.Name = "unknown.test" })
	want("its name could not be looked up")
	through(t, g, func(p *proxy.Proxy) { p.Fault = "no word" })
	want("can't be used: no word")
	through(t, g, func(p *proxy.Proxy) { p.TLS = true })
	want("no authority")
	// By TLS it must be the one that was named.
	p := w.Proxy(theProxy, "", "proxy.test")
	secure := func(name string) {
		through(t, g, func(p *proxy.Proxy) {
			p.TLS, p.Roots, p.Name, p.Addr = true, w.CAPEM(), name, netip.Addr{}
		})
	}
	w.Name("other.test", "81.2.69.2")
	secure("other.test")
	want("certificate is valid for proxy.test")
	wantAll(t, "the proxy was asked for", p.Seen.All())
	wantAll(t, "the server saw", seen.All())
	secure("proxy.test")
	if got := b.get("http://allowed.test/"); got != "hello" {
		t.Errorf("by TLS: %q, %s", got, b.reason(rules.Unreachable))
	}
}

// TLS is passed through a proxy as it is, also one that is spoken to by TLS itself; ends are passed on, too.
func TestProxyTLS(t *testing.T) {
	w := world.New(t)
	w.Name("proxy.test", "81.2.69.2")
	w.Name("secure.test", world.Web)
	w.Serve(world.Web+":443", func(c net.Conn) {
		s := tls.Server(c, w.TLS("secure.test"))
		all, err := io.ReadAll(s)
		if err == nil {
			_, _ = s.Write(all)
		}
		_ = s.Close()
	})
	w.Proxy(theProxy, "", "proxy.test")
	g := newGateway(t, nil)
	b := newBox(t, g, "one", policyOf(t, "allow secure.test"))
	through(t, g, func(p *proxy.Proxy) { p.TLS, p.Roots, p.Name, p.Addr = true, w.CAPEM(), "proxy.test", netip.Addr{} })
	c, err := b.dialName("secure.test", "443")
	if err != nil {
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(w.CAPEM())
	s := tls.Client(c, &tls.Config{RootCAs: roots, ServerName: "secure.test"})
	text := strings.Repeat("through two layers of TLS ", 10_000)
	if _, err := io.WriteString(s, text); err != nil {
		t.Fatal(err)
	}
	if err := s.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(s); err != nil || string(got) != text {
		t.Errorf("%d bytes came back: %v", len(got), err)
	}
}
