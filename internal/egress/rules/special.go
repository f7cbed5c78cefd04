package rules

import (
	"encoding/binary"
	"net/netip"
	"strings"
)

// block is a range of addresses that mean something particular.
type block struct {
	prefix netip.Prefix
	what   string
}

// special lists the ranges that need a rule of their own, the narrowest first: IANA's registries of
// special-purpose addresses (RFC 6890 and its updates), and the metadata services of clouds.
func special() []block {
	b := func(s, what string) block { return block{netip.MustParsePrefix(s), what} }
	return []block{
		b("169.254.169.254/32", "a metadata service"), b("169.254.170.2/32", "a metadata service"),
		b("169.254.170.23/32", "a metadata service"), b("100.100.100.200/32", "a metadata service"),
		b("168.63.129.16/32", "a metadata service"), b("192.0.0.192/32", "a metadata service"),
		b("255.255.255.255/32", "a broadcast address"),
		b("0.0.0.0/8", "a reserved address"), b("10.0.0.0/8", "a private address"),
		b("100.64.0.0/10", "a private address"), b("127.0.0.0/8", "a loopback address"),
		b("169.254.0.0/16", "a link-local address"), b("172.16.0.0/12", "a private address"),
		b("192.0.0.0/24", "a reserved address"), b("192.0.2.0/24", "a reserved address"),
		b("192.88.99.0/24", "a reserved address"), b("192.168.0.0/16", "a private address"),
		b("198.18.0.0/15", "a reserved address"), b("198.51.100.0/24", "a reserved address"),
		b("203.0.113.0/24", "a reserved address"), b("224.0.0.0/4", "a multicast address"),
		b("240.0.0.0/4", "a reserved address"),

		b("fd00:ec2::254/128", "a metadata service"), b("fd00:ec2::23/128", "a metadata service"),
		b("fd20:ce::254/128", "a metadata service"),
		b("::1/128", "a loopback address"), b("::/96", "a reserved address"),
		b("64:ff9b::/96", "an address that stands for an IPv4 address"),
		b("64:ff9b:1::/48", "an address that stands for an IPv4 address"),
		b("2002::/16", "an address that stands for an IPv4 address"),
		b("2001:db8::/32", "a reserved address"), b("2001::/23", "a reserved address"),
		b("100::/64", "a reserved address"), b("3fff::/20", "a reserved address"), b("5f00::/16", "a reserved address"),
		b("fc00::/7", "a private address"), b("fe80::/10", "a link-local address"), b("fec0::/10", "a private address"),
		b("ff00::/8", "a multicast address"),
	}
}

// classifier is special, made once for each Set.
type classifier []block

// of returns the narrowest special range that an address lies in.
func (c classifier) of(a netip.Addr) (block, bool) {
	for _, b := range c {
		if b.prefix.Contains(a) {
			return b, true
		}
	}
	return block{}, false
}

// embedded returns the IPv4 address that an IPv6 address leads to on hosts that translate it: NAT64
// (RFC 6052), 6to4 (RFC 3056), Teredo (RFC 4380) and the old compatible form (RFC 4291).
func embedded(a netip.Addr) (netip.Addr, bool) {
	if !a.Is6() {
		return netip.Addr{}, false
	}
	b := a.As16()
	v4 := func(at int) (netip.Addr, bool) { return netip.AddrFrom4([4]byte(b[at : at+4])), true }
	hi := binary.BigEndian.Uint64(b[:8])
	switch {
	case hi == 0x0064_ff9b_0000_0000 && binary.BigEndian.Uint32(b[8:12]) == 0:
		return v4(12)
	case hi == 0 && binary.BigEndian.Uint32(b[8:12]) == 0:
		return v4(12)
	case b[0] == 0x20 && b[1] == 0x02:
		return v4(2)
	case hi>>32 == 0x2001_0000:
		return netip.AddrFrom4([4]byte{^b[12], ^b[13], ^b[14], ^b[15]}), true
	}
	return netip.Addr{}, false
}

// Special reports whether an address needs a rule of its own.
func (s *Set) Special(a netip.Addr) bool {
	if _, found := s.special.of(a); found {
		return true
	}
	e, ok := embedded(a)
	if !ok {
		return false
	}
	_, found := s.special.of(e)
	return found
}

// PrivateName reports whether a name belongs to private networks: one without a dot, or below a top-level domain
// that networks use among themselves (RFC 6761, RFC 6762 with its appendix G, RFC 8375).
func PrivateName(name string) bool {
	i := strings.LastIndexByte(name, '.')
	if i < 0 || name == "home.arpa" || strings.HasSuffix(name, ".home.arpa") {
		return true
	}
	switch name[i+1:] {
	case "localhost", "local", "intranet", "internal", "private", "corp", "home", "lan", "localdomain":
		return true
	}
	return false
}

// Special reports what an address is that needs a rule of its own, for whoever has no Set; "": it is an ordinary
// one.
func Special(a netip.Addr) (what string) {
	c := classifier(special())
	if b, found := c.of(a); found {
		return b.what
	}
	if e, ok := embedded(a); ok {
		if b, found := c.of(e); found {
			return b.what
		}
	}
	return ""
}
