package cli

import (
	"fmt"
	"io"
	"strings"
	"unicode/utf8"
)

// style is a terminal attribute; the empty one is plain text.
type style string

// The styles, by what they mean.
const (
	plain  style = ""
	bold   style = "1"
	faint  style = "2"
	red    style = "31"
	green  style = "32"
	yellow style = "33"
	cyan   style = "36"
)

// cell is one field of a table.
type cell struct {
	text  string
	style style
}

// table prints aligned columns. Every text is cleaned; the last column is not padded.
type table struct {
	head []string
	rows [][]cell
	// indent stands in front of every line.
	indent string
}

// add appends a row; items are strings or cells.
func (t *table) add(items ...any) {
	row := make([]cell, len(items))
	for i, it := range items {
		switch v := it.(type) {
		case cell:
			row[i] = cell{clean(v.text), v.style}
		default:
			row[i] = cell{text: clean(fmt.Sprint(v))}
		}
	}
	t.rows = append(t.rows, row)
}

// write prints the table to w, with colours where color is set.
func (t *table) write(w io.Writer, color bool) {
	var widths []int
	measure := func(i int, text string) {
		for len(widths) <= i {
			widths = append(widths, 0)
		}
		widths[i] = max(widths[i], utf8.RuneCountInString(text))
	}
	for i, h := range t.head {
		measure(i, h)
	}
	for _, r := range t.rows {
		for i, c := range r {
			measure(i, c.text)
		}
	}
	var b strings.Builder
	if len(t.head) > 0 {
		row := make([]cell, len(t.head))
		for i, h := range t.head {
			row[i] = cell{h, faint}
		}
		t.line(&b, row, widths, color)
	}
	for _, r := range t.rows {
		t.line(&b, r, widths, color)
	}
	_, _ = io.WriteString(w, b.String()) // a closed pipe shows at the next write that matters
}

func (t *table) line(b *strings.Builder, row []cell, widths []int, color bool) {
	b.WriteString(t.indent)
	last := len(row) - 1
	for last > 0 && row[last].text == "" {
		last--
	}
	for i, c := range row[:last+1] {
		b.WriteString(paint(c.text, c.style, color))
		if i < last {
			b.WriteString(strings.Repeat(" ", widths[i]-utf8.RuneCountInString(c.text)+2))
		}
	}
	b.WriteByte('\n')
}

// paint wraps text in a style where color is set.
func paint(text string, s style, color bool) string {
	if !color || s == plain || text == "" {
		return text
	}
	return "\x1b[" + string(s) + "m" + text + "\x1b[0m"
}
