package gateway

import (
	"errors"
	"io"
	"net"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/waiter"

	"casemate.dev/internal/egress/peek"
	"casemate.dev/internal/egress/rules"
)

// relay copies between the sandbox and the other side until both have ended, or one fails.
func (c *conn) relay(in *inner, up net.Conn) {
	var wg sync.WaitGroup
	guard := guard{answered: make(chan struct{})}
	var outErr error
	wg.Go(func() {
		if outErr = c.outwards(in, up, &guard); outErr != nil {
			c.abort()
			return
		}
		closeWrite(up)
	})
	inErr := c.inwards(up, in, &guard)
	if inErr != nil {
		c.abort()
	} else {
		_ = in.CloseWrite()
	}
	wg.Wait()
	if inErr == nil && outErr == nil {
		c.finish(in, up)
	}
}

// finish closes both sides in peace: what was written still arrives.
func (c *conn) finish(sides ...io.Closer) {
	c.mu.Lock()
	c.sides = nil
	c.mu.Unlock()
	for _, s := range sides {
		_ = s.Close()
	}
}

func closeWrite(c net.Conn) {
	if w, ok := c.(interface{ CloseWrite() error }); ok {
		_ = w.CloseWrite()
	}
}

// guard looks at what a client sends before it goes on.
type guard struct {
	begun    []byte // first bytes that do not say yet what is spoken
	decided  bool
	requests *peek.Requests // HTTP/1
	once     sync.Once
	answered chan struct{} // closed once the server has begun to answer
	switched bool          // it agreed to another protocol; set before answered is closed
}

// outwards copies from the sandbox to the other side.
func (c *conn) outwards(in *inner, up net.Conn, g *guard) error {
	raw, err := rawOf(up)
	if err != nil {
		return err
	}
	_, plain := up.(*net.TCPConn)
	for !plain || !g.through() {
		// A buffer is taken once there is something for it, and a place where it goes.
		if err := in.await(waiter.ReadableEvents, c.ctx.Done()); err != nil {
			return err
		}
		if err := writable(raw); err != nil {
			return err
		}
		pool := c.buffers()
		buf := pool.get()
		n, err := in.Read(*buf)
		if n > 0 {
			err = errors.Join(err, c.pass((*buf)[:n], up, g))
		}
		pool.put(buf)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return c.spliceOut(in, raw)
}

// through reports whether everything that follows goes on as it is.
func (g *guard) through() bool { return g.decided && g.requests == nil }

// pass sends on what the guard lets through.
func (c *conn) pass(b []byte, up net.Conn, g *guard) error {
	if !c.count(len(b), true) {
		return net.ErrClosed
	}
	for {
		out, err := c.check(b, g)
		if err != nil {
			return err
		}
		if len(out) > 0 {
			if _, err = up.Write(out); err != nil {
				return err
			}
		}
		if g.requests == nil || !g.requests.More() {
			return nil
		}
		b = nil
	}
}

// check looks at bytes of the client and returns those that may go on.
func (c *conn) check(b []byte, g *guard) ([]byte, error) {
	if !g.decided {
		g.begun = append(g.begun, b...)
		f, more := classify(g.begun)
		if more {
			return nil, nil
		}
		g.decided, b, g.begun = true, g.begun, nil
		v := c.refineFirst(f)
		if !v.Allow {
			c.refuse(v)
			c.cut(v)
			return nil, net.ErrClosed
		}
		// A rule for the web counts for every request; one for a port, for whatever is spoken there.
		if f.http && v.Web {
			g.requests = &peek.Requests{Judge: c.judgeHead, Switched: func() bool { return g.waitSwitched(c) }}
		}
	}
	if g.requests == nil {
		return b, nil
	}
	out, err := g.requests.Next(b)
	if err != nil {
		v, ok := err.(*headError)
		if !ok {
			v = &headError{rules.Verdict{Code: rules.NotWeb, Reason: err.Error()}}
		}
		c.refuse(v.verdict)
		c.cut(v.verdict)
	}
	return out, err
}

// headError is a verdict as an error.
type headError struct{ verdict rules.Verdict }

func (r *headError) Error() string { return r.verdict.Reason }

// judgeHead judges a request that is passed through: only its host counts, since rules that look at more
// are the Inspector's.
func (c *conn) judgeHead(h peek.Head) error {
	host, port, err := peek.HostPort(h.Host)
	if err != nil {
		return err
	}
	name, addr, err := rules.Host(host)
	if err != nil {
		return err
	}
	if name == "" {
		name = addr.String()
	}
	v := c.refine(func(q *rules.Query) {
		q.HTTP = &rules.HTTP{Host: name, Port: port, Method: h.Method, Path: h.Path, Upgrade: h.Upgrade}
	})
	if !v.Allow {
		return &headError{v}
	}
	return nil
}

// inwards copies from the other side to the sandbox.
func (c *conn) inwards(up net.Conn, in *inner, g *guard) error {
	defer g.see(nil)
	read, err := pooledReader(up)
	if err != nil {
		return err
	}
	t, plain := up.(*net.TCPConn)
	for first := true; first || !plain; first = false {
		buf, n, err := read(c.s.gw.small)
		if n > 0 {
			g.see((*buf)[:n])
			if !c.count(n, false) {
				err = net.ErrClosed
			} else if _, werr := in.Write((*buf)[:n]); werr != nil {
				err = werr
			}
		}
		if buf != nil {
			c.s.gw.small.put(buf)
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return err
	}
	return c.spliceIn(raw, in)
}

// see notes how the server begins to answer.
func (g *guard) see(b []byte) {
	g.once.Do(func() {
		const status = "HTTP/1.1 101"
		g.switched = len(b) >= len(status) && string(b[:len(status)]) == status
		close(g.answered)
	})
}

func (g *guard) waitSwitched(c *conn) bool {
	select {
	case <-g.answered:
		return g.switched
	case <-c.ctx.Done():
		return false
	}
}

// pooledReader returns a function that reads what has come, in a buffer that is taken only once there is
// something. Its caller gives the buffer back.
func pooledReader(c net.Conn) (func(*frames) (*[]byte, int, error), error) {
	var t syscall.Conn
	switch x := c.(type) {
	case *net.TCPConn:
		t = x
	case *net.UDPConn:
		t = x
	default: // TLS with a proxy holds more than this anyway
		return func(pool *frames) (*[]byte, int, error) {
			buf := pool.get()
			n, err := c.Read(*buf)
			return buf, n, err
		}, nil
	}
	_, stream := t.(*net.TCPConn) // the end of one is an empty read, and packets may be empty
	raw, err := t.SyscallConn()
	if err != nil {
		return nil, err
	}
	return func(pool *frames) (buf *[]byte, n int, err error) {
		rerr := raw.Read(func(fd uintptr) bool {
			buf = pool.get()
			for {
				n, err = unix.Read(int(fd), *buf)
				if !errors.Is(err, unix.EINTR) {
					break
				}
			}
			if errors.Is(err, unix.EAGAIN) {
				pool.put(buf)
				buf, n = nil, 0
				return false
			}
			return true
		})
		switch {
		case rerr != nil:
			return buf, 0, rerr
		case err != nil:
			return buf, 0, err
		case n == 0 && stream:
			return buf, 0, io.EOF
		}
		return buf, n, nil
	}, nil
}
