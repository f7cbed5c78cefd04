package gateway

import (
	"context"
	"net"
	"os"
	"runtime"
	"sync"
	"time"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/egress/control"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/linux/daemon"
)

// lonelyLimit is how long a gateway that serves nobody waits for a server. One that was killed, and whose run
// directory is gone, never comes back.
const lonelyLimit = 2 * time.Minute

// company counts the connections of servers.
type company struct {
	mu   sync.Mutex // guards the fields below
	open int
	left time.Time // when the last one went
}

func (c *company) add(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open += n
	c.left = time.Now()
}

// alone returns for how long there has been no server.
func (c *company) alone() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.open > 0 {
		return 0
	}
	return time.Since(c.left)
}

// leaveWhenAlone ends a gateway that serves nobody and that nobody talks to.
func (g *Gateway) leaveWhenAlone(ctx context.Context, c *company, limit time.Duration, leave func()) {
	t := time.NewTicker(max(limit/10, time.Millisecond))
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		if c.alone() > limit && len(g.Sandboxes()) == 0 {
			leave()
			return
		}
	}
}

// Serve answers calls on l until the server asks the process to end, or there is neither a server nor a
// sandbox any more.
func (g *Gateway) Serve(l *net.UnixListener) error { return g.serve(l, lonelyLimit) }

func (g *Gateway) serve(l *net.UnixListener, limit time.Duration) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	servers := &company{left: time.Now()}
	go g.leaveWhenAlone(ctx, servers, limit, cancel)
	context.AfterFunc(ctx, func() { _ = l.Close() })
	for {
		c, err := l.AcceptUnix()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		go func() {
			servers.add(1)
			defer servers.add(-1)
			defer func() { _ = c.Close() }()
			if err := daemon.CheckPeer(c); err != nil {
				g.log.Warn("refused a control connection", "err", err)
				return
			}
			if g.serveConn(ctx, c) {
				cancel()
			}
		}()
	}
}

// serveConn answers the calls of one connection and reports whether the process is to end.
func (g *Gateway) serveConn(ctx context.Context, c *net.UnixConn) bool {
	// A server that goes away ends what it waits for.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for {
		var r control.Request
		f, err := control.Read(c, &r)
		if err != nil {
			return false
		}
		if r.Op == control.OpExit {
			_ = control.Write(c, &control.Reply{}, nil)
			return true
		}
		reply, err := g.call(ctx, r, f)
		if err != nil {
			reply = control.Fail(err)
		}
		if control.Write(c, reply, nil) != nil {
			return false
		}
	}
}

func (g *Gateway) call(ctx context.Context, r control.Request, f *os.File) (*control.Reply, error) {
	if f != nil && r.Op != control.OpAttach {
		_ = f.Close()
	}
	policy := egress.Policy{}
	if r.Policy != nil {
		policy = *r.Policy
	}
	reply := &control.Reply{}
	var err error
	switch r.Op {
	case control.OpHello:
		reply.Protocol, reply.Sandboxes = control.Protocol, g.Sandboxes()
		g.SetProxy(r.Proxy)
		if g.inspector != nil {
			err = g.inspector.Setup(r.Shared)
		}
	case control.OpAttach:
		if f == nil {
			return nil, errs.New(errs.InvalidArgument, "no device came with the call")
		}
		err = g.Attach(r.Sandbox, f, policy)
	case control.OpConfigure:
		err = g.Configure(r.Sandbox, policy)
	case control.OpDetach:
		g.Detach(r.Sandbox)
	case control.OpRefused:
		reply.Refusals, err = g.Refused(r.Sandbox, r.Since)
	case control.OpUsage:
		var u egress.Usage
		u, err = g.Usage(r.Sandbox)
		reply.Usage = &u
	case control.OpEvents:
		reply.Events, reply.Last, err = g.Events(ctx, r.After)
	case control.OpAnswers:
		err = g.SetAnswers(r.Sandbox, r.Answers, r.More)
	case control.OpWaiting:
		reply.Last = g.waiting(r.Sandbox)
	case control.OpStats:
		reply.Stats = g.statsNow()
	default:
		err = errs.New(errs.Unsupported, "the gateway knows no call %q", r.Op)
	}
	return reply, err
}

func (g *Gateway) statsNow() *egress.Stats {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return &egress.Stats{
		Sandboxes: len(g.Sandboxes()), Connections: g.stats.connections.Load(), Events: g.stats.events.Load(),
		Open: g.stats.open.Load(), Refused: g.stats.refused.Load(), Sent: g.stats.sent.Load(), Received: g.stats.received.Load(),
		Goroutines: runtime.NumGoroutine(), HeapBytes: int64(m.HeapAlloc),
	}
}
