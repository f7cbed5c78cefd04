package cli

import (
	"fmt"
	"io"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/term"
)

// progress shows long work on stderr: one line that changes on a terminal, a line per step elsewhere.
type progress struct {
	w     io.Writer
	fd    int
	tty   bool
	color bool
	start time.Time
	step  string
	drawn time.Time
	last  []string // the latest lines of the work itself, for when it fails
}

// kept is how many of the work's own lines are shown after a failure.
const kept = 20

func (a *app) newProgress() *progress {
	fd, tty := terminal(a.stderr)
	return &progress{w: a.stderr, fd: fd, tty: tty && a.getenv("TERM") != "dumb", color: a.color(a.stderr), start: time.Now()}
}

// update tells the step that is under way, how much of all is done (negative: unknown), and a line
// of the work's own output.
func (p *progress) update(step string, fraction float64, line string) {
	if line = clean(line); line != "" {
		p.last = append(p.last, line)
		p.last = p.last[max(0, len(p.last)-kept):]
	}
	changed := step != "" && step != p.step
	if changed {
		p.step = step
	}
	if !p.tty {
		if changed {
			fmt.Fprintln(p.w, clean(p.step))
		}
		return
	}
	// A terminal gains nothing from more than twenty pictures a second.
	if !changed && time.Since(p.drawn) < 50*time.Millisecond {
		return
	}
	p.drawn = time.Now()
	took := "0s"
	if d := time.Since(p.start).Truncate(time.Second); d > 0 {
		took = formatDuration(d)
	}
	text := fmt.Sprintf("%5s  ", took)
	if fraction >= 0 {
		const width = 24
		full := int(min(fraction, 1) * width)
		text += strings.Repeat("█", full) + strings.Repeat("░", width-full) + fmt.Sprintf(" %3.0f%%  ", min(fraction, 1)*100)
	}
	cols := p.columns() - 1
	if step := clean(p.step); line == "" {
		text += step
	} else { // what the work prints keeps half of the room
		text += shorten(step, max(10, (cols-utf8.RuneCountInString(text))/2)) + ": " + line
	}
	fmt.Fprint(p.w, "\r\x1b[K", shorten(text, cols))
}

// columns is how wide the terminal is.
func (p *progress) columns() int {
	cols, _, err := term.GetSize(p.fd)
	if err != nil || cols < 20 {
		return 80
	}
	return cols
}

// keep prints a line that stays, above the one that changes.
func (p *progress) keep(line string) {
	if p.tty {
		fmt.Fprint(p.w, "\r\x1b[K")
	}
	fmt.Fprintln(p.w, line)
	p.drawn = time.Time{}
}

// done removes the line.
func (p *progress) done() {
	if p.tty {
		fmt.Fprint(p.w, "\r\x1b[K")
	}
}

// tail prints the last lines of the work's own output.
func (p *progress) tail() {
	for _, l := range p.last {
		fmt.Fprintln(p.w, paint("  | "+l, faint, p.color))
	}
}
