package network

import (
	"bytes"
	"os"
	"testing"

	"casemate.dev/internal/selftest"
	"casemate.dev/internal/server"
	"casemate.dev/internal/testenv"
	"casemate.dev/internal/testenv/world"
	"casemate.dev/test/stage"
)

// nightly is set where section F is to run whole on every backend: each of its cases makes a sandbox, which takes seconds on gVisor
// where the machine is busy.
const nightly = "CASEMATE_TEST_NIGHTLY"

// TestBattery is section F of the battery in both profiles for every backend, each of which is a row. What differs
// between them stands in the cases.
func TestBattery(t *testing.T) {
	for isolation, only := range map[string][]string{"namespace": nil, "gvisor": {"F01", "F04", "F17"}} {
		if os.Getenv(nightly) != "" {
			only = nil
		}
		t.Run(isolation, func(t *testing.T) {
			p := newPlaceIn(t, world.New(t), func(c *server.Config) { c.Runsc = testenv.Runsc(t) })
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
			report, err := selftest.Run(t.Context(), selftest.Options{Target: target, Internet: internet, Isolation: isolation, Only: only})
			if err != nil {
				t.Fatal(err)
			}
			for _, v := range report.Verdicts {
				if v.Outcome != selftest.Right && v.Outcome != selftest.NotApplicable {
					t.Errorf("%s %s %s: %s, %s", v.Profile, v.ID, v.Title, v.Outcome, v.Detail)
				}
			}
			cases := len(only)
			if cases == 0 {
				cases = 19
			}
			if len(report.Verdicts) < 2*cases || !report.OK() {
				t.Error(report.Summary())
			}
			t.Log(report.Summary())
		})
	}
}
