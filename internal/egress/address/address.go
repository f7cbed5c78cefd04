// Package address holds the addresses of a sandbox's own little network: itself, the gateway, and the
// addresses that stand for names.
//
// Every sandbox has the same, since no packet ever leaves its device: they mean something between the
// sandbox and its stack in the gateway only. What belongs here: these constants. What does not: which name
// has which address (package gateway).
package address

import (
	"net"
	"net/netip"
)

// Device is the name of a sandbox's network device, and MTU its largest IP packet: packets cost by number.
const (
	Device = "eth0"
	MTU    = 65000
)

// MAC returns the address of the sandbox's end of the link, in the range for local use.
func MAC() net.HardwareAddr { return net.HardwareAddr{0x02, 0xca, 0x5e, 0x00, 0x00, 0x02} }

// GatewayMAC returns the address of the other end.
func GatewayMAC() net.HardwareAddr { return net.HardwareAddr{0x02, 0xca, 0x5e, 0x00, 0x00, 0x01} }

// v6 returns an address in the range fdca:5e00:5a9d::/48, by its subnet and host.
func v6(subnet, host byte) netip.Addr {
	return netip.AddrFrom16([16]byte{0xfd, 0xca, 0x5e, 0x00, 0x5a, 0x9d, 0, subnet, 15: host})
}

// Sandbox returns a sandbox's addresses. The IPv4 ones lie in the range for tests of network devices (RFC
// 2544), which belongs to nobody, the IPv6 ones in the range for local use (RFC 4193). The link holds four addresses of each: the
// kernel remembers whom it sends to on a link in one table of the whole host.
func Sandbox() [2]netip.Prefix {
	return [2]netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{198, 18, 0, 2}), 30), netip.PrefixFrom(v6(0, 2), 126)}
}

// Gateway returns the gateway's addresses, which answer DNS.
func Gateway() [2]netip.Addr {
	return [2]netip.Addr{netip.AddrFrom4([4]byte{198, 18, 0, 1}), v6(0, 1)}
}

// Names returns the ranges whose addresses stand for names.
func Names() [2]netip.Prefix {
	return [2]netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{198, 19, 0, 0}), 16), netip.PrefixFrom(v6(1, 0), 64)}
}

// Whole returns the ranges that hold everything above, and nothing of the world.
func Whole() [2]netip.Prefix {
	return [2]netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{198, 18, 0, 0}), 15), netip.PrefixFrom(v6(0, 0), 48)}
}

// ResolvConf returns the content of a sandbox's /etc/resolv.conf. One server and few attempts: it answers
// at once or never.
func ResolvConf() string {
	return "# Names are looked up by Casemate's gateway, under the sandbox's network rules.\n" +
		"nameserver " + Gateway()[0].String() + "\noptions timeout:5 attempts:2\n"
}
