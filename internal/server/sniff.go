package server

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// splitter divides the connections of one address into those that begin with TLS and the rest, so that
// both may use it: a server on one port needs no second one to be opened, named and remembered.
type splitter struct {
	net.Listener
	plain, secure *half

	// mu guards the fields below.
	mu     sync.Mutex
	fresh  map[net.Conn]struct{} // those that have said nothing yet
	closed chan struct{}
	once   sync.Once
}

// half is one of the two listeners that a splitter looks like.
type half struct {
	*splitter
	accepted chan accepted
}

type accepted struct {
	conn net.Conn
	err  error
}

// split divides l. Closing either half closes l.
func split(l net.Listener) *splitter {
	s := &splitter{Listener: l, fresh: make(map[net.Conn]struct{}), closed: make(chan struct{})}
	s.plain, s.secure = &half{s, make(chan accepted)}, &half{s, make(chan accepted)}
	return s
}

// run accepts until the listener is closed. An error is what the plain half accepts, and its server
// decides whether to go on: it waits a while, and nothing is accepted meanwhile.
func (s *splitter) run() {
	for {
		c, err := s.Listener.Accept()
		if err != nil {
			s.give(s.plain, accepted{err: err})
			if errors.Is(err, net.ErrClosed) {
				return
			}
			continue
		}
		go s.sort(c)
	}
}

// sort hands a connection to the half that it is for, once it has begun.
func (s *splitter) sort(c net.Conn) {
	if !s.expect(c) {
		_ = c.Close()
		return
	}
	_ = c.SetReadDeadline(time.Now().Add(headerTimeout))
	first, err := peek(c)
	_ = c.SetReadDeadline(time.Time{})
	s.mu.Lock()
	delete(s.fresh, c)
	s.mu.Unlock()
	to := s.plain
	switch {
	case err != nil:
		_ = c.Close()
		return
	case first == recordHandshake:
		to = s.secure
	}
	s.give(to, accepted{conn: c})
}

// recordHandshake is the first byte of every TLS connection (RFC 8446, section 5.1), which no HTTP
// request begins with.
const recordHandshake = 0x16

// expect notes a connection that has said nothing; false where the listener is closed.
func (s *splitter) expect(c net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-s.closed:
		return false
	default:
		s.fresh[c] = struct{}{}
		return true
	}
}

func (s *splitter) give(to *half, a accepted) {
	select {
	case to.accepted <- a:
	case <-s.closed:
		if a.conn != nil {
			_ = a.conn.Close()
		}
	}
}

// Close implements net.Listener. Connections that have said nothing are dropped.
func (s *splitter) Close() error {
	err := net.ErrClosed
	s.once.Do(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		close(s.closed)
		for c := range s.fresh {
			_ = c.Close()
		}
		err = s.Listener.Close()
	})
	return err
}

// Accept implements net.Listener.
func (h *half) Accept() (net.Conn, error) {
	select {
	case a := <-h.accepted:
		return a.conn, a.err
	case <-h.closed:
		return nil, net.ErrClosed
	}
}

// peek returns the first byte that comes.
func peek(c net.Conn) (byte, error) {
	var first [1]byte
	_, err := peekInto(c, first[:])
	return first[0], err
}

// peekInto waits for something to come and fills buf with it, as far as it goes, without taking it (recv(2),
// MSG_PEEK), so that whoever reads the connection next needs no wrapper around it.
func peekInto(c net.Conn, buf []byte) (int, error) {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return 0, errors.New("connection has no descriptor")
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return 0, err
	}
	var n int
	var recvErr error
	err = raw.Read(func(fd uintptr) bool {
		for {
			n, _, recvErr = syscall.Recvfrom(int(fd), buf, syscall.MSG_PEEK)
			if !errors.Is(recvErr, syscall.EINTR) {
				return !errors.Is(recvErr, syscall.EAGAIN)
			}
		}
	})
	switch {
	case err != nil:
		return 0, err
	case recvErr != nil:
		return 0, os.NewSyscallError("recvfrom", recvErr)
	case n == 0:
		return 0, io.EOF
	}
	return n, nil
}
