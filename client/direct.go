package client

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"
)

// direct sends unary calls over HTTP/1.1 without a goroutine: the caller writes the request and reads the
// answer itself. http.Transport has two goroutines for each connection, and each call passes through both;
// for a call to a server on the same machine those hand-overs cost more than anything else in the client.
// Whatever is not such a call goes to next.
type direct struct {
	dial func(ctx context.Context) (net.Conn, error)
	next http.RoundTripper

	// mu guards the fields below.
	mu   sync.Mutex
	idle []*directConn // the one that was used last at the end
}

const (
	// maxDirect bounds the body of a request that is sent before anything is read.
	maxDirect = 64 << 10
	// maxIdle and idleLimit bound what is kept; a server closes what has rested for two minutes.
	maxIdle   = 64
	idleLimit = 90 * time.Second
)

// directConn is a connection between calls, or of one.
type directConn struct {
	net.Conn
	r     *bufio.Reader
	w     *bufio.Writer
	since time.Time // of its last use
}

// suits reports whether a request is a unary call: Connect's streams have other types.
func suits(r *http.Request) bool {
	return r.Method == http.MethodPost && r.Header.Get("Content-Type") == "application/proto" &&
		r.ContentLength >= 0 && r.ContentLength <= maxDirect
}

// RoundTrip implements http.RoundTripper.
func (d *direct) RoundTrip(r *http.Request) (*http.Response, error) {
	if !suits(r) {
		return d.next.RoundTrip(r)
	}
	ctx := r.Context()
	c, err := d.get(ctx)
	if err != nil {
		if r.Body != nil {
			_ = r.Body.Close()
		}
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	resp, err := c.roundTrip(r)
	if err != nil {
		stop()
		_ = c.Close()
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return nil, err
	}
	resp.Body = &directBody{ReadCloser: resp.Body, d: d, c: c, stop: stop, keep: !resp.Close}
	return resp, nil
}

func (c *directConn) roundTrip(r *http.Request) (*http.Response, error) {
	if err := r.Write(c.w); err != nil {
		return nil, err
	}
	if err := c.w.Flush(); err != nil {
		return nil, err
	}
	resp, err := http.ReadResponse(c.r, r)
	if err == io.EOF { //nolint:errorlint // what ReadResponse returns for a connection that ends before it
		err = io.ErrUnexpectedEOF
	}
	return resp, err
}

// get returns a connection that stands, as far as can be seen.
func (d *direct) get(ctx context.Context) (*directConn, error) {
	for {
		c := d.take()
		if c == nil {
			break
		}
		if time.Since(c.since) < idleLimit && c.quiet() {
			return c, nil
		}
		_ = c.Close()
	}
	nc, err := d.dial(ctx)
	if err != nil {
		return nil, err
	}
	return &directConn{Conn: nc, r: bufio.NewReader(nc), w: bufio.NewWriterSize(nc, 8<<10)}, nil
}

func (d *direct) take() *directConn {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := len(d.idle)
	if n == 0 {
		return nil
	}
	c := d.idle[n-1]
	d.idle[n-1] = nil
	d.idle = d.idle[:n-1]
	return c
}

// quiet reports whether nothing has come on an idle connection: neither its end nor bytes that belong to
// no call.
func (c *directConn) quiet() bool {
	sc, ok := c.Conn.(syscall.Conn)
	if !ok || c.r.Buffered() > 0 {
		return false
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return false
	}
	quiet := false
	err = raw.Read(func(fd uintptr) bool {
		var b [1]byte
		_, _, rerr := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		quiet = rerr == syscall.EAGAIN //nolint:errorlint // a system call's own
		return true
	})
	return err == nil && quiet
}

func (d *direct) put(c *directConn) {
	c.since = time.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.idle) >= maxIdle {
		_ = c.Close()
		return
	}
	d.idle = append(d.idle, c)
}

// closeIdle drops the idle connections.
func (d *direct) closeIdle() {
	for c := d.take(); c != nil; c = d.take() {
		_ = c.Close()
	}
}

// directBody is an answer's body. Once it was read to its end, the connection is free for another call.
type directBody struct {
	io.ReadCloser
	d    *direct
	c    *directConn
	stop func() bool // detaches the connection from the call's context
	keep bool
	done bool
}

func (b *directBody) Read(p []byte) (int, error) {
	if b.done {
		return 0, io.EOF
	}
	n, err := b.ReadCloser.Read(p)
	if err == io.EOF { //nolint:errorlint // as io.Reader has it
		b.end(b.keep)
	}
	return n, err
}

// Close implements io.Closer.
func (b *directBody) Close() error {
	b.end(false)
	return nil
}

func (b *directBody) end(whole bool) {
	if b.done {
		return
	}
	b.done = true
	// Where the context has ended already, its deadline is on the connection, or about to be.
	if b.stop() && whole {
		b.d.put(b.c)
		return
	}
	_ = b.c.Close()
}
