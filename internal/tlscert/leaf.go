package tlscert

import (
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
)

// Certificate chooses, and makes where it must, the certificate for one handshake; it is for
// tls.Config.GetCertificate. Who asks for a name that is not the server's is shown the server's first
// name, and so learns in the error what it is.
func (a *Authority) Certificate(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
	names, ip := a.covering(strings.ToLower(strings.TrimSuffix(hello.ServerName, ".")), hello.Conn)
	key := names[0]
	if ip.IsValid() {
		key = ip.String()
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := a.leaves[key]; c != nil && c.Leaf.NotAfter.Sub(a.cfg.Clock.Now()) > leafLeft {
		return c, nil
	}
	c, err := a.sign(names, ip)
	if err != nil {
		return nil, fmt.Errorf("make a certificate for %s: %w", key, err)
	}
	if _, known := a.leaves[key]; !known && len(a.leaves) >= maxLeaves {
		for other := range a.leaves { // any: to make one again takes less time than the handshake
			delete(a.leaves, other)
			break
		}
	}
	a.leaves[key] = c
	return c, nil
}

// covering returns what the certificate must say for a client that asks for name, or for an address
// where it asks for none (RFC 6066: names only).
func (a *Authority) covering(name string, conn net.Conn) ([]string, netip.Addr) {
	if name == "" && conn != nil {
		if ip, err := netip.ParseAddrPort(conn.LocalAddr().String()); err == nil {
			if addr := ip.Addr().Unmap().WithZone(""); slices.Contains(a.cfg.Addrs, addr) {
				return a.cfg.Names[:1], addr
			}
		}
	}
	for _, n := range a.cfg.Names {
		label, parent, _ := strings.Cut(name, ".")
		switch {
		case name != n && (parent != n || label == ""):
		case name == n || strings.Contains(n, "."):
			return named(n), netip.Addr{}
		case validLabel(label):
			return []string{name}, netip.Addr{} // clients take no wildcard right below a top-level name
		}
	}
	return named(a.cfg.Names[0]), netip.Addr{}
}

// named is what a certificate says for a name of the server's and those below it.
func named(n string) []string {
	if strings.Contains(n, ".") {
		return []string{n, "*." + n}
	}
	return []string{n}
}

// validLabel reports whether s may stand in a certificate as a label (RFC 1123, section 2.1).
func validLabel(s string) bool {
	if s == "" || len(s) > 63 || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	for i := range len(s) {
		if c := s[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
			return false
		}
	}
	return true
}

// sign makes a leaf.
func (a *Authority) sign(names []string, ip netip.Addr) (*tls.Certificate, error) {
	t := a.template(leafLife)
	if t.NotAfter.After(a.cert.NotAfter) {
		t.NotAfter = a.cert.NotAfter
	}
	t.Subject = pkix.Name{CommonName: names[0]}
	t.DNSNames = names
	t.KeyUsage = x509.KeyUsageDigitalSignature
	if ip.IsValid() {
		t.IPAddresses = []net.IP{ip.AsSlice()}
	}
	der, err := x509.CreateCertificate(rand.Reader, t, a.cert, a.leafKey.Public(), a.key)
	if err != nil {
		return nil, err
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: a.leafKey, Leaf: leaf}, nil
}
