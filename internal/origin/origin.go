// Package origin defends what a browser could be made to call: which names a request may ask for, and
// which pages it may come from.
//
// A page that resolves its own name to this server's address can send requests, but only under that
// name (DNS rebinding). So a Host must be an address, localhost or a name that the operator listed, and
// a browser's Origin must be the same host.
//
// What belongs here: judging a request's Host and Origin. What does not: who asks (package policy), and
// which requests need not be judged.
package origin

import (
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"

	"casemate.dev/internal/errs"
)

// List holds the names under which a server answers. It is immutable.
type List struct {
	names map[string]bool
	any   bool
}

// New allows names beside addresses and localhost; "*" allows every name.
func New(names []string) List {
	l := List{names: map[string]bool{"localhost": true}}
	for _, n := range names {
		l.any = l.any || n == "*"
		l.names[strings.ToLower(n)] = true
	}
	return l
}

// Check refuses a request whose Host or Origin is not allowed: PermissionDenied.
func (l List) Check(r *http.Request) error {
	if !l.allowed(r.Host) {
		return errs.New(errs.PermissionDenied, "the host name %q is not allowed", hostOnly(r.Host)).
			WithHint("reach the server by its address, or start it with --allow-host NAME")
	}
	for _, origin := range r.Header["Origin"] {
		u, err := url.Parse(origin)
		if err != nil || u.Host == "" || !l.sameHost(u.Host, r.Host) {
			return errs.New(errs.PermissionDenied, "requests from the origin %q are not allowed", origin)
		}
	}
	return nil
}

func (l List) allowed(host string) bool {
	name := strings.ToLower(hostOnly(host))
	if l.any || l.names[name] {
		return true
	}
	_, err := netip.ParseAddr(name)
	return err == nil
}

// sameHost reports whether a page of origin may call host: the same one, or one that the operator
// listed by name.
func (l List) sameHost(origin, host string) bool {
	return strings.EqualFold(origin, host) || (hostOnly(origin) != "localhost" && l.names[strings.ToLower(hostOnly(origin))])
}

// hostOnly strips a port and the brackets of an IPv6 address.
func hostOnly(host string) string {
	if h, _, err := net.SplitHostPort(host); err == nil {
		return h
	}
	return strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
}
