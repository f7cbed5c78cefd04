package gateway

import (
	"context"
	"errors"
	"io"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/waiter"

	"casemate.dev/internal/egress/address"
)

// What is passed on unseen goes from a socket of the host straight into the stack's own buffers and back: no copy in
// between, and nobody holds a buffer while the other side is slow. What the stack may hold is the sandbox's budget.

// pieceLen is how much is carried at once: what fits one packet, so that none is cut in two.
const pieceLen = address.MTU - header.IPv6MinimumSize - header.TCPMinimumSize - header.TCPOptionsMaximumSize

// await returns when the sandbox's end is ready for one of the events.
func (i *inner) await(events waiter.EventMask, done <-chan struct{}) error {
	events |= waiter.EventHUp | waiter.EventErr
	if i.ep.Readiness(events) != 0 {
		return nil
	}
	e, ready := waiter.NewChannelEntry(events)
	i.wq.EventRegister(&e)
	defer i.wq.EventUnregister(&e)
	if i.ep.Readiness(events) != 0 {
		return nil
	}
	select {
	case <-ready:
		return nil
	case <-done:
		return context.Canceled
	}
}

// rawOf returns the socket under a connection of the host's, through whatever stands above it.
func rawOf(c net.Conn) (syscall.RawConn, error) {
	t, ok := below(c).(*net.TCPConn)
	if !ok {
		return nil, errors.ErrUnsupported
	}
	return t.SyscallConn()
}

// below returns the connection that carries c.
func below(c net.Conn) net.Conn {
	for {
		n, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			return c
		}
		c = n.NetConn()
	}
}

// piece is what one socket has for the stack; it implements tcpip.Payloader.
type piece struct {
	fd   int
	left int
	err  error // what the socket said
}

// Len implements tcpip.Payloader.
func (p *piece) Len() int { return p.left }

// Read implements io.Reader. There is as much as Len says.
func (p *piece) Read(b []byte) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	for {
		n, err := unix.Read(p.fd, b)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err == nil && n == 0:
			err = io.ErrUnexpectedEOF
		case err == nil:
			p.left -= n
			return n, nil
		}
		p.err = err
		return 0, err
	}
}

// waiting says how many bytes a socket has for us. With none, err tells why: EAGAIN, io.EOF, or what is wrong.
func waiting(fd int) (int, error) {
	n, err := unix.IoctlGetInt(fd, unix.SIOCINQ)
	if err != nil || n > 0 {
		return n, err
	}
	var b [1]byte
	for {
		n, _, err = unix.Recvfrom(fd, b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return 0, err
		case n == 0:
			return 0, io.EOF
		default: // it came meanwhile
			return unix.IoctlGetInt(fd, unix.SIOCINQ)
		}
	}
}

// spliceIn carries from the other side to the sandbox until the other side has ended.
func (c *conn) spliceIn(raw syscall.RawConn, in *inner) error {
	for {
		if err := in.await(waiter.WritableEvents, c.ctx.Done()); err != nil {
			return err
		}
		var n int64
		var err error
		rerr := raw.Read(func(fd uintptr) bool {
			var have int
			if have, err = waiting(int(fd)); errors.Is(err, unix.EAGAIN) {
				err = nil
				return false
			}
			if err == nil {
				n, err = in.take(&piece{fd: int(fd), left: c.allowance(min(have, pieceLen))})
			}
			return true
		})
		if err = errors.Join(rerr, err); errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if !c.count(int(n), false) {
			return net.ErrClosed
		}
	}
}

// take writes a piece of what a socket has. It takes less where the stack has no room for more.
func (i *inner) take(p *piece) (int64, error) {
	n, err := i.ep.Write(p, tcpip.WriteOptions{})
	switch err.(type) {
	case nil, *tcpip.ErrWouldBlock:
		return n, p.err
	}
	if p.err != nil {
		return n, p.err
	}
	return n, tcpipError("write", err)
}

// sink writes to a socket what it takes at once; it implements io.Writer.
type sink struct {
	fd   int
	left int // how much may be written
	err  error
}

// errFull says that the socket takes no more now.
var errFull = errors.New("full")

// Write implements io.Writer.
func (s *sink) Write(b []byte) (int, error) {
	done := 0
	for done < len(b) {
		if s.left == 0 {
			s.err = errFull
			return done, s.err
		}
		n, err := unix.Write(s.fd, b[done:min(len(b), done+s.left)])
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN):
			s.err = errFull
			return done, s.err
		case err != nil:
			s.err = err
			return done, err
		default:
			done += n
			s.left -= n
		}
	}
	return done, nil
}

// burstLen bounds what is carried out in one go, so that limits are looked at in between.
const burstLen = 256 << 10

// spliceOut carries from the sandbox to the other side until the sandbox has ended.
func (c *conn) spliceOut(in *inner, raw syscall.RawConn) error {
	for {
		if err := in.await(waiter.ReadableEvents, c.ctx.Done()); err != nil {
			return err
		}
		var n int
		var err error
		rerr := raw.Write(func(fd uintptr) bool {
			s := &sink{fd: int(fd), left: c.allowance(burstLen)}
			n, err = in.give(s)
			return n > 0 || err != nil || !errors.Is(s.err, errFull)
		})
		if err = errors.Join(rerr, err); errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if !c.count(n, true) {
			return net.ErrClosed
		}
	}
}

// give writes what the sandbox has sent into a socket.
func (i *inner) give(s *sink) (int, error) {
	r, err := i.ep.Read(s, tcpip.ReadOptions{})
	if r.Count > 0 {
		i.ep.ModerateRecvBuf(r.Count) // the window grows with what is read
	}
	switch {
	case s.err != nil && !errors.Is(s.err, errFull):
		return r.Count, s.err
	case err == nil, s.err != nil:
		return r.Count, nil
	}
	switch err.(type) {
	case *tcpip.ErrWouldBlock:
		return 0, nil
	case *tcpip.ErrClosedForReceive:
		return 0, io.EOF
	}
	return 0, tcpipError("read", err)
}

// writable returns when a socket takes more.
func writable(raw syscall.RawConn) error {
	var err error
	werr := raw.Write(func(fd uintptr) bool {
		list := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		_, err = unix.Ppoll(list, &unix.Timespec{}, nil)
		return err == nil && list[0].Revents != 0 || err != nil && !errors.Is(err, unix.EINTR)
	})
	return errors.Join(werr, err)
}
