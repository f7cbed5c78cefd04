package network

import (
	"bytes"
	"testing"

	"casemate.dev/internal/selftest"
	"casemate.dev/test/stage"
)

// TestBattery is section F of the battery in both profiles for every backend, each of which is a row. What differs
// between them stands in the cases.
func TestBattery(t *testing.T) {
	for _, isolation := range []string{"namespace"} {
		t.Run(isolation, func(t *testing.T) {
			p := newPlace(t)
			internet, err := selftest.OpenInternet(p.w.Net)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(internet.Close)
			if err := internet.Provide(t.Context(), p.Client); err != nil {
				t.Fatal(err)
			}
			if _, _, err := p.Images.Import(t.Context(), bytes.NewReader(stage.Image(t)), "small"); err != nil {
				t.Fatal(err)
			}
			target := selftest.NewServer(p.Client)
			target.Use("standard", "small")
			report, err := selftest.Run(t.Context(), selftest.Options{Target: target, Internet: internet, Isolation: isolation})
			if err != nil {
				t.Fatal(err)
			}
			for _, v := range report.Verdicts {
				if v.Outcome != selftest.Right && v.Outcome != selftest.NotApplicable {
					t.Errorf("%s %s %s: %s, %s", v.Profile, v.ID, v.Title, v.Outcome, v.Detail)
				}
			}
			if len(report.Verdicts) < 2*19 || !report.OK() {
				t.Error(report.Summary())
			}
		})
	}
}
