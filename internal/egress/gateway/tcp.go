package gateway

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/egress/address"
	"casemate.dev/internal/egress/rules"
)

// maxHandshakes bounds the first packets of connections of one sandbox that are answered at once; more are
// not answered, and its kernel sends them again.
const maxHandshakes = 512

// portDNS is DNS's.
const portDNS = 53

// inner is the sandbox's end of a connection.
type inner struct {
	*gonet.TCPConn
	ep tcpip.Endpoint
	wq *waiter.Queue
}

// Abort implements side, with a reset.
func (i *inner) Abort() { i.ep.Abort() }

// accept answers a connection's first packet. The other side is a kernel on the same machine, so this
// takes no time, unless somebody there sends packets by hand.
func accept(r *tcp.ForwarderRequest) (*inner, error) {
	var wq waiter.Queue
	ep, err := r.CreateEndpoint(&wq)
	if err != nil {
		return nil, tcpipError("accept", err)
	}
	ep.SocketOptions().SetDelayOption(false)
	return &inner{TCPConn: gonet.NewTCPConn(&wq, ep), ep: ep, wq: &wq}, nil
}

// targetOf says what an address in a packet means.
func (s *sandbox) targetOf(a netip.Addr, port uint16) (egress.Target, *rules.Verdict) {
	if name, in := s.names.of(a); in {
		if name == "" {
			return egress.Target{Addr: a, Port: port}, &rules.Verdict{
				Code: rules.UnknownAddress, Reason: fmt.Sprintf("the address %s stands for no name that was looked up", a),
			}
		}
		return egress.Target{Name: name, Port: port}, nil
	}
	for _, p := range address.Whole() {
		if p.Contains(a) {
			return egress.Target{Addr: a, Port: port}, &rules.Verdict{
				Code: rules.UnknownAddress, Reason: fmt.Sprintf("nothing is at %s port %d", a, port),
			}
		}
	}
	return egress.Target{Addr: a, Port: port}, nil
}

// forwardTCP handles the first packet of a connection, in a goroutine of its own.
func (s *sandbox) forwardTCP(r *tcp.ForwarderRequest) {
	id := r.ID()
	a, port := addrOf(id.LocalAddress), id.LocalPort
	if isGateway(a) && port == portDNS {
		s.acceptDNS(r)
		return
	}
	t, bad := s.targetOf(a, port)
	q := queryOf(rules.TCP, t, s.gw.ownAddress)
	if bad != nil {
		s.refuse(rules.TCP, rules.Target(q), *bad)
		r.Complete(true)
		return
	}
	c, bad := s.begin(rules.TCP, t, q)
	if bad != nil {
		s.refuse(rules.TCP, rules.Target(q), *bad)
		r.Complete(true)
		return
	}
	c.forward(r)
}

// forward decides on a connection and carries it. It always completes r.
func (c *conn) forward(r *tcp.ForwarderRequest) {
	open := false
	defer func() { c.end(open) }()
	want := c.s.gw.want(c.s.id, c.target)
	c.own = want == egress.Answer && c.s.recorded == nil
	v := rules.Verdict{Allow: true, Code: rules.Allowed}
	if !c.own {
		v = c.judgeTarget()
	}
	inspected := v.Inspect || want != egress.Pass
	if v.Allow && inspected && c.s.gw.inspector == nil {
		v = rules.Verdict{Code: rules.NotInspectable, Rule: v.Rule, Reason: "a rule looks into requests to " + rules.Target(c.judged()) + ", and this gateway can't"}
	}
	if !v.Allow {
		c.refuse(v)
		r.Complete(true)
		return
	}
	var up net.Conn
	if !inspected {
		var err error
		if up, err = c.dial(c.ctx); err != nil {
			r.Complete(true) // dial has recorded why
			return
		}
		if !c.hold(netSide{up}) {
			r.Complete(true)
			return
		}
	}
	in, err := accept(r)
	r.Complete(err != nil)
	if err != nil || !c.hold(in) {
		return
	}
	c.inside.Store(in)
	open = true
	c.established()
	if inspected {
		c.inspect(in)
		return
	}
	c.relay(in, up)
}

// inspectWait is how long a connection that is to be inspected may keep silent.
const inspectWait = 30 * time.Second

// inspect hands a connection to the Inspector, once its first bytes say what is spoken there.
func (c *conn) inspect(in *inner) {
	_ = in.SetReadDeadline(time.Now().Add(inspectWait))
	first, err := readFirst(in)
	if err != nil {
		c.cut(rules.Verdict{Code: rules.NotInspectable, Reason: "nothing was sent that could be looked into"})
		return
	}
	_ = in.SetReadDeadline(time.Time{})
	client := &replay{Conn: in, side: in, first: first.bytes, c: c}
	if v := c.refineFirst(first); !c.own && !v.Allow {
		c.refuse(v)
		c.cut(v)
		return
	}
	if first.plain {
		v := rules.Verdict{Code: rules.NotInspectable, Reason: rules.Target(c.judged()) + " is to be looked into, and this is neither TLS nor HTTP/1"}
		c.refuse(v)
		c.cut(v)
		return
	}
	f := &egress.Flow{
		Sandbox: c.s.id, Target: c.target, Client: client, Hello: first.hello,
		Judge: c.judgeRequest, Dial: c.dialForInspector,
		DialTo: func(ctx context.Context, name string, port uint16, special bool) (net.Conn, error) {
			if err := c.sealed(); err != nil {
				return nil, err
			}
			return c.s.gw.dialTo(ctx, name, port, special)
		},
		Event: func(e egress.Event) { c.event(e) },
		Keep:  c.s.policy.Load().keep,
	}
	if c.s.recorded != nil {
		f.Recorded = c.fromRecord
	}
	err = c.s.gw.inspector.Serve(c.ctx, f)
	var fault *egress.FaultError
	switch {
	case errors.As(err, &fault):
		c.s.gw.log.Error("a fault ended an inspected connection", "sandbox", c.s.id, "target", rules.Target(c.judged()), "err", err)
	case err != nil && !errors.Is(err, net.ErrClosed):
		c.s.gw.log.Debug("inspected connection", "sandbox", c.s.id, "target", rules.Target(c.judged()), "err", err)
	}
}

// dialForInspector dials the target and notes what is dialled.
func (c *conn) dialForInspector(ctx context.Context) (net.Conn, error) {
	if c.own {
		return nil, errors.New("nothing is behind this name but the gateway")
	}
	up, err := c.dial(ctx)
	if err != nil {
		return nil, err
	}
	h := &held{Conn: up, c: c}
	if !c.hold(h) {
		return nil, net.ErrClosed
	}
	return h, nil
}

// held is a connection of an Inspector's, which ends with the sandbox's at the latest.
type held struct {
	net.Conn
	c *conn
}

// Abort implements side.
func (h *held) Abort() { netSide{h.Conn}.Abort() }

// Close closes it and lets go of it.
func (h *held) Close() error {
	h.c.mu.Lock()
	h.c.sides = slices.DeleteFunc(h.c.sides, func(s side) bool { return s == side(h) })
	h.c.mu.Unlock()
	return h.Conn.Close()
}

// CloseWrite sends the end of what is written; reading goes on.
func (h *held) CloseWrite() error {
	closeWrite(h.Conn)
	return nil
}

// judgeRequest judges one request of an inspected connection.
func (c *conn) judgeRequest(h rules.HTTP) rules.Verdict {
	if c.own {
		return rules.Verdict{Allow: true, Code: rules.Allowed}
	}
	q := c.judged()
	q.HTTP = &h
	v := c.s.judge(q)
	if !v.Allow {
		c.s.refuse(c.proto, h.Method+" "+rules.Target(q)+h.Path, v)
	}
	return v
}

// event records something about the connection.
func (c *conn) event(e egress.Event) {
	c.mu.Lock()
	base := c.eventLocked(e.Type)
	c.mu.Unlock()
	e.Sandbox, e.Conn, e.Proto, e.Target, e.Dialed, e.Via = base.Sandbox, base.Conn, base.Proto, base.Target, base.Dialed, base.Via
	c.s.emit(e)
}

// replay is a connection whose first bytes were read already, and whose bytes are counted.
type replay struct {
	net.Conn
	side  side
	first []byte
	c     *conn
}

// Read implements net.Conn.
func (r *replay) Read(b []byte) (int, error) {
	n := copy(b, r.first)
	r.first = r.first[n:]
	var err error
	if n == 0 && len(b) > 0 {
		n, err = r.Conn.Read(b)
	}
	if n > 0 && !r.c.count(n, true) {
		return 0, net.ErrClosed
	}
	return n, err
}

// Write implements net.Conn.
func (r *replay) Write(b []byte) (int, error) {
	if !r.c.count(len(b), false) {
		return 0, net.ErrClosed
	}
	return r.Conn.Write(b)
}

// CloseWrite sends the end of what is written; reading goes on.
func (r *replay) CloseWrite() error { return r.side.(*inner).CloseWrite() }
