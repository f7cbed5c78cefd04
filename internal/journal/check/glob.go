package check

import (
	"fmt"
	"path"
	"slices"
	"strings"
)

// glob matches absolute paths, byte for byte. A part of it is as in path.Match; "**" stands for any number of parts, and
// as the last one for one or more: /a/** is everything below /a and not /a itself.
type glob []string

// parseGlob reads a glob. One that begins with "**" begins at the root.
func parseGlob(text string) (glob, error) {
	if strings.HasPrefix(text, "**") {
		text = "/" + text
	}
	if !strings.HasPrefix(text, "/") {
		return nil, fmt.Errorf("%q is not absolute: begin with / or **", text)
	}
	if text == "/" {
		return glob{}, nil
	}
	parts := strings.Split(strings.TrimSuffix(text[1:], "/"), "/")
	for _, p := range parts {
		switch {
		case p == "" || p == "." || p == "..":
			return nil, fmt.Errorf("%q has a part that no path has: %q", text, p)
		case p != "**" && strings.Contains(p, "**"):
			return nil, fmt.Errorf("%q: ** must be a part of its own", text)
		}
		if _, err := path.Match(p, ""); err != nil {
			return nil, fmt.Errorf("%q: %q is malformed", text, p)
		}
	}
	return parts, nil
}

func partsOf(p string) []string {
	if p == "/" {
		return nil
	}
	return strings.Split(strings.TrimPrefix(p, "/"), "/")
}

// after returns which parts of the glob may come next once all parts of a path are matched, in order; len(g) is among
// them where the path itself matches.
func (g glob) after(parts []string) []int {
	at := g.reach([]int{0})
	for _, p := range parts {
		var next []int
		for _, i := range at {
			if i == len(g) {
				continue
			}
			if g[i] == "**" {
				next = append(next, i)
				if i == len(g)-1 {
					next = append(next, len(g))
				}
				continue
			}
			if ok, err := path.Match(g[i], p); ok && err == nil {
				next = append(next, i+1)
			}
		}
		slices.Sort(next)
		at = g.reach(slices.Compact(next))
	}
	return at
}

// reach adds what can come next where a "**" that is not the last part stands for nothing.
func (g glob) reach(at []int) []int {
	for k := 0; k < len(at); k++ {
		i := at[k]
		if i < len(g)-1 && g[i] == "**" && !slices.Contains(at, i+1) {
			at = append(at, i+1)
		}
	}
	return at
}

// match reports whether the glob matches a path.
func (g glob) match(p string) bool { return slices.Contains(g.after(partsOf(p)), len(g)) }

// below reports whether the glob matches some, and whether it matches every path below a directory.
func (g glob) below(dir string) (some, every bool) {
	for _, i := range g.after(partsOf(dir)) {
		if i == len(g) {
			continue
		}
		some = true
		rest := g[i:]
		every = every || rest[0] == "**" && (len(rest) == 1 || len(rest) == 2 && rest[1] == "*")
	}
	return some, every
}

// wildcard matches text against a pattern in which * stands for anything, also for nothing, and ? for one byte.
func wildcard(pattern, text string) bool {
	p, t, star, mark := 0, 0, -1, 0
	for t < len(text) {
		switch {
		case p < len(pattern) && pattern[p] == '*':
			star, mark = p, t
			p++
		case p < len(pattern) && (pattern[p] == '?' || pattern[p] == text[t]):
			p++
			t++
		case star >= 0:
			mark++
			p, t = star+1, mark
		default:
			return false
		}
	}
	return strings.Trim(pattern[p:], "*") == ""
}
