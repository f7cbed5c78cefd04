package sandbox

import (
	"strings"
	"testing"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/egress/rules"
	"casemate.dev/internal/metrics"
)

// TestTheGatewayMakesNoLabels: the process that faces strangers can't make a series of its own for each thing it says.
func TestTheGatewayMakesNoLabels(t *testing.T) {
	s := newWorld(t).serve()
	sb := s.create(alice, Spec{})
	if err := s.RecordNetwork([]egress.Event{
		{Sandbox: sb.ID, Type: egress.EventRefused, Verdict: &rules.Verdict{Code: rules.NoRule}},
		{Sandbox: sb.ID, Type: egress.EventOpened, Verdict: &rules.Verdict{Allow: true, Code: rules.Allowed}},
		{Sandbox: sb.ID, Type: egress.EventModel},
		{Sandbox: sb.ID, Type: "made-up", Verdict: &rules.Verdict{Code: "made-up-too"}},
		{Sandbox: sb.ID, Type: "made-up-2", Verdict: &rules.Verdict{Code: "made-up-too-2"}},
	}); err != nil {
		t.Fatal(err)
	}
	st := s.Stats()
	p := &metrics.Page{}
	p.Counter("n_total", "N.", st.Network.Samples(func(k [2]string) []string { return []string{"event", k[0], "code", k[1]} })...)
	_, got, _ := strings.Cut(p.String(), "counter\n")
	const want = `n_total{event="model.used",code=""} 1
n_total{event="network.opened",code="allowed"} 1
n_total{event="network.refused",code="no_rule"} 1
n_total{event="other",code="other"} 2
`
	if got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
	if st.States[Running] != 1 || st.States[Paused] != 0 {
		t.Errorf("states %v", st.States)
	}
}
