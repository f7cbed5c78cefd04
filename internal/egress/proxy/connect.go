package proxy

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"
)

// maxAnswer bounds the head of a proxy's answer.
const maxAnswer = 64 << 10

// Client asks one proxy for connections. It is safe for concurrent use.
type Client struct {
	Proxy
	tls  *tls.Config
	auth string // value of Proxy-Authorization, or ""
}

// NewClient returns a client of a proxy.
func NewClient(p Proxy) (*Client, error) {
	c := &Client{Proxy: p}
	if len(p.Credentials) > 0 && !p.SOCKS {
		c.auth = "Basic " + base64.StdEncoding.EncodeToString(p.Credentials)
	}
	if p.TLS {
		roots := x509.NewCertPool()
		if !roots.AppendCertsFromPEM(p.Roots) {
			return nil, errors.New("there is no authority that the proxy could be verified by")
		}
		c.tls = &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots, ServerName: p.Host(), NextProtos: []string{"http/1.1"}}
	}
	return c, nil
}

// RefusedError says that a proxy answered, and would not connect.
type RefusedError struct {
	Proxy  string // host:port
	Status int
	// Asked says that credentials were shown.
	Asked bool
}

// Error implements error.
func (e *RefusedError) Error() string {
	status := fmt.Sprintf("%d %s", e.Status, http.StatusText(e.Status)) // not the proxy's own words: they are no text of ours
	switch {
	case e.Status == http.StatusProxyAuthRequired && e.Asked:
		return fmt.Sprintf("the proxy %s does not take the credentials that it is given (%s)", e.Proxy, status)
	case e.Status == http.StatusProxyAuthRequired:
		return fmt.Sprintf("the proxy %s asks for credentials, and the server has none for it (%s)", e.Proxy, status)
	}
	return fmt.Sprintf("the proxy %s would not connect: %s", e.Proxy, status)
}

// Connect asks the proxy, over a new connection to it, for a connection to host:port, and returns that. It closes c
// where it fails. Kinds of error: *RefusedError, *SOCKSError, and what the
// network says.
func (c *Client) Connect(ctx context.Context, to net.Conn, host string, port uint16) (net.Conn, error) {
	stop := context.AfterFunc(ctx, func() { _ = to.SetDeadline(time.Unix(1, 0)) })
	var out net.Conn
	var err error
	if c.SOCKS {
		out, err = c.connectSOCKS(ctx, to, host, port)
	} else {
		out, err = c.connect(ctx, to, net.JoinHostPort(host, strconv.Itoa(int(port))))
	}
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		_ = to.Close()
		return nil, err
	}
	return out, nil
}

func (c *Client) connect(ctx context.Context, to net.Conn, target string) (net.Conn, error) {
	if c.tls != nil {
		t := tls.Client(to, c.tls)
		if err := t.HandshakeContext(ctx); err != nil {
			return nil, fmt.Errorf("TLS with the proxy: %w", err)
		}
		to = t
	}
	request := "CONNECT " + target + " HTTP/1.1\r\nHost: " + target + "\r\n"
	if c.auth != "" {
		request += "Proxy-Authorization: " + c.auth + "\r\n"
	}
	if _, err := io.WriteString(to, request+"\r\n"); err != nil {
		return nil, err
	}
	r := bufio.NewReader(io.LimitReader(to, maxAnswer))
	status, err := answer(r)
	if err != nil {
		return nil, fmt.Errorf("the proxy's answer: %w", err)
	}
	if status/100 != 2 {
		return nil, &RefusedError{Proxy: c.String(), Status: status, Asked: c.auth != ""}
	}
	// What came behind the head is the other side's already.
	rest, err := r.Peek(r.Buffered())
	if err != nil || len(rest) == 0 {
		return to, err
	}
	return &begun{Conn: to, rest: append([]byte(nil), rest...)}, nil
}

// answer reads the head of the answer to CONNECT. Interim ones are passed over.
func answer(r *bufio.Reader) (status int, err error) {
	for range 8 {
		resp, err := http.ReadResponse(r, &http.Request{Method: http.MethodConnect}) //nolint:bodyclose // it has none: what follows is the connection
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return 0, err
		}
		// Of an answer to CONNECT nothing but the head is read, and of another the connection is closed.
		if resp.StatusCode/100 != 1 || resp.StatusCode == http.StatusSwitchingProtocols {
			return resp.StatusCode, nil
		}
	}
	return 0, errors.New("it never ends")
}

// begun is a connection whose first bytes have been read already.
type begun struct {
	net.Conn
	rest []byte
}

// Read implements net.Conn.
func (b *begun) Read(p []byte) (int, error) {
	if len(b.rest) == 0 {
		return b.Conn.Read(p)
	}
	n := copy(p, b.rest)
	b.rest = b.rest[n:]
	return n, nil
}

// NetConn returns the connection below, as that of crypto/tls does.
func (b *begun) NetConn() net.Conn { return b.Conn }

// CloseWrite sends the end of what is written; reading goes on.
func (b *begun) CloseWrite() error {
	if w, ok := b.Conn.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return nil
}
