package inspect

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
)

// h1Response writes one response of HTTP/1. It implements http.ResponseWriter, http.Flusher and
// http.Hijacker. Trailers are those of Go's http.TrailerPrefix.
type h1Response struct {
	c    *h1
	r    *http.Request
	body *clientBody

	header   http.Header
	length   int64 // that was promised; -1: none
	written  int64
	chunked  bool
	bare     bool // it has no body
	closing  bool // the connection ends with it
	hijacked bool

	// mu guards the writer and wrote: a body that is read asks for it while the response may begin.
	mu    sync.Mutex
	wrote bool
}

var errTooMuch = errors.New("the response is longer than it says")

// Header implements http.ResponseWriter.
func (w *h1Response) Header() http.Header { return w.header }

func (w *h1Response) askForBody() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.wrote {
		_, _ = io.WriteString(w.c.out, "HTTP/1.1 100 Continue\r\n\r\n")
		_ = w.c.out.Flush() // a client that has gone shows in the next read
	}
}

// WriteHeader implements http.ResponseWriter; 1xx responses may come before the last one.
func (w *h1Response) WriteHeader(status int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.wrote {
		return
	}
	if status >= 100 && status < 200 && status != http.StatusSwitchingProtocols {
		if w.r.ProtoAtLeast(1, 1) && status != http.StatusContinue { // we say Continue ourselves
			w.writeHead(status, w.header)
			_ = w.c.out.Flush()
		}
		return
	}
	w.wrote = true
	h := w.header.Clone()
	for name := range h {
		if len(name) > len(http.TrailerPrefix) && name[:len(http.TrailerPrefix)] == http.TrailerPrefix {
			delete(h, name)
		}
	}
	w.length = lengthOf(h)
	w.bare = w.r.Method == http.MethodHead || status == http.StatusNoContent || status == http.StatusNotModified
	switch {
	case status == http.StatusSwitchingProtocols:
		w.bare = true
	case w.bare:
	case w.length >= 0:
	case w.r.ProtoAtLeast(1, 1):
		w.chunked = true
		h.Set("Transfer-Encoding", "chunked")
	default:
		w.closing = true
	}
	w.closing = w.closing || h.Get("Connection") == "close"
	if body := w.body; body != nil && body.expect && !body.asked.Load() {
		w.closing = true
	}
	if status != http.StatusSwitchingProtocols {
		if w.r.Close || w.closing {
			w.closing = true
			h.Set("Connection", "close")
		} else if !w.r.ProtoAtLeast(1, 1) {
			h.Set("Connection", "keep-alive")
		}
	}
	w.writeHead(status, h)
}

func (w *h1Response) writeHead(status int, h http.Header) {
	fmt.Fprintf(w.c.out, "HTTP/1.1 %03d %s\r\n", status, http.StatusText(status))
	_ = h.Write(w.c.out) // an error stays in the writer and shows at its flush
	_, _ = io.WriteString(w.c.out, "\r\n")
}

// Write implements io.Writer.
func (w *h1Response) Write(p []byte) (int, error) {
	w.WriteHeader(http.StatusOK)
	if w.bare || len(p) == 0 {
		return len(p), nil
	}
	if w.length >= 0 && w.written+int64(len(p)) > w.length {
		return 0, errTooMuch
	}
	w.written += int64(len(p))
	if !w.chunked {
		return w.c.out.Write(p)
	}
	fmt.Fprintf(w.c.out, "%x\r\n", len(p))
	n, err := w.c.out.Write(p)
	if err == nil {
		_, err = io.WriteString(w.c.out, "\r\n")
	}
	return n, err
}

// FlushError implements what http.ResponseController looks for.
func (w *h1Response) FlushError() error {
	w.WriteHeader(http.StatusOK)
	return w.c.out.Flush()
}

// Flush implements http.Flusher.
func (w *h1Response) Flush() { _ = w.FlushError() }

// Hijack implements http.Hijacker. The head must have been written.
func (w *h1Response) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	w.hijacked = true
	return w.c.conn, bufio.NewReadWriter(w.c.in, w.c.out), w.c.out.Flush()
}

// finish ends the response. One that is shorter than it said ends the connection, so that the client
// knows.
func (w *h1Response) finish() error {
	w.WriteHeader(http.StatusOK)
	if w.length >= 0 && !w.bare && w.written < w.length {
		w.closing = true
	}
	if w.chunked {
		_, _ = io.WriteString(w.c.out, "0\r\n")
		trailer := make(http.Header)
		for name, values := range w.header {
			if len(name) > len(http.TrailerPrefix) && name[:len(http.TrailerPrefix)] == http.TrailerPrefix {
				trailer[name[len(http.TrailerPrefix):]] = values
			}
		}
		_ = trailer.Write(w.c.out)
		_, _ = io.WriteString(w.c.out, "\r\n")
	}
	return w.c.out.Flush()
}
