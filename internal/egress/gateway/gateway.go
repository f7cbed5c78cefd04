// Package gateway is the process that carries what sandboxes send.
//
// Per sandbox it holds one end of a TAP device and a user-space network stack behind it, in which every
// address answers: what the rules allow is dialled from here with ordinary sockets and copied; the rest is
// reset. It runs without any privilege, holds nothing but descriptors, rules and the secrets of the
// sandboxes that it serves, and believes nothing that comes from a device.
//
// What belongs here: packets, connections, DNS, and telling the server about them. What does not: deciding
// (package rules), and who has which rules (the server).
package gateway

import (
	"log/slog"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/egress/proxy"
	"casemate.dev/internal/errs"
)

// Config says how a Gateway works.
type Config struct {
	// Nameservers (host:port) look names up instead of the host's own.
	Nameservers []string
	// Inspector looks into connections; nil: what must be looked into is refused.
	Inspector egress.Inspector
	// Log takes what goes wrong; nil: nowhere.
	Log *slog.Logger
}

// Gateway serves sandboxes. Methods are safe for concurrent use.
type Gateway struct {
	log       *slog.Logger
	inspector egress.Inspector
	resolver  *resolver
	frames    *frames // for whole packets
	small     *frames // for sandboxes with many connections
	most      int     // connections of all sandboxes together
	began     time.Time
	nextConn  atomic.Uint64
	stats     stats
	answers   atomic.Int64                 // the cost of what sandboxes are answered from records
	proxy     atomic.Pointer[proxy.Client] // through which connections leave; nil: directly
	events    *events
	stop      chan struct{}
	wg        sync.WaitGroup

	mu        sync.Mutex // guards the fields below
	sandboxes map[string]*sandbox
	closed    bool

	ownMu    sync.Mutex // guards the fields below
	own      map[netip.Addr]bool
	ownUntil time.Time
}

// smallLen is the length of a small buffer, and fewConns how many connections of one sandbox get large ones:
// each may hold one each way while the other side is slow, within the sandbox's budget.
const (
	smallLen = 8 << 10
	fewConns = bufferBudget / 4 / (2 * frameLen)
)

// spareFiles is how many descriptors are for other things than connections.
const spareFiles = 1024

// descriptors returns how many connections the process may have open: each takes one, and each sandbox one
// for its device.
func descriptors() int {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return spareFiles
	}
	const sane = 1 << 20
	return max(int(min(l.Cur, sane))-spareFiles, spareFiles/4)
}

// stats count over all sandboxes.
type stats struct {
	connections, events atomic.Int64
	open                atomic.Int64 // now
	refused             atomic.Int64
	sent, received      atomic.Int64
}

// New returns a gateway that serves nobody yet.
func New(cfg Config) *Gateway {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	g := &Gateway{
		log: cfg.Log, inspector: cfg.Inspector, resolver: newResolver(cfg.Nameservers), frames: newFrames(frameLen), small: newFrames(smallLen), most: descriptors(), began: time.Now(),
		events: newEvents(), stop: make(chan struct{}), sandboxes: map[string]*sandbox{},
	}
	g.wg.Go(g.watchIdle)
	return g
}

// Attach begins to serve a sandbox by the descriptor of its device, which it takes over. Kinds:
// AlreadyExists, Unavailable.
func (g *Gateway) Attach(id string, tap *os.File, p egress.Policy) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	var err error
	switch {
	case g.closed:
		err = errs.New(errs.Unavailable, "the gateway is shutting down")
	case g.sandboxes[id] != nil:
		err = errs.New(errs.AlreadyExists, "the gateway serves sandbox %s already", id)
	}
	if err == nil && g.inspector != nil {
		err = g.inspector.Configure(id, p.Private)
	}
	if err != nil {
		_ = tap.Close()
		return err
	}
	s, err := g.newSandbox(id, tap, p)
	if err != nil {
		_ = tap.Close()
		return err
	}
	g.sandboxes[id] = s
	return nil
}

// Configure replaces a sandbox's policy, and cuts the connections that it no longer allows. Kinds: NotFound,
// FailedPrecondition where it would no longer be answered from a record, or only then.
func (g *Gateway) Configure(id string, p egress.Policy) error {
	s, err := g.find(id)
	if err != nil {
		return err
	}
	if p.Recorded != (s.recorded != nil) {
		return errs.New(errs.FailedPrecondition, "whether sandbox %s is answered from a record can't change", id)
	}
	if g.inspector != nil {
		if err := g.inspector.Configure(id, p.Private); err != nil {
			return err
		}
	}
	s.configure(p)
	return nil
}

// Detach ends everything of a sandbox and closes its device. A sandbox that is not served is no error.
func (g *Gateway) Detach(id string) {
	g.mu.Lock()
	s := g.sandboxes[id]
	delete(g.sandboxes, id)
	g.mu.Unlock()
	if s == nil {
		return
	}
	s.close()
	if g.inspector != nil {
		g.inspector.Remove(id)
	}
}

// Refused returns what was refused to a sandbox at or after since.
func (g *Gateway) Refused(id string, since time.Time) ([]egress.Refusal, error) {
	s, err := g.find(id)
	if err != nil {
		return nil, err
	}
	return s.refused(since), nil
}

// Sandboxes returns the ids of those that are served.
func (g *Gateway) Sandboxes() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	out := make([]string, 0, len(g.sandboxes))
	for id := range g.sandboxes {
		out = append(out, id)
	}
	return out
}

// Usage returns what a sandbox has moved and has open.
func (g *Gateway) Usage(id string) (egress.Usage, error) {
	s, err := g.find(id)
	if err != nil {
		return egress.Usage{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return egress.Usage{Sent: s.out.total.Load(), Received: s.in.total.Load(), Connections: len(s.conns)}, nil
}

// Close ends everything.
func (g *Gateway) Close() {
	g.mu.Lock()
	if g.closed {
		g.mu.Unlock()
		return
	}
	g.closed = true
	g.mu.Unlock()
	close(g.stop)
	for _, id := range g.Sandboxes() {
		g.Detach(id)
	}
	g.wg.Wait()
}

func (g *Gateway) find(id string) (*sandbox, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.sandboxes[id]
	if s == nil {
		return nil, errs.New(errs.NotFound, "the gateway does not serve sandbox %s", id)
	}
	return s, nil
}

// want asks the Inspector.
func (g *Gateway) want(sandbox string, t egress.Target) egress.Want {
	if g.inspector == nil {
		return egress.Pass
	}
	return g.inspector.Want(sandbox, t)
}

// idleLook is how often connections are looked at for the idle limit.
const idleLook = 5 * time.Second

// watchIdle ends connections that no byte has passed over for too long.
func (g *Gateway) watchIdle() {
	t := time.NewTicker(idleLook)
	defer t.Stop()
	for {
		select {
		case <-g.stop:
			return
		case <-t.C:
		}
		for _, id := range g.Sandboxes() {
			s, err := g.find(id)
			if err != nil {
				continue
			}
			s.flush()
			limit := s.policy.Load().limits.Idle
			for _, c := range s.open() {
				if c.idle() > limit {
					c.cut(limited("nothing passed for " + limit.String() + " (limit idle)"))
				}
			}
		}
	}
}
