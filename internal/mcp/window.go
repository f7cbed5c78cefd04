package mcp

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// window keeps the head and the tail of output, each half of its limit, and knows at which offsets of
// the whole they stand. The tail gets what matters most: how it ended.
type window struct {
	limit int

	head, tail []byte
	tailFrom   int64 // the offset of tail's first byte
	split      bool  // the head is complete
	next       int64 // the offset of the next byte
}

// Write implements io.Writer: output as it comes.
func (w *window) Write(p []byte) (int, error) {
	n := len(p)
	if !w.split {
		room := w.limit/2 - len(w.head)
		k := min(room, len(p))
		w.head = append(w.head, p[:k]...)
		w.next += int64(k)
		p = p[k:]
		if len(p) == 0 {
			return n, nil
		}
		w.cut()
	}
	w.tail = append(w.tail, p...)
	w.next += int64(len(p))
	if most := w.limit - w.limit/2; len(w.tail) > 2*most { // rarely, so that it costs little
		drop := len(w.tail) - most
		w.tail = append(w.tail[:0], w.tail[drop:]...)
		w.tailFrom += int64(drop)
	}
	return n, nil
}

// cut ends the head, and begins the tail, at the offset reached.
func (w *window) cut() {
	w.split, w.tail, w.tailFrom = true, w.tail[:0], w.next
}

// skip notes that n bytes are missing here: nothing before them can be the tail.
func (w *window) skip(n int64) {
	w.next += n
	w.cut()
}

// shown is output as a model gets it.
type shown struct {
	text string
	// from and to bound the bytes that were left out; equal where none were.
	from, to int64
	// bytes counts the output in all.
	bytes int64
}

// shown returns the text, with a line where bytes were left out. Where a character would be cut in two
// it is left out whole.
func (w *window) shown() shown {
	tail, from := w.tail, w.tailFrom
	if drop := len(tail) - (w.limit - w.limit/2); drop > 0 {
		tail, from = tail[drop:], from+int64(drop)
	}
	out := shown{from: int64(len(w.head)), to: from, bytes: w.next}
	if !w.split || out.from == out.to {
		out.from, out.to = 0, 0
		out.text = text(append(w.head[:len(w.head):len(w.head)], tail...))
		return out
	}
	head := wholeEnd(w.head)
	tail = wholeStart(tail)
	out.from, out.to = int64(len(head)), w.next-int64(len(tail))
	out.text = fmt.Sprintf("%s\n[… %d bytes left out, from offset %d to %d …]\n%s", text(head), out.to-out.from, out.from, out.to, text(tail))
	return out
}

// lastLine returns the last line that is not empty, for a report of progress.
func (w *window) lastLine() string {
	b := w.tail
	if len(b) == 0 {
		b = w.head
	}
	b = b[max(0, len(b)-4096):]
	lines := strings.Split(strings.TrimRight(text(b), "\r\n\t "), "\n")
	line := strings.TrimSpace(lines[len(lines)-1])
	if r := []rune(line); len(r) > 200 {
		line = string(r[:200]) + "…"
	}
	return line
}

// text shows bytes as text; those that are none become U+FFFD.
func text(b []byte) string { return strings.ToValidUTF8(string(b), "\uFFFD") }

// wholeEnd drops the beginning of a character that b ends in.
func wholeEnd(b []byte) []byte {
	for i := 1; i <= utf8.UTFMax && i <= len(b); i++ {
		if c := b[len(b)-i]; utf8.RuneStart(c) {
			if !utf8.FullRune(b[len(b)-i:]) {
				return b[:len(b)-i]
			}
			break
		}
	}
	return b
}

// wholeStart drops the end of a character that b begins in.
func wholeStart(b []byte) []byte {
	i := 0
	for i < len(b) && i < utf8.UTFMax && !utf8.RuneStart(b[i]) {
		i++
	}
	if i == utf8.UTFMax {
		return b // no character is that long: it is no text
	}
	return b[i:]
}
