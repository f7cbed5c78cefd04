package tlscert

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/clock"
	"casemate.dev/internal/errs"
)

// stopped is a clock that tests set.
type stopped struct{ now time.Time }

// Now implements clock.Clock.
func (s *stopped) Now() time.Time { return s.now }

// AfterFunc implements clock.Clock.
func (s *stopped) AfterFunc(time.Duration, func()) clock.Timer { panic("no timers here") }

func open(t *testing.T, cfg Config) *Authority {
	t.Helper()
	a, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// local is a connection that a client made to an address.
type local struct {
	net.Conn
	addr string
}

// LocalAddr implements net.Conn.
func (l local) LocalAddr() net.Addr { return net.TCPAddrFromAddrPort(netip.MustParseAddrPort(l.addr)) }

// leaf returns what a client is shown that asks for name, or connects to addr.
func leaf(t *testing.T, a *Authority, name, addr string) *x509.Certificate {
	t.Helper()
	hello := &tls.ClientHelloInfo{ServerName: name}
	if addr != "" {
		hello.Conn = local{addr: addr}
	}
	c, err := a.Certificate(hello)
	if err != nil {
		t.Fatal(err)
	}
	return c.Leaf
}

// verify checks a certificate as a client does that trusts the authority and nothing else.
func verify(authority []byte, c *x509.Certificate, name string, at time.Time) error {
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(authority)
	_, err := c.Verify(x509.VerifyOptions{DNSName: name, Roots: roots, CurrentTime: at})
	return err
}

func TestLeaves(t *testing.T) {
	dir := t.TempDir()
	a := open(t, Config{
		Dir: dir, Names: []string{"Boxes.Example.com", "localhost", "box"},
		Addrs: []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback()},
	})
	for _, c := range []struct {
		asked, addr, name string
		ok                bool
	}{
		{"boxes.example.com", "", "boxes.example.com", true},
		{"8080-abc.boxes.example.com", "", "8080-abc.boxes.example.com", true},
		{"8080-ABC.boxes.example.com.", "", "8080-abc.boxes.example.com", true},
		{"a.b.boxes.example.com", "", "a.b.boxes.example.com", false},
		{"localhost", "", "localhost", true},
		{"80-abc.localhost", "", "80-abc.localhost", true},
		{"80-abc.box", "", "80-abc.box", true},
		{"evil.test", "", "evil.test", false},
		{"xboxes.example.com", "", "xboxes.example.com", false},
		{"*.localhost", "", "x.localhost", false},
		{"", "127.0.0.1:7433", "127.0.0.1", true},
		{"", "[::1]:7433", "::1", true},
		{"", "192.0.2.1:7433", "192.0.2.1", false},
	} {
		got := verify(a.PEM(), leaf(t, a, c.asked, c.addr), c.name, time.Now())
		if (got == nil) != c.ok {
			t.Errorf("asked for %q at %q, checked as %q: %v", c.asked, c.addr, c.name, got)
		}
	}
	// Who asks for nothing of ours learns our name.
	if got := leaf(t, a, "evil.test", "").DNSNames; got[0] != "boxes.example.com" {
		t.Errorf("shown %q", got)
	}
	first, second := leaf(t, a, "localhost", ""), leaf(t, a, "localhost", "")
	if first != second {
		t.Error("made anew each time")
	}
	for range 3 * maxLeaves { // strangers choose these names
		leaf(t, a, strings.ToLower(time.Now().Format("x150405000000000"))+".localhost", "")
	}
	if len(a.leaves) > maxLeaves {
		t.Errorf("%d leaves are kept", len(a.leaves))
	}
}

// TestStolenKeyVouchesForNothingElse: whatever is signed with the authority's key, clients that trust the
// authority refuse it for other names and addresses. The twin is the same leaf below an authority without
// constraints.
func TestStolenKeyVouchesForNothingElse(t *testing.T) {
	a := open(t, Config{Dir: t.TempDir(), Names: []string{"boxes.example.com"}, Addrs: []netip.Addr{netip.MustParseAddr("127.0.0.1")}})
	twin := open(t, Config{Dir: t.TempDir(), Names: []string{"boxes.example.com"}})
	free := *twin.cert
	free.PermittedDNSDomains, free.PermittedIPRanges, free.ExtraExtensions, free.Extensions = nil, nil, nil, nil
	der, err := x509.CreateCertificate(nil, &free, &free, twin.key.Public(), twin.key)
	if err != nil {
		t.Fatal(err)
	}
	if twin.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		ip   string
	}{{"bank.test", ""}, {"example.com", ""}, {"xboxes.example.com", ""}, {"a.boxes.example.com", "192.0.2.1"}} {
		var ip netip.Addr
		checked := c.name
		if c.ip != "" {
			ip, checked = netip.MustParseAddr(c.ip), c.ip
		}
		for _, by := range []*Authority{a, twin} {
			l, err := by.sign([]string{c.name}, ip)
			if err != nil {
				t.Fatal(err)
			}
			if got := verify(by.PEM(), l.Leaf, checked, time.Now()); (got == nil) != (by == twin) {
				t.Errorf("%s %s, twin %v: %v", c.name, c.ip, by == twin, got)
			}
		}
	}
}

// TestAuthorityStays: over restarts it is the same; a new name prolongs it, and the old certificate still
// stands for the old names.
func TestAuthorityStays(t *testing.T) {
	dir := t.TempDir()
	clk := &stopped{time.Now()}
	var log bytes.Buffer
	cfg := Config{Dir: dir, Names: []string{"a.test"}, Clock: clk, Log: slog.New(slog.NewTextHandler(&log, nil))}
	first := open(t, cfg)
	if again := open(t, cfg); again.Fingerprint() != first.Fingerprint() {
		t.Error("another one after a restart")
	}
	cfg.Names = []string{"b.test"}
	cfg.Addrs = []netip.Addr{netip.MustParseAddr("192.0.2.7")}
	second := open(t, cfg)
	if second.Fingerprint() == first.Fingerprint() {
		t.Fatal("the same for another name")
	}
	if got := strings.Join(second.Names(), " "); got != "a.test b.test 192.0.2.7" {
		t.Errorf("it covers %q", got)
	}
	if err := verify(second.PEM(), leaf(t, second, "x.b.test", ""), "x.b.test", clk.now); err != nil {
		t.Error(err)
	}
	cfg.Names = []string{"a.test"}
	third := open(t, cfg)
	if third.Fingerprint() != second.Fingerprint() {
		t.Error("made anew for fewer names")
	}
	if err := verify(first.PEM(), leaf(t, third, "x.a.test", ""), "x.a.test", clk.now); err != nil {
		t.Errorf("who trusts the old certificate: %v", err)
	}
	clk.now = clk.now.Add(authorityLife - authorityLeft + time.Hour)
	if fourth := open(t, cfg); fourth.Fingerprint() == third.Fingerprint() || fourth.NotAfter().Sub(clk.now) < authorityLife-time.Minute {
		t.Error("not prolonged")
	}
	if got := strings.Count(log.String(), "certificate authority"); got != 3 {
		t.Errorf("the log tells of %d:\n%s", got, log.String())
	}
}

func TestLeavesAreRenewed(t *testing.T) {
	clk := &stopped{time.Now()}
	a := open(t, Config{Dir: t.TempDir(), Names: []string{"a.test"}, Clock: clk})
	first := leaf(t, a, "a.test", "")
	clk.now = clk.now.Add(leafLife - leafLeft - time.Hour)
	if leaf(t, a, "a.test", "") != first {
		t.Error("renewed too soon")
	}
	clk.now = clk.now.Add(2 * time.Hour)
	second := leaf(t, a, "a.test", "")
	if second == first || verify(a.PEM(), second, "a.test", clk.now.Add(leafLife-time.Minute)) != nil {
		t.Error("not renewed")
	}
}

// TestKeyIsItsOwners: it is made for nobody else to read, and refused where somebody could.
func TestKeyIsItsOwners(t *testing.T) {
	dir := t.TempDir()
	cfg := Config{Dir: dir, Names: []string{"a.test"}}
	open(t, cfg)
	path := filepath.Join(dir, KeyFile)
	if info, err := os.Stat(path); err != nil || info.Mode() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	if err := os.Chmod(path, 0o640); err != nil { //nolint:gosec // the point of the test
		t.Fatal(err)
	}
	if _, err := Open(cfg); !errs.Is(err, errs.FailedPrecondition) {
		t.Errorf("a key that others read: %v", err)
	}
	if err := errors.Join(os.Chmod(path, 0o600), os.WriteFile(path, []byte("no key"), 0o600)); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(cfg); !errs.Is(err, errs.FailedPrecondition) {
		t.Errorf("a key that is none: %v", err)
	}
	// Another key than the certificate's: an attacker's, or a mixture of two backups.
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	a := open(t, cfg)
	if err := verify(a.PEM(), leaf(t, a, "a.test", ""), "a.test", time.Now()); err != nil {
		t.Error(err)
	}
	// A certificate that is damaged is made from the key.
	if err := os.WriteFile(filepath.Join(dir, CertFile), []byte("none"), 0o600); err != nil {
		t.Fatal(err)
	}
	b := open(t, cfg)
	if !b.own(a.cert) || verify(a.PEM(), leaf(t, b, "a.test", ""), "a.test", time.Now()) != nil {
		t.Error("another key")
	}
}

// TestFiles: a certificate that is renewed in its files is shown without a restart, and one that is
// damaged is not.
func TestFiles(t *testing.T) {
	dir := t.TempDir()
	clk := &stopped{time.Now()}
	cert, key := filepath.Join(dir, "c.pem"), filepath.Join(dir, "k.pem")
	write := func(name string) {
		t.Helper()
		a := open(t, Config{Dir: t.TempDir(), Names: []string{name}})
		k, err := os.ReadFile(filepath.Join(a.cfg.Dir, KeyFile))
		if err != nil {
			t.Fatal(err)
		}
		for path, text := range map[string][]byte{cert: a.PEM(), key: k} {
			if err := errors.Join(os.WriteFile(path, text, 0o600), os.Chtimes(path, clk.now, clk.now)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := OpenFiles(cert, key, clk, nil); err == nil {
		t.Error("files that are not there")
	}
	write("a.test")
	f, err := OpenFiles(cert, key, clk, nil)
	if err != nil {
		t.Fatal(err)
	}
	shown := func() string {
		t.Helper()
		c, err := f.Certificate(nil)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Join(c.Leaf.PermittedDNSDomains, " ")
	}
	clk.now = clk.now.Add(time.Minute)
	write("b.test")
	if got := shown(); got != "b.test" {
		t.Errorf("after a renewal %q", got)
	}
	clk.now = clk.now.Add(time.Minute)
	if err := os.WriteFile(cert, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := shown(); got != "b.test" {
		t.Errorf("while it is written %q", got)
	}
	if f.Covers("a.test") {
		t.Error("covers anything")
	}
}
