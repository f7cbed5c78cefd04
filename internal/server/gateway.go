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
	"casemate.dev/internal/egress/rules"
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
		Failed: func(id string, err error) { s.manager.NetworkFailed(id, err) }, // which is there before any sandbox
	})
	s.undo.Add(s.gateway.Close)
}

// setSuffix ends the names of files that hold sets of rules.
const setSuffix = ".rules"

// networkSets returns the names of the sets that there are, beside open.
func (s *Server) networkSets() []string {
	names := []string{registries.Name}
	files, err := os.ReadDir(s.cfg.NetworkSets)
	if err != nil {
		return names // there is no such directory, as on most hosts
	}
	for _, f := range files {
		if name, ok := strings.CutSuffix(f.Name(), setSuffix); ok && setName(name) && name != registries.Name && name != rules.Open {
			names = append(names, name)
		}
	}
	return names
}

func setName(s string) bool {
	return s != "" && strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789-_") == ""
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
		WithHint("casemate net sets shows those that there are; they are files NAME.rules in %s, one rule a line", s.cfg.NetworkSets)
	if !setName(name) {
		return nil, unknown
	}
	f, err := os.Open(filepath.Join(s.cfg.NetworkSets, name+setSuffix))
	if err != nil {
		return nil, unknown
	}
	defer func() { _ = f.Close() }()
	var out []string
	lines := bufio.NewScanner(f)
	for n := 1; lines.Scan(); n++ {
		l := strings.TrimSpace(lines.Text())
		if l == "" || strings.HasPrefix(l, "#") {
			continue
		}
		if _, err := rules.Parse(l, false); err != nil {
			text, hint := errs.PublicText(err)
			return nil, errs.Wrap(err, errs.FailedPrecondition, "line %d of the set of network rules %q can't be used: %s", n, name, text).WithHint("%s", hint)
		}
		out = append(out, l)
	}
	return out, lines.Err()
}
