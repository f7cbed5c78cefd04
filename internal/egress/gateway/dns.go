package gateway

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/miekg/dns"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/egress/address"
	"casemate.dev/internal/egress/rules"
)

// ttl is the time to live of what the gateway answers. Addresses stand for names as long as the gateway
// knows them; a short life lets changes of the rules reach programs that remember.
const ttl = 30

// serveDNS answers on the gateway's addresses.
func (s *sandbox) serveDNS() error {
	for _, a := range address.Gateway() {
		c, err := gonet.DialUDP(s.stack, &tcpip.FullAddress{NIC: nic, Addr: addressOf(a), Port: portDNS}, nil, protocolOf(a))
		if err != nil {
			return err
		}
		s.wg.Go(func() { s.readDNS(c) })
		context.AfterFunc(s.ctx, func() { _ = c.Close() })
	}
	return nil
}

// readDNS answers questions over UDP until the connection is closed.
func (s *sandbox) readDNS(c *gonet.UDPConn) {
	buf := make([]byte, dns.MinMsgSize)
	for {
		n, from, err := c.ReadFrom(buf)
		if err != nil {
			return
		}
		question := new(dns.Msg)
		if question.Unpack(buf[:n]) != nil || question.Response {
			continue
		}
		select {
		case s.lookups <- struct{}{}:
		default:
			continue // it asks again
		}
		s.wg.Go(func() {
			defer func() { <-s.lookups }()
			answer := s.answer(question)
			size := dns.MinMsgSize
			if o := question.IsEdns0(); o != nil {
				size = max(size, int(o.UDPSize()))
			}
			answer.Truncate(size)
			if b, err := answer.Pack(); err == nil {
				_, _ = c.WriteTo(b, from)
			}
		})
	}
}

// dnsIdle is how long a connection for DNS may keep silent.
const dnsIdle = 10 * time.Second

// acceptDNS answers questions over TCP.
func (s *sandbox) acceptDNS(r *tcp.ForwarderRequest) {
	select {
	case s.lookups <- struct{}{}:
	default:
		r.Complete(true)
		return
	}
	defer func() { <-s.lookups }()
	in, err := accept(r)
	r.Complete(err != nil)
	if err != nil {
		return
	}
	stop := context.AfterFunc(s.ctx, in.Abort)
	defer stop()
	defer func() { _ = in.Close() }()
	c := &dns.Conn{Conn: in}
	for {
		_ = in.SetDeadline(time.Now().Add(dnsIdle))
		question, err := c.ReadMsg()
		if err != nil || question.Response || c.WriteMsg(s.answer(question)) != nil {
			return
		}
	}
}

// answer answers one question. A denied name does not exist: with any other answer resolvers ask again, or
// ask another server, and programs wait. Nothing of a denied name leaves the gateway.
func (s *sandbox) answer(question *dns.Msg) *dns.Msg {
	m := new(dns.Msg)
	m.SetReply(question)
	m.RecursionAvailable = true
	m.Compress = true
	if o := question.IsEdns0(); o != nil {
		m.SetEdns0(dns.DefaultMsgSize, false)
	}
	if question.Opcode != dns.OpcodeQuery || len(question.Question) != 1 {
		m.Rcode = dns.RcodeNotImplemented
		return m
	}
	q := question.Question[0]
	if q.Qclass != dns.ClassINET {
		m.Rcode = dns.RcodeRefused
		return m
	}
	if q.Qtype == dns.TypePTR {
		s.reverse(m, q)
		return m
	}
	name, v := s.mayLookUp(q.Name)
	if !v.Allow {
		s.refuse(rules.DNS, cutName(q.Name), v)
		m.Rcode = dns.RcodeNameError
		prohibit(m, v.Reason)
		return m
	}
	s.records(m, q, name)
	return m
}

// mayLookUp judges a name as it stands in a question.
func (s *sandbox) mayLookUp(asked string) (string, rules.Verdict) {
	bad := rules.Verdict{Code: rules.BadName, Reason: "the name is no host name"}
	// In a question, a backslash begins an escape of what no host name holds.
	if strings.Contains(asked, `\`) {
		return "", bad
	}
	name, _, err := rules.Host(asked)
	if err != nil || name == "" {
		return "", bad
	}
	if s.answers(name) {
		return name, rules.Verdict{Allow: true, Code: rules.Allowed}
	}
	return name, s.judgeName(name)
}

// answers reports whether a name is the gateway's own in this sandbox.
func (s *sandbox) answers(name string) bool {
	return s.recorded == nil && s.gw.want(s.id, egress.Target{Name: name}) == egress.Answer
}

// records answers for a name that may be looked up: with addresses that stand for it, and with what else
// is harmless. Keys for encrypted hellos (HTTPS, SVCB) are left out, since a hello that hides its name is
// refused.
func (s *sandbox) records(m *dns.Msg, q dns.Question, name string) {
	if s.recorded == nil && !s.answers(name) {
		if err := s.exists(m, q, name); err != nil {
			return
		}
	}
	head := dns.RR_Header{Name: q.Name, Rrtype: q.Qtype, Class: dns.ClassINET, Ttl: ttl}
	switch q.Qtype {
	case dns.TypeA:
		v4, _ := s.names.give(name)
		m.Answer = append(m.Answer, &dns.A{Hdr: head, A: v4.AsSlice()})
	case dns.TypeAAAA:
		_, v6 := s.names.give(name)
		m.Answer = append(m.Answer, &dns.AAAA{Hdr: head, AAAA: v6.AsSlice()})
	}
}

// exists looks a name up, so that a name that is not there is not there inside either, and adds the records
// of the other types that are carried. On error the answer says so.
func (s *sandbox) exists(m *dns.Msg, q dns.Question, name string) error {
	ctx, cancel := context.WithTimeout(s.ctx, lookupTimeout)
	defer cancel()
	r := s.gw.resolver
	head := dns.RR_Header{Name: q.Name, Rrtype: q.Qtype, Class: dns.ClassINET, Ttl: ttl}
	var err error
	switch q.Qtype {
	case dns.TypeA, dns.TypeAAAA:
		if p := s.gw.proxied(s.policy.Load().proxy, name, netip.Addr{}, 0); p != nil && p.ByName {
			return nil // whether it is there, the proxy will know
		}
		_, err = r.lookup(ctx, name)
	case dns.TypeTXT:
		var list []string
		list, err = r.net.LookupTXT(ctx, name+".")
		for _, t := range list {
			m.Answer = append(m.Answer, &dns.TXT{Hdr: head, Txt: chunks(t)})
		}
	case dns.TypeMX:
		var list []*net.MX
		list, err = r.net.LookupMX(ctx, name+".")
		for _, x := range list {
			m.Answer = append(m.Answer, &dns.MX{Hdr: head, Preference: x.Pref, Mx: dns.Fqdn(x.Host)})
		}
	case dns.TypeSRV:
		var list []*net.SRV
		_, list, err = r.net.LookupSRV(ctx, "", "", name+".")
		for _, x := range list {
			m.Answer = append(m.Answer, &dns.SRV{Hdr: head, Priority: x.Priority, Weight: x.Weight, Port: x.Port, Target: dns.Fqdn(x.Target)})
		}
	default:
		return nil // no such record
	}
	var de *net.DNSError
	if errors.As(err, &de) && de.IsNotFound {
		// "Not found" covers "no such record", too, and only for addresses does it mean that there is nothing.
		if q.Qtype == dns.TypeA || q.Qtype == dns.TypeAAAA {
			m.Rcode = dns.RcodeNameError
			return err
		}
		return nil
	}
	if err != nil {
		m.Rcode, m.Answer = dns.RcodeServerFailure, nil
	}
	return err
}

// chunks splits a text into the pieces that a TXT record holds.
func chunks(s string) []string {
	const most = 255
	var out []string
	for len(s) > most {
		out = append(out, s[:most])
		s = s[most:]
	}
	return append(out, s)
}

// reverse answers who has an address: for addresses that stand for a name that name, for others nobody.
func (s *sandbox) reverse(m *dns.Msg, q dns.Question) {
	m.Rcode = dns.RcodeNameError
	labels := dns.SplitDomainName(strings.ToLower(q.Name))
	if len(labels) != 6 || labels[4] != "in-addr" {
		return
	}
	a, err := netip.ParseAddr(labels[3] + "." + labels[2] + "." + labels[1] + "." + labels[0])
	if err != nil {
		return
	}
	if name, _ := s.names.of(a); name != "" {
		m.Rcode = dns.RcodeSuccess
		m.Answer = append(m.Answer, &dns.PTR{Hdr: dns.RR_Header{Name: q.Name, Rrtype: q.Qtype, Class: dns.ClassINET, Ttl: ttl}, Ptr: dns.Fqdn(name)})
	}
}

// prohibit adds the reason, for who asks for it (RFC 8914).
func prohibit(m *dns.Msg, reason string) {
	if o := m.IsEdns0(); o != nil {
		o.Option = append(o.Option, &dns.EDNS0_EDE{InfoCode: dns.ExtendedErrorCodeProhibited, ExtraText: reason})
	}
}

// cutName keeps a record short, whatever was asked.
func cutName(s string) string {
	const most = 253
	s = strings.TrimSuffix(strings.ToLower(s), ".")
	return s[:min(len(s), most)]
}
