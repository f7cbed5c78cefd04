package server

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"runtime/debug"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// direct answers unary calls of the native API over HTTP/1.1 in one goroutine for each connection, as the Go
// client's half of the same name asks them. net/http has a second goroutine look for the caller's leaving
// during each call, and tells it to stop afterwards: that wakes two threads, and costs as much as all else that
// net/http does for a call. Here only a call that takes hangupAfter is looked after so.
//
// It stands between a listener and net/http, to which it is the listener: whatever is not such a call, or not in
// so plain a form, goes there, with the connection.
type direct struct {
	net.Listener
	handler http.Handler
	context func(context.Context, net.Conn) context.Context
	log     *slog.Logger

	handed chan accepted // for net/http
	closed chan struct{}
	rested chan struct{} // closed once it is closed and no call is under way

	// mu guards the fields below.
	mu    sync.Mutex
	conns map[*directConn]struct{}
	calls int
	over  bool // it is closed
}

const (
	// rpcStart is how a request begins that may be one for direct.
	rpcStart = "POST /casemate.v1."
	// unaryType is the type of unary calls in protobuf; those in JSON are made by hand and by programs that
	// have no hurry, and streams have types of their own.
	unaryType = "application/proto"
	// maxDirect bounds the body of a request that is answered here, and directBuffer its header.
	maxDirect    = 64 << 10
	directBuffer = 4 << 10
	// hangupAfter is from when on a call ends with its caller. It costs nobody more than that time.
	hangupAfter = 50 * time.Millisecond
)

// newDirect returns what serve puts in front of srv.
func newDirect(srv *http.Server, log *slog.Logger) *direct {
	return &direct{
		handler: srv.Handler, context: srv.ConnContext, log: log,
		handed: make(chan accepted), closed: make(chan struct{}), rested: make(chan struct{}),
		conns: make(map[*directConn]struct{}),
	}
}

// before returns the listener for net/http that lets through what comes from l and is not for direct.
func (d *direct) before(l net.Listener) net.Listener {
	d.Listener = l
	go d.run()
	return d
}

// run accepts until the listener is closed. net/http decides what becomes of errors.
func (d *direct) run() {
	for {
		c, err := d.Listener.Accept()
		if err != nil {
			d.hand(accepted{err: err})
			if errors.Is(err, net.ErrClosed) {
				return
			}
			continue
		}
		go d.serve(c)
	}
}

// hand gives a connection to net/http.
func (d *direct) hand(a accepted) {
	select {
	case d.handed <- a:
	case <-d.closed:
		if a.conn != nil {
			_ = a.conn.Close()
		}
	}
}

// Accept implements net.Listener.
func (d *direct) Accept() (net.Conn, error) {
	select {
	case a := <-d.handed:
		return a.conn, a.err
	case <-d.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener. Connections without a call are dropped; calls under way go on, see wait.
func (d *direct) Close() error {
	d.mu.Lock()
	if d.over {
		d.mu.Unlock()
		return net.ErrClosed
	}
	d.over = true
	close(d.closed)
	if d.calls == 0 {
		close(d.rested)
	}
	for c := range d.conns {
		_ = c.SetReadDeadline(past()) // a call that was read whole does not notice
	}
	d.mu.Unlock()
	return d.Listener.Close()
}

// past is a deadline that is over.
func past() time.Time { return time.Unix(1, 0) }

// shutdown returns once no call is under way any more. When ctx ends it drops those that are left. It follows
// Close.
func (d *direct) shutdown(ctx context.Context) {
	select {
	case <-d.rested:
		return
	case <-ctx.Done():
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for c := range d.conns {
		_ = c.Close()
	}
}

// begin notes a call; false after Close.
func (d *direct) begin() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.over {
		d.calls++
	}
	return !d.over
}

func (d *direct) end() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.calls--; d.calls == 0 && d.over {
		close(d.rested)
	}
}

// enter notes a connection; false after Close.
func (d *direct) enter(c *directConn) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.over {
		d.conns[c] = struct{}{}
	}
	return !d.over
}

func (d *direct) leave(c *directConn) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.conns, c)
}

// directConn is a connection that has begun with a unary call.
type directConn struct {
	net.Conn
	d      *direct
	ctx    context.Context
	r      *bufio.Reader
	out    []byte
	body   []byte
	remote string
	until  time.Time // the read deadline
	used   bool      // it has carried a call
	last   bool      // no other call follows
}

// serve serves a connection, or gives it to net/http.
func (d *direct) serve(nc net.Conn) {
	c := &directConn{Conn: nc, d: d}
	if !d.enter(c) {
		_ = nc.Close()
		return
	}
	defer d.leave(c)
	if _, ok := nc.(syscall.Conn); !ok { // loopback's, into which nobody can look
		d.hand(accepted{conn: nc})
		return
	}
	_ = nc.SetReadDeadline(time.Now().Add(headerTimeout))
	ours, err := beginsWith(nc, rpcStart)
	if err != nil {
		_ = nc.Close()
		return
	}
	if !ours {
		_ = nc.SetReadDeadline(time.Time{})
		d.hand(accepted{conn: nc})
		return
	}
	c.r = bufio.NewReaderSize(nc, directBuffer)
	c.remote = nc.RemoteAddr().String()
	c.ctx = d.context(context.Background(), nc)
	if c.converse() {
		_ = nc.SetReadDeadline(time.Time{})
		rest, _ := c.r.Peek(c.r.Buffered()) // what is there can't fail
		d.hand(accepted{conn: &begun{Conn: nc, rest: rest}})
		return
	}
	_ = nc.Close()
}

// begun is a connection of which some bytes have been read.
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

// converse answers one call after the other. It reports whether what comes next is for net/http.
func (c *directConn) converse() (others bool) {
	for !c.last {
		if !c.await() {
			return false
		}
		head, _ := c.r.Peek(c.r.Buffered())
		if !plain(head) {
			return true
		}
		r, err := http.ReadRequest(c.r)
		if err != nil || !suits(r) {
			// Nothing was read from the connection meanwhile: head holds the whole of it.
			c.r.Reset(io.MultiReader(bytes.NewReader(bytes.Clone(head)), c.Conn))
			_, _ = c.r.Peek(1)
			return true
		}
		if !c.answer(r) {
			return false
		}
	}
	return false
}

// await waits for the next request. It reports false where there is none.
func (c *directConn) await() bool {
	if now := time.Now(); c.used && c.until.Sub(now) < idleTimeout/2 {
		c.until = now.Add(idleTimeout)
		_ = c.SetReadDeadline(c.until)
	}
	select {
	case <-c.d.closed: // after the deadline was set, which Close sets too
		return false
	default:
	}
	_, err := c.r.Peek(1)
	return err == nil
}

// plain reports whether a whole header of a unary call lies in head.
func plain(head []byte) bool {
	end := bytes.Index(head, []byte("\r\n\r\n"))
	return end > 0 && bytes.HasPrefix(head, []byte(rpcStart)) && bytes.Contains(head[:end+2], []byte(": "+unaryType+"\r\n"))
}

// suits reports whether a request is a unary call in the usual form. What is not is net/http's, also to refuse.
func suits(r *http.Request) bool {
	h := r.Header
	return r.ProtoMajor == 1 && r.ProtoMinor == 1 && r.Host != "" && r.ContentLength >= 0 && r.ContentLength <= maxDirect &&
		h.Get("Content-Type") == unaryType && !r.Close && len(r.TransferEncoding) == 0 && r.Trailer == nil &&
		len(h["Connection"]) == 0 && len(h["Upgrade"]) == 0 && len(h["Expect"]) == 0 && r.URL.Host == "" && r.URL.RawQuery == ""
}

// answer serves a call. It reports whether another may follow.
func (c *directConn) answer(r *http.Request) (more bool) {
	n := int(r.ContentLength)
	if cap(c.body) < n {
		c.body = make([]byte, n)
	}
	c.body = c.body[:n]
	if _, err := io.ReadFull(r.Body, c.body); err != nil || !c.d.begin() {
		return false
	}
	defer c.d.end()
	c.used = true
	ctx, cancel := context.WithCancel(c.ctx)
	defer cancel()
	r.Body = io.NopCloser(bytes.NewReader(c.body))
	r.RemoteAddr = c.remote
	h := c.watch(cancel)
	w := &directWriter{c: c, status: http.StatusOK, header: make(http.Header, 8)}
	defer func() {
		h.stop()
		if e := recover(); e != nil {
			more = false
			if e != http.ErrAbortHandler { //nolint:errorlint // as net/http does
				c.d.log.Error("a handler panicked", slog.Any("panic", e), slog.String("stack", string(debug.Stack())))
			}
		}
	}()
	c.d.handler.ServeHTTP(w, r.WithContext(ctx))
	return w.send() == nil
}

// hangup looks whether the caller leaves during a call that takes long.
type hangup struct {
	c      *directConn
	cancel func()
	timer  *time.Timer
	over   chan struct{}

	// mu guards the field below, and the setting of deadlines.
	mu      sync.Mutex
	stopped bool
}

func (c *directConn) watch(cancel func()) *hangup {
	h := &hangup{c: c, cancel: cancel, over: make(chan struct{})}
	h.timer = time.AfterFunc(hangupAfter, h.look)
	return h
}

func (h *hangup) look() {
	defer close(h.over)
	h.mu.Lock()
	stopped := h.stopped
	if !stopped {
		_ = h.c.SetReadDeadline(time.Time{})
	}
	h.mu.Unlock()
	if stopped {
		return
	}
	// What comes stays in the buffer: the next request, if anything.
	if _, err := h.c.r.Peek(1); err != nil && !isTimeout(err) {
		h.cancel()
	}
}

// stop ends the looking; the connection can be read again afterwards.
func (h *hangup) stop() {
	if h.timer.Stop() {
		return
	}
	h.mu.Lock()
	h.stopped = true
	_ = h.c.SetReadDeadline(past())
	h.mu.Unlock()
	<-h.over
	h.c.until = time.Time{} // it is to be set anew
}

func isTimeout(err error) bool {
	var t net.Error
	return errors.As(err, &t) && t.Timeout()
}

// directWriter is an answer, which is sent whole.
type directWriter struct {
	c      *directConn
	status int
	wrote  bool
	header http.Header
	body   []byte
}

// Header implements http.ResponseWriter.
func (w *directWriter) Header() http.Header { return w.header }

// WriteHeader implements http.ResponseWriter.
func (w *directWriter) WriteHeader(status int) {
	if !w.wrote && status >= http.StatusOK { // an informational one is nothing that anybody waits for
		w.status, w.wrote = status, true
	}
}

// Write implements http.ResponseWriter.
func (w *directWriter) Write(p []byte) (int, error) {
	w.wrote = true
	w.body = append(w.body, p...)
	return len(p), nil
}

// SetReadDeadline is for http.ResponseController. The body was read already.
func (w *directWriter) SetReadDeadline(time.Time) error { return nil }

// SetWriteDeadline is for http.ResponseController.
func (w *directWriter) SetWriteDeadline(t time.Time) error { return w.c.SetWriteDeadline(t) }

// send sends the answer.
func (w *directWriter) send() error {
	c := w.c
	c.last = w.header.Get("Connection") == "close"
	b := append(c.out[:0], "HTTP/1.1 "...)
	b = strconv.AppendInt(b, int64(w.status), 10)
	b = append(append(append(b, ' '), http.StatusText(w.status)...), "\r\nDate: "...)
	b = time.Now().UTC().AppendFormat(b, http.TimeFormat)
	b = strconv.AppendInt(append(b, "\r\nContent-Length: "...), int64(len(w.body)), 10)
	b = append(b, "\r\n"...)
	w.header.Del("Content-Length")
	out := bytes.NewBuffer(b)
	if err := w.header.Write(out); err != nil {
		return err
	}
	_, _ = out.WriteString("\r\n") // into memory
	_, _ = out.Write(w.body)
	if c.out = out.Bytes(); len(c.out) > maxDirect {
		defer func() { c.out = nil }()
	}
	_, err := c.Conn.Write(c.out)
	return err
}

// beginsWith reports whether what comes on a connection begins with text, without taking it (recv(2), MSG_PEEK).
// What comes in pieces does not.
func beginsWith(c net.Conn, text string) (bool, error) {
	var buf [64]byte
	n, err := peekInto(c, buf[:len(text)])
	return err == nil && string(buf[:n]) == text, err
}
