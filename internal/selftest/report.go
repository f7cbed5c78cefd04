package selftest

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"
)

// Outcome says how a case came out.
type Outcome string

// The outcomes.
const (
	Right         Outcome = "right"
	Wrong         Outcome = "wrong"          // an attack worked, or what must work does not
	Broken        Outcome = "broken"         // the case could not be tried
	NotApplicable Outcome = "not applicable" // the profile allows it; Detail says why
)

// Verdict is what came of one case in one profile.
type Verdict struct {
	ID      string        `json:"id"`
	Profile string        `json:"profile"`
	Class   Class         `json:"class"`
	Title   string        `json:"title"`
	Outcome Outcome       `json:"outcome"`
	Detail  string        `json:"detail,omitempty"`
	Took    time.Duration `json:"took_ns"`
}

// Report is the battery's result.
type Report struct {
	Isolation string        `json:"isolation,omitempty"`
	Started   time.Time     `json:"started"`
	Took      time.Duration `json:"took_ns"`
	Verdicts  []Verdict     `json:"verdicts"`
}

// OK reports whether nothing came out wrong and everything could be tried.
func (r Report) OK() bool {
	n := r.counts()
	return n[Wrong]+n[Broken] == 0 && n[Right] > 0
}

func (r Report) counts() map[Outcome]int {
	n := map[Outcome]int{}
	for _, v := range r.Verdicts {
		n[v.Outcome]++
	}
	return n
}

// Table writes the verdicts for eyes, and a summary.
func (r Report) Table(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "CASE\tPROFILE\tCLASS\tWHAT IS TRIED\tOUTCOME\tDETAIL")
	for _, v := range r.Verdicts {
		detail := v.Detail
		if v.Outcome == Right {
			detail = shorten(detail, 60)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\n", v.ID, v.Profile, v.Class, v.Title, v.Outcome, plain(detail))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintln(w, "\n"+r.Summary())
	return err
}

// Summary is one line: how many cases came out how.
func (r Report) Summary() string {
	n := r.counts()
	s := fmt.Sprintf("%d right, %d wrong, %d broken, %d not applicable, in %v",
		n[Right], n[Wrong], n[Broken], n[NotApplicable], r.Took.Round(100*time.Millisecond))
	if r.OK() {
		return s + ": every wall held"
	}
	return s
}

func shorten(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "") + "…"
}

// plain keeps what a sandbox printed from steering the terminal that shows it.
func plain(s string) string {
	return strings.Map(func(r rune) rune {
		if r < 0x20 || r >= 0x7f && r < 0xa0 || r >= 0x202a && r <= 0x202e || r >= 0x2066 && r <= 0x2069 {
			return '?'
		}
		return r
	}, s)
}
