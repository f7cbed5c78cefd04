package e2b

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/isolation/fake"
	"casemate.dev/internal/policy"
	"casemate.dev/internal/sandbox"
)

// noGateway takes every sandbox and carries nothing.
type noGateway struct{}

var _ sandbox.Gateway = noGateway{}

// Attach implements sandbox.Gateway.
func (noGateway) Attach(context.Context, egress.Member) error { return nil }

// Configure implements sandbox.Gateway.
func (noGateway) Configure(context.Context, string, egress.Policy) error { return nil }

// Detach implements sandbox.Gateway.
func (noGateway) Detach(context.Context, string) error { return nil }

// Refused implements sandbox.Gateway.
func (noGateway) Refused(context.Context, string, time.Time) ([]egress.Refusal, error) {
	return nil, nil
}

// SetAnswers implements sandbox.Gateway.
func (noGateway) SetAnswers(context.Context, string, []egress.RecordedAnswer, bool) error { return nil }

// Settle implements sandbox.Gateway.
func (noGateway) Settle(context.Context, string) error { return nil }

// Stats implements sandbox.Gateway.
func (noGateway) Stats() (egress.Stats, bool) { return egress.Stats{}, false }

// Usage implements sandbox.Gateway.
func (noGateway) Usage(context.Context, string) (egress.Usage, error) { return egress.Usage{}, nil }

// Adopt implements sandbox.Gateway.
func (noGateway) Adopt(context.Context, []egress.Member) map[string]error { return nil }

// rulesOf returns a sandbox's rules, one a line.
func (h *harness) rulesOf(sandboxID string) string {
	h.t.Helper()
	s, err := h.manager.Get(h.t.Context(), server(), sandboxID)
	if err != nil || s.Spec.Network == nil {
		h.t.Fatalf("network %v, %v", s.Spec.Network, err)
	}
	var out []string
	for _, r := range s.Spec.Network.Rules {
		out = append(out, string(r))
	}
	return strings.Join(out, "\n")
}

// TestWayOut: what E2B's options mean as rules. Each set of rules is one that the Manager takes.
func TestWayOut(t *testing.T) {
	host := fake.NewHost()
	t.Cleanup(host.Close)
	h := newHarnessIn(t, place{dir: t.TempDir(), host: host, gateway: noGateway{}})
	const open = "allow @open"
	for more, want := range map[string]string{
		``:                                    open,
		`"allow_internet_access":true`:        open,
		`"allow_internet_access":false`:       ``,
		`"network":{"denyOut":["0.0.0.0/0"]}`: ``,
		`"network":{"denyOut":["8.8.8.8","10.0.0.0/8"]}`:                                                 "deny 8.8.8.8\ndeny 10.0.0.0/8\n" + open,
		`"network":{"allowOut":["1.1.1.1"],"denyOut":["0.0.0.0/0"]}`:                                     "allow 1.1.1.1:*\nallow udp://1.1.1.1:*",
		`"network":{"allowOut":["1.1.1.0/24","2606:4700:4700::1111"],"denyOut":["0.0.0.0/0","1.1.1.1"]}`: "allow 1.1.1.0/24:*\nallow udp://1.1.1.0/24:*\nallow [2606:4700:4700::1111]:*\nallow udp://[2606:4700:4700::1111]:*\ndeny 1.1.1.1",
		`"network":{"allowOut":["example.com","*.example.org"],"denyOut":["0.0.0.0/0"]}`:                 "allow example.com\nallow *.example.org",
		`"network":{"allowOut":["0.0.0.0/0"],"denyOut":["1.1.1.1"]}`:                                     open + "\ndeny 1.1.1.1\n" + open,
		`"allow_internet_access":false,"network":{"allowOut":["1.1.1.1"],"denyOut":["8.8.8.8"]}`:         "allow 1.1.1.1:*\nallow udp://1.1.1.1:*\ndeny 8.8.8.8",
	} {
		if got := h.rulesOf(h.create(more).SandboxID); got != want {
			t.Errorf("%s: rules\n%s\nwant\n%s", more, got, want)
		}
	}
	// Private addresses are never open, and only an administrator's key opens them.
	h.refused(h.call("POST", "/v2/sandboxes", `{"templateID":"base","network":{"allowOut":["10.0.0.1"]}}`), 403, "only an administrator")

	s := h.create("")
	path := "/sandboxes/" + s.SandboxID + "/network"
	for _, c := range [][2]string{
		{`{"allowOut":["1.1.1.1"],"denyOut":["0.0.0.0/0"]}`, "allow 1.1.1.1:*\nallow udp://1.1.1.1:*"},
		{`{"allow_internet_access":false}`, ``},
		{`{}`, open},
	} {
		body, want := c[0], c[1]
		if a := h.call("PUT", path, body); a.status != 204 {
			t.Errorf("%s: %d %s", body, a.status, a.body)
		}
		if got := h.rulesOf(s.SandboxID); got != want {
			t.Errorf("%s: rules\n%s\nwant\n%s", body, got, want)
		}
	}
	h.refused(h.call("PUT", path, `{"egressProxy":{"address":"a:1"}}`), 501, "egressProxy")
	if d := h.detail(s.SandboxID); fmt.Sprint(d.Network.AllowOut) != "[]" {
		t.Errorf("a refused update shows: %+v", d.Network)
	}
	// One that the native API made without a network stays without.
	admin := sandbox.Principal{ID: "x", Admin: true}
	bare, err := h.manager.Create(t.Context(), admin, sandbox.Spec{Template: "host"}, sandbox.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	_, adminKey, err := h.api.cfg.Keys.Create(t.Context(), policy.KeyOptions{Admin: true})
	if err != nil {
		t.Fatal(err)
	}
	for body, want := range map[string]int{`{"allowOut":["1.1.1.1"]}`: 409, `{"denyOut":["1.1.1.1"]}`: 204} {
		if a := h.call("PUT", "/sandboxes/"+bare.ID+"/network", body, "X-API-Key", adminKey); a.status != want {
			t.Errorf("%s: %d %s", body, a.status, a.body)
		}
	}
}
