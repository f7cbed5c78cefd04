package server

import (
	"crypto/tls"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"casemate.dev/internal/api"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/tlscert"
)

// openTLS settles the domain, and opens the certificates that TCP addresses show.
func (s *Server) openTLS() (err error) {
	if (s.cfg.TLSCert == "") != (s.cfg.TLSKey == "") {
		return errs.New(errs.InvalidArgument, "TLS needs both a certificate and a key").
			WithHint("give --tls-cert and --tls-key, or neither: the server then makes its own")
	}
	if err := s.chooseDomain(); err != nil {
		return err
	}
	addrs := s.tcpAddrs()
	if len(addrs) == 0 {
		return nil
	}
	if s.cfg.TLSCert != "" {
		if s.certFiles, err = tlscert.OpenFiles(s.cfg.TLSCert, s.cfg.TLSKey, nil, s.log); err != nil {
			return errs.Wrap(err, errs.InvalidArgument, "cannot use the certificate %s with the key %s", s.cfg.TLSCert, s.cfg.TLSKey)
		}
		if s.domain != "" && !s.certFiles.Covers("1-x."+hostOf(s.domain)) {
			s.log.Warn("the certificate is not for the names of sandboxes' ports: clients will refuse them",
				slog.String("certificate", s.cfg.TLSCert), slog.String("wanted", "*."+hostOf(s.domain)))
		}
		return nil
	}
	s.ca, err = tlscert.Open(tlscert.Config{Dir: s.cfg.KeysDir, Names: s.certNames(), Addrs: reachable(addrs), Log: s.log})
	return err
}

// certNames are the names that the server's own certificates are for. Of the hosts that browsers may use, "*"
// and what else is no name has no certificate.
func (s *Server) certNames() []string {
	var names []string
	for _, n := range append(s.hosts(), LocalDomain, "localhost") {
		if n = strings.ToLower(n); validHost(n) && !slices.Contains(names, n) {
			if _, err := netip.ParseAddr(n); err != nil {
				names = append(names, n)
			}
		}
	}
	return names
}

// chooseDomain takes the domain that was asked for, or one that leads to this machine.
func (s *Server) chooseDomain() error {
	addrs := s.tcpAddrs()
	switch s.cfg.Domain {
	case NoDomain:
		return nil
	case "":
		for _, a := range addrs {
			if a.Addr().IsLoopback() || a.Addr().IsUnspecified() {
				s.domain = withPort(LocalDomain, a.Port())
				break
			}
		}
		return nil
	}
	s.domain = strings.ToLower(s.cfg.Domain)
	host, port := hostOf(s.domain), uint64(443)
	if host != s.domain {
		var err error
		if port, err = strconv.ParseUint(s.domain[strings.LastIndexByte(s.domain, ':')+1:], 10, 16); err != nil || port == 0 {
			return errs.New(errs.InvalidArgument, "the domain %q has no valid port", s.cfg.Domain)
		}
	}
	if _, err := netip.ParseAddr(host); err == nil || !validHost(host) {
		return errs.New(errs.InvalidArgument, "the domain %q is no DNS name", s.cfg.Domain).
			WithHint("sandboxes' ports get names below it, so it can't be an address; for this machine alone leave it out")
	}
	if !slices.ContainsFunc(addrs, func(a netip.AddrPort) bool { return uint64(a.Port()) == port }) {
		s.log.Info("no address listens on the domain's port; something must lead there",
			slog.String("domain", s.domain), slog.Uint64("port", port))
	}
	return nil
}

// validHost reports whether s is a DNS name (RFC 1123, section 2.1) with room for a label before it.
func validHost(s string) bool {
	if len(s) > 253-64 {
		return false
	}
	for label := range strings.SplitSeq(s, ".") {
		if label == "" || len(label) > 63 || strings.Trim(label, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" ||
			label[0] == '-' || label[len(label)-1] == '-' {
			return false
		}
	}
	return true
}

// hostOf drops a port.
func hostOf(domain string) string {
	if h, _, err := net.SplitHostPort(domain); err == nil {
		return h
	}
	return domain
}

func withPort(host string, port uint16) string {
	if port == 443 {
		return host
	}
	return net.JoinHostPort(host, strconv.Itoa(int(port)))
}

// tcpAddrs returns the TCP addresses that the server listens on.
func (s *Server) tcpAddrs() []netip.AddrPort {
	var out []netip.AddrPort
	for _, a := range s.Addrs() {
		if tcp, ok := a.(*net.TCPAddr); ok {
			ap := tcp.AddrPort()
			out = append(out, netip.AddrPortFrom(ap.Addr().Unmap().WithZone(""), ap.Port()))
		}
	}
	return out
}

// reachable returns the addresses by which clients may ask for a server: those it listens on, and where
// that is every one, those that this machine has now.
func reachable(listening []netip.AddrPort) []netip.Addr {
	out := []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback()}
	for _, l := range listening {
		if !l.Addr().IsUnspecified() {
			out = append(out, l.Addr())
			continue
		}
		ifaces, err := net.InterfaceAddrs()
		if err != nil {
			continue // the addresses that are known still do
		}
		for _, a := range ifaces {
			if n, ok := a.(*net.IPNet); ok {
				if ip, ok := netip.AddrFromSlice(n.IP); ok && !ip.IsLinkLocalUnicast() {
					out = append(out, ip.Unmap())
				}
			}
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out)
}

// hosts are the names under which browsers may reach the native API, beside addresses and localhost.
func (s *Server) hosts() []string {
	var out []string
	if s.domain != "" {
		out = append(out, hostOf(s.domain))
	}
	return append(out, s.cfg.AllowHosts...)
}

// certificate chooses what a TCP address shows in a handshake.
func (s *Server) certificate(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
	if s.certFiles != nil {
		return s.certFiles.Certificate(hello)
	}
	return s.ca.Certificate(hello)
}

// authority is what the API tells of the server's own authority; nil where it has none.
func (s *Server) authority() *api.Authority {
	if s.ca == nil {
		return nil
	}
	return &api.Authority{
		PEM: string(s.ca.PEM()), SHA256: s.ca.Fingerprint(), Names: s.ca.Names(), NotAfter: s.ca.NotAfter(), Domain: s.domain,
	}
}
