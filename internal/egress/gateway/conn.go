package gateway

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/egress/rules"
)

// conn is one connection of a sandbox, from the first packet to its end.
type conn struct {
	id     uint64
	s      *sandbox
	proto  rules.Proto
	target egress.Target
	own    bool // answered by the Inspector alone
	ctx    context.Context
	cancel context.CancelFunc

	inside atomic.Pointer[inner] // the sandbox's end, once it is accepted

	sent, recv atomic.Int64 // bytes out of the sandbox and into it
	active     atomic.Int64 // when the last byte passed, in nanoseconds since the gateway began

	mu     sync.Mutex // guards the fields below
	query  rules.Query
	sides  []side // what abort closes
	ended  bool
	reason *rules.Verdict // why it was cut
	dialed string
	via    string
}

// side is one end of a connection.
type side interface {
	// Abort ends it at once, with a reset where there is one.
	Abort()
}

// minConns is how many connections a sandbox may have however few files the gateway may open, and maxFlows
// how many flows of UDP, each of which holds two buffers.
const (
	minConns = 64
	maxFlows = 32
)

// begin enters a connection that is about to be opened, or says which limit is in its way.
func (s *sandbox) begin(proto rules.Proto, t egress.Target, q rules.Query) (*conn, *rules.Verdict) {
	l := s.policy.Load().limits
	s.mu.Lock()
	defer s.mu.Unlock()
	var v rules.Verdict
	switch {
	case s.closed:
		v = limited("the sandbox ends")
		return nil, &v
	case len(s.conns) >= l.Connections:
		v = limited("the sandbox has its connections open already (limit connections)")
		return nil, &v
	case s.gw.stats.open.Load() >= int64(s.gw.most), len(s.conns) >= max(s.gw.most/4, minConns):
		v = limited("the gateway has as many connections open as its limit of open files allows one sandbox")
		return nil, &v
	case proto == rules.UDP && len(s.flows) >= maxFlows:
		v = limited("the sandbox has its flows of UDP open already")
		return nil, &v
	case s.pending >= l.Pending:
		v = limited("the sandbox has too many connections that are not established yet (limit pending)")
		return nil, &v
	case l.Bytes > 0 && s.out.total.Load()+s.in.total.Load() >= l.Bytes:
		v = limited("the sandbox has moved all the bytes that it may (limit bytes)")
		return nil, &v
	}
	c := &conn{id: s.gw.nextConn.Add(1), s: s, proto: proto, target: t, query: q}
	c.ctx, c.cancel = context.WithCancel(s.ctx)
	c.touch()
	s.conns[c.id] = c
	s.pending++
	s.rebalance()
	s.wg.Add(1)
	s.gw.stats.connections.Add(1)
	s.gw.stats.open.Add(1)
	return c, nil
}

// established says that a connection is no longer pending, and is to be recorded.
func (c *conn) established() {
	c.s.mu.Lock()
	c.s.pending--
	c.s.mu.Unlock()
	c.mu.Lock()
	e := c.eventLocked(egress.EventOpened)
	c.mu.Unlock()
	c.s.emit(e)
}

// end takes a connection out. open says that established was called.
func (c *conn) end(open bool) {
	c.cancel()
	c.abort()
	c.s.mu.Lock()
	delete(c.s.conns, c.id)
	if !open {
		c.s.pending--
	}
	c.s.rebalance()
	c.s.mu.Unlock()
	c.s.gw.stats.open.Add(-1)
	if open {
		c.mu.Lock()
		e := c.eventLocked(egress.EventClosed)
		if c.reason != nil {
			e.Type, e.Verdict = egress.EventCut, c.reason
		}
		c.mu.Unlock()
		e.Sent, e.Recv = c.sent.Load(), c.recv.Load()
		c.s.emit(e)
	}
	c.s.wg.Done()
}

func (c *conn) eventLocked(t egress.EventType) egress.Event {
	return egress.Event{
		Sandbox: c.s.id, Type: t, Conn: c.id, Proto: c.proto, Target: rules.Target(c.query), Dialed: c.dialed, Via: c.via,
	}
}

// hold adds an end that abort closes. It reports false, and closes it, where that has happened already.
func (c *conn) hold(x side) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		x.Abort()
		return false
	}
	c.sides = append(c.sides, x)
	return true
}

// shrink holds what waits for the sandbox to a share of its budget that has become smaller: it was more when the
// connection began. What waits already is not thrown away.
func (c *conn) shrink(share int) {
	in := c.inside.Load()
	if in == nil {
		return
	}
	if o := in.ep.SocketOptions(); o.GetSendBufferSize() > int64(share) {
		o.SetSendBufferSize(int64(share), false)
	}
}

// abort ends both sides at once. Idempotent.
func (c *conn) abort() {
	c.cancel()
	c.mu.Lock()
	sides := c.sides
	c.sides, c.ended = nil, true
	c.mu.Unlock()
	for _, x := range sides {
		x.Abort()
	}
}

// cut ends a connection because of a verdict.
func (c *conn) cut(v rules.Verdict) {
	c.mu.Lock()
	if c.reason == nil {
		c.reason = &v
	}
	c.mu.Unlock()
	c.abort()
}

// judged returns what was judged last.
func (c *conn) judged() rules.Query {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.query
}

// refine notes what became known, and judges again.
func (c *conn) refine(f func(*rules.Query)) rules.Verdict {
	c.mu.Lock()
	f(&c.query)
	q := c.query
	c.mu.Unlock()
	return c.s.judge(q)
}

// refuse records that the connection was refused.
func (c *conn) refuse(v rules.Verdict) { c.s.refuse(c.proto, rules.Target(c.judged()), v) }

// touch notes that the connection is in use.
func (c *conn) touch() { c.active.Store(int64(time.Since(c.s.gw.began))) }

// idle returns for how long no byte has passed.
func (c *conn) idle() time.Duration {
	return time.Since(c.s.gw.began) - time.Duration(c.active.Load())
}

// count notes bytes that passed, and waits where the sandbox has a rate. It reports false where a limit
// ends the connection.
func (c *conn) count(n int, out bool) bool {
	c.touch()
	m, own, all := c.s.in, &c.recv, &c.s.gw.stats.received
	if out {
		m, own, all = c.s.out, &c.sent, &c.s.gw.stats.sent
	}
	own.Add(int64(n))
	all.Add(int64(n))
	if err := m.wait(c.ctx, n); err != nil {
		return false
	}
	if l := c.s.policy.Load().limits.Bytes; l > 0 && c.s.out.total.Load()+c.s.in.total.Load() > l {
		v := limited("the sandbox has moved all the bytes that it may (limit bytes)")
		c.refuse(v)
		c.cut(v)
		return false
	}
	return true
}

// allowance is how much of n bytes may pass in one go: so little where the sandbox has a rate that it is kept, and with
// a limit on bytes not more than one beyond it, at which count ends the connection.
func (c *conn) allowance(n int) int {
	const perSecond, least = 10, 512
	l := c.s.policy.Load().limits
	if l.Rate > 0 {
		n = int(min(int64(n), max(l.Rate/perSecond, least)))
	}
	if l.Bytes > 0 {
		n = int(min(int64(n), l.Bytes-c.s.out.total.Load()-c.s.in.total.Load()+1))
	}
	return max(n, 1)
}

// buffers returns the pool that the connection reads into at this time.
func (c *conn) buffers() *frames {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	if len(c.s.conns) <= fewConns {
		return c.s.gw.frames
	}
	return c.s.gw.small
}

// netSide is a connection of the host's.
type netSide struct{ net.Conn }

// Abort implements side: without waiting for what was not sent yet, nor for TLS with a proxy.
func (n netSide) Abort() {
	c := below(n.Conn)
	if t, ok := c.(*net.TCPConn); ok {
		_ = t.SetLinger(0)
	}
	_ = c.Close()
}

// queryOf is what is known of a target before anything is dialled.
func queryOf(proto rules.Proto, t egress.Target, own func(netip.Addr) bool) rules.Query {
	return rules.Query{Proto: proto, Name: t.Name, Addr: t.Addr, Own: t.Addr.IsValid() && own(t.Addr), Port: t.Port}
}
