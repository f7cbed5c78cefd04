package gateway

import (
	"bufio"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/egress/address"
	"casemate.dev/internal/egress/rules"
	"casemate.dev/internal/testenv"
	"casemate.dev/internal/testenv/world"
)

// Each test below is a row of the network part of the battery: an attack from inside, and its twin, which
// shows that the same packets arrive where the rules let them.

// refusedAt fails the test unless a connection is refused at once.
func (b *box) refusedAt(network, addr string) {
	b.t.Helper()
	c, err := b.dial(network, addr)
	if err == nil {
		_ = c.Close()
		b.t.Errorf("%s %s: connected", network, addr)
		return
	}
	if !errors.Is(err, syscall.ECONNREFUSED) { // one that hangs ends otherwise
		b.t.Errorf("%s %s: %v", network, addr, err)
	}
}

func echoServer(w *world.World, addr string) *atomic.Int64 {
	var n atomic.Int64
	w.Serve(addr, func(c net.Conn) {
		n.Add(1)
		_, _ = io.Copy(c, c)
	})
	return &n
}

func speak(t *testing.T, c net.Conn, text string) {
	t.Helper()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, len(text))
	if _, err := io.ReadFull(c, buf); err != nil || string(buf) != text {
		t.Fatalf("%q %v", buf, err)
	}
}

// F01, F02: nothing leaves by default, neither TCP nor UDP.
func TestDefaultDeny(t *testing.T) {
	w := world.New(t)
	tcp := echoServer(w, "1.1.1.1:443")
	u := w.ListenUDP("8.8.8.8:53")
	got := make(chan string, 256)
	go func() {
		buf := make([]byte, 64)
		for {
			n, _, err := u.ReadFrom(buf)
			if err != nil {
				return
			}
			got <- string(buf[:n])
		}
	}()
	g := newGateway(t, nil)
	b := newBox(t, g, "one", egress.Policy{})
	b.refusedAt("tcp", "1.1.1.1:443")
	b.refusedAt("tcp", "[2606:2800::1]:443")
	c, err := b.dial("udp", "8.8.8.8:53")
	if err != nil {
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	_, _ = c.Write([]byte("secret"))
	if _, err := c.Read(make([]byte, 8)); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("UDP: %v", err)
	}
	if n := tcp.Load(); n != 0 || len(got) != 0 {
		t.Errorf("%d connections and %d packets left", n, len(got))
	}
	// The twin.
	b = newBox(t, g, "two", policyOf(t, "allow 1.1.1.1", "allow udp://8.8.8.8:53"))
	if c, err = b.dial("tcp", "1.1.1.1:443"); err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	if c, err = b.dial("udp", "8.8.8.8:53"); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, time.Minute, "a packet comes through", func() bool { // one may be lost
		_, _ = c.Write([]byte("hello"))
		select {
		case s := <-got:
			if s != "hello" {
				t.Errorf("got %q", s)
			}
			return true
		case <-time.After(time.Second):
			return false
		}
	})
}

// F04, F05, F06: metadata, loopback, the host and private networks need a rule that names them, however they
// are written and whatever leads to them.
func TestSpecialAddresses(t *testing.T) {
	w := world.New(t)
	seen := serveHTTP(w, t, world.Metadata+":80", "keys")
	serveHTTP(w, t, world.Private+":80", "intranet")
	w.Name("meta.allowed.test", world.Metadata)
	w.Name("intra.allowed.test", world.Private)
	w.Name("loop.allowed.test", "127.0.0.1")
	own := echoOnHost(t)
	g := newGateway(t, nil)
	b := newBox(t, g, "one", policyOf(t, "allow *:*", "allow 0.0.0.0/0:*", "allow ::/0"))
	for _, a := range []string{
		world.Metadata + ":80", world.Private + ":80", "127.0.0.2:" + own, "100.100.100.200:80", "168.63.129.16:80", "169.254.170.2:80",
		"192.168.7.7:80", "172.16.0.1:80", "100.64.0.1:80", "81.2.69.1:" + own, "[fd00:ec2::254]:80", "[64:ff9b::a9fe:a9fe]:80", "[2002:a9fe:a9fe::1]:80",
		"[fc00::1]:80", "198.18.0.1:80", "198.18.0.3:80",
	} {
		b.refusedOrUnrouted(a)
	}
	for _, name := range []string{"meta.allowed.test", "intra.allowed.test", "loop.allowed.test"} {
		if c, err := b.dialName(name, "80"); err == nil {
			_ = c.Close()
			t.Errorf("%s: connected", name)
		}
	}
	if got := seen.All(); len(got) != 0 {
		t.Errorf("the metadata service saw %v", got)
	}
	b.refused(rules.SpecialAddress)
	// The twin: named, they are reached.
	b = newBox(t, g, "two", policyOf(t, "allow meta.allowed.test", "allow "+world.Metadata, "allow "+world.Private, "allow 81.2.69.1:"+own))
	for _, url := range []string{"http://meta.allowed.test/", "http://" + world.Metadata + "/"} {
		r, err := b.client().Get(url)
		if err != nil {
			t.Fatal(err)
		}
		_ = r.Body.Close()
	}
	c, err := b.dial("tcp", "81.2.69.1:"+own)
	if err != nil {
		t.Fatal(err)
	}
	speak(t, c, "host")
}

// refusedOrUnrouted is refusedAt for addresses that the kernel inside may not send at all.
func (b *box) refusedOrUnrouted(addr string) {
	b.t.Helper()
	if c, err := b.dial("tcp", addr); err == nil {
		_ = c.Close()
		b.t.Errorf("%s: connected", addr)
	}
}

// echoOnHost listens on the gateway's own host, on every address, and returns the port.
func echoOnHost(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(c, c); _ = c.Close() }()
		}
	}()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	return port
}

// F07, F23: a name that is denied is never asked for, and does not exist at once.
func TestDNSCarriesNothingOut(t *testing.T) {
	w := world.New(t)
	w.Name("allowed.test", world.Web)
	g := newGateway(t, nil)
	b := newBox(t, g, "one", policyOf(t, "allow allowed.test", "allow 0.0.0.0/0"))
	for _, kind := range []uint16{dns.TypeA, dns.TypeAAAA, dns.TypeTXT, dns.TypeMX, dns.TypeSRV, dns.TypeHTTPS, dns.TypeNULL, dns.TypeANY, dns.TypePTR, dns.TypeCNAME} {
		for _, name := range []string{"736563726574.exfil.test", "allowed.test.evil.test", "evilallowed.test", "x.allowed.test", "2852039166", "0xA9FEA9FE", "169.254.169.254", "a\\000.allowed.test"} {
			m, err := b.resolve(name, kind)
			if err != nil {
				t.Fatal(err)
			}
			if m.Rcode != dns.RcodeNameError || len(m.Answer) > 0 {
				t.Errorf("%s %s: %v", dns.TypeToString[kind], name, m)
			}
		}
	}
	if seen := w.Asked(); len(seen) != 0 {
		t.Errorf("the name server was asked for %v", seen)
	}
	// The twin: one that is allowed is asked for, and gets an address of its own.
	if a := b.address("ALLOWED.test."); !address.Names()[0].Contains(a) {
		t.Errorf("got %v", a)
	}
	if m, err := b.resolve("allowed.test", dns.TypeTXT); err != nil || len(m.Answer) != 1 {
		t.Errorf("TXT: %v %v", m, err)
	}
	if m, err := b.resolve("allowed.test", dns.TypeHTTPS); err != nil || len(m.Answer) != 0 || m.Rcode != dns.RcodeSuccess {
		t.Errorf("HTTPS: %v %v", m, err)
	}
	if !slices.Contains(w.Asked(), "allowed.test.") {
		t.Error("twin: the name server was not asked")
	}
}

// F08: the address that is dialled is the one that was checked, whatever the name server says next.
func TestRebinding(t *testing.T) {
	w := world.New(t)
	serveHTTP(w, t, world.Web+":80", "public")
	private := serveHTTP(w, t, world.Private+":80", "private")
	var turn atomic.Int32
	w.NameFunc("flip.allowed.test", func() []string {
		if turn.Add(1)%2 == 0 {
			return []string{world.Private}
		}
		return []string{world.Web}
	})
	g := newGateway(t, nil)
	b := newBox(t, g, "one", policyOf(t, "allow flip.allowed.test"))
	for range 20 {
		g.resolver.mu.Lock()
		clear(g.resolver.known) // as if each answer were forgotten
		g.resolver.mu.Unlock()
		r, err := b.client().Get("http://flip.allowed.test/")
		if err != nil {
			continue
		}
		body, _ := io.ReadAll(r.Body)
		_ = r.Body.Close()
		if string(body) != "public" {
			t.Errorf("got %q", body)
		}
	}
	if got := private.All(); len(got) != 0 {
		t.Errorf("the private server saw %v", got)
	}
}

// F10: the name in the TLS hello is the one that was connected to.
func TestFronting(t *testing.T) {
	w := world.New(t)
	l := tls.NewListener(w.Listen(world.Web+":443"), w.TLS("allowed.test", "denied.test"))
	go func() { _ = http.Serve(l, http.NotFoundHandler()) }() //nolint:gosec // a test's
	w.Name("allowed.test", world.Web)
	g := newGateway(t, nil)
	b := newBox(t, g, "one", policyOf(t, "allow allowed.test"))
	try := func(sni string) error {
		c, err := b.dialName("allowed.test", "443")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		return tls.Client(c, &tls.Config{ServerName: sni, InsecureSkipVerify: true}).Handshake() //nolint:gosec // an attacker
	}
	if err := try("denied.test"); err == nil {
		t.Error("another server name passed")
	}
	b.refused(rules.NameMismatch)
	if err := try(""); err == nil {
		t.Error("no server name passed")
	}
	b.refused(rules.NoServerName)
	if err := try("allowed.test"); err != nil {
		t.Errorf("twin: %v", err)
	}
	// A hello that hides another one: the name outside is the right one.
	key, list := echKey(t, "allowed.test")
	c, err := b.dialName("allowed.test", "443")
	if err != nil {
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	hides := tls.Client(c, &tls.Config{ServerName: "denied.test", EncryptedClientHelloConfigList: list, MinVersion: tls.VersionTLS13, InsecureSkipVerify: true}) //nolint:gosec // an attacker
	if err := hides.Handshake(); err == nil {
		t.Error("a hidden server name passed")
	}
	if r := b.refused(rules.NoServerName); !strings.Contains(r.Verdict.Reason, "ECH") {
		t.Errorf("the hidden name was refused as %+v", r)
	}
	// Its twin: the server would have read it.
	if name := echTwin(t, w, key, list); name != "denied.test" {
		t.Errorf("twin: the server reads %q", name)
	}
	// F15: what is not TLS on 443.
	c, err = b.dialName("allowed.test", "443")
	if err != nil {
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	_, _ = io.WriteString(c, "SSH-2.0-x\r\n")
	if _, err := c.Read(make([]byte, 1)); err == nil {
		t.Error("plain text passed on 443")
	}
	b.refused(rules.NotWeb)
}

// F13: the Host header is the name that was connected to, in every request of a connection.
func TestHTTPHost(t *testing.T) {
	w := world.New(t)
	seen := serveHTTP(w, t, world.Web+":80", "ok")
	w.Name("allowed.test", world.Web)
	g := newGateway(t, nil)
	b := newBox(t, g, "one", policyOf(t, "allow allowed.test"))
	const good = "GET /good HTTP/1.1\r\nHost: allowed.test\r\n\r\n"
	for name, bad := range map[string]string{
		"another host":   "GET /bad HTTP/1.1\r\nHost: denied.test\r\n\r\n",
		"two hosts":      "GET /bad HTTP/1.1\r\nHost: allowed.test\r\nHost: denied.test\r\n\r\n",
		"no host":        "GET /bad HTTP/1.1\r\n\r\n",
		"absolute":       "GET http://denied.test/bad HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
		"CL and TE":      "POST /bad HTTP/1.1\r\nHost: allowed.test\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"two lengths":    "POST /bad HTTP/1.1\r\nHost: allowed.test\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nabcd",
		"hidden TE":      "POST /bad HTTP/1.1\r\nHost: allowed.test\r\nTransfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
		"bare line feed": "GET /bad HTTP/1.1\nHost: allowed.test\n\n",
		"folded":         "GET /bad HTTP/1.1\r\nHost: allowed.test\r\nX: a\r\n b\r\n\r\n",
		"space in name":  "GET /bad HTTP/1.1\r\nHost : allowed.test\r\n\r\n",
		"connect":        "CONNECT denied.test:443 HTTP/1.1\r\nHost: denied.test:443\r\n\r\n",
		"HTTP/2":         "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
		"behind a good":  good + "GET /bad HTTP/1.1\r\nHost: denied.test\r\n\r\n",
		"behind a body":  "POST /good HTTP/1.1\r\nHost: allowed.test\r\nContent-Length: 2\r\n\r\nokGET /bad HTTP/1.1\r\nHost: denied.test\r\n\r\n",
		"behind chunks":  "POST /good HTTP/1.1\r\nHost: allowed.test\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\nGET /bad HTTP/1.1\r\nHost: denied.test\r\n\r\n",
		"upgrade":        "GET /good HTTP/1.1\r\nHost: allowed.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nGET /bad HTTP/1.1\r\nHost: denied.test\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			c, err := b.dialName("allowed.test", "80")
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = c.Close() }()
			_ = c.SetDeadline(time.Now().Add(time.Minute))
			if _, err := io.WriteString(c, bad); err != nil {
				t.Fatal(err)
			}
			_, _ = io.Copy(io.Discard, c)
		})
	}
	for _, s := range seen.All() {
		if strings.Contains(s, "bad") || strings.Contains(s, "denied") {
			t.Errorf("the server saw %q", s)
		}
	}
	// The twin: two good ones on one connection, in many pieces.
	c, err := b.dialName("allowed.test", "80")
	if err != nil {
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	r := bufio.NewReader(c)
	for range 2 {
		for i := range good {
			if _, err := io.WriteString(c, good[i:i+1]); err != nil {
				t.Fatal(err)
			}
		}
		resp, err := http.ReadResponse(r, nil)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
	}
}

// F20: a sandbox is known by its device. Its packets from another address go nowhere, and another sandbox's
// rules are not its own.
func TestIdentity(t *testing.T) {
	w := world.New(t)
	echoServer(w, world.Web+":443")
	g := newGateway(t, nil)
	a := newBox(t, g, "one", policyOf(t, "allow "+world.Web+":443"))
	b := newBox(t, g, "two", egress.Policy{})
	a.addAddress("198.18.0.77/32")
	c, err := a.dialFrom("198.18.0.77", world.Web+":443")
	if err == nil {
		_ = c.Close()
		t.Error("a packet with a forged source passed", c.LocalAddr(), c.RemoteAddr())
	}
	b.refusedAt("tcp", world.Web+":443")
	if c, err = a.dial("tcp", world.Web+":443"); err != nil {
		t.Fatal(err)
	}
	speak(t, c, "twin")
}

// F06: other sandboxes are nowhere, whatever is allowed: each has a stack of its own, with the same addresses.
func TestNeighbour(t *testing.T) {
	world.New(t)
	g := newGateway(t, nil)
	open := policyOf(t, "allow *:*", "allow 0.0.0.0/0:*", "allow 198.18.0.0/15:*", "allow [fdca:5e00:5a9d::/48]:*", "allow udp://198.18.0.0/15:*")
	neighbour, b := newBox(t, g, "one", open), newBox(t, g, "two", open)
	heard := neighbour.listens(t, "7000")
	for _, a := range []string{"198.18.0.1", "198.18.0.2", "198.18.0.3", "198.19.0.77", "fdca:5e00:5a9d::1", "fdca:5e00:5a9d::2", "fdca:5e00:5a9d::3", "fdca:5e00:5a9d:1::9"} {
		b.refusedOrUnrouted(net.JoinHostPort(a, "7000"))
		if c, err := b.dial("udp", net.JoinHostPort(a, "7000")); err == nil {
			_, _ = io.WriteString(c, "spy")
			_ = c.Close()
		}
	}
	b.refused(rules.UnknownAddress)
	// The twin: from beside the listener, the same reaches it, and is all that does.
	for _, a := range []string{"198.18.0.2", "fdca:5e00:5a9d::2"} {
		c, err := neighbour.dial("udp", net.JoinHostPort(a, "7000"))
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(c, "own")
		_ = c.Close()
		if got := testenv.Receive(t, "the listener hears it", heard); got != "own" {
			t.Errorf("it heard %q", got)
		}
		if c, err = neighbour.dial("tcp", net.JoinHostPort(a, "7000")); err != nil {
			t.Fatal(err)
		}
		_ = c.Close()
		if got := testenv.Receive(t, "the listener hears it", heard); got != "tcp" {
			t.Errorf("it heard %q", got)
		}
	}
}

// F06: nothing answers a ping but the gateway, and none leaves.
func TestPing(t *testing.T) {
	world.New(t)
	g := newGateway(t, nil)
	b := newBox(t, g, "one", policyOf(t, "allow *:*", "allow 0.0.0.0/0:*", "allow 10.0.0.0/8:*"))
	for _, a := range []string{world.Private, world.Metadata, world.Web, "198.18.0.3", "198.19.0.1"} {
		b.pings(a)
	}
	// The twin: the gateway's answer comes, and it is the only one.
	b.pings(address.Gateway()[0].String())
	if from := b.answerer(); from != address.Gateway()[0].String() {
		t.Errorf("%s answers", from)
	}
	list, err := g.Refused("one", time.Time{})
	if err != nil || !slices.ContainsFunc(list, func(r egress.Refusal) bool { return r.Proto == rules.ICMP && r.Target == world.Private }) {
		t.Errorf("refused %+v, %v", list, err)
	}
}

// A change of the rules cuts what they no longer allow, at once, and leaves the rest.
func TestLiveChange(t *testing.T) {
	w := world.New(t)
	echoServer(w, world.Web+":7000")
	echoServer(w, world.Other+":7000")
	w.Name("a.test", world.Web)
	g := newGateway(t, nil)
	b := newBox(t, g, "one", policyOf(t, "allow a.test:7000", "allow "+world.Other+":7000"))
	c, err := b.dialName("a.test", "7000")
	if err != nil {
		t.Fatal(err)
	}
	speak(t, c, "before")
	other, err := b.dial("tcp", world.Other+":7000")
	if err != nil {
		t.Fatal(err)
	}
	speak(t, other, "before")
	// The address that the name led to is allowed, and opens no connection to a name.
	if err := g.Configure("one", policyOf(t, "allow "+world.Other+":7000", "allow "+world.Web+":7000")); err != nil {
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("after the change: %v", err)
	}
	speak(t, other, "after")
	b.refusedName(t, "a.test")
}

// F21: limits hold a sandbox to its share, and one that is at its limits does not slow another.
func TestLimits(t *testing.T) {
	w := world.New(t)
	echoServer(w, world.Web+":7000")
	g := newGateway(t, nil)
	p := policyOf(t, "allow "+world.Web+":7000")
	p.Limits = egress.Limits{Connections: 3, Bytes: 1 << 20, Idle: time.Hour}
	b := newBox(t, g, "one", p)
	var open []net.Conn
	for range 3 {
		c, err := b.dial("tcp", world.Web+":7000")
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, c)
	}
	b.refusedAt("tcp", world.Web+":7000")
	b.refused(rules.Limit)
	_ = open[0].Close()
	testenv.Eventually(t, time.Minute, "two connections", func() bool { u, _ := g.Usage("one"); return u.Connections == 2 })
	c, err := b.dial("tcp", world.Web+":7000")
	if err != nil {
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	// The reset is told to whichever of the two asks first.
	wrote := make(chan error, 1)
	go func() { _, err := io.Copy(c, zeroes{}); wrote <- err }()
	n, err := io.Copy(io.Discard, c)
	if werr := testenv.Receive(t, "the writer ends", wrote); err == nil && werr == nil || n > 1<<20 {
		t.Errorf("%d bytes came back, %v, %v", n, err, werr)
	}
}

type zeroes struct{}

func (zeroes) Read(b []byte) (int, error) { clear(b); return len(b), nil }

// Rate limits are kept, roughly.
func TestRate(t *testing.T) {
	w := world.New(t)
	echoServer(w, world.Web+":7000")
	g := newGateway(t, nil)
	p := policyOf(t, "allow "+world.Web+":7000")
	p.Limits = egress.Limits{Rate: 1 << 20}
	b := newBox(t, g, "one", p)
	c, err := b.dial("tcp", world.Web+":7000")
	if err != nil {
		t.Fatal(err)
	}
	const size = 1 << 19
	began := time.Now()
	go func() { _, _ = io.CopyN(c, zeroes{}, size) }()
	if _, err := io.CopyN(io.Discard, c, size); err != nil {
		t.Fatal(err)
	}
	if d := time.Since(began); d < 300*time.Millisecond {
		t.Errorf("half a second's bytes took %v", d)
	}
}

// Events tell of every connection and every refusal, and a loop of refusals does not flood.
func TestEvents(t *testing.T) {
	w := world.New(t)
	echoServer(w, world.Web+":7000")
	g := newGateway(t, nil)
	b := newBox(t, g, "one", policyOf(t, "allow "+world.Web+":7000"))
	c, err := b.dial("tcp", world.Web+":7000")
	if err != nil {
		t.Fatal(err)
	}
	speak(t, c, "hello")
	_ = c.Close()
	for range 100 {
		b.refusedAt("tcp", "1.1.1.1:443")
	}
	var list []egress.Event
	var last uint64
	for len(list) < 9 {
		more, n, err := g.Events(t.Context(), last)
		if err != nil {
			t.Fatal(err)
		}
		list, last = append(list, more...), n
	}
	kinds := map[egress.EventType]int{}
	for _, e := range list {
		kinds[e.Type]++
		if e.Type == egress.EventClosed && (e.Sent != 5 || e.Recv != 5 || e.Dialed != world.Web+":7000") {
			t.Errorf("%+v", e)
		}
	}
	if kinds[egress.EventOpened] != 1 || kinds[egress.EventClosed] != 1 || kinds[egress.EventRefused] != 7 {
		t.Errorf("%v", kinds)
	}
	if r := b.refused(rules.NoRule); r.Count != 100 || r.Target != "1.1.1.1:443" || r.Verdict.Hint != "1.1.1.1" {
		t.Errorf("%+v", r)
	}
}

// A sandbox that opens connections in a loop fills no journal: what is too much is summed up, and no connection
// is left out of the sums.
func TestEventFlood(t *testing.T) {
	s := &sandbox{id: "one", gw: &Gateway{events: newEvents()}, quota: newQuota()}
	const n = 5000
	for i := range n {
		s.emit(egress.Event{Type: egress.EventClosed, Target: fmt.Sprintf("a%d.test:443", i%500), Sent: 1})
	}
	s.flush()
	var alone, summed int
	var bytes int64
	for _, e := range s.gw.events.list {
		if e.Count == 0 {
			alone++
		}
		summed += e.Count
		bytes += e.Sent
	}
	if alone+summed != n || bytes != n || len(s.gw.events.list) > n/2 { // some more stand alone the slower this machine is
		t.Errorf("%d alone, %d summed up, %d bytes, %d events", alone, summed, bytes, len(s.gw.events.list))
	}
}

// A sandbox that spends its events on refusals hides neither what it uses of a model provider, which a budget counts, nor
// which secrets were put on.
func TestFloodHidesNoUse(t *testing.T) {
	s := &sandbox{id: "one", gw: &Gateway{events: newEvents()}, quota: newQuota()}
	for i := range eventBurst + 2*maxSums {
		s.emit(egress.Event{Type: egress.EventRefused, Proto: rules.DNS, Target: fmt.Sprintf("a%d.test", i)})
	}
	const n = 500
	for i := range n {
		for _, provider := range []string{"first", "second"} {
			s.emit(egress.Event{Type: egress.EventModel, Provider: provider, Model: fmt.Sprint("m", i), TokensIn: 3, TokensOut: 2})
		}
		s.emit(egress.Event{Type: egress.EventSecret, Secret: "sec_a", Version: 1, Target: fmt.Sprintf("b%d.test", i), Count: 10})
		s.emit(egress.Event{Type: egress.EventSecret, Secret: "sec_b", Version: 1, Target: fmt.Sprintf("b%d.test", i)})
	}
	s.flush()
	got := usesOf(s.gw.events.list)
	want := map[string]uses{
		"first": {n, 3 * n, 2 * n}, "second": {n, 3 * n, 2 * n}, "sec_a": {10 * n, 0, 0}, "sec_b": {n, 0, 0},
	}
	if !maps.Equal(got, want) {
		t.Errorf("told %v, want %v", got, want)
	}
}

// uses is how often something was used, and the tokens.
type uses struct{ times, in, out int64 }

// usesOf counts uses of providers and secrets, by their names.
func usesOf(list []egress.Event) map[string]uses {
	got := map[string]uses{}
	for _, e := range list {
		if e.Type != egress.EventModel && e.Type != egress.EventSecret {
			continue
		}
		u := got[e.Provider+e.Secret]
		got[e.Provider+e.Secret] = uses{u.times + int64(times(e)), u.in + e.TokensIn, u.out + e.TokensOut}
	}
	return got
}

// Where no server takes the events for so long that there is no room for more, each sandbox is told how many of its own
// are missing, and what was used of model providers is whole.
func TestEventsWithoutRoom(t *testing.T) {
	g := &Gateway{events: newEvents()}
	const more = 100
	for i := range keepEvents + more {
		g.emit(egress.Event{Sandbox: fmt.Sprint("box", i%2), Type: egress.EventOpened})
		if i >= keepEvents {
			g.emit(egress.Event{Sandbox: "box0", Type: egress.EventModel, Provider: "first", TokensIn: 3, TokensOut: 2})
		}
	}
	var list []egress.Event
	var last uint64
	for len(list) < keepEvents+3 {
		some, n, err := g.Events(t.Context(), last)
		if err != nil {
			t.Fatal(err)
		}
		list, last = append(list, some...), n
	}
	missing := map[string]int{}
	for _, e := range list {
		if e.Type == egress.EventDropped {
			missing[e.Sandbox] += e.Count
		}
	}
	if missing["box0"] != more/2 || missing["box1"] != more/2 || len(missing) != 2 {
		t.Errorf("missing %v", missing)
	}
	if got := usesOf(list)["first"]; got != (uses{more, 3 * more, 2 * more}) {
		t.Errorf("used %v", got)
	}
}

// A server that refuses, and one that is not there, look inside as they are.
func TestUpstreamRefuses(t *testing.T) {
	w := world.New(t)
	w.Name("a.test", world.Web)
	g := newGateway(t, nil)
	b := newBox(t, g, "one", policyOf(t, "allow a.test:9", "allow "+world.Web+":9"))
	b.refusedAt("tcp", netip.AddrPortFrom(b.address("a.test"), 9).String())
	b.refused(rules.Unreachable)
}

// Half-closed connections, and large ones, come through whole.
func TestBulk(t *testing.T) {
	w := world.New(t)
	l := w.Listen(world.Web + ":7000")
	const out, in = 48 << 20, 32 << 20
	sum := make(chan string, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		sum <- digest(c) // until the other end has closed its half
		_, _ = io.Copy(c, noise(2, in))
		_ = c.Close()
	}()
	g := newGateway(t, nil)
	b := newBox(t, g, "one", policyOf(t, "allow "+world.Web+":7000"))
	c, err := b.dial("tcp", world.Web+":7000")
	if err != nil {
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(2 * time.Minute))
	if _, err := io.Copy(c, noise(1, out)); err != nil {
		t.Fatal(err)
	}
	_ = c.(*net.TCPConn).CloseWrite()
	if got := digest(c); got != digest(noise(2, in)) {
		t.Error("what came in is not what was sent")
	}
	if got := testenv.Receive(t, "the other end has it all", sum); got != digest(noise(1, out)) {
		t.Error("what went out is not what was sent")
	}
	u, err := g.Usage("one")
	if err != nil || u.Sent != out || u.Received != in {
		t.Errorf("counted %+v, %v", u, err)
	}
}

// noise is bytes that no mistake repeats, the same for a seed each time.
func noise(seed byte, size int64) io.Reader {
	return io.LimitReader(rand.NewChaCha8([32]byte{seed}), size)
}

// digest reads to the end.
func digest(r io.Reader) string {
	h := sha256.New()
	if _, err := io.Copy(h, r); err != nil {
		return err.Error()
	}
	return hex.EncodeToString(h.Sum(nil))
}

// Connections whose sandbox does not read hold what the stack's budget allows, and nothing beside.
func TestUnreadIsBounded(t *testing.T) {
	w := world.New(t)
	begin := make(chan struct{})
	piece := make([]byte, 256<<10) // one for all: what is measured is the gateway
	w.Serve(world.Web+":7000", func(c net.Conn) {
		<-begin
		for _, err := c.Write(piece); err == nil; _, err = c.Write(piece) {
		}
	})
	g := newGateway(t, nil)
	b := newBox(t, g, "one", policyOf(t, "allow "+world.Web+":7000"))
	const n = 400
	for range n {
		c, err := b.dial("tcp", world.Web+":7000")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
	}
	quiet := memory()
	close(begin)
	var last int64
	still := 0
	testenv.Eventually(t, 2*time.Minute, "nothing more goes in", func() bool {
		u, err := g.Usage("one")
		if err != nil || u.Received != last || last == 0 {
			last, still = u.Received, 0
			return false
		}
		still++
		return still > 10
	})
	more := memory() - quiet
	t.Logf("%d connections hold %d KB each beside what they cost idle, %d MB in all; %d MB were received", n, more/n>>10, more>>20, last>>20)
	if more > bufferBudget {
		t.Errorf("they hold %d bytes, and the budget is %d", more, bufferBudget)
	}
}
