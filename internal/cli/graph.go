package cli

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"casemate.dev/client"
)

// graph draws commits as a tree that grows upwards: one lane for each line of history, which part where a fork
// was made and join where one was merged.
type graph struct {
	// lanes hold, for each column, the commit that comes next in it; "": the column is free.
	lanes []string
	// drawn are the commits that are in the list.
	drawn map[string]bool
}

// rows returns the lines of a list of commits, the newest first: those of a commit's own end in its text.
func (g *graph) rows(list []*client.Commit, text func(*client.Commit) string) []string {
	g.drawn = map[string]bool{}
	for _, c := range list {
		g.drawn[c.GetId()] = true
	}
	var out []string
	for _, c := range list {
		lane := g.laneOf(c.GetId())
		if joining := g.joining(c.GetId(), lane); len(joining) > 0 {
			out = append(out, g.line(lane, joining, '┴', '┘'))
			for _, i := range joining {
				g.lanes[i] = ""
			}
			g.trim()
		}
		out = append(out, g.commitLine(lane)+" "+text(c))
		out = append(out, g.leave(c, lane)...)
	}
	return out
}

// laneOf returns the leftmost lane that waits for a commit, or a free one.
func (g *graph) laneOf(id string) int {
	lane := slices.Index(g.lanes, id)
	if lane < 0 {
		lane = g.free()
		g.lanes[lane] = id
	}
	return lane
}

func (g *graph) free() int {
	lane := slices.Index(g.lanes, "")
	if lane < 0 {
		g.lanes = append(g.lanes, "")
		lane = len(g.lanes) - 1
	}
	return lane
}

// joining returns the other lanes that wait for a commit: it was forked.
func (g *graph) joining(id string, lane int) (all []int) {
	for i := lane + 1; i < len(g.lanes); i++ {
		if g.lanes[i] == id {
			all = append(all, i)
		}
	}
	return all
}

// leave goes on from a commit to its parents.
func (g *graph) leave(c *client.Commit, lane int) (lines []string) {
	g.lanes[lane] = ""
	if g.drawn[c.GetParent()] {
		g.lanes[lane] = c.GetParent()
	}
	if merged := c.GetMerged(); merged != "" && g.drawn[merged] {
		other := slices.Index(g.lanes, merged)
		mark := '┤' // a line that is there already
		if other < 0 {
			if g.lanes[lane] == "" {
				g.lanes[lane] = merged
				return nil
			}
			other = g.free()
			g.lanes[other], mark = merged, '┐'
		}
		switch {
		case other > lane:
			lines = append(lines, g.line(lane, []int{other}, mark, mark))
		case other < lane:
			lines = append(lines, g.back(lane, other))
		}
	}
	g.trim()
	return lines
}

func (g *graph) trim() {
	for len(g.lanes) > 0 && g.lanes[len(g.lanes)-1] == "" {
		g.lanes = g.lanes[:len(g.lanes)-1]
	}
}

func (g *graph) commitLine(lane int) string {
	var b strings.Builder
	for i := range max(len(g.lanes), lane+1) {
		switch {
		case i == lane:
			b.WriteString("● ")
		case g.lanes[i] != "":
			b.WriteString("│ ")
		default:
			b.WriteString("  ")
		}
	}
	return strings.TrimRight(b.String(), " ")
}

// line connects a lane with others to its right.
func (g *graph) line(lane int, to []int, middle, end rune) string {
	last := to[len(to)-1]
	var b strings.Builder
	for i := range len(g.lanes) {
		mark, fill := ' ', ' '
		if g.lanes[i] != "" {
			mark = '│'
		}
		switch {
		case i == lane:
			mark, fill = '├', '─'
		case i == last:
			mark = end
		case i > lane && i < last:
			fill = '─'
			switch {
			case slices.Contains(to, i):
				mark = middle
			case g.lanes[i] != "":
				mark = '┼'
			default:
				mark = '─'
			}
		}
		b.WriteRune(mark)
		b.WriteRune(fill)
	}
	return strings.TrimRight(b.String(), " ")
}

// back connects a lane with one to its left.
func (g *graph) back(lane, to int) string {
	var b strings.Builder
	for i := range len(g.lanes) {
		mark, fill := ' ', ' '
		if g.lanes[i] != "" {
			mark = '│'
		}
		switch {
		case i == to:
			mark, fill = '├', '─'
		case i == lane && g.lanes[i] != "":
			mark = '┤'
		case i == lane:
			mark = '┘'
		case i > to && i < lane:
			fill = '─'
			if mark = '─'; g.lanes[i] != "" {
				mark = '┼'
			}
		}
		b.WriteRune(mark)
		b.WriteRune(fill)
	}
	return strings.TrimRight(b.String(), " ")
}

// writeGraph prints commits as a tree.
func (a *app) writeGraph(list []*client.Commit) error {
	now, color := time.Now(), a.color(a.stdout)
	rows := (&graph{}).rows(list, func(c *client.Commit) string {
		parts := []string{paint(c.GetId(), yellow, color)}
		if len(c.GetTags()) > 0 {
			parts = append(parts, "("+paint(clean(joined(c.GetTags())), green, color)+")")
		}
		if c.GetName() != "" {
			parts = append(parts, clean(c.GetName())+":")
		}
		if m := firstLine(c.GetMessage()); m != "" {
			parts = append(parts, clean(m))
		}
		parts = append(parts, paint(ago(when(c.GetCreatedAt()), now), faint, color))
		if p := c.GetParent(); p != "" && !slices.ContainsFunc(list, func(o *client.Commit) bool { return o.GetId() == p }) {
			parts = append(parts, paint(fmt.Sprintf("(from %s)", p), faint, color))
		}
		return strings.Join(parts, " ")
	})
	if len(rows) == 0 {
		return nil
	}
	_, err := io.WriteString(a.stdout, strings.Join(rows, "\n")+"\n")
	return err
}

func joined(tags []string) string { return strings.Join(tags, ", ") }

func firstLine(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	return line
}
