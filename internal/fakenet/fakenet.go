// Package fakenet is a fake internet: a network namespace with public addresses, in which servers can be opened, a name
// server that knows what it is told, and an authority for certificates.
//
// The process that opens it runs in a network namespace of its own, which is wired to the fake one as a host is to
// the internet: nothing reaches the real one, and nothing of the machine's network is changed. What belongs here: the
// namespaces, addresses, names and certificates. What does not: servers, and whatever is tried against them.
package fakenet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"syscall"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"

	"casemate.dev/internal/cleanup"
	"casemate.dev/internal/linux/netns"
)

// The addresses. The first three are public, though of nobody here; Host is the one of the process that opens it.
const (
	Web      = "93.184.215.14" // where most names lead
	Other    = "93.184.215.99"
	Resolver = "93.184.215.53"
	Metadata = "169.254.169.254"
	Private  = "10.20.30.40"
	Web6     = "2606:2800:21f:cb07:6820:80da:af6b:8b2c"
	Host     = "81.2.69.1"
)

// addresses are all that the fake internet has.
func addresses() []string {
	return []string{
		"81.2.69.2/24", "2a02:ff80::2/64", Web + "/32", Other + "/32", Resolver + "/32", Metadata + "/32", Private + "/32",
		"1.1.1.1/32", "8.8.8.8/32", "100.100.100.200/32", "192.168.7.7/32", Web6 + "/128", "fd00:ec2::254/128",
	}
}

// Net is one fake internet. It is safe for concurrent use.
type Net struct {
	ns *os.File
	authority

	mu    sync.Mutex // guards the fields below
	undo  cleanup.Stack
	names map[string]func() []string
	asked []string
}

// Open makes a fake internet and the way from here to it. The process must be in a network namespace of its own.
func Open() (_ *Net, err error) {
	if err := alone(); err != nil {
		return nil, err
	}
	n := &Net{names: map[string]func() []string{}}
	defer func() {
		if err != nil {
			n.Close()
		}
	}()
	if n.ns, err = netns.New(); err != nil {
		return nil, fmt.Errorf("make a network namespace: %w", err)
	}
	n.later(func() { _ = n.ns.Close() })
	if err := n.wire(); err != nil {
		return nil, err
	}
	if n.authority, err = newAuthority(); err != nil {
		return nil, err
	}
	return n, n.serveNames()
}

// alone reports an error unless the network namespace is this process's own: it would get a route to nowhere.
func alone() error {
	links, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	for _, l := range links {
		if l.Attrs().Name != "lo" && l.Attrs().Flags&net.FlagUp != 0 {
			return errors.New("this network namespace is in use: a fake internet needs one of its own")
		}
	}
	return nil
}

// Close ends it, with its servers.
func (n *Net) Close() {
	n.mu.Lock()
	undo := n.undo
	n.undo.Release()
	n.mu.Unlock()
	undo.Run()
}

// later adds what Close does.
func (n *Net) later(step func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.undo.Add(step)
}

// wire connects this process's namespace with the fake internet.
func (n *Net) wire() error {
	if err := netns.LoopbackUp(); err != nil {
		return err
	}
	h, err := netlink.NewHandle(syscall.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer h.Close()
	const name = "w0" // there is one at a time: a second would have the same addresses
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	if err := h.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: name + "p"}); err != nil {
		return fmt.Errorf("make veth: %w", err)
	}
	peer, err := h.LinkByName(name + "p")
	if err != nil {
		return err
	}
	if err := h.LinkSetNsFd(peer, int(n.ns.Fd())); err != nil {
		return err
	}
	here, err := h.LinkByName(name)
	if err != nil {
		return err
	}
	n.later(func() { _ = netlink.LinkDel(here) })
	if err := setUp(h, here, Host+"/24", "2a02:ff80::1/64"); err != nil {
		return err
	}
	for _, gateway := range []string{"81.2.69.2", "2a02:ff80::2"} {
		if err := h.RouteReplace(&netlink.Route{LinkIndex: here.Attrs().Index, Gw: net.ParseIP(gateway)}); err != nil {
			return fmt.Errorf("add route: %w", err)
		}
	}
	return netns.In(n.ns, func() error {
		h, err := netlink.NewHandle(syscall.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		there, err := h.LinkByName(name + "p")
		if err != nil {
			return err
		}
		return setUp(h, there, addresses()...)
	})
}

func setUp(h *netlink.Handle, link netlink.Link, addrs ...string) error {
	if err := h.LinkSetUp(link); err != nil {
		return err
	}
	for _, a := range addrs {
		p := netip.MustParsePrefix(a)
		addr := &netlink.Addr{IPNet: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}, Flags: syscall.IFA_F_NODAD}
		if err := h.AddrAdd(link, addr); err != nil {
			return fmt.Errorf("add address %s: %w", a, err)
		}
	}
	return nil
}

// Listen opens a server's socket at an address of the fake internet. It closes with the Net.
func (n *Net) Listen(addr string) (l net.Listener, err error) {
	err = netns.In(n.ns, func() (err error) {
		l, err = net.Listen("tcp", addr)
		return err
	})
	if err != nil {
		return nil, err
	}
	n.later(func() { _ = l.Close() })
	return l, nil
}

// ListenUDP is Listen for UDP.
func (n *Net) ListenUDP(addr string) (c net.PacketConn, err error) {
	err = netns.In(n.ns, func() (err error) {
		c, err = net.ListenPacket("udp", addr)
		return err
	})
	if err != nil {
		return nil, err
	}
	n.later(func() { _ = c.Close() })
	return c, nil
}

// Name lets a name lead to addresses; one that begins with *. is every name with one label more.
func (n *Net) Name(name string, addrs ...string) { n.NameFunc(name, func() []string { return addrs }) }

// NameFunc lets a name lead where f says each time.
func (n *Net) NameFunc(name string, f func() []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.names[name+"."] = f
}

// Leads returns the addresses that a name leads to, without asking the name server; none where it knows none.
func (n *Net) Leads(name string) []string {
	n.mu.Lock()
	f := n.names[name+"."]
	n.mu.Unlock()
	if f == nil {
		return nil
	}
	return f()
}

// Dial connects to an address from within the fake internet.
func (n *Net) Dial(ctx context.Context, addr string) (c net.Conn, err error) {
	err = netns.In(n.ns, func() (err error) {
		var d net.Dialer
		c, err = d.DialContext(ctx, "tcp", addr)
		return err
	})
	return c, err
}

// Asked returns the names that the name server was asked for so far, each with a dot at its end.
func (n *Net) Asked() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return append([]string(nil), n.asked...)
}

func (n *Net) serveNames() error {
	pc, err := n.ListenUDP(Resolver + ":53")
	if err != nil {
		return err
	}
	srv := &dns.Server{PacketConn: pc, Handler: dns.HandlerFunc(n.serveName)}
	go func() { _ = srv.ActivateAndServe() }()
	n.later(func() { _ = srv.Shutdown() })
	return nil
}

func (n *Net) serveName(out dns.ResponseWriter, q *dns.Msg) {
	m := new(dns.Msg)
	m.SetReply(q)
	name := q.Question[0].Name
	n.mu.Lock()
	n.asked = append(n.asked, name)
	f := n.names[name]
	if _, above, ok := strings.Cut(name, "."); f == nil && ok {
		f = n.names["*."+above]
	}
	n.mu.Unlock()
	if f == nil {
		m.Rcode = dns.RcodeNameError
		_ = out.WriteMsg(m)
		return
	}
	head := dns.RR_Header{Name: name, Rrtype: q.Question[0].Qtype, Class: dns.ClassINET}
	for _, s := range f() {
		a := netip.MustParseAddr(s)
		switch {
		case a.Is4() && head.Rrtype == dns.TypeA:
			m.Answer = append(m.Answer, &dns.A{Hdr: head, A: a.AsSlice()})
		case a.Is6() && head.Rrtype == dns.TypeAAAA:
			m.Answer = append(m.Answer, &dns.AAAA{Hdr: head, AAAA: a.AsSlice()})
		}
	}
	if head.Rrtype == dns.TypeTXT {
		m.Answer = append(m.Answer, &dns.TXT{Hdr: head, Txt: []string{"text of " + name}})
	}
	_ = out.WriteMsg(m)
}
