package sandbox

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"

	"casemate.dev/internal/errs"
)

// TestRecordedNetwork: of a sandbox that is answered from a record nothing leaves, whoever asks for it: neither by other
// rules, nor by a child, nor by a fork. So anybody may give it any rules. Twins: what a sandbox that may leave is refused, or
// may.
func TestRecordedNetwork(t *testing.T) {
	w := newWorld(t)
	gw := &fakeGateway{}
	w.shape = func(c *Config) { c.Gateway = gw }
	s := w.serve()
	private := &Network{Rules: []NetworkRule{"allow 10.20.30.40"}}
	if _, err := s.Create(t.Context(), alice, Spec{Network: private}, CreateOptions{}); !errs.Is(err, errs.PermissionDenied) {
		t.Errorf("the twin, with private addresses: %v", err)
	}
	recorded := *private
	recorded.Recorded = true
	a := s.create(alice, Spec{Network: &recorded})
	open := s.create(alice, Spec{Network: &Network{Rules: []NetworkRule{"allow example.com"}}})
	if _, err := s.Update(t.Context(), alice, a.ID, Update{Network: &Network{Rules: []NetworkRule{"allow example.com"}}}); !errs.Is(err, errs.FailedPrecondition) {
		t.Errorf("it is let out: %v", err)
	}
	if _, err := s.Update(t.Context(), alice, open.ID, Update{Network: &recorded}); !errs.Is(err, errs.FailedPrecondition) {
		t.Errorf("one that may leave is answered from a record: %v", err)
	}
	inside := Principal{ID: "sandbox:" + a.ID, Sandbox: a.ID}
	for _, n := range []*Network{{Rules: recorded.Rules}, {}} {
		if _, err := s.Create(t.Context(), inside, Spec{Network: n}, CreateOptions{}); !errs.Is(err, errs.PermissionDenied) {
			t.Errorf("a child with %+v: %v", n, err)
		}
	}
	_, forks, err := s.Fork(t.Context(), alice, a.ID, ForkOptions{Count: 1})
	if err != nil || forks[0].Err != nil {
		t.Fatal(err, forks)
	}
	if n := forks[0].Sandbox.Spec.Network; n == nil || !n.Recorded {
		t.Errorf("a fork has %+v", n)
	}
	list := []RecordedAnswer{{Method: "GET", URL: "https://example.com/", Status: 200}}
	if err := s.SetAnswers(t.Context(), alice, a.ID, list, false); err != nil {
		t.Error(err)
	}
	if err := s.SetAnswers(t.Context(), alice, open.ID, list, false); !errs.Is(err, errs.FailedPrecondition) {
		t.Errorf("answers for one that may leave: %v", err)
	}
	if err := s.SetAnswers(t.Context(), bob, a.ID, list, false); !errs.Is(err, errs.NotFound) {
		t.Errorf("answers of somebody else: %v", err)
	}
	if err := s.SetTemplateNetwork(t.Context(), admin, "host", &recorded); !errs.Is(err, errs.InvalidArgument) {
		t.Errorf("a template's default: %v", err)
	}
}

// TestRecordedNetworkIsExplainedWithoutLookingUp: who asks what a sandbox of which nothing leaves may reach has no name looked up.
// Twin: of one that may leave it is.
func TestRecordedNetworkIsExplainedWithoutLookingUp(t *testing.T) {
	w := newWorld(t)
	var asked atomic.Int64
	w.shape = func(c *Config) {
		c.Gateway = &fakeGateway{}
		c.Resolver = &net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) {
			asked.Add(1)
			return nil, errors.New("no name server")
		}}
	}
	s := w.serve()
	rules := []NetworkRule{"allow example.com", "allow udp://example.com:53"}
	a := s.create(alice, Spec{Network: &Network{Rules: rules, Recorded: true}})
	open := s.create(alice, Spec{Network: &Network{Rules: rules}})
	for target, allowed := range map[string]bool{"https://example.com/": true, "https://other.example.com/": false, "udp://example.com:53": false} {
		answers, _, err := s.ExplainNetwork(t.Context(), alice, a.ID, target, "")
		if err != nil || NetworkAllowed(answers) != allowed {
			t.Errorf("%s: %+v, %v", target, answers, err)
		}
	}
	if n := asked.Load(); n != 0 {
		t.Errorf("a name server was asked %d times", n)
	}
	if _, _, err := s.ExplainNetwork(t.Context(), alice, open.ID, "https://example.com/", ""); err != nil || asked.Load() == 0 {
		t.Errorf("the twin: asked %d times, %v", asked.Load(), err)
	}
}
