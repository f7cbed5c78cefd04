// Package proxy is a proxy on the way out: that of the host's own network, where that has no other way, or one
// sandbox's. It says what a proxy is, which targets it is for, and how a connection is asked of it.
//
// What belongs here: the setting, CONNECT (RFC 9110, section 9.3.6) and SOCKS5 (RFC 1928). What does not: whether a
// target may be reached at all, and the addresses that it leads to (package gateway, which asks the rules first).
package proxy

import (
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/egress/rules"
	"casemate.dev/internal/errs"
)

// Proxy is a proxy as the server tells the gateway of it.
type Proxy struct {
	// Name is its canonical host name, or "" where it is known by Addr.
	Name string     `json:"name,omitempty"`
	Addr netip.Addr `json:"addr,omitzero"`
	Port uint16     `json:"port"`
	// SOCKS says that it speaks SOCKS5, else HTTP.
	SOCKS bool `json:"socks,omitempty"`
	// TLS says that it is spoken to by TLS. Roots are the authorities that it is verified by, in PEM.
	TLS   bool   `json:"tls,omitempty"`
	Roots []byte `json:"roots,omitempty"`
	// Credentials are USER:PASSWORD, the password alone where User is set, or nothing.
	Credentials egress.Private `json:"credentials,omitempty"`
	User        string         `json:"user,omitempty"`
	// ByName says that the proxy looks names up. Else the gateway does, and asks it for an address.
	ByName bool `json:"by_name,omitempty"`
	// Direct are the targets that it is not for.
	Direct []rules.Rule `json:"direct,omitempty"`
	// Own says that it is one sandbox's. Then what leads to it is judged, and goes through the host's: it is at a public
	// address, unless Special says that an administrator named it.
	Own     bool `json:"own,omitempty"`
	Special bool `json:"special,omitempty"`
	// Fault says why it can't be used now, as when its credentials can't be read; "": it can.
	Fault string `json:"fault,omitempty"`
}

// The ports of proxies whose URL names none, as in curl's and Go's clients.
const (
	portPlain = 80
	portTLS   = 443
)

// Parse reads the URL of a proxy: http://HOST:PORT, https://HOST:PORT or socks5://HOST:PORT. Kind: InvalidArgument.
func Parse(text string) (Proxy, error) {
	bad := func(format string, args ...any) (Proxy, error) {
		return Proxy{}, errs.New(errs.InvalidArgument, "the proxy's URL is not valid: %s", fmt.Sprintf(format, args...)).
			WithHint("write it as http://proxy.example.com:3128, https:// where the proxy itself speaks TLS, or socks5://")
	}
	u, err := url.Parse(text)
	switch {
	case err != nil: // the error would show the text, and with it a password
		return bad("it can't be read")
	case u.User != nil:
		return Proxy{}, errs.New(errs.InvalidArgument, "the proxy's URL holds a user or a password, which every process of this host could read").
			WithHint("give them by --proxy-credentials FILE, or --proxy-secret NAME")
	case u.Scheme != "http" && u.Scheme != "https" && u.Scheme != "socks5":
		return bad("it begins with none of http://, https:// and socks5://")
	case u.Path != "" && u.Path != "/" || u.RawQuery != "" || u.Fragment != "" || u.Opaque != "":
		return bad("nothing goes behind its port")
	}
	p := Proxy{TLS: u.Scheme == "https", SOCKS: u.Scheme == "socks5", Port: portPlain}
	switch {
	case p.TLS:
		p.Port = portTLS
	case p.SOCKS:
		p.Port = portSOCKS
	}
	if port := u.Port(); port != "" {
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil || n == 0 {
			return bad("%q is no port", port)
		}
		p.Port = uint16(n)
	}
	if p.Name, p.Addr, err = rules.Host(u.Hostname()); err != nil {
		return bad("%s", err)
	}
	return p, nil
}

// ParseDirect reads the targets that no proxy is for: HOST, which covers what is below it, too, *.SUFFIX, .SUFFIX,
// ADDRESS or RANGE, each with :PORT or for every port, several to an entry with commas between them. Kind:
// InvalidArgument.
func ParseDirect(list []string) ([]rules.Rule, error) {
	var out []rules.Rule
	for _, entry := range strings.Split(strings.Join(list, ","), ",") {
		entry = strings.TrimSpace(entry)
		if entry == "" {
			continue
		}
		text := entry
		if suffix, ok := strings.CutPrefix(text, "."); ok {
			text = "*." + suffix
		}
		r, err := rules.Parse(text, false)
		if err == nil && !hasPort(text) {
			r, err = rules.Parse(bracketed(text)+":*", false)
		}
		if err == nil && (r.HTTP() || strings.Contains(text, "://")) {
			err = errs.New(errs.InvalidArgument, "it names hosts and ports, no schemes, methods and paths")
		}
		if err != nil {
			reason, _ := errs.PublicText(err)
			return nil, errs.New(errs.InvalidArgument, "%q is no target that could go past the proxy: %s", entry, reason).
				WithHint("give HOST, *.SUFFIX, ADDRESS or RANGE as 10.0.0.0/8, with :PORT where only that is meant")
		}
		out = append(out, r)
		if r.Name() != "" {
			below, err := rules.Parse("*."+r.Text(), false)
			if err != nil {
				return nil, err
			}
			out = append(out, below)
		}
	}
	return out, nil
}

// hasPort reports whether a host, address or range has a port behind it.
func hasPort(s string) bool {
	i := strings.LastIndexByte(s, ':')
	return i >= 0 && !strings.HasSuffix(s, "]") && (strings.Count(s, ":") == 1 || strings.HasPrefix(s, "["))
}

// bracketed is an IPv6 address or range as it stands before a port.
func bracketed(s string) string {
	if strings.Count(s, ":") > 1 && !strings.HasPrefix(s, "[") {
		return "[" + s + "]"
	}
	return s
}

// String names it, as host:port.
func (p *Proxy) String() string { return net.JoinHostPort(p.Host(), strconv.Itoa(int(p.Port))) }

// Host is its name, or its address.
func (p *Proxy) Host() string {
	if p.Name != "" {
		return p.Name
	}
	return p.Addr.String()
}

// Bypassed reports whether a target goes past it, by its name, or by its address where that is known. Port 0
// is whichever. A nil Proxy is bypassed always.
func (p *Proxy) Bypassed(name string, addr netip.Addr, port uint16) bool {
	if p == nil {
		return true
	}
	return slices.ContainsFunc(p.Direct, func(r rules.Rule) bool { return r.Covers(name, addr, port) })
}
