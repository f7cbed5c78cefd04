// Package resolve makes the resolver that looks up names for sandboxes.
//
// What belongs here: which name servers are asked. What does not: whether a name may be asked for (package
// rules), and keeping answers (package gateway).
package resolve

import (
	"context"
	"errors"
	"net"
)

// New returns a resolver that asks the given name servers (address:port), or the host's own where there are
// none. It never runs code of the C library.
func New(servers []string) *net.Resolver {
	r := &net.Resolver{PreferGo: true}
	if len(servers) == 0 {
		return r
	}
	r.Dial = func(ctx context.Context, network, _ string) (net.Conn, error) {
		var d net.Dialer
		var all []error
		for _, s := range servers {
			c, err := d.DialContext(ctx, network, s)
			if err == nil {
				return c, nil
			}
			all = append(all, err)
		}
		return nil, errors.Join(all...)
	}
	return r
}
