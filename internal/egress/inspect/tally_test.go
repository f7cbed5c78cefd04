package inspect

import (
	"testing"

	"casemate.dev/internal/egress"
)

func TestTallyLosesNothing(t *testing.T) {
	told, total := 0, 0
	y := &tally{tell: func(e egress.Event) {
		told++
		total += max(e.Count, 1)
	}}
	for range 10_007 {
		y.event(egress.Event{Type: egress.EventSecret, Secret: "sec_1"})
	}
	y.event(egress.Event{Type: egress.EventSecret, Secret: "sec_2"})
	y.close()
	if total != 10_008 || told > toldSingly+10_007/toldAtOnce+3 {
		t.Errorf("%d told, which say %d", told, total)
	}
}
