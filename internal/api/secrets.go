package api

import (
	"context"
	"strings"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/policy"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/secret"
	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// secrets implements SecretService. No answer of it holds a value.
type secrets struct{ *API }

var _ casematev1connect.SecretServiceHandler = (*secrets)(nil)

// vault returns the vault and who asks it.
func (h *secrets) vault(ctx context.Context) (*secret.Vault, secret.Caller, error) {
	if h.cfg.Secrets == nil {
		return nil, secret.Caller{}, errs.New(errs.Unsupported, "this server keeps no secrets")
	}
	return h.cfg.Secrets, policy.SecretCaller(principalOf(ctx)), nil
}

// useful refuses what would do nothing: a binding or a route of a server without a gateway.
func (h *secrets) useful() error {
	if h.cfg.Gateway {
		return nil
	}
	return errs.New(errs.Unsupported, "this server has no gateway, so that secrets can be kept but not used")
}

// shown turns what the vault returns into what a handler returns.
func shown(s secret.Secret, err error) (*v1.Secret, error) {
	if err != nil {
		return nil, err
	}
	return secretMessage(s), nil
}

// SetSecret implements SecretServiceHandler.
func (h *secrets) SetSecret(ctx context.Context, req *v1.SetSecretRequest) (*v1.Secret, error) {
	v, c, err := h.vault(ctx)
	if err != nil {
		return nil, err
	}
	r := secret.SetRequest{
		Name: req.GetName(), Class: secret.Class(req.GetClass()), Value: secret.NewValue([]byte(req.GetValue())),
		Source: sourceOf(req.GetSource()),
	}
	req.Value = ""
	if p := req.GetPlaceholder(); p != nil {
		r.Shape = &secret.Shape{Prefix: p.GetPrefix(), Length: int(p.GetLength())}
	}
	return shown(v.Set(ctx, c, r))
}

// GetSecret implements SecretServiceHandler.
func (h *secrets) GetSecret(ctx context.Context, req *v1.GetSecretRequest) (*v1.Secret, error) {
	v, c, err := h.vault(ctx)
	if err != nil {
		return nil, err
	}
	return shown(v.Get(c, req.GetSecret()))
}

// ListSecrets implements SecretServiceHandler.
func (h *secrets) ListSecrets(ctx context.Context, _ *v1.ListSecretsRequest) (*v1.ListSecretsResponse, error) {
	v, c, err := h.vault(ctx)
	if err != nil {
		return nil, err
	}
	all, err := v.List(c)
	if err != nil {
		return nil, err
	}
	resp := &v1.ListSecretsResponse{}
	for _, s := range all {
		resp.Secrets = append(resp.Secrets, secretMessage(s))
	}
	return resp, nil
}

// RotateSecret implements SecretServiceHandler.
func (h *secrets) RotateSecret(ctx context.Context, req *v1.RotateSecretRequest) (*v1.Secret, error) {
	v, c, err := h.vault(ctx)
	if err != nil {
		return nil, err
	}
	value := secret.NewValue([]byte(req.GetValue()))
	req.Value = ""
	return shown(v.Rotate(ctx, c, req.GetSecret(), value))
}

// DeleteSecret implements SecretServiceHandler.
func (h *secrets) DeleteSecret(ctx context.Context, req *v1.DeleteSecretRequest) (*v1.Secret, error) {
	v, c, err := h.vault(ctx)
	if err != nil {
		return nil, err
	}
	return shown(v.Remove(ctx, c, req.GetSecret()))
}

// BindSecret implements SecretServiceHandler.
func (h *secrets) BindSecret(ctx context.Context, req *v1.BindSecretRequest) (*v1.Secret, error) {
	if err := h.useful(); err != nil {
		return nil, err
	}
	v, c, err := h.vault(ctx)
	if err != nil {
		return nil, err
	}
	b := bindingOf(req.GetBinding())
	if b.For.Sandboxes, err = h.ids(ctx, b.For.Sandboxes); err != nil {
		return nil, err
	}
	s, _, err := v.Bind(ctx, c, req.GetSecret(), b)
	return shown(s, err)
}

// ids turns references to sandboxes into ids, and refuses those that the caller may not see.
func (h *secrets) ids(ctx context.Context, refs []string) ([]string, error) {
	var out []string
	for _, ref := range refs {
		sb, err := h.cfg.Manager.Get(ctx, principalOf(ctx), ref)
		if err != nil {
			return nil, err
		}
		out = append(out, sb.ID)
	}
	return out, nil
}

// UnbindSecret implements SecretServiceHandler.
func (h *secrets) UnbindSecret(ctx context.Context, req *v1.UnbindSecretRequest) (*v1.Secret, error) {
	v, c, err := h.vault(ctx)
	if err != nil {
		return nil, err
	}
	switch id := req.GetBinding(); id {
	case "":
		return nil, errs.New(errs.InvalidArgument, "name the binding, or all")
	case "all":
		return shown(v.Unbind(ctx, c, req.GetSecret(), ""))
	default:
		return shown(v.Unbind(ctx, c, req.GetSecret(), id))
	}
}

// ListGrants implements SecretServiceHandler.
func (h *secrets) ListGrants(ctx context.Context, req *v1.ListGrantsRequest) (*v1.ListGrantsResponse, error) {
	v, c, err := h.vault(ctx)
	if err != nil {
		return nil, err
	}
	if c.Sandbox {
		return nil, errs.New(errs.PermissionDenied, "a sandbox may not see what is granted")
	}
	sb, err := h.cfg.Manager.Get(ctx, principalOf(ctx), req.GetSandbox())
	if err != nil {
		return nil, err
	}
	sub := policy.SecretSubject(sb, func(id string) (sandbox.Sandbox, error) {
		return h.cfg.Manager.Get(ctx, policy.Local(), id) // what it is, not who sees it
	})
	resp := &v1.ListGrantsResponse{}
	for _, g := range v.Grants(ctx, sub) {
		resp.Grants = append(resp.Grants, grantMessage(g))
	}
	spent, err := v.SpentBy(ctx, sb.ID)
	if err != nil {
		return nil, err
	}
	for _, r := range v.RouteGrants(ctx, sub) {
		u := spent[r.Provider]
		resp.Routes = append(resp.Routes, &v1.RouteGrant{
			Provider: r.Provider, BaseUrl: r.InsideURL(), Token: r.Token, ExpiresAt: stamp(r.ExpiresAt(sb.CreatedAt)),
			Requests: u.Requests, TokensIn: u.TokensIn, TokensOut: u.TokensOut, Cost: r.Budget.Price(u.TokensIn, u.TokensOut),
		})
	}
	return resp, nil
}

// SetClassPolicy implements SecretServiceHandler.
func (h *secrets) SetClassPolicy(ctx context.Context, req *v1.SetClassPolicyRequest) (*v1.ClassPolicy, error) {
	v, c, err := h.vault(ctx)
	if err != nil {
		return nil, err
	}
	p := secret.ClassPolicy{
		Hosts: req.GetPolicy().GetHosts(), Templates: req.GetPolicy().GetTemplates(), RoutesOnly: req.GetPolicy().GetRoutesOnly(),
	}
	if err := v.SetClassPolicy(ctx, c, secret.Class(req.GetClass()), p); err != nil {
		return nil, err
	}
	return policyMessage(secret.Class(req.GetClass()), p), nil
}

// ListClassPolicies implements SecretServiceHandler.
func (h *secrets) ListClassPolicies(ctx context.Context, _ *v1.ListClassPoliciesRequest) (*v1.ListClassPoliciesResponse, error) {
	v, c, err := h.vault(ctx)
	if err != nil {
		return nil, err
	}
	all, err := v.ClassPolicies(c)
	if err != nil {
		return nil, err
	}
	resp := &v1.ListClassPoliciesResponse{}
	for _, class := range []secret.Class{secret.ModelKey, secret.ToolKey, secret.Other} {
		if p, ok := all[class]; ok {
			resp.Policies = append(resp.Policies, policyMessage(class, p))
		}
	}
	return resp, nil
}

// SetModelRoute implements SecretServiceHandler.
func (h *secrets) SetModelRoute(ctx context.Context, req *v1.SetModelRouteRequest) (*v1.ModelRoute, error) {
	if err := h.useful(); err != nil {
		return nil, err
	}
	v, c, err := h.vault(ctx)
	if err != nil {
		return nil, err
	}
	r := routeOf(req.GetProvider(), req.GetRoute())
	if r.For.Sandboxes, err = h.ids(ctx, r.For.Sandboxes); err != nil {
		return nil, err
	}
	if r, err = v.PutRoute(ctx, c, r); err != nil {
		return nil, err
	}
	return routeMessage(r), nil
}

// ListModelRoutes implements SecretServiceHandler.
func (h *secrets) ListModelRoutes(ctx context.Context, _ *v1.ListModelRoutesRequest) (*v1.ListModelRoutesResponse, error) {
	v, c, err := h.vault(ctx)
	if err != nil {
		return nil, err
	}
	all, err := v.Routes(c)
	if err != nil {
		return nil, err
	}
	resp := &v1.ListModelRoutesResponse{}
	for _, r := range all {
		resp.Routes = append(resp.Routes, routeMessage(r))
	}
	return resp, nil
}

// DeleteModelRoute implements SecretServiceHandler.
func (h *secrets) DeleteModelRoute(ctx context.Context, req *v1.DeleteModelRouteRequest) (*v1.ModelRoute, error) {
	v, c, err := h.vault(ctx)
	if err != nil {
		return nil, err
	}
	r, err := v.RemoveRoute(ctx, c, strings.ToLower(req.GetProvider()))
	if err != nil {
		return nil, err
	}
	return routeMessage(r), nil
}
