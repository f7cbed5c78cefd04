package server

import (
	"context"
	"encoding/json"
	"time"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/egress/proxy"
	"casemate.dev/internal/egress/resolve"
	"casemate.dev/internal/egress/rules"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/secret"
)

// proxyLookup is how long the name of a sandbox's proxy is looked up.
const proxyLookup = 10 * time.Second

// SandboxProxy implements e2b.Proxies. What it returns is kept by the vault, encrypted, and read by ownProxy. The gateway
// judges the address once more each time that it connects.
func (s *Server) SandboxProxy(ctx context.Context, address, user, password string, admin bool) (string, secret.Value, error) {
	p, err := proxy.Parse("socks5://" + address)
	if err != nil || address == "" {
		return "", secret.Value{}, errs.New(errs.InvalidArgument, "%.300q is no address of a proxy", address).WithHint("write it as proxy.example.com:1080")
	}
	p.User, p.Credentials, p.ByName, p.Own, p.Special = user, egress.Private(password), true, true, admin
	if err := s.checkProxy(ctx, p); err != nil {
		return "", secret.Value{}, err
	}
	text, err := json.Marshal(p)
	if err != nil {
		return "", secret.Value{}, err
	}
	return p.String(), secret.NewValue(text), nil
}

// checkProxy refuses a proxy that is not known, and one inside the host's networks that no administrator names.
func (s *Server) checkProxy(ctx context.Context, p proxy.Proxy) error {
	if p.Name == "" {
		if what := rules.Special(p.Addr); what != "" && !p.Special {
			return errs.New(errs.InvalidArgument, "the proxy %s is at %s, which only an administrator may name", p.String(), what)
		}
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, proxyLookup)
	defer cancel()
	addrs, err := resolve.New(s.cfg.Nameservers).LookupNetIP(ctx, "ip", p.Name+".")
	if err != nil || len(addrs) == 0 {
		return errs.Wrap(err, errs.InvalidArgument, "the proxy %s can't be looked up", p.String())
	}
	for _, a := range addrs {
		if what := rules.Special(a.Unmap()); what != "" && !p.Special {
			return errs.New(errs.InvalidArgument, "the proxy %s leads to %s, which only an administrator may name", p.String(), what)
		}
	}
	return nil
}

// ownProxy is what the gateway needs to use a sandbox's own proxy; nothing where that is not there.
func (s *Server) ownProxy(_ context.Context, sandbox string) egress.Private {
	return egress.Private(s.vault.ProxyOf(sandbox).Reveal())
}
