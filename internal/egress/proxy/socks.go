package proxy

import (
	"bytes"
	"context"
	"errors"
	"net"
	"strconv"
	"strings"

	"golang.org/x/net/proxy"
)

// portSOCKS is SOCKS's (RFC 1928, section 3).
const portSOCKS = 1080

// maxSOCKSName bounds a name (RFC 1928, section 5).
const maxSOCKSName = 255

// connectSOCKS asks a proxy that speaks SOCKS5, over a connection to it. Nothing behind its answer is read.
func (c *Client) connectSOCKS(ctx context.Context, to net.Conn, host string, port uint16) (net.Conn, error) {
	if len(host) > maxSOCKSName {
		return nil, errors.New("the name is longer than SOCKS can carry")
	}
	var auth *proxy.Auth
	switch {
	case c.User != "":
		auth = &proxy.Auth{User: c.User, Password: string(c.Credentials)}
	case len(c.Credentials) > 0:
		user, password, _ := bytes.Cut(c.Credentials, []byte(":"))
		auth = &proxy.Auth{User: string(user), Password: string(password)}
	}
	d, err := proxy.SOCKS5("tcp", c.String(), auth, already{to})
	if err != nil {
		return nil, err
	}
	cd, ok := d.(proxy.ContextDialer)
	if !ok {
		return nil, errors.New("the client of SOCKS takes no time limit")
	}
	if _, err = cd.DialContext(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(int(port)))); err != nil {
		var op *net.OpError
		if errors.As(err, &op) && op.Err != nil {
			err = op.Err // the rest are addresses, which the caller knows
		}
		return nil, &SOCKSError{Proxy: c.String(), Reason: strings.TrimPrefix(err.Error(), "unknown error ")}
	}
	return to, nil
}

// SOCKSError says why a proxy that speaks SOCKS5 would not connect, or that it does not speak it.
type SOCKSError struct {
	Proxy  string // host:port
	Reason string
}

// Error implements error.
func (e *SOCKSError) Error() string {
	return "the proxy " + e.Proxy + " would not connect: " + e.Reason
}

// already is a dialer to a proxy that was dialled.
type already struct{ net.Conn }

// Dial implements proxy.Dialer.
func (a already) Dial(string, string) (net.Conn, error) { return a.Conn, nil }

// DialContext implements proxy.ContextDialer.
func (a already) DialContext(context.Context, string, string) (net.Conn, error) { return a.Conn, nil }
