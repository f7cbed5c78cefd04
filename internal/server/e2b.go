package server

import (
	"context"
	"fmt"

	"casemate.dev/internal/e2b"
	"casemate.dev/internal/e2b/envd"
	"casemate.dev/internal/observe"
	"casemate.dev/internal/policy"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/usage"
)

// e2bSecretFile is the file in the keys directory that the tokens of E2B's protocol are derived from.
const e2bSecretFile = "e2b.key"

// openE2B makes the handler of E2B's protocol.
func (s *Server) openE2B(keys *policy.Keys, calls *observe.Calls) error {
	secret, err := policy.KeptSecret(s.cfg.KeysDir, e2bSecretFile)
	if err != nil {
		return err
	}
	s.usage = usage.New(usage.Config{Source: s.manager})
	s.e2b, err = e2b.New(e2b.Config{
		Manager: s.manager, Keys: keys, Usage: s.usage, Secret: secret, Domain: s.domain, Calls: calls, Log: s.log,
		Envd: envd.New(envd.Config{Manager: s.manager, Log: s.log, Failed: e2b.CallFailed}), Transforms: s.vault, Proxies: s, Secrets: s.vault, Builder: s.builder,
	})
	if err != nil {
		return fmt.Errorf("make E2B's protocol: %w", err)
	}
	s.undo.Add(s.e2b.Close)
	close(s.e2bOpen)
	return s.openDebug()
}

// sandboxUp serves what a sandbox that runs finds on its own loopback device. Sandboxes that an earlier server left
// run before there is an interface.
func (s *Server) sandboxUp(ctx context.Context, sb sandbox.Sandbox) {
	select {
	case <-s.e2bOpen:
		s.e2b.ServeInside(ctx, sb)
	case <-ctx.Done():
	}
}

// openDebug opens the ports of E2B's debug mode, where that was asked for.
func (s *Server) openDebug() error {
	if !s.cfg.E2BDebug {
		return nil
	}
	for _, port := range e2b.DebugPorts() {
		l, err := e2b.ListenDebug(port)
		if err != nil {
			return err
		}
		s.add(l, true, false)
		added := &s.listeners[len(s.listeners)-1]
		added.debug, added.http.Handler = true, s.e2b.Debug(port)
	}
	s.log.Warn("E2B's debug mode is on: every user of this machine may run commands in one sandbox without a key")
	return nil
}
