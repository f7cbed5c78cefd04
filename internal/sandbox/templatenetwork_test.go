package sandbox

import (
	"slices"
	"testing"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal"
)

// What a create does not say of the network, its template says: an administrator's word, also where only administrators
// may give it. It survives the server, and sandboxes that are there keep what they have.
func TestTemplateNetwork(t *testing.T) {
	w := newWorld(t)
	w.shape = func(c *Config) { c.Gateway = &fakeGateway{} }
	s := w.serve()
	ctx := t.Context()
	set := func(p Principal, template string, rules ...NetworkRule) error {
		return s.SetTemplateNetwork(ctx, p, template, &Network{Rules: rules})
	}
	before := s.create(alice, Spec{})
	for _, c := range []struct {
		err  error
		want errs.Kind
	}{
		{set(alice, "host", "allow a.test"), errs.PermissionDenied},
		{set(admin, "nothing", "allow a.test"), errs.NotFound},
		{set(admin, "host", "allow a..test"), errs.InvalidArgument},
		{set(admin, "host", "allow @unknown"), errs.NotFound},
	} {
		if !errs.Is(c.err, c.want) {
			t.Errorf("got %v, want %v", c.err, c.want)
		}
	}
	if err := set(admin, "host", "allow a.test", "allow 10.1.2.3:5432"); err != nil {
		t.Fatal(err)
	}
	rulesOf := func(sb Sandbox) []NetworkRule {
		if sb.Spec.Network == nil {
			return nil
		}
		return append([]NetworkRule{NetworkRule("of " + sb.Spec.Network.Template)}, sb.Spec.Network.Rules...)
	}
	want := []NetworkRule{"of host", "allow a.test", "allow 10.1.2.3:5432"}
	first := s.create(alice, Spec{})
	if got := rulesOf(first); !slices.Equal(got, want) {
		t.Errorf("the default: %q", got)
	}
	if got := rulesOf(s.create(alice, Spec{NoNetwork: true})); got != nil {
		t.Errorf("none asked for: %q", got)
	}
	if got := rulesOf(s.create(alice, Spec{Network: &Network{Rules: []NetworkRule{"allow b.test"}}})); !slices.Equal(got, []NetworkRule{"of ", "allow b.test"}) {
		t.Errorf("another asked for: %q", got)
	}
	if _, err := s.Create(ctx, alice, Spec{Network: &Network{}, NoNetwork: true}, CreateOptions{}); !errs.Is(err, errs.InvalidArgument) {
		t.Errorf("both: %v", err)
	}
	if got := rulesOf(s.create(Principal{ID: "sandbox:" + before.ID, Sandbox: before.ID}, Spec{})); got != nil {
		t.Errorf("a child of one without network: %q", got)
	}
	// What a child sends would go past its parent's own proxy. The twin: a parent without one.
	for proxy, refused := range map[string]bool{"81.2.69.2:1080": true, "": false} {
		net := &Network{Rules: []NetworkRule{"allow a.test"}, Proxy: proxy}
		parent := s.create(alice, Spec{Network: net})
		p := Principal{ID: "sandbox:" + parent.ID, Sandbox: parent.ID}
		if _, err := s.Create(ctx, p, Spec{Network: &Network{Rules: net.Rules}}, CreateOptions{}); (err != nil) != refused || refused && !errs.Is(err, errs.PermissionDenied) {
			t.Errorf("a child of one with proxy %q: %v", proxy, err)
		}
	}
	// A fork has what its parent has; who starts from its commit gets the default of the template below.
	for id, want := range map[string][]NetworkRule{before.ID: nil, first.ID: want} {
		c, forks, err := s.Fork(ctx, alice, id, ForkOptions{Count: 1})
		if err != nil || forks[0].Err != nil {
			t.Fatal(err, forks)
		}
		if got := rulesOf(forks[0].Sandbox); !slices.Equal(got, want) {
			t.Errorf("a fork: %q", got)
		}
		if got := rulesOf(s.create(alice, Spec{Template: c.ID})); len(got) != 3 {
			t.Errorf("from a commit: %q", got)
		}
	}
	s.stop(false)
	s = w.serve() // another server on the same data
	if got := rulesOf(s.create(alice, Spec{})); !slices.Equal(got, want) {
		t.Errorf("after a restart: %q", got)
	}
	if err := s.SetTemplateNetwork(ctx, admin, "host", nil); err != nil {
		t.Fatal(err)
	}
	if got := rulesOf(s.create(alice, Spec{})); got != nil {
		t.Errorf("taken away: %q", got)
	}
	if now, err := s.Get(ctx, alice, first.ID); err != nil || !slices.Equal(rulesOf(now), want) {
		t.Errorf("one that was there: %q %v", rulesOf(now), err)
	}
	list, err := s.Events(ctx, admin, journal.ServerStream, 0, 100)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, e := range list {
		if e.Type == journal.TemplateNetwork {
			n++
		}
	}
	if n != 2 {
		t.Errorf("%d changes are recorded", n)
	}
}
