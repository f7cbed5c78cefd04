package cli

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"casemate.dev/client"
)

// buildView shows a build at a terminal: a line for each step that is done, and below them the one under way, with
// what it prints.
type buildView struct {
	bar *progress
	of  int32 // steps that there are

	step, text  string // of the step under way
	begun, last time.Time
	kept        bool
}

// show takes the next entry of the log.
func (v *buildView) show(e *client.BuildLogEntry) {
	if e.GetStep() != v.step {
		v.finish("✓", green)
		v.begin(e)
		v.bar.last = nil // a failure shows what its own step printed
	}
	v.last = when(e.GetTime())
	printed := e.GetStream() != ""
	switch {
	case printed || e.GetLevel() == "debug":
	case e.GetLevel() == "warn":
		v.bar.keep(paint("! "+clean(e.GetText()), yellow, v.bar.color))
	case e.GetLevel() == "error": // the command's own error says it
	case strings.HasPrefix(e.GetText(), "kept from an earlier build"):
		v.kept = true
	default:
		if v.text != "" { // of the base, or after the last step
			v.finish("✓", green)
			v.begin(e)
		}
		v.text = e.GetText()
	}
	line := ""
	if printed {
		line = e.GetText()
	}
	v.bar.update(v.title(), v.fraction(), line)
}

func (v *buildView) begin(e *client.BuildLogEntry) {
	v.step, v.text, v.begun, v.kept = e.GetStep(), "", when(e.GetTime()), false
}

// number is that of the step under way; 0: it is the base, or what follows the last step.
func (v *buildView) number() int {
	n, _ := strconv.Atoi(v.step) // "base" and "finalize" have none
	return n
}

func (v *buildView) fraction() float64 {
	done := v.number() - 1
	if v.step == "finalize" {
		done = int(v.of)
	}
	return float64(max(0, done)) / float64(max(v.of, 1))
}

// title names the step under way.
func (v *buildView) title() string {
	if n := v.number(); n > 0 {
		return fmt.Sprintf("[%d/%d] %s", n, v.of, v.text)
	}
	return v.text
}

// finish prints the line that stays of a step.
func (v *buildView) finish(mark string, color style) {
	if v.text == "" {
		return
	}
	note := "  kept"
	if took := v.last.Sub(v.begun); !v.kept && took < 10*time.Millisecond {
		note = "" // it only set something
	} else if !v.kept {
		note = "  " + formatDuration(took)
	}
	title := shorten(clean(firstLine(v.title())), max(20, v.bar.columns()-len(note)-3))
	v.bar.keep(paint(mark, color, v.bar.color) + " " + title + paint(note, faint, v.bar.color))
}

// end says at which step the build ended, unless it was well: then the command says so.
func (v *buildView) end(well bool) {
	if v.bar.tty && !well {
		v.finish("✗", red)
	}
}
