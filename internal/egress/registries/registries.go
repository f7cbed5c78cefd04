// Package registries reads from a host's own configuration where its package managers fetch packages.
//
// No host name stands here: the named set "registries" is what this host's apt, pip, npm and Go would use,
// by their configuration, or by the defaults that they bring along. What belongs here: where these programs
// keep that, and reading it. What does not: rules of other kinds (package rules).
package registries

import (
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Name is the name of the set.
const Name = "registries"

// source is a kind of file, and how addresses stand in it.
type source struct {
	program string
	globs   []string
	// line finds an address, or several separated by spaces or commas, as its first group.
	line string
	// fallback sources count only where nothing before them of the same program was found: the program's
	// own default, which configuration replaces.
	fallback bool
}

// sources lists the files, below a root and below a home directory (~).
func sources() []source {
	const value = `["']?([^"'\n]+)`
	python := []string{
		"/usr/lib/python3*/*-packages/pip/_internal/models/index.py", "/usr/lib/python3/*-packages/pip/_internal/models/index.py",
		"/usr/local/lib/python3*/*-packages/pip/_internal/models/index.py", "~/.pyenv/versions/*/lib/python3*/site-packages/pip/_internal/models/index.py",
	}
	npm := "npm/node_modules/@npmcli/config/lib/definitions/definitions.js"
	return []source{
		{program: "apt", globs: []string{"/etc/apt/sources.list", "/etc/apt/sources.list.d/*.list"}, line: `(?m)^\s*deb(?:-src)?\s+(?:\[[^\]]*\]\s+)?(\S+)`},
		{program: "apt", globs: []string{"/etc/apt/sources.list.d/*.sources"}, line: `(?mi)^URIs:\s*(.+)$`},
		{program: "pip", globs: []string{"/etc/pip.conf", "~/.config/pip/pip.conf", "~/.pip/pip.conf"}, line: `(?mi)^\s*(?:index-url|extra-index-url|find-links)\s*=\s*(.+)$`},
		{program: "pip", globs: python, line: `"(https?://[^"]+)"`, fallback: true},
		{program: "pip-files", globs: python, line: `file_storage_domain="([^"]+)"`, fallback: true},
		{program: "npm", globs: []string{"/etc/npmrc", "/usr/etc/npmrc", "/usr/local/etc/npmrc", "~/.npmrc"}, line: `(?m)^\s*(?:@[^:=\s]+:)?registry\s*=\s*` + value},
		{program: "npm", globs: []string{"/usr/share/nodejs/" + npm, "/usr/lib/node_modules/" + npm, "/usr/local/lib/node_modules/" + npm}, line: `default: ["'](https?://[^"']*registry[^"']*)["']`, fallback: true},
		{program: "go", globs: []string{"~/.config/go/env"}, line: `(?m)^(?:GOPROXY)=(.+)$`},
		{program: "go", globs: []string{"/usr/local/go/go.env", "/usr/lib/go/go.env", "/usr/lib/go-*/go.env"}, line: `(?m)^(?:GOPROXY)=(.+)$`, fallback: true},
		{program: "go-sums", globs: []string{"~/.config/go/env"}, line: `(?m)^GOSUMDB=(.+)$`},
		{program: "go-sums", globs: []string{"/usr/local/go/go.env", "/usr/lib/go/go.env", "/usr/lib/go-*/go.env"}, line: `(?m)^GOSUMDB=(.+)$`, fallback: true},
	}
}

// maxFile bounds what is read of one file.
const maxFile = 1 << 20

// Read returns rules, without allow in front, for what the host with its files below root would fetch
// from, for the user whose home directory is home. An unreadable file counts as absent.
func Read(root, home string) []string {
	var out []string
	found := map[string]bool{}
	for _, s := range sources() {
		if s.fallback && found[s.program] {
			continue
		}
		for _, text := range s.read(root, home) {
			if r, ok := rule(text); ok {
				found[s.program] = true
				out = append(out, r)
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// read returns the addresses in a source's files.
func (s source) read(root, home string) []string {
	find := regexp.MustCompile(s.line)
	var out []string
	for _, g := range s.globs {
		if rest, ok := strings.CutPrefix(g, "~"); ok {
			g = filepath.Join(home, rest)
		}
		paths, err := filepath.Glob(filepath.Join(root, g))
		if err != nil {
			continue
		}
		for _, p := range paths {
			for _, m := range find.FindAllStringSubmatch(readFile(p), -1) {
				out = append(out, strings.FieldsFunc(m[1], func(r rune) bool { return r == ' ' || r == ',' || r == '|' || r == '\t' })...)
			}
		}
	}
	return out
}

func readFile(path string) string {
	info, err := os.Stat(path)
	if err != nil || !info.Mode().IsRegular() || info.Size() > maxFile {
		return ""
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	// Comments often hold addresses that nothing uses.
	var keep []string
	for line := range strings.Lines(string(b)) {
		if t := strings.TrimSpace(line); !strings.HasPrefix(t, "#") && !strings.HasPrefix(t, ";") && !strings.HasPrefix(t, "//") {
			keep = append(keep, line)
		}
	}
	return strings.Join(keep, "")
}

// rule makes a rule of an address: its scheme, host and port. A bare name is one over TLS.
func rule(text string) (string, bool) {
	text = strings.TrimSpace(text)
	if !strings.Contains(text, "://") {
		if !strings.Contains(text, ".") {
			return "", false // "direct", "off"
		}
		text = "https://" + strings.SplitN(text, "+", 2)[0]
	}
	u, err := url.Parse(text)
	if err != nil || u.Hostname() == "" || u.Scheme != "http" && u.Scheme != "https" {
		return "", false
	}
	return u.Scheme + "://" + u.Host, true
}
