package rules

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"casemate.dev/internal/errs"
)

// maxRule bounds a rule's text.
const maxRule = 2048

// The ports of the web, which a rule without ports opens.
const (
	portHTTP  = 80
	portHTTPS = 443
)

// Rule is one parsed rule. As text, and in JSON, it is "allow RULE" or "deny RULE".
type Rule struct {
	deny    bool
	text    string
	proto   Proto
	host    hostPattern
	ports   portRange
	web     bool // TLS and HTTP only, on their ports
	whole   bool // denies the host whatever the port and the protocol, and so its name's lookup
	methods []string
	path    string // "" is every path
}

type portRange struct{ from, to uint16 }

// hostPattern is one of: any, a name, a suffix, a range of addresses.
type hostPattern struct {
	any    bool
	name   string
	suffix string // with its dot in front
	prefix netip.Prefix
}

// Deny reports whether the rule denies.
func (r Rule) Deny() bool { return r.deny }

// Text returns the rule without its "allow" or "deny".
func (r Rule) Text() string { return r.text }

// String returns the rule with it.
func (r Rule) String() string {
	if r.deny {
		return "deny " + r.text
	}
	return "allow " + r.text
}

// Name returns the one name that the rule is about, or "".
func (r Rule) Name() string { return r.host.name }

// Covers reports whether the rule's host and ports, whatever it says of them, are those of a target: by its name,
// or by its address where that is valid. Port 0 is whichever.
func (r Rule) Covers(name string, addr netip.Addr, port uint16) bool {
	if port != 0 && !r.portOK(port) {
		return false
	}
	q := Query{Name: name, Addr: addr}
	return r.host.match(q, false) == yes
}

// HTTP reports whether the rule looks at methods or paths.
func (r Rule) HTTP() bool { return r.path != "" || len(r.methods) > 0 }

// MarshalText implements encoding.TextMarshaler.
func (r Rule) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (r *Rule) UnmarshalText(b []byte) error {
	action, text, ok := strings.Cut(string(b), " ")
	if !ok || action != "allow" && action != "deny" {
		return errs.New(errs.InvalidArgument, "the rule %q begins with neither allow nor deny", cut(string(b)))
	}
	p, err := Parse(text, action == "deny")
	if err == nil {
		*r = p
	}
	return err
}

// Parse parses one rule. Kind: InvalidArgument; the text says what is wrong with it.
func Parse(text string, deny bool) (Rule, error) {
	r := Rule{deny: deny, text: strings.TrimSpace(text), proto: TCP}
	if err := r.parse(); err != nil {
		return Rule{}, errs.New(errs.InvalidArgument, "the rule %q is not valid: %s", cut(text), err).
			WithHint("a rule is [METHOD ][SCHEME://]HOST[:PORT][/PATH], as example.com, *.example.com, example.com:8443 or 10.0.0.0/8:5432")
	}
	return r, nil
}

func cut(s string) string {
	const most = 80
	if len(s) > most {
		return strings.ToValidUTF8(s[:most], "") + "…"
	}
	return s
}

func (r *Rule) parse() error {
	rest := r.text
	if len(rest) > maxRule {
		return fmt.Errorf("it is longer than %d bytes", maxRule)
	}
	if methods, after, ok := strings.Cut(rest, " "); ok {
		if err := r.parseMethods(methods); err != nil {
			return err
		}
		rest = strings.TrimSpace(after)
	}
	scheme, after, ok := strings.Cut(rest, "://")
	if ok {
		rest = after
	} else {
		scheme = ""
	}
	rest, err := r.parsePath(rest)
	if err != nil {
		return err
	}
	host, ports := splitPorts(rest)
	if err := r.parseHost(host); err != nil {
		return err
	}
	if err := r.parsePorts(scheme, ports); err != nil {
		return err
	}
	if r.HTTP() && r.host.prefix.IsValid() && scheme == "https" {
		return fmt.Errorf("what TLS carries can be looked into for names only, not for addresses")
	}
	if r.HTTP() && r.proto != TCP {
		return fmt.Errorf("methods and paths belong to http and https")
	}
	return nil
}

func (r *Rule) parseMethods(list string) error {
	for m := range strings.SplitSeq(list, ",") {
		if m == "" || strings.Trim(m, "ABCDEFGHIJKLMNOPQRSTUVWXYZ-") != "" {
			return fmt.Errorf("%q is no HTTP method", m)
		}
		r.methods = append(r.methods, m)
	}
	return nil
}

// parsePath takes the path off the end. A slash with a number behind it is a range of addresses.
func (r *Rule) parsePath(rest string) (string, error) {
	from := 0
	if p, n := prefixOf(rest); p.IsValid() {
		r.host.prefix, from = p, n
	}
	i := strings.IndexByte(rest[from:], '/')
	if i < 0 {
		return rest, nil
	}
	r.path = rest[from+i:]
	if strings.ContainsAny(r.path, "?#\\ ") || !ascii(r.path) {
		return "", fmt.Errorf("a path holds no query, fragment, space or backslash, and is ASCII")
	}
	return rest[:from+i], nil
}

// prefixOf finds ADDRESS/BITS or [ADDRESS/BITS] at the beginning, and says how long it is.
func prefixOf(s string) (netip.Prefix, int) {
	var end int
	var text string
	if strings.HasPrefix(s, "[") {
		i := strings.IndexByte(s, ']')
		if i < 0 {
			return netip.Prefix{}, 0
		}
		text, end = s[1:i], i+1
	} else {
		slash := strings.IndexByte(s, '/')
		if slash < 0 {
			return netip.Prefix{}, 0
		}
		n := slash + 1
		for n < len(s) && s[n] >= '0' && s[n] <= '9' {
			n++
		}
		text, end = s[:n], n
	}
	p, err := netip.ParsePrefix(text)
	if err != nil {
		return netip.Prefix{}, 0
	}
	return p, end
}

// splitPorts splits HOST:PORTS, where HOST may be an IPv6 address in brackets or, without ports, as it is.
func splitPorts(s string) (host, ports string) {
	i := strings.LastIndexByte(s, ':')
	if i < 0 || strings.HasSuffix(s, "]") || strings.Count(s, ":") > 1 && !strings.HasPrefix(s, "[") {
		return s, ""
	}
	return s[:i], s[i+1:]
}

func (r *Rule) parseHost(host string) error {
	if p := r.host.prefix; p.IsValid() {
		if p.Addr().Is4In6() {
			return fmt.Errorf("write the IPv4 range %s as such", p)
		}
		if p != p.Masked() {
			return fmt.Errorf("%s has bits behind its length; %s is meant", p, p.Masked())
		}
		return nil
	}
	if host == "*" {
		r.host.any = true
		return nil
	}
	suffix, wild := strings.CutPrefix(host, "*.")
	if strings.Contains(suffix, "*") {
		return fmt.Errorf("* stands alone, or for whole parts at the beginning, as in *.example.com")
	}
	name, addr, err := Host(suffix)
	switch {
	case err != nil:
		return err
	case wild && name == "":
		return fmt.Errorf("*. goes before a name, not before an address; write a range")
	case wild:
		r.host.suffix = "." + name
	case name != "":
		r.host.name = name
	default:
		r.host.prefix = netip.PrefixFrom(addr, addr.BitLen())
	}
	return nil
}

func (r *Rule) parsePorts(scheme, ports string) error {
	one := func(p uint16) portRange { return portRange{p, p} }
	switch scheme {
	case "":
		// Without ports, the web is allowed and everything is denied; with ports, whatever is spoken there.
		r.web = ports == "" && !r.deny
		r.whole = ports == "" && r.deny && !r.HTTP()
	case "https", "wss":
		r.web, r.ports = true, one(portHTTPS)
	case "http", "ws":
		r.web, r.ports = true, one(portHTTP)
	case "tcp":
	case "udp":
		r.proto = UDP
	default:
		return fmt.Errorf("%q is no scheme; use http, https, tcp or udp", scheme)
	}
	if ports == "" {
		if scheme == "tcp" || scheme == "udp" {
			return fmt.Errorf("%s:// needs a port, or :* for all", scheme)
		}
		return nil
	}
	if ports == "*" {
		r.ports = portRange{1, 65535}
		return nil
	}
	from, to, ok := strings.Cut(ports, "-")
	if !ok {
		to = from
	}
	a, err1 := strconv.ParseUint(from, 10, 16)
	b, err2 := strconv.ParseUint(to, 10, 16)
	if err1 != nil || err2 != nil || a == 0 || b < a {
		return fmt.Errorf("%q is no port, and no range of ports", ports)
	}
	r.ports = portRange{uint16(a), uint16(b)}
	return nil
}

// portOK reports whether the rule is about a port.
func (r Rule) portOK(p uint16) bool {
	if r.ports == (portRange{}) {
		return p == portHTTP || p == portHTTPS
	}
	return r.ports.from <= p && p <= r.ports.to
}

func (r Rule) httpOK(h HTTP) bool {
	if len(r.methods) > 0 && !slices.Contains(r.methods, h.Method) {
		return false
	}
	return r.path == "" || glob(r.path, h.Path)
}

// glob matches * to any text. It is linear in practice: only the last star is ever tried again.
func glob(pattern, s string) bool {
	p, i, star, mark := 0, 0, -1, 0
	for i < len(s) {
		switch {
		case p < len(pattern) && pattern[p] == '*':
			star, mark = p, i
			p++
		case p < len(pattern) && pattern[p] == s[i]:
			p++
			i++
		case star >= 0:
			mark++
			p, i = star+1, mark
		default:
			return false
		}
	}
	for p < len(pattern) && pattern[p] == '*' {
		p++
	}
	return p == len(pattern)
}
