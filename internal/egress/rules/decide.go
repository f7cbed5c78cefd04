package rules

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
)

// Set is a list of rules, ready to decide. It does not change, and is safe for concurrent use.
type Set struct {
	rules   []Rule
	special classifier
}

// NewSet makes a set of rules, in the order in which they are judged.
func NewSet(list []Rule) *Set { return &Set{rules: list, special: special()} }

// Rules returns the rules. The caller must not change them.
func (s *Set) Rules() []Rule { return s.rules }

// match is what a rule says to a query of which not everything is known.
type match int

const (
	no match = iota
	maybe
	yes
)

// Decide judges all that is known. While something is not known yet, Allow means "not forbidden so far":
// what Decide refuses then it would refuse whatever else became known. With everything known it is final.
func (s *Set) Decide(q Query) Verdict {
	if v, bad := s.disagree(q); bad {
		return v
	}
	if q.Name != "" && q.Addr.IsValid() {
		// A rule of addresses opens no name, wherever that leads: what may not be looked up may not stay open either,
		// once its address is known.
		before := q
		before.Addr, before.Own = netip.Addr{}, false
		if _, v := s.first(before); !v.Allow {
			return v
		}
	}
	rule, verdict := s.first(q)
	if !verdict.Allow {
		return verdict
	}
	if v, bad := s.addressRefused(q); bad {
		return v
	}
	if rule.web && q.Plain {
		return deny(NotWeb, rule.text, hint(q, true), "%s is open for the web only, and this is neither TLS nor HTTP", target(q))
	}
	return verdict
}

// first walks the rules. The rule that it returns is the one that allows.
func (s *Set) first(q Query) (Rule, Verdict) {
	var open *Rule // an earlier rule that may allow
	looks := false // an earlier rule depends on the HTTP request
	for i := range s.rules {
		r := &s.rules[i]
		m := r.match(q)
		switch {
		case m == no:
			continue
		case m == maybe:
			looks = looks || r.HTTP() && q.HTTP == nil
			if !r.deny && open == nil {
				open = r
			}
			continue
		case r.deny && open == nil:
			return *r, deny(Denied, r.String(), "", "%s is denied by the rule %q", target(q), r.text)
		case !r.deny:
			return *r, allow(*r, looks, q)
		}
		return *open, allow(*open, looks, q)
	}
	if open != nil {
		return *open, allow(*open, looks, q)
	}
	return Rule{}, deny(NoRule, "", hint(q, false), "no rule allows %s", target(q))
}

func allow(r Rule, inspect bool, q Query) Verdict {
	return Verdict{
		Allow: true, Inspect: inspect, Web: r.web, Code: Allowed, Rule: r.String(),
		Reason: fmt.Sprintf("the rule %q allows %s", r.text, target(q)),
	}
}

func deny(c Code, rule, hint, format string, args ...any) Verdict {
	return Verdict{Code: c, Rule: rule, Hint: hint, Reason: fmt.Sprintf(format, args...)}
}

// match says whether the rule is about what a query asks.
func (r *Rule) match(q Query) match {
	m := yes
	switch {
	case r.whole:
	case q.Proto == DNS:
		m = maybe // of no port yet
	case q.Proto != r.proto || !r.portOK(q.Port):
		return no
	}
	switch r.host.match(q, r.deny) {
	case no:
		return no
	case maybe:
		m = maybe
	case yes:
	}
	if !r.HTTP() {
		return m
	}
	if q.HTTP == nil {
		if q.Plain {
			return no // will never be a request
		}
		return maybe
	}
	if q.HTTP.Path != "" && ambiguous(q.HTTP.Path) {
		// Servers read it differently, so a rule that allows some paths allows none of these, and one
		// that denies some denies all of these.
		if r.deny && r.path != "" {
			return m
		}
		if r.path != "" {
			return no
		}
	}
	if !r.httpOK(*q.HTTP) {
		return no
	}
	return m
}

func (h hostPattern) match(q Query, deny bool) match {
	known := q.Addr.IsValid()
	if q.Name == "" && deny {
		q.Name = said(q)
	}
	switch {
	case h.any:
		return yes
	case h.prefix.IsValid() && known:
		if h.prefix.Contains(q.Addr) {
			return yes
		}
		// One that denies also covers the same address in another dress.
		if e, ok := embedded(q.Addr); ok && deny && h.prefix.Contains(e) {
			return yes
		}
		return no
	case h.prefix.IsValid():
		// A rule of addresses is no reason to look a name up: the lookup itself would carry data out.
		if deny {
			return maybe
		}
		return no
	case q.Name == "":
		return no
	case h.name != "":
		return is(h.name == q.Name)
	default:
		return is(len(q.Name) > len(h.suffix) && strings.HasSuffix(q.Name, h.suffix))
	}
}

// said is the name that a client of a bare address says it means. It opens nothing, and a rule that denies
// it holds.
func said(q Query) string {
	switch {
	case q.HTTP != nil:
		return q.HTTP.Host
	case q.TLS != nil:
		return q.TLS.ServerName
	}
	return ""
}

func is(b bool) match {
	if b {
		return yes
	}
	return no
}

// disagree compares what the client says with where it goes.
func (s *Set) disagree(q Query) (Verdict, bool) {
	if q.Name == "" {
		return Verdict{}, false
	}
	if t := q.TLS; t != nil {
		switch {
		case t.ECH:
			return deny(NoServerName, "", "", "the TLS hello to %s hides its server name (ECH)", q.Name), true
		case t.ServerName == "":
			return deny(NoServerName, "", "", "the TLS hello to %s names no server", q.Name), true
		case t.ServerName != q.Name:
			return deny(NameMismatch, "", "", "the TLS hello names %s on a connection to %s", t.ServerName, q.Name), true
		}
	}
	if h := q.HTTP; h != nil {
		if h.Host != q.Name {
			return deny(NameMismatch, "", "", "the Host header names %s on a connection to %s", h.Host, q.Name), true
		}
		if h.Port != 0 && h.Port != q.Port {
			return deny(NameMismatch, "", "", "the Host header names port %d on a connection to port %d", h.Port, q.Port), true
		}
	}
	return Verdict{}, false
}

// addressRefused checks an address that means something particular: it needs a rule that means it.
func (s *Set) addressRefused(q Query) (Verdict, bool) {
	if !q.Addr.IsValid() {
		return Verdict{}, false
	}
	b, found := s.special.of(q.Addr)
	if e, ok := embedded(q.Addr); ok && !found {
		b, found = s.special.of(e)
	}
	if !found && !q.Own {
		return Verdict{}, false
	}
	what := b.what
	if !found {
		what, b.prefix = "an address of the host itself", netip.PrefixFrom(q.Addr, q.Addr.BitLen())
	}
	for i := range s.rules {
		r := &s.rules[i]
		if !r.host.prefix.IsValid() || r.match(q) == no {
			continue
		}
		if r.deny {
			break
		}
		if r.host.prefix.Bits() >= b.prefix.Bits() && b.prefix.Contains(r.host.prefix.Addr()) {
			return Verdict{}, false
		}
	}
	at := net.JoinHostPort(q.Addr.String(), strconv.Itoa(int(q.Port)))
	who := ""
	if q.Name != "" {
		who = q.Name + " leads to "
	}
	v := deny(SpecialAddress, "", at, "%s%s, %s, which needs a rule that names it", who, q.Addr, what)
	if q.Proto == UDP {
		v.Hint = "udp://" + at
	}
	return v, true
}

// target names what a query is about, as host:port.
func target(q Query) string {
	host := q.Name
	if host == "" {
		host = q.Addr.String()
	}
	if q.Proto == DNS || q.Port == 0 {
		return host
	}
	t := net.JoinHostPort(host, strconv.Itoa(int(q.Port)))
	if q.Proto == UDP {
		t = "udp://" + t
	}
	if q.HTTP != nil {
		t = q.HTTP.Method + " " + t + q.HTTP.Path
	}
	return t
}

// Target names what a query is about, as host:port.
func Target(q Query) string { q.HTTP = nil; return target(q) }

// hint is a rule that would allow a query, as narrow as people write them.
func hint(q Query, raw bool) string {
	host := q.Name
	if host == "" {
		host = q.Addr.String()
		if q.Addr.Is6() {
			host = "[" + host + "]"
		}
	}
	port := ":" + strconv.Itoa(int(q.Port))
	switch {
	case q.Proto == UDP:
		return "udp://" + host + port
	case q.Proto == ICMP:
		return ""
	case q.HTTP != nil && q.HTTP.Method != "" && (q.TLS == nil || q.Name != ""): // of addresses, TLS can't be looked into
		scheme, path := "http", q.HTTP.Path
		if q.TLS != nil {
			scheme = "https"
		}
		if ambiguous(path) || strings.ContainsAny(path, "*?# ") {
			path = "" // no rule by path would allow it, or only it
		}
		return q.HTTP.Method + " " + scheme + "://" + host + port + path
	case q.Proto == DNS || !raw && (q.Port == portHTTP || q.Port == portHTTPS):
		return host
	}
	return host + port
}

// ambiguous reports whether servers read a path differently: dot segments, empty ones, and what decodes
// to a dot, a slash, a backslash or nothing that belongs there.
func ambiguous(path string) bool {
	if strings.Contains(path, "//") || strings.ContainsAny(path, "\\;") {
		return true
	}
	for segment := range strings.SplitSeq(path, "/") {
		if segment == "." || segment == ".." {
			return true
		}
	}
	for rest := path; ; {
		_, after, ok := strings.Cut(rest, "%")
		if !ok {
			return false
		}
		if len(after) < 2 {
			return true
		}
		b, err := strconv.ParseUint(after[:2], 16, 8)
		if err != nil || unreserved(byte(b)) || b < ' ' || b == '/' || b == '\\' || b == '%' || b == ';' || b == 0x7f {
			return true // an unreserved character has no reason to hide
		}
		rest = after[2:]
	}
}

func unreserved(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '.' || c == '_' || c == '~'
}
