package walls

import (
	"flag"
	"os"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/selftest"
	"casemate.dev/internal/testenv"
)

var only = flag.String("only", "", "cases of the battery to run, as C,D02")

// nightly is set where all cases are to run on every backend: that takes minutes where a kernel is emulated.
const nightly = "CASEMATE_TEST_NIGHTLY"

// TestBattery attacks sandboxes of both profiles from inside. Package selftest shows for each case that
// it can fail.
func TestBattery(t *testing.T) {
	testenv.NoLeaks(t)
	for _, isolation := range []string{namespaceName, gvisorName} {
		h := newHostOf(t, isolation)
		for _, profile := range []string{"locked", "standard"} {
			t.Run(isolation+"/"+profile, func(t *testing.T) { attack(t, h, isolation, profile) })
		}
	}
}

func attack(t *testing.T, h *host, isolation, profile string) {
	cases := strings.FieldsFunc(*only, func(r rune) bool { return r == ',' })
	if isolation == gvisorName && len(cases) == 0 && os.Getenv(nightly) == "" {
		cases = []string{"A", "D16"}
		t.Log("sections A and case D16 of all: the whole runs at night")
	}
	report, err := selftest.Run(t.Context(), selftest.Options{
		Target: h, Isolation: isolation, Profiles: []string{profile}, Patience: 30 * time.Second, Only: cases,
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
}
