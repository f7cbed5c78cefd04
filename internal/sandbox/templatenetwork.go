package sandbox

import (
	"context"
	"slices"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal"
)

// TemplateNetwork returns the network that sandboxes of a template get by default; nil: none.
func (m *Manager) TemplateNetwork(ctx context.Context, template string) (*Network, error) {
	all, err := m.templateNetworks.read(ctx)
	if err != nil {
		return nil, err
	}
	n, ok := all[template]
	if !ok {
		return nil, nil
	}
	n.Rules, n.Template = slices.Clone(n.Rules), template
	return &n, nil
}

// templateNetworkFacts are the server's facts of template.network.
//
//casemate:facts server template.network
type templateNetworkFacts struct {
	Template string   `json:"template"`
	Network  *Network `json:"network"` // nil: no longer
}

// SetTemplateNetwork gives sandboxes that start from a template, which may be a commit or its tag, a network by
// default; nil takes it away. Sandboxes that are there keep theirs. Kinds: NotFound, PermissionDenied, and what a create
// with this network would say.
func (m *Manager) SetTemplateNetwork(ctx context.Context, p Principal, template string, n *Network) error {
	if !p.admin() || p.Sandbox != "" {
		return errs.New(errs.PermissionDenied, "only an administrator may say what a template's sandboxes reach")
	}
	var kept *Network
	if n != nil {
		if n.Recorded {
			return invalid("a template's default network is none that is answered from a record")
		}
		if err := m.checkNetwork(p, n); err != nil {
			return err
		}
		if err := m.startsFrom(ctx, p, template); err != nil {
			return err
		}
		kept = &Network{Rules: slices.Clone(n.Rules), Limits: n.Limits}
	}
	return m.templateNetworks.set(ctx, template, kept, event(journal.TemplateNetwork, p.ID, templateNetworkFacts{template, n}))
}

// networkFor decides which network a create gets: the one it says, or the default of what it names, or of the template
// below that. A fork has what its parent had, and a sandbox's child what it says itself.
func (m *Manager) networkFor(ctx context.Context, p Principal, s Spec, asked string, forked bool) (*Network, error) {
	switch {
	case s.NoNetwork && s.Network != nil:
		return nil, invalid("a network is given, and none is asked for")
	case s.Network != nil && s.Network.Template != "" && p.Sandbox == "":
		return s.Network, m.usable(s.Network) // an administrator gave it
	case s.Network != nil:
		return s.Network, m.checkNetwork(p, s.Network)
	case s.NoNetwork, forked, p.Sandbox != "", m.cfg.Gateway == nil:
		return nil, nil
	}
	for _, name := range []string{asked, s.Template} {
		n, err := m.TemplateNetwork(ctx, name)
		if err != nil {
			return nil, err
		}
		if n != nil {
			return n, m.usable(n)
		}
	}
	return nil, nil
}

// usable refuses a default whose rules are none any more, as when a named set has gone.
func (m *Manager) usable(n *Network) error {
	if _, err := m.expand(n); err != nil {
		return errs.Wrap(err, errs.FailedPrecondition, "the default network of template %s can't be used", n.Template).
			WithHint("an administrator sets another: casemate net template %s", n.Template)
	}
	return nil
}
