package sandbox

import (
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
