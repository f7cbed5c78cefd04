package server

import (
	"bytes"
	"context"
	"os"

	"casemate.dev/internal/egress/proxy"
	"casemate.dev/internal/errs"
)

// maxCredentials bounds what a proxy is shown.
const maxCredentials = 4 << 10

// openProxy reads the setting of the proxy that sandboxes' connections leave through.
func (s *Server) openProxy() error {
	cfg := s.cfg
	if cfg.ProxyURL == "" {
		if cfg.ProxyCredentials != "" || cfg.ProxySecret != "" || len(cfg.NoProxy) > 0 || cfg.ProxyNames {
			return errs.New(errs.InvalidArgument, "there are settings of a proxy, and none is named").
				WithHint("give its URL by --proxy, or leave --proxy-credentials, --proxy-secret, --proxy-names and --no-proxy out")
		}
		return nil
	}
	p, err := proxy.Parse(cfg.ProxyURL)
	if err != nil {
		return err
	}
	if p.Direct, err = proxy.ParseDirect(cfg.NoProxy); err != nil {
		return err
	}
	p.ByName = cfg.ProxyNames
	if p.TLS {
		p.Roots = s.trust.roots
	}
	switch {
	case cfg.ProxyCredentials != "" && cfg.ProxySecret != "":
		return errs.New(errs.InvalidArgument, "the proxy's credentials are in a file or in a secret, not in both")
	case cfg.ProxyCredentials != "":
		raw, err := os.ReadFile(cfg.ProxyCredentials)
		if err != nil {
			return errs.Wrap(err, errs.InvalidArgument, "cannot read the proxy's credentials in %s", cfg.ProxyCredentials)
		}
		if p.Credentials, err = credentials(raw); err != nil {
			return errs.Wrap(err, errs.InvalidArgument, "the file %s holds no credentials for a proxy", cfg.ProxyCredentials).
				WithHint("it holds one line, USER:PASSWORD")
		}
	}
	s.proxy = &p
	return nil
}

// credentials checks what is shown to a proxy (RFC 7617, section 2).
func credentials(raw []byte) ([]byte, error) {
	raw = bytes.TrimRight(raw, "\r\n")
	switch {
	case len(raw) > maxCredentials:
		return nil, errs.New(errs.InvalidArgument, "it is longer than %d bytes", maxCredentials)
	case bytes.IndexByte(raw, ':') < 1:
		return nil, errs.New(errs.InvalidArgument, "it is not USER:PASSWORD")
	case bytes.ContainsFunc(raw, func(r rune) bool { return r < ' ' || r == 0x7f }):
		return nil, errs.New(errs.InvalidArgument, "it holds a control character")
	}
	return raw, nil
}

// currentProxy is the proxy as the gateway is to know it now; nil: none.
func (s *Server) currentProxy(ctx context.Context) *proxy.Proxy {
	if s.proxy == nil || s.cfg.ProxySecret == "" {
		return s.proxy
	}
	p := *s.proxy
	value, err := s.vault.Own(ctx, s.cfg.ProxySecret)
	if err == nil {
		p.Credentials, err = credentials(value.Reveal())
	}
	if err != nil {
		text, _ := errs.PublicText(err)
		p.Fault = "its credentials, the secret " + s.cfg.ProxySecret + ", can't be read: " + text
		s.log.Warn("the proxy's credentials can't be read; nothing that goes through it is connected", "secret", s.cfg.ProxySecret, "error", err)
	}
	return &p
}
