package replay

import (
	"bytes"
	"fmt"
	"strings"
)

// Part is what of an outcome is compared.
type Part string

// The parts, in the order in which they are compared.
const (
	PartNetwork  Part = "network" // what it asked for, where it was answered from the record
	PartEnd      Part = "end"     // how it ended: exit code, signal, why it did not start
	PartStdout   Part = "stdout"
	PartStderr   Part = "stderr"
	PartTerminal Part = "terminal"
	PartResults  Part = "results" // of code: values and errors, a line of JSON each
	PartFiles    Part = "files"
)

// Difference is one place in which an outcome is not what was recorded.
type Difference struct {
	Part Part `json:"part"`
	// Offset is the first byte that differs in output as it was recorded, and Line the number of its line, from 1.
	Offset int64 `json:"offset"`
	Line   int   `json:"line,omitempty"`
	// Path is of files, where they are named, and what was asked for of the network.
	Path string `json:"path,omitempty"`
	// Recorded and Replayed are what is there, in short.
	Recorded string `json:"recorded"`
	Replayed string `json:"replayed"`
}

// Where says where it is.
func (d Difference) Where() string {
	switch {
	case d.Part == PartNetwork && d.Recorded != "":
		return d.Path + ", which it did not ask for again"
	case d.Part == PartNetwork:
		return d.Path + ", which it asked for and which is not in the record"
	case d.Part == PartEnd:
		return "its end"
	case d.Path != "":
		return "file " + d.Path
	case d.Part == PartFiles:
		return "the files that it changed"
	}
	return fmt.Sprintf("byte %d of %s", d.Offset, d.Part)
}

// key tells differences of one comparison from each other, and is the same for those of another one in the same place.
func (d Difference) key() string { return fmt.Sprintf("%s %d %s", d.Part, d.Line, d.Path) }

// maxExcerpt bounds what a difference shows of each side, in bytes.
const maxExcerpt = 160

func excerpt(line string, at int) string {
	line = strings.TrimSuffix(line, "\n")
	from := max(0, min(at-maxExcerpt/2, len(line)-maxExcerpt))
	to := min(len(line), from+maxExcerpt)
	out := line[from:to]
	if from > 0 {
		out = "…" + out
	}
	if to < len(line) {
		out += "…"
	}
	return strings.ToValidUTF8(out, "\uFFFD")
}

// compareEnds compares how two processes ended.
func compareEnds(a, b *Process) []Difference {
	if m, n := a.ending(), b.ending(); m != n {
		return []Difference{{Part: PartEnd, Recorded: m, Replayed: n}}
	}
	return nil
}

// ending says how a process ended.
func (p *Process) ending() string {
	switch p.End {
	case "exited":
		return fmt.Sprintf("exit code %d", p.ExitCode)
	case "signaled":
		return fmt.Sprintf("signal %d", p.Signal)
	case "failed":
		if p.Code != nil {
			return "an error"
		}
		return "not started: " + p.Problem
	case "":
		return "none"
	case "driver_ended":
		return fmt.Sprintf("its interpreter ended (exit code %d, signal %d)", p.ExitCode, p.Signal)
	}
	return strings.ReplaceAll(p.End, "_", " ")
}

// compareOutput compares what two processes said on one stream, line by line where both have as many.
func (n *normaliser) compareOutput(part Part) []Difference {
	a, b := n.a.p.output[string(part)], n.b.p.output[string(part)]
	if a.bytes == b.bytes && bytes.Equal(a.data, b.data) {
		return nil
	}
	x, y := lines(a.data), lines(b.data)
	var out []Difference
	offset := 0
	for i := range max(len(x), len(y)) {
		var s, t string
		if i < len(x) {
			s = x[i]
		}
		if i < len(y) {
			t = y[i]
		}
		at, ok := n.line(s, t)
		if !ok {
			d := Difference{Part: part, Offset: n.a.p.whole(part, offset+at), Line: i + 1, Recorded: excerpt(s, at), Replayed: excerpt(t, at)}
			if out = append(out, d); len(x) != len(y) {
				out[0].Line = 0 // lines of the two don't stand for each other from here on
				return out
			}
		}
		offset += len(s)
	}
	if len(out) == 0 && (a.bytes > int64(len(a.data)) || b.bytes > int64(len(b.data))) && a.bytes != b.bytes {
		d := Difference{Part: part, Recorded: fmt.Sprintf("%d bytes", a.bytes), Replayed: fmt.Sprintf("%d bytes", b.bytes)}
		d.Offset = int64(len(a.data)) - a.tail
		out = append(out, d)
	}
	return out
}

// whole returns the offset in all that was said of a byte of what is kept.
func (p *Process) whole(part Part, at int) int64 {
	c := p.output[string(part)]
	if left := c.bytes - int64(len(c.data)); left > 0 && int64(at) >= int64(len(c.data))-c.tail {
		return int64(at) + left
	}
	return int64(at)
}

// lines splits text behind its line feeds.
func lines(b []byte) []string {
	out := strings.SplitAfter(string(b), "\n")
	return out[:len(out)-1+min(len(out[len(out)-1]), 1)] // without what is empty behind the last one
}

// partial reports whether only the beginning and the end of an output are kept.
func (p *Process) partial() bool {
	for _, c := range p.output {
		if c.bytes > int64(len(c.data)) {
			return true
		}
	}
	return false
}

// outcome compares two processes in everything that is compared.
type outcome struct {
	diffs []Difference
	names []string
	// files says that it is known on both sides which files changed.
	files bool
	// alike and others are the normaliser's.
	alike  [2]map[string]bool
	others []otherContents
}

func compare(a, b side, pairs *pairing) outcome {
	n := newNormaliser(a, b, pairs)
	asked, names := compareRequests(a, b)
	o := outcome{diffs: append(asked, compareEnds(a.p, b.p)...)}
	for _, part := range []Part{PartStdout, PartStderr, PartTerminal, PartResults} {
		o.diffs = append(o.diffs, n.compareOutput(part)...)
	}
	files, compared := n.compareFiles()
	o.diffs, o.files = append(o.diffs, files...), compared
	if len(o.diffs) > 0 {
		o.diffs = append(names, o.diffs...)
	}
	o.names, o.alike, o.others = n.names(), n.alike, n.others
	return o
}
