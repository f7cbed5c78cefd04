// Package tap makes and opens TAP devices in the network namespaces of others.
//
// What belongs here: the device, its addresses, routes and neighbours. What does not: what travels over it
// (package egress), and the namespace itself (package netns).
package tap

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"casemate.dev/internal/linux/netns"
)

// tunPath is the door to TUN and TAP devices (Documentation/networking/tuntap.rst).
const tunPath = "/dev/net/tun"

// tapFlags are the device's: whole Ethernet frames, with the header that says which checksum is still to be
// made (struct virtio_net_hdr), so that a packet that never leaves the host needs none.
const tapFlags = unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR

// addrGenModeNone keeps the kernel from making a link-local address (IN6_ADDR_GEN_MODE_NONE in
// linux/if_link.h).
const addrGenModeNone = 1

// Config says what a TAP device and the namespace's way to it look like.
type Config struct {
	Name string
	MTU  int
	// MAC is the namespace's end, PeerMAC the other one. The neighbour is entered for good, and nothing asks
	// for it, or for any other.
	MAC, PeerMAC net.HardwareAddr
	// Addrs are the namespace's addresses, Gateways the ones of the default routes: one each for IPv4 and IPv6.
	Addrs    []netip.Prefix
	Gateways []netip.Addr
}

// Create makes a persistent TAP device in ns, with addresses and routes, and returns its other end and its
// index. Closing that end and opening another by Open costs milliseconds: the kernel waits until no processor
// can still use it.
func Create(ns *os.File, c Config) (f *os.File, index int, err error) {
	err = netns.In(ns, func() (err error) {
		if f, err = attach(c.Name); err != nil {
			return err
		}
		if index, err = configure(c); err == nil {
			// Only now, so that a device that could not be finished goes with its descriptor.
			err = persist(f)
		}
		if err != nil {
			_ = f.Close()
			return fmt.Errorf("configure %s: %w", c.Name, err)
		}
		return nil
	})
	if err != nil {
		return nil, 0, err
	}
	return f, index, nil
}

// persist keeps a device when its end is closed.
func persist(f *os.File) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	cerr := raw.Control(func(fd uintptr) { err = unix.IoctlSetInt(int(fd), unix.TUNSETPERSIST, 1) })
	return os.NewSyscallError("ioctl TUNSETPERSIST", errors.Join(err, cerr))
}

// ErrGone says that the device is not the one that was made: somebody removed or renamed it.
var ErrGone = errors.New("the network device is gone")

// Open opens the other end of a device that Create made. Its reads and writes do not block. Opening a
// name that is not there would make a new device, so the index is compared; ErrGone where it differs.
func Open(ns *os.File, name string, index int) (*os.File, error) {
	var f *os.File
	err := netns.In(ns, func() error {
		d, err := net.InterfaceByName(name)
		if err != nil || d.Index != index {
			return ErrGone
		}
		tap, err := attach(name)
		if err != nil {
			return err
		}
		if d, err = net.InterfaceByName(name); err != nil || d.Index != index {
			_ = tap.Close()
			return ErrGone
		}
		f = tap
		return nil
	})
	return f, err
}

// attach opens the device called name, or makes it, in the calling thread's namespace.
func attach(name string) (*os.File, error) {
	fd, err := unix.Open(tunPath, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: tunPath, Err: err}
	}
	req, err := unix.NewIfreq(name)
	if err == nil {
		req.SetUint16(tapFlags)
		err = os.NewSyscallError("ioctl TUNSETIFF", unix.IoctlIfreq(fd, unix.TUNSETIFF, req))
	}
	if err == nil {
		// The kernel may leave checksums of TCP and UDP to be made by us, and we never do: the stack on the
		// other side takes them for good.
		err = os.NewSyscallError("ioctl TUNSETOFFLOAD", unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, unix.TUN_F_CSUM))
	}
	if err == nil {
		// Of an owner that no sandbox has: nobody inside may attach to it.
		err = os.NewSyscallError("ioctl TUNSETOWNER", unix.IoctlSetInt(fd, unix.TUNSETOWNER, 0))
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("attach to device %s: %w", name, err)
	}
	return os.NewFile(uintptr(fd), "tap"), nil
}

// configure gives the device its addresses and brings it up.
func configure(c Config) (int, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return 0, err
	}
	defer h.Close()
	link, err := h.LinkByName(c.Name)
	if err != nil {
		return 0, err
	}
	v6 := hasIPv6()
	steps := []func() error{
		func() error {
			if !v6 {
				return nil
			}
			// No address of its own making: what the namespace has is what was given to it.
			return h.LinkSetIP6AddrGenMode(link, addrGenModeNone)
		},
		func() error { return h.LinkSetHardwareAddr(link, c.MAC) },
		func() error { return h.LinkSetMTU(link, c.MTU) },
		// The kernel looks for nobody on the link. Whom it looks for stands in one table of the whole host until it is found
		// or given up, and who binds a socket to the device and asks for no route (SO_DONTROUTE) has any address looked for.
		func() error { return h.LinkSetARPOff(link) },
		func() error { return h.LinkSetUp(link) },
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return 0, err
		}
	}
	for _, a := range c.Addrs {
		if a.Addr().Is6() && !v6 {
			continue
		}
		addr := &netlink.Addr{IPNet: ipNet(a), Flags: unix.IFA_F_NODAD}
		if err := h.AddrAdd(link, addr); err != nil {
			return 0, fmt.Errorf("add address %s: %w", a, err)
		}
	}
	index := link.Attrs().Index
	for _, g := range c.Gateways {
		if g.Is6() && !v6 {
			continue
		}
		n := &netlink.Neigh{LinkIndex: index, State: unix.NUD_PERMANENT, IP: g.AsSlice(), HardwareAddr: c.PeerMAC}
		if err := h.NeighSet(n); err != nil {
			return 0, fmt.Errorf("add neighbour %s: %w", g, err)
		}
		r := &netlink.Route{LinkIndex: index, Gw: g.AsSlice()}
		if err := h.RouteAdd(r); err != nil {
			return 0, fmt.Errorf("add route by %s: %w", g, err)
		}
	}
	for _, a := range c.Addrs {
		if a.Addr().Is6() && v6 {
			if err := awaitAddr(h, a.Addr()); err != nil {
				return 0, fmt.Errorf("add address %s: %w", a, err)
			}
		}
	}
	return index, nil
}

// The kernel takes an IPv6 address into service in the background, also one that it need not look for on
// the link (addrconf_dad_work in net/ipv6/addrconf.c). What arrives for it before is dropped, and whoever
// waits for it sends again a second later.
const (
	addrLimit = 20 * time.Second
	addrEvery = 100 * time.Microsecond
)

// awaitAddr waits until packets to an address of this namespace arrive.
func awaitAddr(h *netlink.Handle, a netip.Addr) error {
	look := time.NewTicker(addrEvery) // the kernel tells only those who listen to all of the namespace's news
	defer look.Stop()
	for deadline := time.Now().Add(addrLimit); ; <-look.C {
		routes, err := h.RouteGet(a.AsSlice())
		if err == nil && len(routes) == 1 && routes[0].Type == unix.RTN_LOCAL {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("it is not in service after %s: %w", addrLimit, errors.Join(err, unix.ETIMEDOUT))
		}
	}
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// hasIPv6 reports whether this kernel has IPv6 at all; a host may boot without (ipv6.disable=1).
func hasIPv6() bool {
	_, err := os.Stat("/proc/self/net/if_inet6")
	return err == nil
}
