package main

import (
	"cmp"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"
	"sync"

	"casemate.dev/internal/selftest"
)

// The page's part that is written here lies between these.
const (
	begin = "<!-- battery: written by make battery -->\n"
	end   = "<!-- battery: end -->\n"
)

func backends() []string { return []string{"namespace", "gvisor"} }

func profiles() []string { return []string{"locked", "standard"} }

// results are what the page shows.
type results struct {
	stamp string
	mu    sync.Mutex // guards ours while it is filled
	ours  map[column]selftest.Outcome
	// beside are the peers' by name and case: held or open.
	beside map[string]map[string]string
}

// column is a case on one of our backends.
type column struct{ id, isolation, profile string }

func newResults(stamp string) *results {
	r := &results{stamp: stamp, ours: map[column]selftest.Outcome{}, beside: map[string]map[string]string{}}
	for _, p := range peerNames() {
		r.beside[p] = map[string]string{}
	}
	return r
}

// write puts the tables into the page.
func (r *results) write(file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	before, _, after, err := split(string(text))
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	return os.WriteFile(file, []byte(before+r.render()+after), 0o644)
}

// split finds the part that is written here.
func split(text string) (before, ours, after string, err error) {
	before, rest, ok := strings.Cut(text, begin)
	ours, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		return "", "", "", fmt.Errorf("it has no part between %q and %q", begin, end)
	}
	return before + begin, ours, end + after, nil
}

// render returns the tables.
func (r *results) render() string {
	var out strings.Builder
	fmt.Fprintf(&out, "\n%s\n\n", r.stamp)
	var n notes
	head := []string{"case", "class", "what is tried"}
	for _, b := range backends() {
		for _, p := range profiles() {
			head = append(head, b+", "+p)
		}
	}
	table(&out, append(head, peerNames()...)...)
	for _, c := range selftest.Cases() {
		row := []string{c.ID, string(c.Class), c.Title}
		for _, b := range backends() {
			for _, p := range profiles() {
				row = append(row, r.cell(c, b, p, &n))
			}
		}
		for _, p := range peerNames() {
			if why := unfit(p, c); why != "" {
				row = append(row, "n/a "+n.of(why))
			} else {
				row = append(row, cmp.Or(r.beside[p][c.ID], "–"))
			}
		}
		line(&out, row...)
	}
	out.WriteString("\n")
	for i, text := range n {
		fmt.Fprintf(&out, "%d. %s.\n", i+1, text)
	}
	out.WriteString("\nThe cases that take a hand on the host, on the API or in an image are tests:\n\n" + drivenTable())
	return out.String()
}

// notes are the reasons below the table, each once.
type notes []string

// of returns a note's number in brackets.
func (n *notes) of(text string) string {
	i := slices.Index(*n, text)
	if i < 0 {
		*n = append(*n, text)
		i = len(*n) - 1
	}
	return fmt.Sprintf("[%d]", i+1)
}

// cell is a case in one column of ours.
func (r *results) cell(c selftest.Case, isolation, profile string, n *notes) string {
	col := selftest.Column{Isolation: isolation, Profile: profile}
	why, inside := c.Reason(col), c.Inside(col)
	text := "–"
	switch outcome, run := r.ours[column{c.ID, isolation, profile}]; {
	case !run:
	case outcome == selftest.NotApplicable:
		text = "n/a"
	case outcome != selftest.Right:
		text = "**" + string(outcome) + "**"
	case inside != "":
		text = "inside"
	case c.Class == selftest.Compat && why != "":
		text = "lacks"
	case c.Class == selftest.Compat:
		text = "works"
	default:
		text = "held"
	}
	if why == "" {
		return text
	}
	if inside != "" {
		why += "; seen from the host by " + links([]string{inside})
	}
	return text + " " + n.of(why)
}

// drivenTable is the table of the cases that are tests.
func drivenTable() string {
	var out strings.Builder
	table(&out, "case", "class", "what is tried", "where", "on gvisor")
	for _, d := range drivenCases() {
		where, gvisor := links(d.tests), links(d.gvisor)
		if d.not != "" {
			where, gvisor = "n/a: "+d.not, "n/a"
		}
		line(&out, d.id, string(d.class), d.title, where, cmp.Or(gvisor, "as there: "+d.same))
	}
	return out.String()
}

// links leads to tests and scripts.
func links(names []string) string {
	var all []string
	for _, n := range names {
		file, test, _ := strings.Cut(n, " ")
		test, _, _ = strings.Cut(test, "/")
		if test == "" {
			all = append(all, fmt.Sprintf("[%s](../%s)", strings.TrimSuffix(path.Base(file), path.Ext(file)), file))
			continue
		}
		all = append(all, fmt.Sprintf("[`%s`](../%s)", test, file))
	}
	return strings.Join(all, ", ")
}

// table begins one.
func table(out *strings.Builder, head ...string) {
	line(out, head...)
	line(out, slices.Repeat([]string{"---"}, len(head))...)
}

func line(out *strings.Builder, cells ...string) {
	out.WriteString("| " + strings.Join(cells, " | ") + " |\n")
}
