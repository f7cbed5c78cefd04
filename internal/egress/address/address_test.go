package address

import (
	"errors"
	"net"
	"net/netip"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"casemate.dev/internal/linux/netns"
	"casemate.dev/internal/linux/tap"
	"casemate.dev/internal/testenv"
)

// VULNERABILITY: whom the kernel looks for on any link of any namespace stands in one table of the host, of 1,024 entries by default
// (net.ipv4.neigh.default.gc_thresh3, and the same of IPv6). While it is full of them, the host finds no new neighbour either.
// ATTACK: packets to addresses on a sandbox's link, and to others as if they were on it, which everybody may send.
// VERIFIES: only few are looked for. Twins: a link that is wide as usual, and one that looks for neighbours as usual.
func TestNeighboursAreFew(t *testing.T) {
	testenv.Root(t)
	wide := Sandbox()
	wide[0], wide[1] = netip.PrefixFrom(wide[0].Addr(), 24), netip.PrefixFrom(wide[1].Addr(), 64)
	for name, link := range map[string]struct {
		addrs            [2]netip.Prefix
		lookOut, noRoute bool // as neighbours has them
		few4, few6       bool // are looked for
	}{
		"a sandbox's link":       {Sandbox(), false, false, true, true},
		"past the routes":        {Sandbox(), false, true, true, true},
		"twin, wide":             {wide, true, false, false, false},
		"twin, past the routes":  {Sandbox(), true, true, false, true},
		"narrow, that looks out": {Sandbox(), true, false, true, true},
	} {
		four, six := neighbours(t, link.addrs, link.lookOut, link.noRoute)
		if (four <= 4) != link.few4 || (six <= 4) != link.few6 {
			t.Errorf("%s: %d neighbours are looked for by IPv4, %d by IPv6", name, four, six)
		}
	}
}

// neighbours returns how many are looked for on a link with these addresses by who sends to 100 of each range, and with noRoute
// without regard to it. lookOut undoes that the kernel looks for nobody on the link.
func neighbours(t *testing.T, addrs [2]netip.Prefix, lookOut, noRoute bool) (four, six int) {
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
		if lookOut {
			link, err := netlink.LinkByIndex(index)
			if err != nil {
				return err
			}
			if err := netlink.LinkSetARPOn(link); err != nil {
				return err
			}
		}
		d := net.Dialer{}
		if noRoute {
			d.Control = pastRoutes
		}
		for _, a := range addrs {
			at := a.Addr()
			for range 100 {
				at = at.Next()
				c, err := d.DialContext(t.Context(), "udp", netip.AddrPortFrom(at, 9).String())
				if err != nil {
					continue // the range's last address is for all on the link
				}
				_, _ = c.Write([]byte("x")) // what nobody answers may fail
				_ = c.Close()
			}
		}
		list, err := netlink.NeighList(index, netlink.FAMILY_ALL)
		for _, n := range list {
			switch {
			case n.State&(unix.NUD_PERMANENT|unix.NUD_NOARP) != 0 || n.IP.IsMulticast(): // has no place that another needs
			case n.IP.To4() != nil:
				four++
			default:
				six++
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return four, six
}

// pastRoutes has a socket send as if every address were on the link; no right is needed for it.
func pastRoutes(_, _ string, c syscall.RawConn) error {
	var err error
	cerr := c.Control(func(fd uintptr) {
		err = errors.Join(unix.SetsockoptString(int(fd), unix.SOL_SOCKET, unix.SO_BINDTODEVICE, Device),
			unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_DONTROUTE, 1))
	})
	return errors.Join(err, cerr)
}
