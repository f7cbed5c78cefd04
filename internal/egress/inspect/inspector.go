package inspect

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/secret"
)

// handshakeTimeout is how long a client may take for its TLS handshake.
const handshakeTimeout = 20 * time.Second

// Inspector implements egress.Inspector. Its zero value is not ready; use New.
type Inspector struct {
	// mu guards the fields below; what they point to does not change.
	mu      sync.RWMutex
	ca      *authority
	caPEM   string // what ca was made of, so that the same one is not opened again
	roots   *x509.CertPool
	boxes   map[string]*box
	budgets map[string]*budget // by sandbox and provider: they outlive a change of the box

	held  holds // of model requests
	taken holds // of what is kept of requests and answers
}

var _ egress.Inspector = (*Inspector)(nil)

// New returns an Inspector that knows no sandbox. Until Setup was called, it serves nothing that needs a
// certificate.
func New() *Inspector {
	return &Inspector{
		boxes: make(map[string]*box), budgets: make(map[string]*budget),
		held: holds{most: maxHeld, mostAll: maxHeldAll}, taken: holds{most: maxTaken, mostAll: maxTakenAll},
	}
}

// Setup implements egress.Inspector.
func (in *Inspector) Setup(p egress.Private) error {
	if len(p) == 0 {
		return nil // a server that has nothing to look into
	}
	var s Shared
	if err := json.Unmarshal(p, &s); err != nil {
		return errors.New("read the gateway's part: it is no JSON") // the cause might quote it
	}
	in.mu.RLock()
	ca, same := in.ca, in.caPEM == string(s.CertPEM)
	in.mu.RUnlock()
	if ca == nil || !same {
		var err error
		if ca, err = openAuthority(s.CertPEM, s.KeyPEM); err != nil {
			return err
		}
	}
	clear(s.KeyPEM)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(s.RootsPEM) // with none, no server is trusted, and requests say so
	in.mu.Lock()
	defer in.mu.Unlock()
	in.ca, in.caPEM, in.roots = ca, string(s.CertPEM), roots
	return nil
}

// Configure implements egress.Inspector.
func (in *Inspector) Configure(sandbox string, private egress.Private) error {
	var p part
	if len(private) > 0 {
		if err := json.Unmarshal(private, &p); err != nil {
			return errors.New("read a sandbox's part: it is no JSON") // the cause might quote it
		}
	}
	b := newBox(p)
	in.mu.Lock()
	defer in.mu.Unlock()
	for _, r := range p.Routes {
		key := sandbox + "/" + r.Provider
		spent, ok := in.budgets[key]
		if !ok {
			spent = &budget{}
			in.budgets[key] = spent
		}
		spent.atLeast(r.Spent)
		b.routes[r.Provider] = newRoute(r, spent)
	}
	in.boxes[sandbox] = b
	return nil
}

// Remove implements egress.Inspector.
func (in *Inspector) Remove(sandbox string) {
	in.mu.Lock()
	defer in.mu.Unlock()
	maps.DeleteFunc(in.budgets, func(key string, _ *budget) bool { return strings.HasPrefix(key, sandbox+"/") })
	delete(in.boxes, sandbox)
}

// box returns what is known of a sandbox; of one that is not known, that it may use nothing.
func (in *Inspector) box(sandbox string) *box {
	in.mu.RLock()
	defer in.mu.RUnlock()
	if b := in.boxes[sandbox]; b != nil {
		return b
	}
	return &box{misplaced: &needles{}}
}

// Want implements egress.Inspector.
func (in *Inspector) Want(sandbox string, t egress.Target) egress.Want {
	b := in.box(sandbox)
	if t.Name == secret.ModelHost {
		if len(b.routes) > 0 && (t.Port == 0 || t.Port == 80 || t.Port == 443) {
			return egress.Answer
		}
		return egress.Pass // which no rule can allow: the name exists nowhere
	}
	if t.Port != 0 && b.wants(t) {
		return egress.Look
	}
	return egress.Pass
}

// Serve implements egress.Inspector. A fault of ours ends the connection that met it, not those of all sandboxes.
func (in *Inspector) Serve(ctx context.Context, f *egress.Flow) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &egress.FaultError{Fault: v, Stack: debug.Stack()}
		}
	}()
	defer func() { _ = f.Client.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = f.Client.Close() })
	defer stop()
	in.mu.RLock()
	ca, roots := in.ca, in.roots
	in.mu.RUnlock()
	if ca == nil {
		return errors.New("no authority yet")
	}
	x := newFlow(in, f, roots)
	defer x.close()
	h := x.serve
	if f.Target.Name == secret.ModelHost {
		h = x.serveModels
	}
	if f.Hello == nil {
		return x.told1(serveHTTP1(ctx, f.Client, h))
	}
	conn, closed, err := x.handshake(ctx, ca)
	if err != nil {
		return err
	}
	if conn.ConnectionState().NegotiatedProtocol == "h2" {
		return serveHTTP2(ctx, conn, closed, h)
	}
	return x.told1(serveHTTP1(ctx, conn, h))
}

// told1 tells of a request of HTTP/1 that can't be understood in exactly one way, with which its connection ended.
func (x *flow) told1(err error) error {
	var bad *requestError
	if errors.As(err, &bad) {
		x.told.event(egress.Event{Type: egress.EventRequest, Status: bad.status, Note: cut(bad.reason, 256)})
	}
	return err
}

// handshake ends the client's TLS with a certificate of ours for the host that it connected to. closed is
// closed with the connection.
func (x *flow) handshake(ctx context.Context, ca *authority) (_ *tls.Conn, closed <-chan struct{}, err error) {
	leaf, err := ca.leaf(x.host)
	if err != nil {
		return nil, nil, err
	}
	done := make(chan struct{})
	watched := &watchedConn{Conn: x.f.Client, closed: sync.OnceFunc(func() { close(done) })}
	conn := tls.Server(watched, &tls.Config{
		MinVersion:   tls.VersionTLS12,
		Certificates: []tls.Certificate{*leaf},
		NextProtos:   []string{"h2", "http/1.1"},
		// Tickets would let a client resume where no certificate is shown; and nothing is gained on this link.
		SessionTicketsDisabled: true,
	})
	hctx, cancel := context.WithTimeout(ctx, handshakeTimeout)
	defer cancel()
	if err := conn.HandshakeContext(hctx); err != nil {
		return nil, nil, fmt.Errorf("TLS with the sandbox: %w", err)
	}
	return conn, done, nil
}

// serveHTTP2 serves one connection of HTTP/2 with net/http, which serves connections of listeners only.
func serveHTTP2(ctx context.Context, conn *tls.Conn, closed <-chan struct{}, h handler) error {
	l := &oneConn{conn: make(chan net.Conn, 1), closed: closed, addr: conn.LocalAddr()}
	l.conn <- conn
	srv := &http.Server{
		Handler:        http.HandlerFunc(h),
		BaseContext:    func(net.Listener) context.Context { return ctx },
		MaxHeaderBytes: maxHeader,
		IdleTimeout:    idleTimeout,
		HTTP2:          &http.HTTP2Config{MaxConcurrentStreams: 100},
		ErrorLog:       discardLog(),
	}
	err := srv.Serve(l)
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}
