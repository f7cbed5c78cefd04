package gateway

import (
	"net"
	"net/netip"

	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"

	"casemate.dev/internal/egress/rules"
)

// udpKey tells the flows of UDP apart: who sends, and where to.
type udpKey struct{ src, dst netip.AddrPort }

// forwardUDP handles the first packet of a flow. Where it reports false, the stack answers that nothing is
// there (ICMP port unreachable), which a program learns of at once.
func (s *sandbox) forwardUDP(r *udp.ForwarderRequest) bool {
	id := r.ID()
	a, port := addrOf(id.LocalAddress), id.LocalPort
	t, bad := s.targetOf(a, port)
	q := queryOf(rules.UDP, t, s.gw.ownAddress)
	if bad == nil {
		if v := s.judge(q); !v.Allow {
			bad = &v
		} else if s.recorded != nil {
			v = notRecorded("udp to " + rules.Target(q) + " is not in the record")
			bad = &v
		} else if q.Name == "" {
			bad = s.gw.notPastProxy(q)
		}
	}
	if bad != nil {
		s.refuse(rules.UDP, rules.Target(q), *bad)
		return false
	}
	key := udpKey{netip.AddrPortFrom(addrOf(id.RemoteAddress), id.RemotePort), netip.AddrPortFrom(a, port)}
	s.mu.Lock()
	_, known := s.flows[key]
	s.mu.Unlock()
	if known {
		return true // it is being opened; the packet is lost, as packets may be
	}
	c, bad := s.begin(rules.UDP, t, q)
	if bad != nil {
		s.refuse(rules.UDP, rules.Target(q), *bad)
		return false
	}
	s.mu.Lock()
	s.flows[key] = c
	s.mu.Unlock()
	var wq waiter.Queue
	ep, err := r.CreateEndpoint(&wq)
	if err != nil {
		s.forget(key)
		c.end(false)
		return false
	}
	go c.carryUDP(key, &flow{UDPConn: gonet.NewUDPConn(&wq, ep), inner: inner{ep: ep, wq: &wq}})
	return true
}

func (s *sandbox) forget(key udpKey) {
	s.mu.Lock()
	delete(s.flows, key)
	s.mu.Unlock()
}

// flow is the sandbox's end of a flow.
type flow struct {
	*gonet.UDPConn
	inner inner // for waiting
}

// udpSide is an end of a flow.
type udpSide struct{ net.Conn }

// Abort implements side.
func (u udpSide) Abort() { _ = u.Close() }

// carryUDP carries the packets of a flow until it has been idle.
func (c *conn) carryUDP(key udpKey, in *flow) {
	open := false
	defer func() { c.s.forget(key); c.end(open) }()
	if !c.hold(udpSide{in}) {
		return
	}
	up, err := c.dialUDP()
	if err != nil || !c.hold(udpSide{up}) {
		return
	}
	open = true
	c.established()
	done := make(chan struct{})
	go func() {
		defer close(done)
		c.packets(in.read(c.ctx.Done()), up, true)
		c.abort()
	}()
	if read, err := pooledReader(up); err == nil {
		c.packets(read, in, false)
	}
	c.abort()
	<-done
}

// read returns a function that reads a packet, as pooledReader does.
func (f *flow) read(done <-chan struct{}) func(*frames) (*[]byte, int, error) {
	return func(pool *frames) (*[]byte, int, error) {
		if err := f.inner.await(waiter.ReadableEvents, done); err != nil {
			return nil, 0, err
		}
		buf := pool.get()
		n, err := f.UDPConn.Read(*buf)
		return buf, n, err
	}
}

// packets carries packets one way. No buffer is held while there is none.
func (c *conn) packets(read func(*frames) (*[]byte, int, error), to net.Conn, out bool) {
	pool := c.s.gw.frames
	for {
		buf, n, err := read(pool)
		if err == nil && c.count(n, out) {
			_, err = to.Write((*buf)[:n])
		} else if err == nil {
			err = net.ErrClosed
		}
		if buf != nil {
			pool.put(buf)
		}
		if err != nil {
			return
		}
	}
}

// notPastProxy refuses what goes through no proxy, where the host has one and the target is not for going past it. A
// sandbox's own proxy is for TCP, and leaves UDP alone.
func (g *Gateway) notPastProxy(q rules.Query) *rules.Verdict {
	p := g.proxied(nil, q.Name, q.Addr, q.Port)
	if p == nil {
		return nil
	}
	return &rules.Verdict{
		Code: rules.Unreachable, Reason: "UDP goes through no proxy, and " + rules.Target(q) + " is not among what goes past " + p.String(),
	}
}

// dialUDP is dial for UDP.
func (c *conn) dialUDP() (net.Conn, error) {
	if err := c.sealed(); err != nil {
		return nil, err
	}
	q := c.judged()
	addrs := []netip.Addr{q.Addr}
	if q.Name != "" {
		var err error
		if addrs, err = c.s.gw.resolver.lookup(c.ctx, q.Name); err != nil {
			return nil, c.failed(rules.Verdict{Code: rules.Unresolved, Reason: q.Name + " could not be looked up"})
		}
	}
	last := rules.Verdict{Code: rules.Unresolved, Reason: q.Name + " has no address"}
	for _, a := range addrs {
		v := c.refine(func(q *rules.Query) { q.Addr, q.Own = a, c.s.gw.ownAddress(a) })
		if !v.Allow {
			last = v
			continue
		}
		q.Addr = a
		if bad := c.s.gw.notPastProxy(q); bad != nil {
			last = *bad
			continue
		}
		to := netip.AddrPortFrom(a, q.Port)
		up, err := net.Dial("udp", to.String())
		if err != nil {
			last = rules.Verdict{Code: rules.Unreachable, Reason: plain(err)}
			continue
		}
		c.mu.Lock()
		c.dialed = to.String()
		c.mu.Unlock()
		return up, nil
	}
	return nil, c.failed(last)
}
