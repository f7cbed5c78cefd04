package api

import (
	"context"

	"casemate.dev/internal/sandbox"
	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// networks implements NetworkService.
type networks struct{ *API }

var _ casematev1connect.NetworkServiceHandler = (*networks)(nil)

// GetNetwork implements NetworkServiceHandler.
func (h *networks) GetNetwork(ctx context.Context, req *v1.GetNetworkRequest) (*v1.NetworkStatus, error) {
	n, list, usage, err := h.cfg.Manager.NetworkOf(ctx, principalOf(ctx), req.GetSandbox())
	if err != nil {
		return nil, err
	}
	m := &v1.NetworkStatus{
		Network: networkMessage(&n), Sent: usage.Sent, Received: usage.Received, Connections: clamp32(usage.Connections),
	}
	for _, r := range list {
		m.Expanded = append(m.Expanded, r.String())
	}
	return m, nil
}

// SetNetwork implements NetworkServiceHandler.
func (h *networks) SetNetwork(ctx context.Context, req *v1.SetNetworkRequest) (*v1.NetworkStatus, error) {
	n := networkOf(req.GetNetwork())
	if n == nil {
		n = &sandbox.Network{} // nothing may be reached
	}
	if _, err := h.cfg.Manager.Update(ctx, principalOf(ctx), req.GetSandbox(), sandbox.Update{Network: n}); err != nil {
		return nil, err
	}
	return h.GetNetwork(ctx, &v1.GetNetworkRequest{Sandbox: req.GetSandbox()})
}

// ExplainNetwork implements NetworkServiceHandler.
func (h *networks) ExplainNetwork(ctx context.Context, req *v1.ExplainNetworkRequest) (*v1.ExplainNetworkResponse, error) {
	answers, n, err := h.cfg.Manager.ExplainNetwork(ctx, principalOf(ctx), req.GetSandbox(), req.GetTarget(), req.GetMethod())
	if err != nil {
		return nil, err
	}
	m := &v1.ExplainNetworkResponse{Allowed: sandbox.NetworkAllowed(answers), Template: n.Template}
	for _, a := range answers {
		m.Answers = append(m.Answers, &v1.NetworkAnswer{
			About: a.About, Allowed: a.Verdict.Allow, Inspected: a.Verdict.Inspect, Code: string(a.Verdict.Code),
			Rule: a.Verdict.Rule, Reason: a.Verdict.Reason, Hint: a.Verdict.Hint,
		})
	}
	return m, nil
}

// GetTemplateNetwork implements NetworkServiceHandler.
func (h *networks) GetTemplateNetwork(ctx context.Context, req *v1.GetTemplateNetworkRequest) (*v1.TemplateNetwork, error) {
	n, err := h.cfg.Manager.TemplateNetwork(ctx, req.GetTemplate())
	return &v1.TemplateNetwork{Template: req.GetTemplate(), Network: networkMessage(n)}, err
}

// SetTemplateNetwork implements NetworkServiceHandler.
func (h *networks) SetTemplateNetwork(ctx context.Context, req *v1.SetTemplateNetworkRequest) (*v1.TemplateNetwork, error) {
	if err := h.cfg.Manager.SetTemplateNetwork(ctx, principalOf(ctx), req.GetTemplate(), networkOf(req.GetNetwork())); err != nil {
		return nil, err
	}
	return h.GetTemplateNetwork(ctx, &v1.GetTemplateNetworkRequest{Template: req.GetTemplate()})
}

// ListNetworkSets implements NetworkServiceHandler.
func (h *networks) ListNetworkSets(context.Context, *v1.ListNetworkSetsRequest) (*v1.ListNetworkSetsResponse, error) {
	resp := &v1.ListNetworkSetsResponse{}
	for _, s := range h.cfg.Manager.NetworkSets() {
		resp.Sets = append(resp.Sets, &v1.NetworkSet{Name: s.Name, Rules: s.Rules, Fault: s.Fault})
	}
	return resp, nil
}

func networkMessage(n *sandbox.Network) *v1.Network {
	if n == nil {
		return nil
	}
	m := &v1.Network{Template: n.Template, Proxy: n.Proxy, Recorded: n.Recorded}
	for _, r := range n.Rules {
		m.Rules = append(m.Rules, string(r))
	}
	if l := n.Limits; l != (sandbox.NetworkLimits{}) {
		m.Limits = &v1.NetworkLimits{
			Connections: clamp32(l.Connections), Pending: clamp32(l.Pending), Bytes: l.Bytes, Rate: l.Rate, Idle: span(l.Idle),
		}
	}
	return m
}

func networkOf(m *v1.Network) *sandbox.Network {
	if m == nil {
		return nil
	}
	n := &sandbox.Network{Recorded: m.GetRecorded()}
	for _, r := range m.GetRules() {
		n.Rules = append(n.Rules, sandbox.NetworkRule(r))
	}
	if l := m.GetLimits(); l != nil {
		n.Limits = sandbox.NetworkLimits{
			Connections: int(l.GetConnections()), Pending: int(l.GetPending()), Bytes: l.GetBytes(), Rate: l.GetRate(),
			Idle: l.GetIdle().AsDuration(),
		}
	}
	return n
}

func refusalMessages(list []sandbox.Refusal) []*v1.Refusal {
	var out []*v1.Refusal
	for _, r := range list {
		out = append(out, &v1.Refusal{
			Time: stamp(r.Time), Proto: string(r.Proto), Target: r.Target, Code: string(r.Verdict.Code),
			Reason: r.Verdict.Reason, Hint: r.Verdict.Hint, Count: clamp32(r.Count),
		})
	}
	return out
}
