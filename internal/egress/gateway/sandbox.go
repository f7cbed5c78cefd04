package gateway

import (
	"context"
	"encoding/json"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/egress/address"
	"casemate.dev/internal/egress/proxy"
	"casemate.dev/internal/egress/rules"
)

// policy is a sandbox's policy, ready to be asked. It does not change; a new one replaces it.
type policy struct {
	set    *rules.Set
	limits egress.Limits
	proxy  *proxy.Client // the sandbox's own; nil: none
	way    [2]string     // what proxy was made of
	keep   bool          // content of inspected requests and answers
}

func newPolicy(p egress.Policy) *policy {
	l, d := p.Limits, egress.DefaultLimits()
	if l.Connections <= 0 {
		l.Connections = d.Connections
	}
	if l.Pending <= 0 {
		l.Pending = d.Pending
	}
	if l.Idle <= 0 {
		l.Idle = d.Idle
	}
	return &policy{set: rules.NewSet(p.Rules), limits: l, proxy: ownProxy(p), way: [2]string{p.Via, string(p.Proxy)}, keep: p.Keep}
}

// ownProxy reads a sandbox's own proxy. One that can't be read is none that can be used, so that nothing leaves past it.
func ownProxy(of egress.Policy) *proxy.Client {
	if of.Via == "" {
		return nil
	}
	var p proxy.Proxy
	if json.Unmarshal(of.Proxy, &p) != nil || p.String() != of.Via { // the error could quote credentials
		p = proxy.Proxy{Name: of.Via, Fault: "its settings can't be read, or are of another sandbox; set the sandbox's proxy again"}
	}
	p.Own = true
	c, err := proxy.NewClient(p)
	if err != nil {
		c = &proxy.Client{Proxy: p}
		c.Fault = err.Error()
	}
	return c
}

// sandbox is one sandbox as the gateway knows it: a device, a stack behind it, and what goes through.
type sandbox struct {
	id     string
	gw     *Gateway
	dev    *device
	stack  *stack.Stack
	names  *names
	policy atomic.Pointer[policy]
	ctx    context.Context
	cancel context.CancelFunc
	out    *meter // bytes out of the sandbox
	in     *meter // bytes into it
	wg     sync.WaitGroup

	quota    *quota
	lookups  chan struct{} // a place for each lookup under way
	recorded *recorded     // answers in place of the world; nil: connections leave

	mu       sync.Mutex // guards the fields below
	conns    map[uint64]*conn
	pending  int
	flows    map[udpKey]*conn
	refusals []egress.Refusal // the last ones, oldest first
	share    int              // of the buffers' budget, as it was set last
	closed   bool
}

// keepRefusals is how many different refusals of a sandbox are kept to be asked for.
const keepRefusals = 64

// maxLookups bounds the lookups of one sandbox that are under way.
const maxLookups = 64

// newSandbox takes over the descriptor of a device and begins to serve it.
func (g *Gateway) newSandbox(id string, tap *os.File, p egress.Policy) (*sandbox, error) {
	s := &sandbox{
		id: id, gw: g, names: newNames(), conns: map[uint64]*conn{}, flows: map[udpKey]*conn{},
		lookups: make(chan struct{}, maxLookups), out: newMeter(), in: newMeter(), quota: newQuota(), recorded: newRecorded(p, &g.answers),
	}
	s.setPolicy(p)
	s.ctx, s.cancel = context.WithCancel(context.Background())
	var err error
	if s.dev, err = newDevice(tap, g.frames, s.strange); err != nil {
		return nil, err
	}
	if s.stack, err = newStack(s.dev); err != nil {
		return nil, err
	}
	f := tcp.NewForwarder(s.stack, bufferStart, maxHandshakes, s.forwardTCP)
	s.stack.SetTransportProtocolHandler(tcp.ProtocolNumber, f.HandlePacket)
	u := udp.NewForwarder(s.stack, s.forwardUDP)
	s.stack.SetTransportProtocolHandler(udp.ProtocolNumber, u.HandlePacket)
	if err := s.serveDNS(); err != nil {
		s.stack.Destroy()
		return nil, err
	}
	return s, nil
}

func (s *sandbox) setPolicy(p egress.Policy) {
	pol := newPolicy(p)
	s.policy.Store(pol)
	s.out.setRate(pol.limits.Rate)
	s.in.setRate(pol.limits.Rate)
}

// configure replaces the policy and cuts what it no longer allows, and what leaves by another way than it would now.
func (s *sandbox) configure(p egress.Policy) {
	before := s.policy.Load().way
	s.setPolicy(p)
	moved := before != s.policy.Load().way
	for _, c := range s.open() {
		v := s.judge(c.judged())
		switch {
		case c.own:
		case !v.Allow:
			c.cut(v)
		case moved && c.proto == rules.TCP:
			c.cut(rules.Verdict{Code: rules.Unreachable, Reason: "the sandbox's proxy was changed"})
		}
	}
}

// open returns the connections that are open or being opened.
func (s *sandbox) open() []*conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]*conn, 0, len(s.conns))
	for _, c := range s.conns {
		all = append(all, c)
	}
	return all
}

// close ends everything of the sandbox and lets go of its device.
func (s *sandbox) close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.cancel()
	for _, c := range s.open() {
		c.abort()
	}
	s.dev.Close()
	s.stack.Destroy()
	s.wg.Wait()
	s.recorded.close()
	s.flush()
}

// judge asks the rules.
func (s *sandbox) judge(q rules.Query) rules.Verdict { return s.policy.Load().set.Decide(q) }

// strange records a packet that the device does not let through.
func (s *sandbox) strange(p packet) {
	v := rules.Verdict{Code: rules.NoRule, Reason: p.what}
	s.refuse(rules.Proto(p.proto), p.dst.String(), v)
}

// refuse records a refusal.
func (s *sandbox) refuse(proto rules.Proto, target string, v rules.Verdict) {
	now := time.Now()
	s.gw.stats.refused.Add(1)
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.refusals {
		r := &s.refusals[i]
		// One that repeats is counted. The first times of each are events; a loop must not flood the journal.
		if r.Proto == proto && r.Target == target && r.Verdict.Code == v.Code {
			again := *r
			again.Count++
			again.Verdict = v
			again.Last = now
			s.refusals = append(append(s.refusals[:i:i], s.refusals[i+1:]...), again)
			if again.Count&(again.Count-1) == 0 { // 2, 4, 8 …
				s.emit(egress.Event{Sandbox: s.id, Type: egress.EventRefused, Proto: proto, Target: target, Verdict: &v, Count: again.Count})
			}
			return
		}
	}
	r := egress.Refusal{Time: now, Last: now, Proto: proto, Target: target, Verdict: v, Count: 1}
	s.refusals = append(s.refusals, r)
	if n := len(s.refusals) - keepRefusals; n > 0 {
		s.refusals = s.refusals[n:]
	}
	s.emit(egress.Event{Sandbox: s.id, Type: egress.EventRefused, Proto: proto, Target: target, Verdict: &v})
}

// refused returns what was refused at or after since.
func (s *sandbox) refused(since time.Time) []egress.Refusal {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []egress.Refusal
	for _, r := range s.refusals {
		if !r.Last.Before(since) {
			out = append(out, r)
		}
	}
	return out
}

// limited is the verdict where a limit is reached.
func limited(what string) rules.Verdict {
	return rules.Verdict{Code: rules.Limit, Reason: what}
}

// rebalance gives every connection its share of the buffers' budget. The caller holds mu.
func (s *sandbox) rebalance() {
	share := bufferMax
	for n := len(s.conns); share > bufferMin && n*2*share > bufferBudget; {
		share /= 2
	}
	if share == s.share {
		return
	}
	s.share = share
	receive := tcpip.TCPReceiveBufferSizeRangeOption{Min: bufferMin, Default: min(bufferStart, share), Max: share}
	send := tcpip.TCPSendBufferSizeRangeOption{Min: bufferMin, Default: min(bufferStart, share), Max: share}
	_ = s.stack.SetTransportProtocolOption(tcp.ProtocolNumber, &receive)
	_ = s.stack.SetTransportProtocolOption(tcp.ProtocolNumber, &send)
	for _, c := range s.conns {
		c.shrink(share)
	}
}

// isGateway reports whether an address is the gateway's own.
func isGateway(a netip.Addr) bool { g := address.Gateway(); return a == g[0] || a == g[1] }
