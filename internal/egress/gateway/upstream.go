package gateway

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/egress/resolve"
	"casemate.dev/internal/egress/rules"
)

// The time limits towards the world.
const (
	lookupTimeout = 5 * time.Second
	dialTimeout   = 10 * time.Second
	// lookupKept is how long an answer is used. The resolver tells no time to live, and most are longer.
	lookupKept  = 30 * time.Second
	maxLookedUp = 4096
)

// resolver looks up names for all sandboxes, with the host's own configuration.
type resolver struct {
	net *net.Resolver

	mu    sync.Mutex // guards the field below
	known map[string]looked
}

type looked struct {
	addrs []netip.Addr
	err   error
	until time.Time
}

func newResolver(servers []string) *resolver {
	return &resolver{net: resolve.New(servers), known: map[string]looked{}}
}

// lookup returns a name's addresses.
func (r *resolver) lookup(ctx context.Context, name string) ([]netip.Addr, error) {
	now := time.Now()
	r.mu.Lock()
	l, ok := r.known[name]
	r.mu.Unlock()
	if ok && now.Before(l.until) {
		return l.addrs, l.err
	}
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	// With a dot at its end, so that no search list of the host's is tried: it would look up other names.
	addrs, err := r.net.LookupNetIP(ctx, "ip", name+".")
	if err != nil && ctx.Err() != nil {
		return nil, err
	}
	for i, a := range addrs {
		addrs[i] = a.Unmap().WithZone("")
	}
	kept := lookupKept
	if err != nil {
		kept = time.Second
	}
	r.keep(name, looked{addrs, err, now.Add(kept)})
	return addrs, err
}

func (r *resolver) keep(name string, l looked) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.known) >= maxLookedUp {
		clear(r.known)
	}
	r.known[name] = l
}

// lookupBriefly is lookup where it may be that nobody answers: that is remembered, too.
func (r *resolver) lookupBriefly(ctx context.Context, name string) ([]netip.Addr, error) {
	brief, cancel := context.WithTimeout(ctx, proxyLookup)
	defer cancel()
	addrs, err := r.lookup(brief, name)
	if err != nil && ctx.Err() == nil {
		r.keep(name, looked{nil, err, time.Now().Add(lookupKept)})
	}
	return addrs, err
}

// dial opens the other side of a connection. It records why it could not.
func (c *conn) dial(ctx context.Context) (net.Conn, error) {
	if err := c.sealed(); err != nil {
		return nil, err
	}
	q := c.judged()
	up, to, v := c.s.gw.reach(ctx, c.s.policy.Load().proxy, q, c.s.judge)
	if !v.Allow {
		return nil, c.failed(v)
	}
	c.mu.Lock()
	c.query.Addr, c.query.Own = to.addr, to.addr.IsValid() && c.s.gw.ownAddress(to.addr)
	c.dialed, c.via = to.dialed, to.via
	c.mu.Unlock()
	return up, nil
}

// failed records a refusal, unless the connection was ended meanwhile.
func (c *conn) failed(v rules.Verdict) error {
	if c.ctx.Err() != nil {
		return c.ctx.Err()
	}
	c.refuse(v)
	return &egress.RefusedError{Target: rules.Target(c.judged()), Verdict: v}
}

// plain is what went wrong without addresses, which the caller knows.
func plain(err error) string {
	var op *net.OpError
	if errors.As(err, &op) {
		if op.Timeout() {
			return "timed out"
		}
		return op.Err.Error()
	}
	return err.Error()
}

// dialAny dials addresses one after the other, IPv4 first, and returns the first connection. Each later
// one begins a little after the one before, so that a silent address costs little.
func (g *Gateway) dialAny(ctx context.Context, addrs []netip.Addr, port uint16) (net.Conn, netip.Addr, error) {
	addrs = ordered(addrs)
	const most, apart = 6, 250 * time.Millisecond
	addrs = addrs[:min(len(addrs), most)]
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	type result struct {
		c   net.Conn
		a   netip.Addr
		err error
	}
	results := make(chan result, len(addrs))
	started, failed := 0, 0
	start := func() {
		a := addrs[started]
		started++
		go func() {
			c, err := g.dialOne(ctx, netip.AddrPortFrom(a, port))
			results <- result{c, a, err}
		}()
	}
	drop := func(n int) {
		for range n {
			if r := <-results; r.c != nil {
				_ = r.c.Close()
			}
		}
	}
	start()
	var all []error
	for {
		var next <-chan time.Time
		var t *time.Timer
		if started < len(addrs) {
			t = time.NewTimer(apart)
			next = t.C
		}
		select {
		case <-next:
			start()
		case r := <-results:
			if r.err == nil {
				if pending := started - failed - 1; pending > 0 {
					cancel()
					go drop(pending)
				}
				return r.c, r.a, nil
			}
			failed++
			all = append(all, r.err)
			if failed == len(addrs) {
				return nil, netip.Addr{}, all[0]
			}
			if started < len(addrs) && failed == started {
				start()
			}
		}
		if t != nil {
			t.Stop()
		}
	}
}

// ordered returns addresses with those of IPv4 first.
func ordered(addrs []netip.Addr) []netip.Addr {
	addrs = slices.Clone(addrs)
	slices.SortStableFunc(addrs, func(a, b netip.Addr) int { return a.BitLen() - b.BitLen() })
	return addrs
}

func (g *Gateway) dialOne(ctx context.Context, a netip.AddrPort) (net.Conn, error) {
	var d net.Dialer
	d.SetMultipathTCP(false)
	return d.DialContext(ctx, "tcp", a.String())
}

// dialTo dials a host outside a sandbox's rules, for the Inspector.
func (g *Gateway) dialTo(ctx context.Context, host string, port uint16, special bool) (net.Conn, error) {
	name, addr, err := rules.Host(host)
	if err != nil {
		return nil, err
	}
	none := rules.NewSet(nil)
	up, _, v := g.reach(ctx, nil, rules.Query{Proto: rules.TCP, Name: name, Addr: addr, Port: port}, func(q rules.Query) rules.Verdict {
		if !special && (none.Special(q.Addr) || q.Own) {
			return rules.Verdict{Code: rules.SpecialAddress, Reason: host + " leads to addresses that are private, reserved or the host's own"}
		}
		return rules.Verdict{Allow: true, Code: rules.Allowed}
	})
	if !v.Allow {
		return nil, &egress.RefusedError{Target: net.JoinHostPort(host, strconv.Itoa(int(port))), Verdict: v}
	}
	return up, nil
}

// ownKept is how long the host's addresses are remembered.
const ownKept = 5 * time.Second

// ownAddress reports whether an address is one of this host's.
func (g *Gateway) ownAddress(a netip.Addr) bool {
	g.ownMu.Lock()
	defer g.ownMu.Unlock()
	if now := time.Now(); now.After(g.ownUntil) {
		list, err := net.InterfaceAddrs()
		if err == nil {
			g.own = map[netip.Addr]bool{}
			for _, x := range list {
				if n, ok := x.(*net.IPNet); ok {
					if b, ok := netip.AddrFromSlice(n.IP); ok {
						g.own[b.Unmap()] = true
					}
				}
			}
			g.ownUntil = now.Add(ownKept)
		}
	}
	// Not known is taken for yes: it only asks for a rule that names the address.
	return g.own == nil || g.own[a]
}
