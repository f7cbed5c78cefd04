package server

import (
	"bufio"
	"context"
	"os"
	"path/filepath"
	"strings"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/egress/control"
	"casemate.dev/internal/egress/gateway"
	"casemate.dev/internal/egress/inspect"
	"casemate.dev/internal/egress/registries"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation/namespace"
)

// GatewayVerb is the program's first argument that makes it the gateway process; see RunGateway.
const GatewayVerb = control.Verb

// RunGateway is the gateway process, which a server starts.
func RunGateway(args []string) error { return gateway.Main(args, inspect.New()) }

// openGateway makes the handle on the gateway. The process itself is started with the first sandbox that
// has a network.
func (s *Server) openGateway(b *namespace.Backend) {
	s.gateway = control.New(control.Config{
		RunDir: s.cfg.RunDir, Program: s.cfg.GatewayProgram, UID: b.ReserveID, KeepUID: b.KeepID,
		Nameservers: s.cfg.Nameservers, Log: s.log,
		Shared:  func(context.Context) (egress.Private, error) { return s.trust.shared, nil },
		Proxy:   s.currentProxy,
		Private: s.private, OwnProxy: s.ownProxy,
		Events: s.sawNetwork,
	})
	s.undo.Add(s.gateway.Close)
}

// networkSet returns the rules of a named set: registries, or a file NAME.rules in the directory for them.
func (s *Server) networkSet(name string) ([]string, error) {
	if name == registries.Name {
		home, err := os.UserHomeDir()
		if err != nil {
			home = "/root"
		}
		return registries.Read("/", home), nil
	}
	unknown := errs.New(errs.NotFound, "there is no set of network rules called %q", name).
		WithHint("sets are open, registries, and the files NAME.rules in %s, one rule a line", s.cfg.NetworkSets)
	if name == "" || strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" {
		return nil, unknown
	}
	f, err := os.Open(filepath.Join(s.cfg.NetworkSets, name+".rules"))
	if err != nil {
		return nil, unknown
	}
	defer func() { _ = f.Close() }()
	var out []string
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if l := strings.TrimSpace(lines.Text()); l != "" && !strings.HasPrefix(l, "#") {
			out = append(out, l)
		}
	}
	return out, lines.Err()
}
