package world

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strconv"
	"strings"
)

// SOCKS is a SOCKS5 proxy in the world (RFC 1928), which looks names up itself.
type SOCKS struct {
	w           *World
	credentials string
	// Seen holds the targets that it was asked for, as host:port.
	Seen Log
}

// SOCKS serves a SOCKS5 proxy on addr in the world, which asks for credentials, USER:PASSWORD, where they are not "".
func (w *World) SOCKS(addr, credentials string) *SOCKS {
	w.t.Helper()
	s := &SOCKS{w: w, credentials: credentials}
	w.Serve(addr, s.serve)
	return s
}

func (s *SOCKS) serve(c net.Conn) {
	target, err := s.greet(c)
	if err != nil {
		return
	}
	s.Seen.Add(target)
	host, port, err := net.SplitHostPort(target)
	if err != nil {
		return
	}
	if leads := s.w.Leads(host); len(leads) > 0 {
		host = leads[0]
	}
	up, err := s.w.Dial(context.Background(), net.JoinHostPort(host, port))
	if err != nil {
		_, _ = c.Write([]byte{5, 5, 0, 1, 0, 0, 0, 0, 0, 0}) // connection refused
		return
	}
	defer func() { _ = up.Close() }()
	_, _ = c.Write([]byte{5, 0, 0, 1, 0, 0, 0, 0, 0, 0})
	join(c, c, up)
}

// greet speaks until the client has said where it wants to go.
func (s *SOCKS) greet(c net.Conn) (target string, err error) {
	read := func(n int) []byte {
		b := make([]byte, n)
		if err == nil {
			_, err = io.ReadFull(c, b)
		}
		return b
	}
	sized := func() string { return string(read(int(read(1)[0]))) }
	read(1)
	methods := sized()
	method := byte(0)
	if s.credentials != "" {
		method = 2
	}
	if err != nil || strings.IndexByte(methods, method) < 0 {
		_, _ = c.Write([]byte{5, 0xff})
		return "", errors.New("no method that both know")
	}
	_, _ = c.Write([]byte{5, method})
	if method != 0 {
		read(1)
		if shown := sized() + ":" + sized(); shown != s.credentials {
			_, _ = c.Write([]byte{1, 1})
			return "", errors.New("other credentials")
		}
		_, _ = c.Write([]byte{1, 0})
	}
	var host string
	switch head := read(4); head[3] {
	case 1:
		host = net.IP(read(4)).String()
	case 3:
		host = sized()
	case 4:
		host = net.IP(read(16)).String()
	}
	port := binary.BigEndian.Uint16(read(2))
	return net.JoinHostPort(host, strconv.Itoa(int(port))), err
}
