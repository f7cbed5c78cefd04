package e2b

import (
	"context"
	"net/http"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/secret"
)

// egressProxy is a SOCKS5 proxy that a sandbox's TCP connections leave through. Its password is neither kept nor shown.
type egressProxy struct {
	Address  string `json:"address"`
	Username string `json:"username,omitempty"`
	Password string `json:"password,omitempty"`
}

// Proxies makes of a proxy what the gateway needs to use it.
type Proxies interface {
	// SandboxProxy refuses an address that is not HOST:PORT, is not known, or is private; admin says that an administrator
	// names it, who may name a private one. It returns the address in its one form, and what is to be kept as a secret.
	// Kind: InvalidArgument.
	SandboxProxy(ctx context.Context, address, user, password string, admin bool) (string, secret.Value, error)
}

// maxProxyWord bounds a user's name and a password (RFC 1929, section 2).
const maxProxyWord = 255

// check refuses what no SOCKS5 proxy can be told.
func (e *egressProxy) check() error {
	switch {
	case e == nil:
		return nil
	case len(e.Username) > maxProxyWord || len(e.Password) > maxProxyWord:
		return fail(http.StatusBadRequest, "network.egressProxy: username and password have at most %d bytes", maxProxyWord)
	case e.Password != "" && e.Username == "":
		return fail(http.StatusBadRequest, "network.egressProxy: a password needs a username")
	}
	return nil
}

// proxy returns the address of the proxy that n asks for, "" for none, and what is to be kept of it as a secret. The
// password is taken out of n, which is kept and shown.
func (a *API) proxy(c call, n *networkConfig) (string, secret.Value, error) {
	if n == nil || n.EgressProxy == nil {
		return "", secret.Value{}, nil
	}
	if a.cfg.Proxies == nil || a.cfg.Transforms == nil || !a.cfg.Manager.HasNetworks() {
		return "", secret.Value{}, fail(http.StatusNotImplemented, "network.egressProxy: this server has no gateway, so its sandboxes reach nothing")
	}
	e := *n.EgressProxy
	address, value, err := a.cfg.Proxies.SandboxProxy(c.r.Context(), e.Address, e.Username, e.Password, c.p.Admin && c.p.Sandbox == "")
	if errs.Is(err, errs.InvalidArgument) {
		return "", secret.Value{}, fail(http.StatusBadRequest, "network.egressProxy: %s", publicText(err))
	}
	n.EgressProxy = &egressProxy{Address: e.Address, Username: e.Username}
	return address, value, err
}
