package address

import (
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"casemate.dev/internal/linux/netns"
	"casemate.dev/internal/linux/tap"
	"casemate.dev/internal/testenv"
)

// VULNERABILITY: whom the kernel looks for on any link of any namespace stands in one table of the host, of 1,024 entries by default
// (net.ipv6.neigh.default.gc_thresh3). Once it is full, the host finds no new neighbour either.
// ATTACK: a packet to each address that may be on a sandbox's link.
// VERIFIES: only few are looked for. Twin: a link that holds as many as is usual.
func TestNeighboursAreFew(t *testing.T) {
	testenv.Root(t)
	wide := Sandbox()
	wide[0], wide[1] = netip.PrefixFrom(wide[0].Addr(), 24), netip.PrefixFrom(wide[1].Addr(), 64)
	for name, addrs := range map[string][2]netip.Prefix{"a sandbox's link": Sandbox(), "twin": wide} {
		found := neighbours(t, addrs)
		if few := found <= 4; few != (addrs == Sandbox()) {
			t.Errorf("%s: %d neighbours are looked for", name, found)
		}
	}
}

// neighbours returns how many are looked for on a link with these addresses by who sends to 100 of each range.
func neighbours(t *testing.T, addrs [2]netip.Prefix) (found int) {
	t.Helper()
	ns, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ns.Close() }()
	gateways := Gateway()
	f, index, err := tap.Create(ns, tap.Config{
		Name: Device, MTU: MTU, MAC: MAC(), PeerMAC: GatewayMAC(), Addrs: addrs[:], Gateways: gateways[:],
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	err = netns.In(ns, func() error {
		for _, a := range addrs {
			at := a.Addr()
			for range 100 {
				at = at.Next()
				c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(at, 9)))
				if err != nil {
					continue // the range's last address is for all on the link
				}
				_, _ = c.Write([]byte("x")) // what nobody answers may fail
				_ = c.Close()
			}
		}
		list, err := netlink.NeighList(index, netlink.FAMILY_ALL)
		for _, n := range list {
			if n.State&unix.NUD_PERMANENT == 0 && !n.IP.IsMulticast() {
				found++
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}
