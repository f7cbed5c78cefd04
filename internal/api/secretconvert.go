package api

import (
	"casemate.dev/internal/secret"
	v1 "casemate.dev/proto/casemate/v1"
)

func secretMessage(s secret.Secret) *v1.Secret {
	m := &v1.Secret{
		Id: s.ID, Owner: s.Owner, Name: s.Name, Class: string(s.Class), Version: int64(s.Version), //nolint:gosec // a count
		CreatedAt: stamp(s.CreatedAt), ChangedAt: stamp(s.ChangedAt), UsedAt: stamp(s.UsedAt), Fault: s.Fault,
		Source: &v1.SecretSource{
			Kind: string(s.Source.Kind), Path: s.Source.Path, Name: s.Source.Name, Argv: s.Source.Argv,
			Timeout: span(s.Source.Timeout), Refresh: span(s.Source.Refresh),
		},
	}
	if s.Shape != (secret.Shape{}) {
		m.Placeholder = &v1.PlaceholderShape{Prefix: s.Shape.Prefix, Length: clamp32(s.Shape.Length)}
	}
	m.Bindings = bindingMessages(s.Bindings)
	return m
}

func bindingMessages(all []secret.Binding) []*v1.SecretBinding {
	var out []*v1.SecretBinding
	for _, b := range all {
		out = append(out, &v1.SecretBinding{
			Id: b.ID, For: selectorMessage(b.For), Hosts: b.Hosts, Scheme: string(b.Place.Scheme), Header: b.Place.Name,
			User: b.Place.User, Format: b.Place.Format, Methods: b.Methods, Paths: b.Paths, Env: b.Env,
			Always: b.Always, Plain: b.Plain, CreatedAt: stamp(b.CreatedAt),
		})
	}
	return out
}

func bindingOf(m *v1.SecretBinding) secret.Binding {
	return secret.Binding{
		For: selectorOf(m.GetFor()), Hosts: m.GetHosts(), Methods: m.GetMethods(), Paths: m.GetPaths(), Env: m.GetEnv(),
		Place:  secret.Place{Scheme: secret.Scheme(m.GetScheme()), Name: m.GetHeader(), User: m.GetUser(), Format: m.GetFormat()},
		Always: m.GetAlways(), Plain: m.GetPlain(),
	}
}

func selectorMessage(s secret.Selector) *v1.SandboxSelector {
	return &v1.SandboxSelector{All: s.All, Sandboxes: s.Sandboxes, Templates: s.Templates, Labels: s.Labels}
}

func selectorOf(m *v1.SandboxSelector) secret.Selector {
	return secret.Selector{All: m.GetAll(), Sandboxes: m.GetSandboxes(), Templates: m.GetTemplates(), Labels: m.GetLabels()}
}

func sourceOf(m *v1.SecretSource) secret.Source {
	return secret.Source{
		Kind: secret.SourceKind(m.GetKind()), Path: m.GetPath(), Name: m.GetName(), Argv: m.GetArgv(),
		Timeout: m.GetTimeout().AsDuration(), Refresh: m.GetRefresh().AsDuration(),
	}
}

func grantMessage(c secret.Credential) *v1.Grant {
	return &v1.Grant{
		Secret: c.Secret, Name: c.Name, Class: string(c.Class), Version: int64(c.Version), //nolint:gosec // a count
		Placeholder: c.Placeholder, Bindings: bindingMessages(c.Bindings), Usable: !c.Value.Empty(),
	}
}

func policyMessage(class secret.Class, p secret.ClassPolicy) *v1.ClassPolicy {
	return &v1.ClassPolicy{Class: string(class), Hosts: p.Hosts, Templates: p.Templates, RoutesOnly: p.RoutesOnly}
}

func routeMessage(r secret.Route) *v1.ModelRoute {
	return &v1.ModelRoute{
		Id: r.ID, Provider: r.Provider, Family: string(r.Family), BaseUrl: r.BaseURL, Secret: r.Secret, For: selectorMessage(r.For),
		Models: r.Models, MaxRequests: r.Budget.Requests, MaxTokens: r.Budget.Tokens, TokenTtl: span(r.TokenTTL),
		CreatedAt: stamp(r.CreatedAt), MaxCost: r.Budget.Cost, PriceIn: r.Budget.PriceIn, PriceOut: r.Budget.PriceOut,
	}
}

func routeOf(provider string, m *v1.ModelRoute) secret.Route {
	return secret.Route{
		Provider: provider, Family: secret.Family(m.GetFamily()), BaseURL: m.GetBaseUrl(), Secret: m.GetSecret(),
		For: selectorOf(m.GetFor()), Models: m.GetModels(), TokenTTL: m.GetTokenTtl().AsDuration(),
		Budget: secret.Budget{
			Requests: m.GetMaxRequests(), Tokens: m.GetMaxTokens(), Cost: m.GetMaxCost(), PriceIn: m.GetPriceIn(), PriceOut: m.GetPriceOut(),
		},
	}
}
