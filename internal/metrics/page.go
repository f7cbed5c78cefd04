// Package metrics counts what the server does, and writes figures in Prometheus's text format (version 0.0.4).
//
// What belongs here: instruments that cost nothing on a hot path, and the format. What does not: which figures there are;
// those who have them name them. Labels must have few values: never an id, a path, a name that somebody chose.
package metrics

import (
	"math"
	"slices"
	"strconv"
	"strings"
)

// ContentType is that of the text format.
const ContentType = "text/plain; version=0.0.4; charset=utf-8"

// Sample is one value of a figure, with its labels.
type Sample struct {
	Value  float64
	labels string // as written, without braces
}

// Of returns a sample; labels are names and values in turns.
func Of(value float64, labels ...string) Sample {
	return Sample{Value: value, labels: join(labels)}
}

// join writes labels. Prometheus refuses a whole page for one byte that is no UTF-8.
func join(labels []string) string {
	var b strings.Builder
	for i := 0; i+1 < len(labels); i += 2 {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(labels[i])
		b.WriteString(`="`)
		_, _ = valueEscapes().WriteString(&b, strings.ToValidUTF8(labels[i+1], "\uFFFD"))
		b.WriteByte('"')
	}
	return b.String()
}

func valueEscapes() *strings.Replacer { return strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`) }

// Page is what one scrape gets. The zero value is empty.
type Page struct{ b strings.Builder }

// String returns the page as text.
func (p *Page) String() string { return p.b.String() }

// Counter writes a figure that only grows; its name ends in _total.
func (p *Page) Counter(name, help string, samples ...Sample) {
	p.family(name, help, "counter", samples)
}

// Gauge writes a figure that goes up and down.
func (p *Page) Gauge(name, help string, samples ...Sample) { p.family(name, help, "gauge", samples) }

// family writes a figure's samples in order of their labels. One without any is left out.
func (p *Page) family(name, help, kind string, samples []Sample) {
	if len(samples) == 0 {
		return
	}
	p.head(name, help, kind)
	slices.SortFunc(samples, func(a, b Sample) int { return strings.Compare(a.labels, b.labels) })
	for _, s := range samples {
		p.line(name, s.labels, s.Value)
	}
}

func (p *Page) head(name, help, kind string) {
	p.b.WriteString("# HELP " + name + " " + strings.NewReplacer(`\`, `\\`, "\n", `\n`).Replace(help) + "\n# TYPE " + name + " " + kind + "\n")
}

func (p *Page) line(name, labels string, value float64) {
	p.b.WriteString(name)
	if labels != "" {
		p.b.WriteString("{" + labels + "}")
	}
	p.b.WriteByte(' ')
	p.b.WriteString(number(value))
	p.b.WriteByte('\n')
}

// number writes a value as the format has it.
func number(v float64) string {
	if math.IsInf(v, 1) {
		return "+Inf"
	}
	return strconv.FormatFloat(v, 'g', -1, 64)
}
