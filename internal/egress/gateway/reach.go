package gateway

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"time"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/egress/proxy"
	"casemate.dev/internal/egress/rules"
)

// How long a proxy may take to connect, and how long a name is looked up that it may know where we do not: in a
// network whose only way out is a proxy, nobody answers.
const (
	proxyTimeout = 20 * time.Second
	proxyLookup  = 2 * time.Second
)

// SetProxy sends what is dialled from now on through a proxy; nil: no longer. One that can't be used is
// remembered as such, so that nothing leaves past it.
func (g *Gateway) SetProxy(p *proxy.Proxy) {
	if p == nil {
		g.proxy.Store(nil)
		return
	}
	c, err := proxy.NewClient(*p)
	if err != nil {
		c = &proxy.Client{Proxy: *p}
		c.Fault = err.Error()
	}
	g.proxy.Store(c)
}

// proxied returns the proxy for a target, or nil where it is dialled directly. A sandbox's own, where it is not nil, is
// for all targets.
func (g *Gateway) proxied(own *proxy.Client, name string, addr netip.Addr, port uint16) *proxy.Client {
	if own != nil {
		return own
	}
	p := g.proxy.Load()
	if p == nil || p.Bypassed(name, addr, port) {
		return nil
	}
	return p
}

// reached says how a target was reached.
type reached struct {
	addr   netip.Addr // the address that was dialled; not valid where a proxy was asked for a name
	dialed string     // address:port, or name:port where a proxy was asked for a name
	via    string     // the proxy as host:port, or ""
}

// reach opens a connection to a target. It looks the name up, judges each address, and dials, or asks the proxy for,
// the very address that was judged. Only where the proxy is to look names up, it is asked for the name; then no
// address may be refused of those that are known here. The verdict says why there is no connection.
func (g *Gateway) reach(ctx context.Context, own *proxy.Client, q rules.Query, judge func(rules.Query) rules.Verdict) (net.Conn, reached, rules.Verdict) {
	p := g.proxied(own, q.Name, q.Addr, q.Port)
	addrs, v := g.addresses(ctx, q, p)
	if !v.Allow {
		return nil, reached{}, v
	}
	var last rules.Verdict
	var allowed, direct []netip.Addr
	for _, a := range addrs {
		q.Addr, q.Own = a, g.ownAddress(a)
		if v := judge(q); !v.Allow {
			last = v
			continue
		}
		allowed = append(allowed, a)
		if g.proxied(own, q.Name, a, q.Port) == nil {
			direct = append(direct, a)
		}
	}
	byName := p != nil && p.ByName && q.Name != ""
	switch {
	case last.Reason != "" && (len(allowed) == 0 || byName):
		// Which of its addresses the proxy would choose is not known, so none may be one that is refused.
		return nil, reached{}, last
	case len(direct) > 0:
		return g.reachDirect(ctx, direct, q)
	case byName:
		return g.reachThrough(ctx, p, q.Name, netip.Addr{}, q)
	case len(allowed) == 0:
		return nil, reached{}, rules.Verdict{Code: rules.Unresolved, Reason: q.Name + " has no address"}
	}
	return g.reachAny(ctx, p, allowed, q)
}

// addresses looks a target's name up. None, and no refusal, means that the proxy is to be asked for the name.
func (g *Gateway) addresses(ctx context.Context, q rules.Query, p *proxy.Client) ([]netip.Addr, rules.Verdict) {
	fine := rules.Verdict{Allow: true, Code: rules.Allowed}
	if q.Name == "" {
		return []netip.Addr{q.Addr}, fine
	}
	if p == nil || !p.ByName {
		addrs, err := g.resolver.lookup(ctx, q.Name)
		if err == nil {
			return addrs, fine
		}
		v := rules.Verdict{Code: rules.Unresolved, Reason: q.Name + " could not be looked up"}
		if p != nil {
			v.Reason += " here; where only the proxy knows names, the server needs --proxy-names proxy"
		}
		return nil, v
	}
	addrs, err := g.resolver.lookupBriefly(ctx, q.Name)
	if err != nil && rules.PrivateName(q.Name) {
		return nil, rules.Verdict{
			Code:   rules.SpecialAddress,
			Reason: q.Name + " is a name of private networks, and can't be looked up here, so that the proxy is not asked for it",
		}
	}
	return addrs, fine
}

func (g *Gateway) reachDirect(ctx context.Context, addrs []netip.Addr, q rules.Query) (net.Conn, reached, rules.Verdict) {
	up, a, err := g.dialAny(ctx, addrs, q.Port)
	if err != nil {
		return nil, reached{}, rules.Verdict{Code: rules.Unreachable, Reason: fmt.Sprintf("%s does not answer: %s", rules.Target(q), plain(err))}
	}
	return up, reached{addr: a, dialed: netip.AddrPortFrom(a, q.Port).String()}, rules.Verdict{Allow: true, Code: rules.Allowed}
}

// reachAny asks the proxy for one address after the other, IPv4 first.
func (g *Gateway) reachAny(ctx context.Context, p *proxy.Client, addrs []netip.Addr, q rules.Query) (c net.Conn, to reached, v rules.Verdict) {
	const most = 3
	addrs = ordered(addrs)
	for _, a := range addrs[:min(len(addrs), most)] {
		if c, to, v = g.reachThrough(ctx, p, a.String(), a, q); v.Allow || ctx.Err() != nil {
			break
		}
	}
	return c, to, v
}

// reachThrough asks the proxy for a connection to a host: an address that was judged, or a name.
func (g *Gateway) reachThrough(ctx context.Context, p *proxy.Client, host string, a netip.Addr, q rules.Query) (net.Conn, reached, rules.Verdict) {
	if p.Fault != "" {
		return nil, reached{}, rules.Verdict{Code: rules.Unreachable, Reason: rules.Target(q) + ": the proxy " + p.String() + " can't be used: " + p.Fault}
	}
	ctx, cancel := context.WithTimeout(ctx, proxyTimeout)
	defer cancel()
	fails := func(format string, args ...any) (net.Conn, reached, rules.Verdict) {
		return nil, reached{}, rules.Verdict{Code: rules.Unreachable, Reason: rules.Target(q) + ": " + fmt.Sprintf(format, args...)}
	}
	c, err := g.dialProxy(ctx, p)
	if err != nil {
		return fails("the proxy %s can't be reached: %s", p.String(), plain(err))
	}
	var refused *proxy.RefusedError
	var socks *proxy.SOCKSError
	switch c, err = p.Connect(ctx, c, host, q.Port); {
	case errors.As(err, &refused):
		return fails("%s", refused)
	case errors.As(err, &socks):
		return fails("%s", socks)
	case err != nil:
		return fails("the proxy %s does not connect: %s", p.String(), plain(err))
	}
	dialed := net.JoinHostPort(host, strconv.Itoa(int(q.Port)))
	return c, reached{addr: a, dialed: dialed, via: p.String()}, rules.Verdict{Allow: true, Code: rules.Allowed}
}

// dialProxy dials the proxy itself. Of the host's, which the administrator named, no rule is asked.
func (g *Gateway) dialProxy(ctx context.Context, p *proxy.Client) (net.Conn, error) {
	if p.Own {
		c, err := g.dialTo(ctx, p.Host(), p.Port, p.Special)
		var refused *egress.RefusedError
		if errors.As(err, &refused) {
			err = errors.New(refused.Verdict.Reason)
		}
		return c, err
	}
	addrs := []netip.Addr{p.Addr}
	if p.Name != "" {
		var err error
		if addrs, err = g.resolver.lookup(ctx, p.Name); err != nil {
			return nil, errors.New("its name could not be looked up")
		}
	}
	c, _, err := g.dialAny(ctx, addrs, p.Port)
	return c, err
}
