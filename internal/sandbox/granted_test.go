package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/journal"
)

// fakeGateway counts what it is told.
type fakeGateway struct {
	mu         sync.Mutex
	configured []string
	failed     map[string]error // of adopting
}

// Attach implements Gateway.
func (*fakeGateway) Attach(context.Context, egress.Member) error { return nil }

// Configure implements Gateway.
func (g *fakeGateway) Configure(_ context.Context, id string, _ egress.Policy) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.configured = append(g.configured, id)
	return nil
}

// Detach implements Gateway.
func (*fakeGateway) Detach(context.Context, string) error { return nil }

// Refused implements Gateway.
func (*fakeGateway) Refused(context.Context, string, time.Time) ([]egress.Refusal, error) {
	return nil, nil
}

// Usage implements Gateway.
func (*fakeGateway) Usage(context.Context, string) (egress.Usage, error) { return egress.Usage{}, nil }

// SetAnswers implements Gateway.
func (*fakeGateway) SetAnswers(context.Context, string, []egress.RecordedAnswer, bool) error {
	return nil
}

// Settle implements Gateway.
func (*fakeGateway) Settle(context.Context, string) error { return nil }

// Stats implements Gateway.
func (*fakeGateway) Stats() (egress.Stats, bool) { return egress.Stats{}, false }

// Adopt implements Gateway.
func (g *fakeGateway) Adopt(context.Context, []egress.Member) map[string]error { return g.failed }

// seeingBackend keeps the specs that it starts.
type seeingBackend struct {
	isolation.Backend
	mu    *sync.Mutex
	specs map[string]isolation.Spec
}

// Start implements isolation.Backend.
func (b seeingBackend) Start(ctx context.Context, spec isolation.Spec) (isolation.Instance, error) {
	b.mu.Lock()
	b.specs[spec.ID] = spec
	b.mu.Unlock()
	return b.Backend.Start(ctx, spec)
}

// TestGranted: a sandbox with a network gets variables and files; its creator's word comes first; a fork gets
// its own; new labels are told to the gateway, since secrets are bound by them.
func TestGranted(t *testing.T) {
	w := newWorld(t)
	gw := &fakeGateway{}
	seen := seeingBackend{mu: &sync.Mutex{}, specs: map[string]isolation.Spec{}}
	w.shape = func(c *Config) {
		seen.Backend = c.Backends["fake"]
		c.Backends["fake"] = seen
		c.Gateway = gw
		c.Grants = func(_ context.Context, s Sandbox) Granted {
			return Granted{
				Env:          map[string]string{"KEY": "placeholder-" + s.ID, "TEAM": "of " + s.Spec.Labels["team"]},
				Placeholders: []string{"KEY"},
				Files:        map[string][]byte{"/etc/casemate/ca.pem": []byte("certificate")},
			}
		}
	}
	s := w.serve()
	const show = `echo "$KEY|$TEAM|$OWN"`
	tell := func(id string) string { return strings.TrimSpace(string(s.exec(id, "sh", "-c", show).Stdout)) }
	net := &Network{}
	a := s.create(alice, Spec{Network: net, Labels: map[string]string{"team": "a"}})
	b := s.create(alice, Spec{Network: net, Env: map[string]string{"KEY": "mine", "OWN": "1"}})
	c := s.create(alice, Spec{})
	for id, want := range map[string]string{a.ID: "placeholder-" + a.ID + "|of a|", b.ID: "mine|of |1", c.ID: "||"} {
		if got := tell(id); got != want {
			t.Errorf("inside: %q, want %q", got, want)
		}
	}
	for id, want := range map[string]bool{a.ID: true, b.ID: false, c.ID: false} { // of b, its creator's word comes first
		if got := s.claimedFacts(id); strings.Contains(got, `"placeholders":["KEY"]`) != want || strings.Contains(got, "placeholder-") {
			t.Errorf("the start's facts: %s", got)
		}
	}
	if f := seen.specs[a.ID].Files; len(f) != 2 || f[1].Path != "/etc/casemate/ca.pem" || len(seen.specs[c.ID].Files) != 0 {
		t.Errorf("files %v", f)
	}
	_, forks, err := s.Fork(t.Context(), alice, a.ID, ForkOptions{Count: 1})
	if err != nil || forks[0].Err != nil {
		t.Fatal(err, forks)
	}
	if id := forks[0].Sandbox.ID; tell(id) != "placeholder-"+id+"|of a|" {
		t.Errorf("inside a fork: %q", tell(id))
	}
	if _, err := s.Update(t.Context(), alice, a.ID, Update{Labels: &map[string]string{"team": "b"}}); err != nil {
		t.Fatal(err)
	}
	if len(gw.configured) != 1 || gw.configured[0] != a.ID {
		t.Errorf("the gateway was told of %v", gw.configured)
	}
}

// claimedFacts returns what the server recorded of a sandbox's start.
func (s *server) claimedFacts(id string) string {
	s.w.t.Helper()
	events, err := s.Events(s.w.t.Context(), admin, id, 0, 0)
	at := slices.IndexFunc(events, func(e journal.Event) bool { return e.Type == journal.SandboxClaimed })
	if err != nil || at < 0 {
		s.w.t.Fatalf("%v: %+v", err, events)
	}
	return string(events[at].Facts[journal.Server])
}

// TestExchangedDeviceEndsTheSandbox: one whose device is not the one that was made ends when it is adopted; one that the
// gateway can't be given for another reason goes on, and reaches nothing.
func TestExchangedDeviceEndsTheSandbox(t *testing.T) {
	w := newWorld(t)
	gw := &fakeGateway{failed: map[string]error{}}
	w.shape = func(c *Config) { c.Gateway = gw }
	s := w.serve()
	exchanged, busy := s.create(alice, Spec{Network: &Network{}}), s.create(alice, Spec{Network: &Network{}})
	s.stop(false)
	gw.failed[exchanged.ID] = fmt.Errorf("open device: %w", isolation.ErrDeviceGone)
	gw.failed[busy.ID] = errors.New("busy")
	s = w.serve()
	s.stops(exchanged.ID, EndLost)
	if s.state(busy.ID) != Running {
		t.Errorf("the other is %s", s.state(busy.ID))
	}
}
