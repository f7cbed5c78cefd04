// Package world is a fake internet for tests: a network namespace with public addresses, in which a test
// opens servers, and a name server that knows what the test tells it.
//
// A test binary calls Main from TestMain, which starts it again in a network namespace of its own, wired to
// the world: so the test reaches the world's addresses as a host reaches the internet, and nothing of it
// reaches the real one. What belongs here: the namespaces, addresses, DNS and certificates. What does not:
// anything that is tested.
package world

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"casemate.dev/internal/linux/netns"
)

// The world's addresses. The first three are public, though of nobody here.
const (
	Web      = "93.184.215.14" // where most names lead
	Other    = "93.184.215.99"
	Resolver = "93.184.215.53"
	Metadata = "169.254.169.254"
	Private  = "10.20.30.40"
	Web6     = "2606:2800:21f:cb07:6820:80da:af6b:8b2c"
)

// marked says in the environment that the namespace is there.
const marked = "CASEMATE_TEST_WORLD"

// Main runs the tests of a package in a network namespace of their own and returns their exit code.
func Main(m *testing.M) int {
	if os.Getenv(marked) != "" {
		return m.Run()
	}
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "these tests make network namespaces and need root")
		return 1
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), marked+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Run(); err != nil {
		if cmd.ProcessState != nil && cmd.ProcessState.ExitCode() > 0 {
			return cmd.ProcessState.ExitCode()
		}
		fmt.Fprintln(os.Stderr, "run in a network namespace:", err)
		return 1
	}
	return 0
}

// World is one fake internet.
type World struct {
	t  testing.TB
	ns *os.File

	CA   *x509.Certificate
	key  *ecdsa.PrivateKey
	Seen Log // names that the name server was asked for

	mu    sync.Mutex // guards the field below
	names map[string]func() []string
}

// Log is a list of words that is safe for concurrent use.
type Log struct {
	mu   sync.Mutex
	list []string
}

// Add appends a word.
func (l *Log) Add(s string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = append(l.list, s)
}

// All returns the words.
func (l *Log) All() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]string(nil), l.list...)
}

// New makes a world with a name server on Resolver, and the way from here to it. It ends with the test.
func New(t testing.TB) *World {
	t.Helper()
	if os.Getenv(marked) == "" {
		t.Fatal("call world.Main from TestMain")
	}
	w := &World{t: t, names: map[string]func() []string{}}
	var err error
	if w.ns, err = NewNamespace(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.ns.Close() })
	if err := w.wire(); err != nil {
		t.Fatal(err)
	}
	w.makeCA()
	w.serveNames()
	return w
}

// NewNamespace makes an empty network namespace, which lives as long as its descriptor.
func NewNamespace() (*os.File, error) {
	type result struct {
		f   *os.File
		err error
	}
	done := make(chan result, 1)
	go func() {
		// The thread ends with the goroutine. The main thread can't end, so another one does it.
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			go func() {
				f, err := NewNamespace()
				done <- result{f, err}
			}()
			runtime.UnlockOSThread()
			return
		}
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- result{nil, err}
			return
		}
		err := netns.LoopbackUp()
		f, oerr := os.Open(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()))
		if err == nil {
			err = oerr
		}
		done <- result{f, err}
	}()
	r := <-done
	return r.f, r.err
}

// wire connects this process's namespace with the world.
func (w *World) wire() error {
	if err := netns.LoopbackUp(); err != nil {
		return err
	}
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
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
	if err := h.LinkSetNsFd(peer, int(w.ns.Fd())); err != nil {
		return err
	}
	here, err := h.LinkByName(name)
	if err != nil {
		return err
	}
	w.t.Cleanup(func() {
		if h, err := netlink.NewHandle(unix.NETLINK_ROUTE); err == nil {
			_ = h.LinkDel(here)
			h.Close()
		}
	})
	if err := setUp(h, here, "81.2.69.1/24", "2a02:ff80::1/64"); err != nil {
		return err
	}
	for _, r := range []*netlink.Route{{LinkIndex: here.Attrs().Index, Gw: net.ParseIP("81.2.69.2")}, {LinkIndex: here.Attrs().Index, Gw: net.ParseIP("2a02:ff80::2")}} {
		if err := h.RouteReplace(r); err != nil {
			return fmt.Errorf("add route: %w", err)
		}
	}
	return netns.In(w.ns, func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		there, err := h.LinkByName(name + "p")
		if err != nil {
			return err
		}
		return setUp(h, there, "81.2.69.2/24", "2a02:ff80::2/64", Web+"/32", Other+"/32", Resolver+"/32", Metadata+"/32", Private+"/32",
			"1.1.1.1/32", "8.8.8.8/32", "100.100.100.200/32", "192.168.7.7/32", Web6+"/128", "fd00:ec2::254/128")
	})
}

func setUp(h *netlink.Handle, link netlink.Link, addrs ...string) error {
	if err := h.LinkSetUp(link); err != nil {
		return err
	}
	for _, a := range addrs {
		p := netip.MustParsePrefix(a)
		addr := &netlink.Addr{IPNet: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}, Flags: unix.IFA_F_NODAD}
		if err := h.AddrAdd(link, addr); err != nil {
			return fmt.Errorf("add address %s: %w", a, err)
		}
	}
	return nil
}

// Listen opens a server's socket in the world.
func (w *World) Listen(addr string) net.Listener {
	w.t.Helper()
	var l net.Listener
	err := netns.In(w.ns, func() (err error) {
		l, err = net.Listen("tcp", addr)
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = l.Close() })
	return l
}

// ListenUDP opens a server's socket for UDP in the world.
func (w *World) ListenUDP(addr string) net.PacketConn {
	w.t.Helper()
	var c net.PacketConn
	err := netns.In(w.ns, func() (err error) {
		c, err = net.ListenPacket("udp", addr)
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = c.Close() })
	return c
}

// Name lets a name lead to addresses.
func (w *World) Name(name string, addrs ...string) {
	w.NameFunc(name, func() []string { return addrs })
}

// NameFunc lets a name lead where f says each time.
func (w *World) NameFunc(name string, f func() []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.names[name+"."] = f
}

func (w *World) serveNames() {
	pc := w.ListenUDP(Resolver + ":53")
	srv := &dns.Server{PacketConn: pc, Handler: dns.HandlerFunc(w.serveName)}
	go func() { _ = srv.ActivateAndServe() }()
	w.t.Cleanup(func() { _ = srv.Shutdown() })
}

func (w *World) serveName(out dns.ResponseWriter, q *dns.Msg) {
	m := new(dns.Msg)
	m.SetReply(q)
	name := q.Question[0].Name
	w.Seen.Add(name)
	w.mu.Lock()
	f := w.names[name]
	w.mu.Unlock()
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

func (w *World) makeCA() {
	w.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		w.t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test CA"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		w.t.Fatal(err)
	}
	w.key = key
	if w.CA, err = x509.ParseCertificate(der); err != nil {
		w.t.Fatal(err)
	}
}

// CAPEM returns the test CA as PEM.
func (w *World) CAPEM() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: w.CA.Raw})
}

// TLS returns a server's configuration with a certificate of the test CA for the names.
func (w *World) TLS(names ...string) *tls.Config {
	w.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		w.t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: names[0]}, DNSNames: names,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, w.CA, &key.PublicKey, w.key)
	if err != nil {
		w.t.Fatal(err)
	}
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}
}
