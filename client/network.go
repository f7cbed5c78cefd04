package client

import (
	"context"

	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// Messages of the API's schema, under short names.
type (
	// NetworkRules is what a sandbox may reach, with its limits.
	NetworkRules = v1.Network
	// NetworkLimits bound what a sandbox may have open and move.
	NetworkLimits = v1.NetworkLimits
	// NetworkStatus is a sandbox's network as it is.
	NetworkStatus = v1.NetworkStatus
	// TemplateNetwork is what sandboxes of a template may reach by default.
	TemplateNetwork = v1.TemplateNetwork
	// NetworkExplanation is what the rules answer to a URL, and why.
	NetworkExplanation = v1.ExplainNetworkResponse
	// NetworkSet is a named set of rules.
	NetworkSet = v1.NetworkSet
	// Refusal is something that was refused to a sandbox.
	Refusal = v1.Refusal
)

// Network shows and changes what sandboxes may reach.
type Network struct {
	conn *conn
	rpc  casematev1connect.NetworkServiceClient
}

// Get shows a sandbox's rules, and what it has moved.
func (n *Network) Get(ctx context.Context, sandbox string) (*NetworkStatus, error) {
	m, err := n.rpc.GetNetwork(ctx, &v1.GetNetworkRequest{Sandbox: sandbox})
	return m, n.conn.wrap(err)
}

// Set replaces a sandbox's rules and limits. Open connections that they no longer allow are cut.
func (n *Network) Set(ctx context.Context, sandbox string, rules *NetworkRules) (*NetworkStatus, error) {
	m, err := n.rpc.SetNetwork(ctx, &v1.SetNetworkRequest{Sandbox: sandbox, Network: rules})
	return m, n.conn.wrap(err)
}

// Template shows what sandboxes of a template may reach where their create says nothing of it.
func (n *Network) Template(ctx context.Context, template string) (*TemplateNetwork, error) {
	m, err := n.rpc.GetTemplateNetwork(ctx, &v1.GetTemplateNetworkRequest{Template: template})
	return m, n.conn.wrap(err)
}

// SetTemplate changes that for sandboxes to come; nil takes the default away.
func (n *Network) SetTemplate(ctx context.Context, template string, rules *NetworkRules) (*TemplateNetwork, error) {
	m, err := n.rpc.SetTemplateNetwork(ctx, &v1.SetTemplateNetworkRequest{Template: template, Network: rules})
	return m, n.conn.wrap(err)
}

// Explain says what the rules answer to a URL, or HOST[:PORT], and why. method "" is GET.
func (n *Network) Explain(ctx context.Context, sandbox, target, method string) (*NetworkExplanation, error) {
	m, err := n.rpc.ExplainNetwork(ctx, &v1.ExplainNetworkRequest{Sandbox: sandbox, Target: target, Method: method})
	return m, n.conn.wrap(err)
}

// Sets shows the named sets that rules may name as @NAME.
func (n *Network) Sets(ctx context.Context) ([]*NetworkSet, error) {
	m, err := n.rpc.ListNetworkSets(ctx, &v1.ListNetworkSetsRequest{})
	return m.GetSets(), n.conn.wrap(err)
}
