package gateway

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/egress/address"
	"casemate.dev/internal/egress/rules"
	"casemate.dev/internal/linux/netns"
	"casemate.dev/internal/linux/tap"
	"casemate.dev/internal/testenv/world"
)

func TestMain(m *testing.M) { os.Exit(world.Main(m)) }

// box is a network namespace with a device that the gateway serves, as a sandbox has one.
type box struct {
	t  testing.TB
	id string
	ns *os.File
	gw *Gateway

	icmp net.PacketConn // see pinger
}

func testTap() tap.Config {
	s, g := address.Sandbox(), address.Gateway()
	return tap.Config{
		Name: address.Device, MTU: address.MTU, MAC: address.MAC(), PeerMAC: address.GatewayMAC(),
		Addrs: s[:], Gateways: g[:],
	}
}

func newGateway(t testing.TB, i egress.Inspector) *Gateway {
	g := New(Config{Nameservers: []string{world.Resolver + ":53"}, Inspector: i})
	t.Cleanup(g.Close)
	return g
}

func policyOf(t testing.TB, list ...string) egress.Policy {
	t.Helper()
	var p egress.Policy
	for _, text := range list {
		var r rules.Rule
		if err := r.UnmarshalText([]byte(text)); err != nil {
			t.Fatal(err)
		}
		p.Rules = append(p.Rules, r)
	}
	return p
}

func newBox(t testing.TB, g *Gateway, id string, p egress.Policy) *box {
	t.Helper()
	ns, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ns.Close() })
	f, _, err := tap.Create(ns, testTap())
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Attach(id, f, p); err != nil {
		t.Fatal(err)
	}
	return &box{t: t, id: id, ns: ns, gw: g}
}

// dial connects from inside to an address.
func (b *box) dial(network, addr string) (c net.Conn, err error) {
	err = netns.In(b.ns, func() (err error) {
		c, err = net.DialTimeout(network, addr, time.Minute)
		return err
	})
	return c, err
}

// resolve asks the gateway, as a program's resolver does.
func (b *box) resolve(name string, kind uint16) (*dns.Msg, error) {
	c, err := b.dial("udp", net.JoinHostPort(address.Gateway()[0].String(), "53"))
	if err != nil {
		return nil, err
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	q := new(dns.Msg)
	q.SetQuestion(dns.Fqdn(name), kind)
	q.SetEdns0(1232, false)
	d := &dns.Conn{Conn: c}
	if err := d.WriteMsg(q); err != nil {
		return nil, err
	}
	return d.ReadMsg()
}

// address looks a name up and fails the test where it has no address.
func (b *box) address(name string) netip.Addr {
	b.t.Helper()
	m, err := b.resolve(name, dns.TypeA)
	if err != nil {
		b.t.Fatal(err)
	}
	if len(m.Answer) != 1 {
		b.t.Fatalf("%s: %v", name, m)
	}
	a, _ := netip.AddrFromSlice(m.Answer[0].(*dns.A).A)
	return a
}

// dialName looks a name up and connects to it.
func (b *box) dialName(name, port string) (net.Conn, error) {
	b.t.Helper()
	return b.dial("tcp", net.JoinHostPort(b.address(name).String(), port))
}

// client returns an HTTP client inside.
func (b *box) client() *http.Client {
	return &http.Client{Timeout: time.Minute, Transport: &http.Transport{
		DialContext: func(_ context.Context, _, addr string) (net.Conn, error) {
			host, port, err := net.SplitHostPort(addr)
			if err != nil {
				return nil, err
			}
			if a, err := netip.ParseAddr(host); err == nil {
				return b.dial("tcp", netip.AddrPortFrom(a, 80).String())
			}
			return b.dialName(host, port)
		},
	}}
}

func (b *box) refused(code rules.Code) *egress.Refusal {
	b.t.Helper()
	list, err := b.gw.Refused(b.id, time.Time{})
	if err != nil {
		b.t.Fatal(err)
	}
	for i := range list {
		if list[i].Verdict.Code == code {
			return &list[i]
		}
	}
	b.t.Fatalf("no refusal %s among %+v", code, list)
	return nil
}

// serveHTTP answers every request with text.
func serveHTTP(w *world.World, t testing.TB, addr, text string) *world.Log {
	t.Helper()
	var seen world.Log
	srv := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(out http.ResponseWriter, r *http.Request) {
		seen.Add(r.Method + " " + r.Host + r.URL.Path)
		_, _ = io.WriteString(out, text)
	})}
	l := w.Listen(addr)
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { _ = srv.Close() })
	return &seen
}

// addAddress gives the namespace another address, as only who makes it can.
func (b *box) addAddress(prefix string) {
	b.t.Helper()
	err := netns.In(b.ns, func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		link, err := h.LinkByName(address.Device)
		if err != nil {
			return err
		}
		a, err := netlink.ParseAddr(prefix)
		if err != nil {
			return err
		}
		return h.AddrAdd(link, a)
	})
	if err != nil {
		b.t.Fatal(err)
	}
}

// dialFrom is dial with a source address, and little patience.
func (b *box) dialFrom(from, to string) (c net.Conn, err error) {
	err = netns.In(b.ns, func() (err error) {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}, Timeout: 300 * time.Millisecond}
		c, err = d.Dial("tcp", to)
		return err
	})
	return c, err
}

// listens takes TCP and UDP on a port of every address inside. What comes is told: "tcp" for a connection, or the text of a
// packet.
func (b *box) listens(t testing.TB, port string) <-chan string {
	t.Helper()
	heard := make(chan string, 64)
	err := netns.In(b.ns, func() error {
		l, err := net.Listen("tcp", ":"+port)
		if err != nil {
			return err
		}
		u, err := net.ListenPacket("udp", ":"+port)
		if err != nil {
			return err
		}
		t.Cleanup(func() { _, _ = l.Close(), u.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				heard <- "tcp"
				_ = c.Close()
			}
		}()
		go func() {
			buf := make([]byte, 64)
			for {
				n, _, err := u.ReadFrom(buf)
				if err != nil {
					return
				}
				heard <- string(buf[:n])
			}
		}()
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return heard
}

// pinger returns a socket that sends and takes ICMP, as only root has one.
func (b *box) pinger() net.PacketConn {
	b.t.Helper()
	if b.icmp == nil {
		err := netns.In(b.ns, func() (err error) {
			b.icmp, err = net.ListenPacket("ip4:icmp", "0.0.0.0")
			return err
		})
		if err != nil {
			b.t.Fatal(err)
		}
		b.t.Cleanup(func() { _ = b.icmp.Close() })
	}
	return b.icmp
}

// pings sends an echo request (RFC 792).
func (b *box) pings(addr string) {
	b.t.Helper()
	m := []byte{8, 0, 0xf7, 0xff, 0, 0, 0, 0} // with the checksum of all of it
	if _, err := b.pinger().WriteTo(m, &net.IPAddr{IP: net.ParseIP(addr)}); err != nil {
		b.t.Logf("ping %s: %v", addr, err) // the kernel inside may know no way
	}
}

// answerer returns who sends the first answer to pings.
func (b *box) answerer() string {
	b.t.Helper()
	_ = b.pinger().SetReadDeadline(time.Now().Add(time.Minute))
	buf := make([]byte, 256)
	for {
		n, from, err := b.pinger().ReadFrom(buf)
		if err != nil {
			b.t.Fatal(err)
		}
		if n > 0 && buf[0] == 0 { // an echo reply
			return from.String()
		}
	}
}

// flood begins connections from inside without waiting for an answer, and returns how many.
func (b *box) flood(t testing.TB, addr string, n int) int {
	t.Helper()
	begun := 0
	var fds []int
	t.Cleanup(func() {
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
	})
	err := netns.In(b.ns, func() error {
		to := unix.SockaddrInet4{Addr: netip.MustParseAddr(addr).As4()}
		for i := range n {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			fds = append(fds, fd)
			to.Port = 1 + i%60000
			if err := unix.Connect(fd, &to); err == unix.EINPROGRESS {
				begun++
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return begun
}

func tasks(t testing.TB) []os.DirEntry {
	t.Helper()
	list, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	return list
}
