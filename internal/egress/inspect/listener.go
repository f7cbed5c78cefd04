package inspect

import (
	"io"
	"log"
	"net"
)

// maxHeader bounds the head of a request of HTTP/2, and of a response.
const maxHeader = 256 << 10

// oneConn is a listener of one connection, which lasts as long as that does.
type oneConn struct {
	conn   chan net.Conn
	closed <-chan struct{}
	addr   net.Addr
}

// Accept implements net.Listener.
func (l *oneConn) Accept() (net.Conn, error) {
	select {
	case c := <-l.conn:
		return c, nil
	default:
	}
	<-l.closed
	return nil, net.ErrClosed
}

// Close implements net.Listener.
func (l *oneConn) Close() error { return nil }

// Addr implements net.Listener.
func (l *oneConn) Addr() net.Addr { return l.addr }

// watchedConn tells when a connection is closed.
type watchedConn struct {
	net.Conn
	closed func()
}

// Close implements net.Conn.
func (c *watchedConn) Close() error {
	defer c.closed()
	return c.Conn.Close()
}

// discardLog is for servers whose errors are their clients'.
func discardLog() *log.Logger { return log.New(io.Discard, "", 0) }
