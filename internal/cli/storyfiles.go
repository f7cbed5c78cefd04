package cli

import (
	"encoding/hex"
	"fmt"
	"strings"

	"google.golang.org/protobuf/types/known/structpb"

	"casemate.dev/client"
)

// shownFiles bounds the files that the story of one event names.
const shownFiles = 20

// tellFiles tells what a process or run changed, or what changed between two.
func tellFiles(e *client.Event) story {
	what := "between processes"
	switch {
	case e.GetProcess() != "":
		what = "by " + shorten(e.GetProcess(), 14)
	case said(e, "run") != "":
		what = words("by", shorten(said(e, "run"), 14), "in", shorten(said(e, "context"), 14))
	}
	if why := said(e, "unknown"); why != "" {
		return story{words("files changed", what+":", "not known:", why), yellow}
	}
	var counts []string
	for _, op := range []string{"created", "modified", "deleted", "renamed"} {
		if n := number(e, op); n > 0 {
			counts = append(counts, fmt.Sprintf("%.0f %s", n, op))
		}
	}
	if len(counts) == 0 {
		counts = []string{"none"}
	}
	return story{words("files changed", what+":", strings.Join(counts, ", "), paren(tellOthers(e))), plain}
}

// fileLines tells of each file that an event names, one a line.
func fileLines(e *client.Event) (lines []string) {
	if e.GetType() != "files.changed" {
		return nil
	}
	files := fact(e, "files").GetListValue().GetValues()
	more := int(number(e, "more"))
	for i, f := range files {
		if i == shownFiles {
			more += len(files) - i
			break
		}
		lines = append(lines, tellFile(f.GetStructValue()))
	}
	if more > 0 {
		lines = append(lines, fmt.Sprintf("and %d more", more))
	}
	return lines
}

// tellFile tells of one file.
func tellFile(f *structpb.Struct) string {
	get := func(key string) string { return valueText(f.GetFields()[key]) }
	shown := func(key string) string {
		path := rawPath(get(key))
		if get("type") == "dir" && path != "/" {
			path += "/"
		}
		return path
	}
	path := shown("path")
	if get("from") != "" {
		path = shown("from") + " → " + path
	}
	return words(get("op"), path, paren(strings.ReplaceAll(get("what"), " ", ", ")))
}

// tellOthers tells who else could have changed the files.
func tellOthers(e *client.Event) string {
	var parts []string
	for _, o := range []struct{ key, text string }{
		{"alive", "also running"}, {"left", "left running by"}, {"contexts", "contexts"},
	} {
		list := fact(e, o.key).GetListValue().GetValues()
		if len(list) == 0 {
			continue
		}
		names := make([]string, 0, 3)
		for i, v := range list {
			if i == cap(names) {
				names = append(names[:i-1], fmt.Sprintf("%d more", len(list)-i+1))
				break
			}
			names = append(names, shorten(v.GetStringValue(), 14))
		}
		parts = append(parts, o.text+" "+strings.Join(names, " "))
	}
	if n := number(e, "calls"); n > 0 {
		parts = append(parts, plural(int64(n), "call of the file API", "calls of the file API"))
	}
	return strings.Join(parts, "; ")
}

// rawPath reads a path that stands in a record: a byte that is no text stands there as NUL and two hexadecimal digits.
func rawPath(text string) string {
	if !strings.Contains(text, "\x00") {
		return text
	}
	var b strings.Builder
	for {
		before, rest, more := strings.Cut(text, "\x00")
		b.WriteString(before)
		if !more {
			return b.String()
		}
		raw, err := hex.DecodeString(rest[:min(2, len(rest))])
		if err != nil || len(raw) != 1 {
			b.WriteByte(0)
			text = rest
			continue
		}
		b.Write(raw)
		text = rest[2:]
	}
}
