package api

import (
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"

	"casemate.dev/internal/errs"
)

// hostList is the defence against DNS rebinding: a page that resolves its own name to this server's
// address can send requests, but only under that name. So a Host must be an address, localhost or a
// name that the operator listed, and a browser's Origin must be the same host.
type hostList struct {
	names map[string]bool
	any   bool
}

// newHostList allows names beside addresses and localhost; "*" allows every name.
func newHostList(names []string) hostList {
	l := hostList{names: map[string]bool{"localhost": true}}
	for _, n := range names {
		l.any = l.any || n == "*"
		l.names[strings.ToLower(n)] = true
	}
	return l
}

// check refuses a request whose Host or Origin is not allowed. Requests on the server's own socket
// pass: no browser can make them.
func (l hostList) check(r *http.Request) error {
	if isLocalPeer(r.Context()) {
		return nil
	}
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

func (l hostList) allowed(host string) bool {
	name := strings.ToLower(hostOnly(host))
	if l.any || l.names[name] {
		return true
	}
	_, err := netip.ParseAddr(name)
	return err == nil
}

// sameHost reports whether a page of origin may call host: the same one, or one that the operator
// listed by name.
func (l hostList) sameHost(origin, host string) bool {
	return strings.EqualFold(origin, host) || (hostOnly(origin) != "localhost" && l.names[strings.ToLower(hostOnly(origin))])
}

// hostOnly strips a port and the brackets of an IPv6 address.
func hostOnly(host string) string {
	if h, _, err := net.SplitHostPort(host); err == nil {
		return h
	}
	return strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
}
