package world

import (
	"context"
	"encoding/base64"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"
)

// Proxy is an HTTP proxy in the world, which connects where it is asked to (CONNECT).
type Proxy struct {
	w *World
	// Seen holds the targets that it was asked for.
	Seen Log

	mu          sync.Mutex // guards the fields below
	credentials string
	names       map[string]string
}

// Proxy serves an HTTP proxy on addr in the world, which asks for credentials, USER:PASSWORD, where they are not "".
// It speaks TLS where names are given, for which it has a certificate.
func (w *World) Proxy(addr, credentials string, names ...string) *Proxy {
	w.t.Helper()
	p := &Proxy{w: w, credentials: credentials, names: map[string]string{}}
	srv := &http.Server{Handler: http.HandlerFunc(p.serve), ReadHeaderTimeout: time.Minute, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)}
	l := w.Listen(addr)
	if len(names) > 0 {
		srv.TLSConfig = w.TLS(names...)
		srv.Protocols = new(http.Protocols)
		srv.Protocols.SetHTTP1(true)
		go func() { _ = srv.ServeTLS(l, "", "") }()
	} else {
		go func() { _ = srv.Serve(l) }()
	}
	w.t.Cleanup(func() { _ = srv.Close() })
	return p
}

// Change makes it ask for other credentials from now on.
func (p *Proxy) Change(credentials string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.credentials = credentials
}

// Name lets a name lead to an address, for the proxy alone.
func (p *Proxy) Name(name, addr string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.names[name] = addr
}

// address is where the proxy finds a host: where it was told, or where the world's names lead.
func (p *Proxy) address(host string) string {
	p.mu.Lock()
	a, ok := p.names[host]
	p.mu.Unlock()
	if ok {
		return a
	}
	if leads := p.w.Leads(host); len(leads) > 0 {
		return leads[0]
	}
	return host
}

func (p *Proxy) serve(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodConnect {
		http.Error(w, "this proxy connects", http.StatusMethodNotAllowed)
		return
	}
	p.mu.Lock()
	credentials := p.credentials
	p.mu.Unlock()
	want := "Basic " + base64.StdEncoding.EncodeToString([]byte(credentials))
	if credentials != "" && r.Header.Get("Proxy-Authorization") != want {
		http.Error(w, "who are you?", http.StatusProxyAuthRequired)
		return
	}
	p.Seen.Add(r.Host)
	host, port, err := net.SplitHostPort(r.Host)
	var up net.Conn
	if err == nil {
		up, err = p.w.Dial(context.Background(), net.JoinHostPort(p.address(host), port))
	}
	if err != nil {
		http.Error(w, "no way there", http.StatusBadGateway)
		return
	}
	defer func() { _ = up.Close() }()
	in, buf, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer func() { _ = in.Close() }()
	_, _ = io.WriteString(in, "HTTP/1.1 200 Connection established\r\n\r\n")
	join(in, buf, up)
}

// join passes on what comes from in, which is read by from, to up, and the other way round, until both have ended.
func join(in net.Conn, from io.Reader, up net.Conn) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = io.Copy(up, from)
		_ = up.(*net.TCPConn).CloseWrite()
	}()
	_, _ = io.Copy(in, up)
	if c, ok := in.(interface{ CloseWrite() error }); ok {
		_ = c.CloseWrite()
	}
	<-done
}
