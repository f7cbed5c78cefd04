package bench

import (
	"fmt"
	"io"
	"maps"
	"os"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// Budget is a promise about a row, and whether it held.
type Budget struct {
	// Text is the promise in words, Limit what it came to in this run.
	Text  string  `json:"text"`
	Value float64 `json:"value"`
	Limit float64 `json:"limit"`
	// Ratio is Value by the peer's, where there is one.
	Ratio float64 `json:"ratio,omitempty"`
	Held  bool    `json:"held"`
}

// Row is one line of the report.
type Row struct {
	ID   string `json:"id"`
	What string `json:"what"`
	Unit string `json:"unit"`
	Stats
	// Total is the time for all of a burst.
	Total   float64          `json:"total,omitempty"`
	Peers   map[string]Stats `json:"peers,omitempty"`
	Budgets []Budget         `json:"budgets,omitempty"`
	Note    string           `json:"note,omitempty"`
}

// budget adds a promise that value is at most limit; peer is what it is compared with, or 0.
func (r *Row) budget(text string, value, limit, peer float64) {
	b := Budget{Text: text, Value: value, Limit: limit, Held: value <= limit}
	if peer > 0 {
		b.Ratio = value / peer
	}
	r.Budgets = append(r.Budgets, b)
}

// atLeast adds a promise that value is at least limit.
func (r *Row) atLeast(text string, value, limit, peer float64) {
	r.budget(text, value, limit, peer)
	r.Budgets[len(r.Budgets)-1].Held = value >= limit
}

// Report is what a run measured.
type Report struct {
	Host    string    `json:"host"`
	Started time.Time `json:"started"`
	Rows    []Row     `json:"rows"`
	Notes   []string  `json:"notes,omitempty"`
}

// OK reports whether every budget held.
func (r Report) OK() bool {
	for _, row := range r.Rows {
		for _, b := range row.Budgets {
			if !b.Held {
				return false
			}
		}
	}
	return true
}

// Table writes the report for eyes.
func (r Report) Table(w io.Writer) error {
	fmt.Fprintln(w, r.Host)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "ROW\tWHAT\tUNIT\tP50\tP95\tP99\tRATE/S\tN\tBUDGET")
	for _, row := range r.Rows {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", row.ID, row.What, row.Unit, row.columns(), row.verdicts())
		for _, name := range slices.Sorted(maps.Keys(row.Peers)) {
			fmt.Fprintf(t, "\t  %s\t%s\t%s\t\n", name, row.Unit, Row{Stats: row.Peers[name]}.columns())
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, n := range r.Notes {
		if _, err := fmt.Fprintln(w, "note: "+n); err != nil {
			return err
		}
	}
	return nil
}

func (r Row) columns() string {
	if r.N == 0 {
		return "-\t-\t-\t-\t-"
	}
	rate := "-"
	if r.Rate > 0 {
		rate = fmt.Sprintf("%.0f", r.Rate)
	}
	return fmt.Sprintf("%s\t%s\t%s\t%s\t%d", short(r.P50), short(r.P95), short(r.P99), rate, r.N)
}

func (r Row) verdicts() string {
	var out []string
	for _, b := range r.Budgets {
		held := "held"
		if !b.Held {
			held = "MISSED"
		}
		s := fmt.Sprintf("%s: %s (%s of %s", b.Text, held, short(b.Value), short(b.Limit))
		if b.Ratio > 0 {
			s += fmt.Sprintf(", %.2f ×", b.Ratio)
		}
		out = append(out, s+")")
	}
	if r.Note != "" {
		out = append(out, r.Note)
	}
	return strings.Join(out, "; ")
}

func short(v float64) string {
	switch {
	case v >= 100:
		return fmt.Sprintf("%.0f", v)
	case v >= 10:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.2f", v)
}

// hostLine says what was measured on.
func hostLine() string {
	release, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	load, _ := os.ReadFile("/proc/loadavg")
	first, _, _ := strings.Cut(string(load), " ")
	return fmt.Sprintf("Linux %s %s, %d CPUs, load %s", strings.TrimSpace(string(release)), runtime.GOARCH, runtime.NumCPU(), first)
}
