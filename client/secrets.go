package client

import (
	"context"

	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// Messages of the API's schema, under short names.
type (
	// Secret is what may be known of a secret: everything but its value.
	Secret = v1.Secret
	// SecretSource says where a secret's value comes from.
	SecretSource = v1.SecretSource
	// PlaceholderShape is how a secret's placeholders look.
	PlaceholderShape = v1.PlaceholderShape
	// SecretBinding says where a secret may be used.
	SecretBinding = v1.SecretBinding
	// SandboxSelector says which sandboxes something is for.
	SandboxSelector = v1.SandboxSelector
	// SetSecretRequest says what a secret shall be.
	SetSecretRequest = v1.SetSecretRequest
	// Grants is what a sandbox may use.
	Grants = v1.ListGrantsResponse
	// ClassPolicy limits secrets of a class.
	ClassPolicy = v1.ClassPolicy
	// ModelRoute is a way for sandboxes to a model provider.
	ModelRoute = v1.ModelRoute
	// RouteGrant is a model route as a sandbox may use it, with what it has used.
	RouteGrant = v1.RouteGrant
)

// Secrets keeps values that sandboxes may use and never see. No call returns a value.
type Secrets struct {
	conn *conn
	rpc  casematev1connect.SecretServiceClient
}

// Set makes a secret, or gives the one of that name a new version.
func (s *Secrets) Set(ctx context.Context, req *SetSecretRequest) (*Secret, error) {
	m, err := s.rpc.SetSecret(ctx, req)
	return m, s.conn.wrap(err)
}

// Get shows a secret by its id or name.
func (s *Secrets) Get(ctx context.Context, secret string) (*Secret, error) {
	m, err := s.rpc.GetSecret(ctx, &v1.GetSecretRequest{Secret: secret})
	return m, s.conn.wrap(err)
}

// List shows the caller's secrets; an admin sees all.
func (s *Secrets) List(ctx context.Context) ([]*Secret, error) {
	m, err := s.rpc.ListSecrets(ctx, &v1.ListSecretsRequest{})
	return m.GetSecrets(), s.conn.wrap(err)
}

// Rotate gives a secret a new value. One with an external source is read again; value is "" then.
func (s *Secrets) Rotate(ctx context.Context, secret, value string) (*Secret, error) {
	m, err := s.rpc.RotateSecret(ctx, &v1.RotateSecretRequest{Secret: secret, Value: value})
	return m, s.conn.wrap(err)
}

// Delete removes a secret with its values and bindings.
func (s *Secrets) Delete(ctx context.Context, secret string) (*Secret, error) {
	m, err := s.rpc.DeleteSecret(ctx, &v1.DeleteSecretRequest{Secret: secret})
	return m, s.conn.wrap(err)
}

// Bind says where a secret may be used.
func (s *Secrets) Bind(ctx context.Context, secret string, b *SecretBinding) (*Secret, error) {
	m, err := s.rpc.BindSecret(ctx, &v1.BindSecretRequest{Secret: secret, Binding: b})
	return m, s.conn.wrap(err)
}

// Unbind removes a binding by its id, or all of them for "all".
func (s *Secrets) Unbind(ctx context.Context, secret, binding string) (*Secret, error) {
	m, err := s.rpc.UnbindSecret(ctx, &v1.UnbindSecretRequest{Secret: secret, Binding: binding})
	return m, s.conn.wrap(err)
}

// Grants shows what a sandbox may use.
func (s *Secrets) Grants(ctx context.Context, sandbox string) (*Grants, error) {
	m, err := s.rpc.ListGrants(ctx, &v1.ListGrantsRequest{Sandbox: sandbox})
	return m, s.conn.wrap(err)
}

// SetClassPolicy limits what secrets of the policy's class may be bound to.
func (s *Secrets) SetClassPolicy(ctx context.Context, p *ClassPolicy) (*ClassPolicy, error) {
	m, err := s.rpc.SetClassPolicy(ctx, &v1.SetClassPolicyRequest{Class: p.GetClass(), Policy: p})
	return m, s.conn.wrap(err)
}

// ClassPolicies shows the policies of classes.
func (s *Secrets) ClassPolicies(ctx context.Context) ([]*ClassPolicy, error) {
	m, err := s.rpc.ListClassPolicies(ctx, &v1.ListClassPoliciesRequest{})
	return m.GetPolicies(), s.conn.wrap(err)
}

// SetModelRoute makes a way for sandboxes to a model provider, or changes it.
func (s *Secrets) SetModelRoute(ctx context.Context, r *ModelRoute) (*ModelRoute, error) {
	m, err := s.rpc.SetModelRoute(ctx, &v1.SetModelRouteRequest{Provider: r.GetProvider(), Route: r})
	return m, s.conn.wrap(err)
}

// ModelRoutes shows the ways to model providers.
func (s *Secrets) ModelRoutes(ctx context.Context) ([]*ModelRoute, error) {
	m, err := s.rpc.ListModelRoutes(ctx, &v1.ListModelRoutesRequest{})
	return m.GetRoutes(), s.conn.wrap(err)
}

// DeleteModelRoute removes a way to a model provider.
func (s *Secrets) DeleteModelRoute(ctx context.Context, provider string) (*ModelRoute, error) {
	m, err := s.rpc.DeleteModelRoute(ctx, &v1.DeleteModelRouteRequest{Provider: provider})
	return m, s.conn.wrap(err)
}
