package rootfs

import (
	"bytes"
	"io"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/epiclabs-io/diff3"

	"casemate.dev/internal/linux/fd"
)

// Bounds of a merge by lines. The library's time grows with the pairs of equal lines, of which a file that
// somebody made for it has the square of its length.
const (
	maxText      = 1 << 20
	maxLinePairs = 1 << 21
)

// mergedText merges three versions of a file by lines; ok is false where both sides changed the same lines, or
// lines that touch, or where it is no text.
func (p *mergePart) mergedText(path string, f three) (text []byte, ok bool, err error) {
	var lines [3][]string
	for i, side := range []*shownFile{f.b, f.o, f.t} {
		data, ok, err := readText(side, path)
		if !ok || err != nil {
			return nil, false, err
		}
		lines[i] = slices.Collect(strings.Lines(string(data)))
	}
	return mergeLines(lines[0], lines[1], lines[2])
}

// mergeLines merges two versions of a text that comes from base.
func mergeLines(base, ours, theirs []string) (text []byte, ok bool, err error) {
	if linePairs(base, ours)+linePairs(base, theirs) > maxLinePairs {
		return nil, false, nil
	}
	var out bytes.Buffer
	for _, part := range diff3.Diff3Merge(ours, base, theirs, true) {
		if part.Conflict != nil {
			return nil, false, nil
		}
		for _, l := range part.Ok {
			// What was the last line without an end on one side may have become one in the middle.
			if out.Len() > 0 && out.Bytes()[out.Len()-1] != '\n' {
				return nil, false, nil
			}
			out.WriteString(l)
		}
	}
	return out.Bytes(), true, nil
}

// linePairs counts the pairs of equal lines.
func linePairs(a, b []string) int {
	count := make(map[string]int, len(a))
	for _, l := range a {
		count[l]++
	}
	pairs := 0
	for _, l := range b {
		pairs += count[l]
	}
	return pairs
}

// readText reads a file whole; ok is false where it is large, or no text.
func readText(f *shownFile, path string) (data []byte, ok bool, err error) {
	if f == nil || !f.info.IsRegular() || f.info.Size > maxText {
		return nil, false, nil
	}
	file, err := fd.OpenFile(f.root, path)
	if err != nil {
		return nil, false, err
	}
	defer file.Close()
	if data, err = io.ReadAll(io.LimitReader(file, maxText+1)); err != nil {
		return nil, false, err
	}
	return data, len(data) <= maxText && isText(data), nil
}

func isText(data []byte) bool { return utf8.Valid(data) && bytes.IndexByte(data, 0) < 0 }
