package server

import (
	"context"
	"net"
	"sync"

	"casemate.dev/client"
	"casemate.dev/internal/mcp"
	"casemate.dev/internal/policy"
)

// mcpPath is where the server speaks the Model Context Protocol.
const mcpPath = "/mcp"

// openMCP makes the handler of the Model Context Protocol. Its tools call the native API as any client
// does, over connections that stay in memory: with the caller's key, which is judged there again.
func (s *Server) openMCP(keys *policy.Keys) {
	loop := newLoopback()
	s.add(loop, true, false)
	s.mcp = mcp.New(mcp.Config{
		Version: s.cfg.Version, Log: s.log,
		Connect: func(key string) (*client.Client, error) {
			return client.New("http://127.0.0.1", key, client.WithDialer(loop.dial), client.WithReconnect(0), client.WithUserAgent("casemate-mcp"))
		},
	})
	s.mcpHandler = s.mcp.Handler(mcp.HTTPConfig{
		Hosts: s.hosts(),
		Verify: func(ctx context.Context, key string) error {
			_, err := keys.Authenticate(ctx, key)
			return err
		},
	})
	s.undo.Add(s.mcp.Close)
}

// loopback is a listener whose connections never leave the process.
type loopback struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func newLoopback() *loopback {
	return &loopback{conns: make(chan net.Conn), closed: make(chan struct{})}
}

// dial opens a connection to the listener.
func (l *loopback) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	ours, theirs := net.Pipe()
	select {
	case l.conns <- theirs:
		return ours, nil
	case <-l.closed:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// Accept implements net.Listener.
func (l *loopback) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (l *loopback) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

// Addr implements net.Listener.
func (l *loopback) Addr() net.Addr { return loopbackAddr{} }

type loopbackAddr struct{}

// Network implements net.Addr.
func (loopbackAddr) Network() string { return "memory" }

// String implements net.Addr.
func (loopbackAddr) String() string { return "memory" }
