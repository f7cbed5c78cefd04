package inspect

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"casemate.dev/internal/egress/peek"
)

// The patience with a client.
const (
	headTimeout = 30 * time.Second // from the first byte of a head to its end
	idleTimeout = 5 * time.Minute  // between requests
	writeStall  = 2 * time.Minute  // for one write to a client that reads nothing
	lingerTime  = time.Second      // for a client that was refused to notice
	// drainMost is how much of a body that nobody wanted is read so that the connection can be used again.
	drainMost = 256 << 10
)

// h1 serves HTTP/1 on one connection: one request after the other.
type h1 struct {
	conn net.Conn
	in   *bufio.Reader
	out  *bufio.Writer
}

// handler answers one request. It must read nothing of a hijacked connection but through the response.
type handler func(w http.ResponseWriter, r *http.Request)

// serveHTTP1 serves a connection to its end. ctx ends every request.
func serveHTTP1(ctx context.Context, conn net.Conn, h handler) error {
	c := &h1{conn: conn, in: bufio.NewReaderSize(conn, peek.MaxHead+4), out: bufio.NewWriterSize(stallGuard{conn}, 16<<10)}
	for {
		r, err := c.next(ctx)
		if err != nil {
			var bad *requestError
			if errors.As(err, &bad) {
				c.refuse(bad)
			}
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		if again, err := c.serve(r, h); err != nil || !again {
			return err
		}
	}
}

// stallGuard gives each write a deadline of its own, so that long responses have none.
type stallGuard struct{ net.Conn }

// Write implements io.Writer.
func (g stallGuard) Write(p []byte) (int, error) {
	_ = g.SetWriteDeadline(time.Now().Add(writeStall)) // a connection that has none never stalls for long
	return g.Conn.Write(p)
}

// requestError is a request that can't be understood in exactly one way.
type requestError struct {
	status int
	reason string
}

// Error implements error.
func (e *requestError) Error() string { return e.reason }

// next reads the head of the next request. What a strict parser does not take is a *requestError: after
// it nobody knows where the next request begins.
func (c *h1) next(ctx context.Context) (*http.Request, error) {
	_ = c.conn.SetReadDeadline(time.Now().Add(idleTimeout))
	if err := c.skipEmptyLine(); err != nil {
		return nil, err
	}
	_ = c.conn.SetReadDeadline(time.Now().Add(headTimeout))
	head, err := c.head()
	if err != nil {
		return nil, err
	}
	r, err := http.ReadRequest(c.in) // reads the bytes that were checked, and no others
	if err != nil {
		return nil, &requestError{http.StatusBadRequest, "the request can't be read"}
	}
	if head.Length < 0 && !r.ProtoAtLeast(1, 1) {
		return nil, &requestError{http.StatusBadRequest, "a request of HTTP/1.0 can't be chunked"}
	}
	if r.Host != head.Host || r.URL.Host != "" || r.ContentLength != head.Length {
		// The strict parser and the reader disagree: a fault of ours, which must not become a smuggled request.
		return nil, &requestError{http.StatusBadRequest, "the request can be understood in two ways"}
	}
	_ = c.conn.SetReadDeadline(time.Time{})
	return r.WithContext(ctx), nil
}

// skipEmptyLine takes the one empty line that old clients send behind a body (RFC 9112, 2.2).
func (c *h1) skipEmptyLine() error {
	b, err := c.in.Peek(1)
	if err != nil || b[0] != '\r' {
		return err
	}
	if b, err = c.in.Peek(2); err == nil && b[1] == '\n' {
		_, err = c.in.Discard(2)
	}
	return err
}

func (c *h1) head() (peek.Head, error) {
	for n := max(1, c.in.Buffered()); ; n = c.in.Buffered() + 1 {
		b, err := c.in.Peek(min(n, c.in.Size()))
		if len(b) < c.in.Buffered() {
			b, _ = c.in.Peek(c.in.Buffered())
		}
		h, perr := peek.ParseHead(b)
		switch {
		case perr == nil:
			return h, nil
		case !errors.Is(perr, peek.ErrShort):
			status := http.StatusBadRequest
			if len(b) > peek.MaxHead {
				status = http.StatusRequestHeaderFieldsTooLarge
			}
			return h, &requestError{status, perr.Error()}
		case errors.Is(err, io.EOF) && len(b) > 0:
			return h, io.ErrUnexpectedEOF
		case err != nil:
			return h, err
		}
	}
}

func (c *h1) refuse(b *requestError) {
	body := "casemate: " + b.reason + "\n"
	_, _ = fmt.Fprintf(c.out, "HTTP/1.1 %d %s\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s",
		b.status, http.StatusText(b.status), len(body), body)
	if c.out.Flush() != nil {
		return // a client that has gone is none to tell
	}
	// A close while the client sends would take the answer from it.
	closeWrite(c.conn)
	_ = c.conn.SetReadDeadline(time.Now().Add(lingerTime))
	_, _ = io.CopyN(io.Discard, c.conn, drainMost)
}

// serve answers one request and reports whether another may follow on the connection.
func (c *h1) serve(r *http.Request, h handler) (again bool, err error) {
	w := &h1Response{c: c, r: r, header: make(http.Header), length: -1}
	body := &clientBody{ReadCloser: r.Body, w: w}
	body.expect = strings.EqualFold(r.Header.Get("Expect"), "100-continue") && r.ProtoAtLeast(1, 1)
	w.body = body
	if r.Body != http.NoBody {
		r.Body = body
	}
	keep := !r.Close
	aborted := serveGuarded(h, w, r)
	if w.hijacked {
		return false, nil
	}
	if aborted {
		return false, nil
	}
	if err := w.finish(); err != nil {
		return false, err
	}
	if !keep || w.closing {
		return false, nil
	}
	if r.Body == http.NoBody || body.done.Load() {
		return true, nil
	}
	if body.expect && !body.asked.Load() {
		return false, nil // the client may send the body, or the next request: nobody can tell
	}
	_ = c.conn.SetReadDeadline(time.Now().Add(headTimeout))
	if _, err := io.CopyN(io.Discard, body, drainMost); !errors.Is(err, io.EOF) {
		return false, nil
	}
	return true, nil
}

// serveGuarded calls h and reports whether it gave up in the middle of a response.
func serveGuarded(h handler, w http.ResponseWriter, r *http.Request) (aborted bool) {
	defer func() {
		if v := recover(); v != nil {
			if v != http.ErrAbortHandler { //nolint:errorlint // net/http compares it so
				panic(v)
			}
			aborted = true
		}
	}()
	h(w, r)
	return false
}

// clientBody is a request's body. Its first read asks a client for it that waits to be asked.
type clientBody struct {
	io.ReadCloser
	w      *h1Response
	expect bool
	asked  atomic.Bool
	done   atomic.Bool
}

// Read implements io.Reader.
func (b *clientBody) Read(p []byte) (int, error) {
	if b.expect && b.asked.CompareAndSwap(false, true) {
		b.w.askForBody()
	}
	n, err := b.ReadCloser.Read(p)
	if errors.Is(err, io.EOF) {
		b.done.Store(true)
	}
	return n, err
}

// Close implements io.Closer. What is left is drained by serve, which knows how much is worth it.
func (b *clientBody) Close() error { return nil }

// lengthOf returns the Content-Length of a response's header; -1 where it has none.
func lengthOf(h http.Header) int64 {
	n, err := strconv.ParseInt(h.Get("Content-Length"), 10, 64)
	if err != nil || n < 0 {
		return -1
	}
	return n
}
