package selftest

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"casemate.dev/client"
	"casemate.dev/internal/cleanup"
	"casemate.dev/internal/fakenet"
)

// hostPort is where the machine that the sandboxes run on listens, on every address of its own.
const hostPort = "7433"

// Internet is the fake internet that section F's cases talk to: servers that note what reaches them. It is safe for
// concurrent use.
type Internet struct {
	net      *fakenet.Net
	sentinel string
	undo     cleanup.Stack

	mu      sync.Mutex // guards the field below
	arrived []string
}

// OpenInternet opens the servers in n and on the machine that this process is to n. Close ends them.
func OpenInternet(n *fakenet.Net) (_ *Internet, err error) {
	var r [12]byte
	_, _ = rand.Read(r[:]) // never fails: crypto/rand.Read
	i := &Internet{net: n, sentinel: "sentinel-" + hex.EncodeToString(r[:])}
	defer func() {
		if err != nil {
			i.Close()
		}
	}()
	i.names()
	for name, addrs := range map[string][]string{
		"metadata": {fakenet.Metadata + ":80", "100.100.100.200:80", "[fd00:ec2::254]:80"},
		"private":  {fakenet.Private + ":80", "192.168.7.7:80"},
		"http":     {fakenet.Web + ":80", fakenet.Other + ":80"},
	} {
		for _, addr := range addrs {
			if err := i.serve(name, addr, nil); err != nil {
				return nil, err
			}
		}
	}
	for _, addr := range []string{fakenet.Web, fakenet.Other, "1.1.1.1"} {
		conf, err := n.TLS(append(i.webNames(), "evil.test", "1.1.1.1")...)
		if err != nil {
			return nil, err
		}
		conf.GetConfigForClient = func(h *tls.ClientHelloInfo) (*tls.Config, error) {
			i.note("hello %s", orDash(h.ServerName))
			return nil, nil
		}
		if err := i.serve("https", addr+":443", conf); err != nil {
			return nil, err
		}
	}
	for _, addr := range []string{"8.8.8.8:53", fakenet.Web + ":22", fakenet.Web + ":25", fakenet.Web + ":6379", fakenet.Web + ":7000"} {
		if err := i.echo(addr); err != nil {
			return nil, err
		}
	}
	for _, addr := range []string{"8.8.8.8:53", fakenet.Web + ":443", fakenet.Web + ":5353"} {
		if err := i.echoUDP(addr); err != nil {
			return nil, err
		}
	}
	return i, i.listenHere()
}

// webNames are those that lead to Web.
func (i *Internet) webNames() []string {
	return []string{"allowed.test", "sub.allowed.test", "fronted.test", "keyed.test", "dns.google", "echo.test"}
}

func (i *Internet) names() {
	for _, name := range i.webNames() {
		i.net.Name(name, fakenet.Web)
	}
	for _, name := range []string{"denied.test", "evil.test", "evilallowed.test", "allowed.test.evil.test", "allowed-test.evil.test", "xn--llowed-2nf.test"} {
		i.net.Name(name, fakenet.Other)
	}
	i.net.Name("meta.test", fakenet.Metadata)
	i.net.Name("metadata.google.internal", fakenet.Metadata)
	i.net.Name("intra.test", fakenet.Private)
	i.net.Name("loop.test", "127.0.0.1")
	i.net.Name("host.test", fakenet.Host)
	i.net.Name("both.test", fakenet.Private, fakenet.Web)
	var turn atomic.Int64
	i.net.NameFunc("rebind.test", func() []string {
		if turn.Add(1)%2 == 1 {
			return []string{fakenet.Web}
		}
		return []string{fakenet.Private}
	})
}

// Close ends the servers.
func (i *Internet) Close() { i.undo.Run() }

// note remembers what arrived, on one line.
func (i *Internet) note(format string, args ...any) {
	text := strings.Join(strings.Fields(fmt.Sprintf(format, args...)), " ")
	i.mu.Lock()
	defer i.mu.Unlock()
	i.arrived = append(i.arrived, text)
}

// mark returns how much has arrived so far.
func (i *Internet) mark() (arrived, asked int) {
	i.mu.Lock()
	defer i.mu.Unlock()
	return len(i.arrived), len(i.net.Asked())
}

// since returns what has arrived since mark, one a line; names that were looked up begin with "dns".
func (i *Internet) since(arrived, asked int) string {
	i.mu.Lock()
	defer i.mu.Unlock()
	lines := append([]string(nil), i.arrived[arrived:]...)
	for _, name := range i.net.Asked()[asked:] {
		lines = append(lines, "dns "+strings.TrimSuffix(name, "."))
	}
	return strings.Join(lines, "\n")
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// serve answers HTTP, with TLS where there is a configuration for it, and notes each request under a name. What
// it answers holds what it was sent.
func (i *Internet) serve(name, addr string, conf *tls.Config) error {
	l, err := i.net.Listen(addr)
	if err != nil {
		return err
	}
	srv := &http.Server{
		ReadHeaderTimeout: time.Minute, MaxHeaderBytes: 8 << 20, TLSConfig: conf, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError),
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(io.LimitReader(r.Body, 1<<20))
			var head bytes.Buffer
			_ = r.Header.Write(&head)
			line := fmt.Sprintf("%s %s %s%s %s %s", name, r.Method, r.Host, r.RequestURI, clip(head.String()), body)
			i.note("%s", line)
			_, _ = fmt.Fprintf(w, "answer to %s", line)
		}),
	}
	i.undo.Add(func() { _ = srv.Close() })
	if conf == nil {
		go func() { _ = srv.Serve(l) }()
		return nil
	}
	go func() { _ = srv.ServeTLS(rawListener{l, i}, "", "") }()
	return nil
}

func clip(s string) string {
	if len(s) > 4096 {
		return s[:4096]
	}
	return s
}

// rawListener notes connections that begin with anything but a hello of TLS.
type rawListener struct {
	net.Listener
	i *Internet
}

// Accept implements net.Listener.
func (l rawListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &rawConn{Conn: c, i: l.i}, nil
}

type rawConn struct {
	net.Conn
	i    *Internet
	seen bool
}

// Read implements net.Conn.
func (c *rawConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	const handshake = 0x16 // the first byte of a record that holds a hello (RFC 8446, 5.1)
	if n > 0 && !c.seen && b[0] != handshake {
		c.i.note("raw %s %q", c.LocalAddr(), b[:min(n, 64)])
	}
	c.seen = c.seen || n > 0
	return n, err
}

// echo sends back what it gets, and notes each connection.
func (i *Internet) echo(addr string) error {
	l, err := i.net.Listen(addr)
	if err != nil {
		return err
	}
	go i.accept(l, "tcp "+addr)
	return nil
}

func (i *Internet) accept(l net.Listener, name string) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		i.note("%s", name)
		go func() {
			_, _ = io.Copy(c, c)
			_ = c.Close()
		}()
	}
}

// echoUDP sends back what it gets, and notes it.
func (i *Internet) echoUDP(addr string) error {
	c, err := i.net.ListenUDP(addr)
	if err != nil {
		return err
	}
	go func() {
		buf := make([]byte, 2048)
		for {
			n, from, err := c.ReadFrom(buf)
			if err != nil {
				return
			}
			i.note("udp %s %q", addr, buf[:n])
			_, _ = c.WriteTo(buf[:n], from)
		}
	}()
	return nil
}

// listenHere opens what the machine itself offers, as its own services do.
func (i *Internet) listenHere() error {
	l, err := net.Listen("tcp", ":"+hostPort)
	if err != nil {
		return err
	}
	i.undo.Add(func() { _ = l.Close() })
	go i.accept(l, "host")
	return nil
}

// Provide gives the server what the cases need: a key that is bound to keyed.test, with its placeholder in KEY.
func (i *Internet) Provide(ctx context.Context, c *client.Client) error {
	if _, err := c.Secrets.Set(ctx, &client.SetSecretRequest{Name: "sentinel", Value: i.sentinel}); err != nil {
		return err
	}
	_, err := c.Secrets.Bind(ctx, "sentinel", &client.SecretBinding{
		For: &client.SandboxSelector{All: true}, Hosts: []string{"keyed.test"}, Scheme: "bearer", Env: "KEY",
	})
	return err
}
