package server

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"casemate.dev/internal/api"
	"casemate.dev/internal/errs"
)

// listener is one way in, with the HTTP server behind it.
type listener struct {
	net.Listener
	http *http.Server
	// direct stands in front of http where plain is spoken.
	direct *direct
	// plain and secure say what is spoken there.
	plain, secure bool
	// debug says that it serves E2B's debug mode alone, metrics the server's figures.
	debug, metrics bool
}

// The limits of a connection. A request's header must come soon and be small; its body and its
// answer may take as long as they take, since streams do. What strangers send is bounded by the API.
const (
	headerTimeout = 10 * time.Second
	idleTimeout   = 2 * time.Minute
	maxHeader     = 64 << 10
	maxSocketPath = 107 // unix(7): sun_path with its final zero byte
)

// listen opens all listeners. Serving starts with Run.
func (s *Server) listen(ctx context.Context) error {
	if err := s.listenUnix(ctx); err != nil {
		return err
	}
	for _, addr := range s.cfg.Listen {
		if err := s.listenTCP(ctx, addr); err != nil {
			return err
		}
	}
	return s.listenMetrics(ctx)
}

func (s *Server) add(l net.Listener, plain, secure bool) {
	way := listener{Listener: l, http: s.newHTTP(plain, secure), plain: plain, secure: secure}
	if plain {
		way.direct = newDirect(way.http, s.log)
	}
	s.listeners = append(s.listeners, way)
	s.undo.Add(func() { _ = l.Close() })
}

// listenUnix listens on the socket that needs no key. A stale one of a killed server is replaced: the
// run directory's lock says that no other server is there.
func (s *Server) listenUnix(ctx context.Context) error {
	path := s.cfg.UnixSocket
	if len(path) > maxSocketPath {
		return errs.New(errs.InvalidArgument, "the path %s is longer than the %d bytes that a socket may have", path, maxSocketPath).
			WithHint("choose a shorter --run-dir")
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove stale socket: %w", err)
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "unix", path)
	if err != nil {
		return fmt.Errorf("listen on %s: %w", path, err)
	}
	// Besides the mode, each connection's peer is asked for its uid; see connContext.
	if err := os.Chmod(path, 0o600); err != nil {
		_ = l.Close()
		return fmt.Errorf("protect socket: %w", err)
	}
	s.add(l, true, false)
	return nil
}

func (s *Server) listenTCP(ctx context.Context, addr string) error {
	l, err := listenAt(ctx, addr, "--listen")
	if err != nil {
		return err
	}
	onlyTLS := s.cfg.TLSCert != "" || s.cfg.TLSOnly
	if tcp, ok := l.Addr().(*net.TCPAddr); ok && !tcp.IP.IsLoopback() && !onlyTLS {
		s.log.Warn("listening beyond this machine, without TLS too: keys and data can be read on the way",
			slog.String("address", l.Addr().String()), slog.String("remedy", "--tls-only, --tls-cert and --tls-key, or a tunnel"))
	}
	s.add(l, !onlyTLS, true)
	return nil
}

// listenAt listens on a TCP address, which flag names.
func listenAt(ctx context.Context, addr, flag string) (net.Listener, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, errs.Wrap(err, errs.FailedPrecondition, "cannot listen on %s: the address is in use", addr).
			WithHint("choose another with %s, or stop what uses it", flag)
	}
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", addr, err)
	}
	return l, nil
}

func (s *Server) newHTTP(plain, secure bool) *http.Server {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(secure)
	protocols.SetUnencryptedHTTP2(plain) // gRPC clients without TLS begin with HTTP/2 at once
	return &http.Server{
		Handler:           s,
		Protocols:         protocols,
		HTTP2:             &http.HTTP2Config{MaxConcurrentStreams: 1000, SendPingTimeout: 30 * time.Second, PingTimeout: 15 * time.Second},
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeader,
		ConnContext:       connContext,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug), // what strangers send wrong
		TLSConfig:         &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: s.certificate},
	}
}

// serve serves one listener until it is closed. Where both are spoken, the first byte of a connection
// says which.
func (s *Server) serve(l listener) error {
	var err error
	switch {
	case l.plain && l.secure:
		both := split(l)
		go both.run()
		var g errgroup.Group
		g.Go(func() error { return l.http.Serve(l.direct.before(both.plain)) })
		g.Go(func() error { return l.http.ServeTLS(both.secure, "", "") })
		err = g.Wait()
	case l.secure:
		err = l.http.ServeTLS(l, "", "")
	case l.direct != nil:
		err = l.http.Serve(l.direct.before(l.Listener))
	default:
		err = l.http.Serve(l.Listener)
	}
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return fmt.Errorf("serve %s: %w", l.Addr(), err)
}

// connContext marks connections whose other end is root or the server's own user: these need no key.
func connContext(ctx context.Context, c net.Conn) context.Context {
	if b, ok := c.(*begun); ok {
		c = b.Conn
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		return ctx
	}
	uid, err := peerUID(u)
	if err != nil || (uid != 0 && int(uid) != os.Geteuid()) {
		return ctx
	}
	return api.WithLocalPeer(ctx)
}

// peerUID returns the user that opened the other end (SO_PEERCRED, unix(7)): the kernel's word.
func peerUID(c *net.UnixConn) (uint32, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *syscall.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	}); err != nil {
		return 0, err
	}
	if credErr != nil {
		return 0, os.NewSyscallError("getsockopt", credErr)
	}
	return cred.Uid, nil
}
