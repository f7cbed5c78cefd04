package sandbox

import (
	"context"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"casemate.dev/internal/egress/proxy"
	"casemate.dev/internal/egress/rules"
	"casemate.dev/internal/errs"
)

// NetworkAnswer is one part of an explanation.
type NetworkAnswer struct {
	About   string // "name", "connection", "proxy", "address", "gateway", "secret", or an address
	Verdict NetworkVerdict
}

// What answers are about, beside addresses.
const (
	aboutName       = "name"
	aboutConnection = "connection"
	aboutAddress    = "address"
	aboutProxy      = "proxy"
	aboutGateway    = "gateway"
	aboutSecret     = "secret"
)

// NetworkBeyond is what becomes of connections to a name beyond what the rules say.
type NetworkBeyond struct {
	// Answered says why the gateway answers them itself, whatever the rules say; "": it does not.
	Answered string
	// Puts says what it puts on their requests, each a sentence, for which it looks into them.
	Puts []string
}

// ExplainNetwork says what the rules of a sandbox answer to a URL, or HOST[:PORT], and why. It looks a name up
// where the rules allow that, and judges each of its addresses, as the gateway does; and it says what the gateway puts
// on requests, and what it answers itself. For a sandbox of which nothing leaves, no name is looked up. It returns the network,
// too.
func (m *Manager) ExplainNetwork(ctx context.Context, p Principal, ref, target, method string) ([]NetworkAnswer, Network, error) {
	_, s, err := m.networked(ctx, p, ref)
	if err != nil {
		return nil, Network{}, err
	}
	list, err := m.expand(s.Spec.Network)
	if err != nil {
		return nil, Network{}, err
	}
	q, err := parseTarget(target, method)
	if err != nil {
		return nil, Network{}, err
	}
	set := rules.NewSet(list)
	if s.Spec.Network.Recorded {
		return []NetworkAnswer{fromRecord(set, q)}, *s.Spec.Network, nil
	}
	beyond := NetworkBeyond{}
	if m.cfg.Beyond != nil && q.Name != "" && q.Proto == rules.TCP {
		beyond = m.cfg.Beyond(ctx, s, q.Name, q.Port)
	}
	if beyond.Answered != "" {
		v := rules.Verdict{Allow: true, Inspect: true, Code: rules.Allowed, Reason: beyond.Answered}
		return []NetworkAnswer{{aboutGateway, v}}, *s.Spec.Network, nil
	}
	answers := m.explain(ctx, set, q, m.proxyFor(s.Spec.Network, q))
	if NetworkAllowed(answers) {
		for _, text := range beyond.Puts {
			answers = append(answers, NetworkAnswer{aboutSecret, rules.Verdict{Allow: true, Inspect: true, Code: rules.Allowed, Reason: text}})
		}
	}
	return answers, *s.Spec.Network, nil
}

// fromRecord answers for a sandbox that is answered from a record.
func fromRecord(set *rules.Set, q rules.Query) NetworkAnswer {
	v := set.Decide(q)
	switch {
	case v.Allow && q.Proto == rules.UDP:
		v = rules.Verdict{Code: rules.NotRecorded, Reason: "nothing leaves this sandbox, and a record holds no answers by UDP"}
	case v.Allow:
		v.Inspect, v.Reason = true, "nothing leaves this sandbox: the record answers what stands in it, and all else is refused"
	}
	return NetworkAnswer{aboutGateway, v}
}

// proxyFor returns the proxy that a sandbox's connections leave through: its own, or the host's; nil: none.
func (m *Manager) proxyFor(n *Network, q rules.Query) *proxy.Proxy {
	if n.Proxy == "" || q.Proto == rules.UDP {
		return m.cfg.Proxy
	}
	p, err := proxy.Parse("socks5://" + n.Proxy)
	if err != nil {
		p = proxy.Proxy{Name: n.Proxy}
	}
	p.ByName = true
	return &p
}

func (m *Manager) explain(ctx context.Context, set *rules.Set, q rules.Query, by *proxy.Proxy) []NetworkAnswer {
	var out []NetworkAnswer
	addrs := []netip.Addr{q.Addr}
	if by.Bypassed(q.Name, q.Addr, q.Port) {
		by = nil
	}
	if q.Name != "" {
		v := set.Decide(rules.Query{Proto: rules.DNS, Name: q.Name})
		out = append(out, NetworkAnswer{aboutName, v})
		if !v.Allow {
			return out
		}
		v = set.Decide(q)
		out = append(out, NetworkAnswer{aboutConnection, v})
		if !v.Allow {
			return out
		}
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		var err error
		if addrs, err = m.cfg.Resolver.LookupNetIP(ctx, "ip", q.Name+"."); err != nil {
			return append(out, unresolved(q, by))
		}
	}
	own := ownAddresses()
	past := by == nil
	for _, a := range addrs {
		q.Addr = a.Unmap()
		q.Own = own[q.Addr]
		v := set.Decide(q)
		out = append(out, NetworkAnswer{q.Addr.String(), v})
		past = past || v.Allow && by.Bypassed(q.Name, q.Addr, q.Port)
	}
	if past {
		return out
	}
	return append(out, throughProxy(q, by, out))
}

// unresolved answers for a name that can't be looked up here, which a proxy may know.
func unresolved(q rules.Query, by *proxy.Proxy) NetworkAnswer {
	switch {
	case by == nil || !by.ByName || q.Proto == rules.UDP:
		return NetworkAnswer{aboutAddress, rules.Verdict{Code: rules.Unresolved, Reason: q.Name + " could not be looked up"}}
	case rules.PrivateName(q.Name):
		return NetworkAnswer{aboutAddress, rules.Verdict{
			Code: rules.SpecialAddress, Reason: q.Name + " is a name of private networks, and can't be looked up here, so that the proxy is not asked for it",
		}}
	}
	return NetworkAnswer{aboutAddress, rules.Verdict{Allow: true, Code: rules.Allowed, Reason: "the proxy " + by.String() + " is asked for the name, which is not known here"}}
}

// throughProxy answers whether a proxy is asked for a target whose addresses have been judged.
func throughProxy(q rules.Query, by *proxy.Proxy, answers []NetworkAnswer) NetworkAnswer {
	switch {
	case q.Proto == rules.UDP:
		return NetworkAnswer{aboutProxy, rules.Verdict{Code: rules.Unreachable, Reason: "UDP goes through no proxy"}}
	case by.ByName && q.Name != "" && slices.ContainsFunc(answers, func(a NetworkAnswer) bool { return !a.Verdict.Allow }):
		return NetworkAnswer{aboutProxy, rules.Verdict{
			Code: rules.SpecialAddress, Reason: "the proxy " + by.String() + " would choose among the addresses, of which one is refused",
		}}
	}
	return NetworkAnswer{aboutProxy, rules.Verdict{Allow: true, Code: rules.Allowed, Reason: "it leaves through the proxy " + by.String()}}
}

func ownAddresses() map[netip.Addr]bool {
	own := map[netip.Addr]bool{}
	list, err := net.InterfaceAddrs()
	if err != nil {
		return own
	}
	for _, a := range list {
		if n, ok := a.(*net.IPNet); ok {
			if b, ok := netip.AddrFromSlice(n.IP); ok {
				own[b.Unmap()] = true
			}
		}
	}
	return own
}

// parseTarget reads a URL, or HOST[:PORT], into what the rules are asked.
func parseTarget(target, method string) (rules.Query, error) {
	q := rules.Query{Proto: rules.TCP, Port: 443}
	bad := func(err error) error {
		return errs.Wrap(err, errs.InvalidArgument, "%s is no URL and no HOST[:PORT]", quote(target))
	}
	whole := strings.Contains(target, "://")
	if !whole {
		target = "tcp://" + target
	}
	u, err := url.Parse(target)
	if err != nil || u.Host == "" || u.User != nil {
		return q, bad(err)
	}
	switch u.Scheme {
	case "http", "ws":
		q.Port = 80
	case "udp":
		q.Proto = rules.UDP
	case "https", "wss", "tcp":
	default:
		return q, invalid("the scheme %s is unknown", quote(u.Scheme)).WithHint("use http, https, tcp or udp")
	}
	if text := u.Port(); text != "" {
		n, err := strconv.ParseUint(text, 10, 16)
		if err != nil || n == 0 {
			return q, bad(err)
		}
		q.Port = uint16(n)
	}
	if q.Name, q.Addr, err = rules.Host(u.Hostname()); err != nil {
		return q, bad(err)
	}
	if whole && (u.Scheme == "http" || u.Scheme == "https") {
		host := q.Name
		if host == "" {
			host = q.Addr.String()
		}
		q.HTTP = &rules.HTTP{Host: host, Port: q.Port, Method: or(method, "GET"), Path: or(u.EscapedPath(), "/")}
		if u.Scheme == "https" {
			q.TLS = &rules.TLS{ServerName: q.Name}
		}
	}
	return q, nil
}

// NetworkAllowed reports whether the answers together allow a connection: the name, the connection, one of the
// addresses, and the proxy where one is on the way; or the gateway answers it.
func NetworkAllowed(answers []NetworkAnswer) bool {
	address := false
	for _, a := range answers {
		switch a.About {
		case aboutName, aboutConnection, aboutProxy, aboutSecret:
			if !a.Verdict.Allow {
				return false
			}
		default:
			address = address || a.Verdict.Allow
		}
	}
	return address
}
