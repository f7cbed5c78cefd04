package e2b

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"casemate.dev/internal/e2b/interpreter"
	"casemate.dev/internal/sandbox"
)

// The code interpreter, as the sandbox's own code reaches it: at E2B a server inside listens on port 49999, and
// what is built for it asks there whether it is up, or has it run code. Here the same port of the sandbox's
// loopback device leads to the interpreter that the SDKs reach from outside. Nothing in the sandbox serves it,
// so nothing in there can end it.
//
// What asks is the sandbox's own code, whoever that is inside: it can have code run in this sandbox, as the user
// whose code the SDKs run, and nothing else. So the port is there only where E2B's protocol made the sandbox of a
// template of the code interpreter.

// Limits of such a connection: what is inside may be hostile.
const (
	insideHeader = 16 << 10
	insideIdle   = time.Minute
	insideRead   = 30 * time.Second // of a request's head
)

// insideKey is where a connection's sandbox stands in a request's context.
type insideKey struct{}

// ServeInside serves the interpreter's port inside a sandbox for which it is meant, until ctx ends.
func (a *API) ServeInside(ctx context.Context, s sandbox.Sandbox) {
	if !interpreter.For(keptOf(s).Template) {
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	conns := &handed{ctx: ctx, conns: make(chan net.Conn)}
	srv := &http.Server{
		Handler:           http.HandlerFunc(a.answerInside),
		ReadHeaderTimeout: insideRead, IdleTimeout: insideIdle, MaxHeaderBytes: insideHeader,
		BaseContext: func(net.Listener) context.Context { return context.WithValue(ctx, insideKey{}, s) },
		ErrorLog:    slog.NewLogLogger(a.log.Handler(), slog.LevelDebug),
	}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = srv.Serve(conns) // ends when it is closed
	}()
	err := a.cfg.Manager.ListenInside(ctx, sandbox.Principal{ID: s.Owner}, s.ID, interpreterPort, conns.hand)
	ended := ctx.Err() != nil
	cancel()
	_ = srv.Close()
	<-served
	if err != nil && !ended {
		a.log.Warn("the code interpreter's port is not served inside", "sandbox", s.ID, "error", err)
	}
}

// answerInside answers a request from inside.
func (a *API) answerInside(w http.ResponseWriter, r *http.Request) {
	s, _ := r.Context().Value(insideKey{}).(sandbox.Sandbox)
	if r.Header.Get("Origin") != "" {
		// A page in a browser inside is not the sandbox's code.
		writeError(w, http.StatusForbidden, "pages may not run code")
		return
	}
	// Counted, and never with a span: whoever is inside could add to anybody's trace.
	counts(a.dataMethod(r, interpreterPort), w, r, func(w http.ResponseWriter, r *http.Request) {
		a.interpreter.ServeSandbox(w, r, sandbox.Principal{ID: s.Owner, Inside: true}, s)
	})
}

// handed is a listener whose connections are handed to it.
type handed struct {
	ctx   context.Context //nolint:containedctx // a listener's life
	conns chan net.Conn
}

var _ net.Listener = (*handed)(nil)

// hand gives a connection to the server and returns when it was closed.
func (h *handed) hand(c net.Conn) {
	closed := make(chan struct{})
	one := &handedConn{Conn: c, closed: closed}
	defer context.AfterFunc(h.ctx, func() { _ = one.Close() })()
	select {
	case h.conns <- one:
		<-closed
	case <-h.ctx.Done():
		_ = one.Close()
	}
}

// Accept implements net.Listener.
func (h *handed) Accept() (net.Conn, error) {
	select {
	case c := <-h.conns:
		return c, nil
	case <-h.ctx.Done():
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener. The end of the context is what closes it.
func (h *handed) Close() error { return nil }

// Addr implements net.Listener.
func (h *handed) Addr() net.Addr { return insideAddr{} }

// insideAddr is the address that those inside know.
type insideAddr struct{}

// Network implements net.Addr.
func (insideAddr) Network() string { return "tcp" }

// String implements net.Addr.
func (insideAddr) String() string { return "127.0.0.1:49999" }

// handedConn tells when it is closed.
type handedConn struct {
	net.Conn
	once   sync.Once
	closed chan struct{}
	err    error
}

// Close implements net.Conn.
func (c *handedConn) Close() error {
	c.once.Do(func() {
		c.err = c.Conn.Close()
		close(c.closed)
	})
	if errors.Is(c.err, net.ErrClosed) {
		return nil
	}
	return c.err
}
