package client

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strings"
)

// Ports reaches what listens on TCP ports inside sandboxes.
type Ports struct{ conn *conn }

// URL returns the address under which the server passes HTTP, WebSocket and server-sent events on to
// a port. Requests need the client's key, as every request does; it is taken off on the way. Over a
// Unix socket the host name in it means nothing: use Transport.
func (p *Ports) URL(sandbox string, port int) string {
	return fmt.Sprintf("%s/v1/sandboxes/%s/ports/%d/", p.conn.base, url.PathEscape(sandbox), port)
}

// Transport returns a round tripper that reaches URL's addresses with the client's key.
func (p *Ports) Transport() http.RoundTripper { return p.conn.http.Transport }

// Dial connects to a port inside: what is written goes to the port as it is, and back.
func (p *Ports) Dial(ctx context.Context, sandbox string, port int) (net.Conn, error) {
	c, err := p.connect(ctx)
	if err != nil {
		return nil, p.conn.wrap(err)
	}
	out, err := p.upgrade(ctx, c, sandbox, port)
	if err != nil {
		_ = c.Close()
		return nil, p.conn.wrap(err)
	}
	return out, nil
}

// connect opens a connection of its own: an upgraded one can't go back to the pool.
func (p *Ports) connect(ctx context.Context) (net.Conn, error) {
	u, err := url.Parse(p.conn.base)
	if err != nil {
		return nil, err
	}
	c, err := p.conn.tr.DialContext(ctx, "tcp", hostPort(u))
	if err != nil || u.Scheme != "https" {
		return c, err
	}
	cfg := &tls.Config{MinVersion: tls.VersionTLS12}
	if p.conn.tr.TLSClientConfig != nil {
		cfg = p.conn.tr.TLSClientConfig.Clone()
	}
	cfg.ServerName, cfg.NextProtos = u.Hostname(), []string{"http/1.1"}
	t := tls.Client(c, cfg)
	if err := t.HandshakeContext(ctx); err != nil {
		_ = c.Close()
		return nil, err
	}
	return t, nil
}

// upgrade asks the server to turn the connection into the port's.
func (p *Ports) upgrade(ctx context.Context, c net.Conn, sandbox string, port int) (net.Conn, error) {
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stop()
	target := strings.TrimSuffix(p.URL(sandbox, port), "/")
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, target, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", "casemate-tcp")
	req.Header.Set("User-Agent", p.conn.agent)
	if p.conn.key != "" {
		req.Header.Set("Authorization", "Bearer "+p.conn.key)
	}
	if err := req.Write(c); err != nil {
		return nil, firstOf(ctx.Err(), err)
	}
	br := bufio.NewReader(c)
	resp, err := http.ReadResponse(br, req)
	if err != nil {
		return nil, firstOf(ctx.Err(), err)
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		defer func() { _ = resp.Body.Close() }()
		return nil, httpError(resp)
	}
	return &upgraded{Conn: c, br: br}, nil
}

// firstOf returns the context's error before one that it caused.
func firstOf(ctxErr, err error) error {
	if ctxErr != nil {
		return ctxErr
	}
	return err
}

// upgraded is a connection whose first bytes may lie in the buffer that the answer was read through.
type upgraded struct {
	net.Conn
	br *bufio.Reader
}

// Read implements net.Conn.
func (u *upgraded) Read(b []byte) (int, error) { return u.br.Read(b) }

// CloseWrite ends the writing side, where the connection has one.
func (u *upgraded) CloseWrite() error {
	if half, ok := u.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return u.Close()
}
