package walls

import (
	"flag"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/selftest"
	"casemate.dev/internal/testenv"
)

var only = flag.String("only", "", "cases of the battery to run, as C,D02")

// TestBattery attacks sandboxes of both profiles from inside. Package selftest shows for each case that
// it can fail.
func TestBattery(t *testing.T) {
	testenv.NoLeaks(t)
	h := newHost(t)
	for _, profile := range []string{"locked", "standard"} {
		t.Run(profile, func(t *testing.T) {
			report, err := selftest.Run(t.Context(), selftest.Options{
				Target: h, Profiles: []string{profile}, Patience: 30 * time.Second,
				Only: strings.FieldsFunc(*only, func(r rune) bool { return r == ',' }),
			})
			if err != nil {
				t.Fatal(err)
			}
			for _, v := range report.Verdicts {
				switch v.Outcome {
				case selftest.Wrong, selftest.Broken:
					t.Errorf("%s %s: %s: %s", v.ID, v.Title, v.Outcome, v.Detail)
				}
			}
			t.Log(report.Summary())
		})
	}
}
