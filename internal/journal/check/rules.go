package check

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// maxRules bounds a file of rules in bytes.
const maxRules = 1 << 20

// Kind is what a rule asserts.
type Kind string

// The kinds. Those of files need a sandbox whose file changes are recorded.
const (
	Changed     Kind = "changed"      // for each glob, some path that matches was created, modified, deleted or renamed
	OnlyChanged Kind = "only-changed" // no path was that matches none of the globs
	Unchanged   Kind = "unchanged"    // no path was that matches one
	Reached     Kind = "reached"      // for each host, a connection to it was opened
	OnlyReached Kind = "only-reached" // none was opened to another host
	NotReached  Kind = "not-reached"  // none was opened to one
	Ran         Kind = "ran"          // for each pattern, a command that matches was started
	NotRan      Kind = "not-ran"      // none was started that matches one
	Exited      Kind = "exited"       // every command that matches ended, with one of the codes
	TestsPassed Kind = "tests-passed" // for each pattern, the last command that matches ended with 0
	NotRefused  Kind = "not-refused"  // nothing was refused: connections, calls
)

// kinds returns all kinds.
func kinds() []Kind {
	return []Kind{Changed, OnlyChanged, Unchanged, Reached, OnlyReached, NotReached, Ran, NotRan, Exited, TestsPassed, NotRefused}
}

// What NotRefused can be about.
const (
	refusedConnections = "connections"
	refusedCalls       = "calls" // system calls that tell of an attempt to get out
)

// Rule is one assertion.
type Rule struct {
	Name string
	Line int // in its file
	Kind Kind
	// Patterns are globs, hosts, patterns of commands, or what may not have been refused.
	Patterns []string
	// Codes are those that Exited accepts.
	Codes []int

	globs []glob
}

// Problem is something in a file of rules that can't be.
type Problem struct {
	Line int
	What string
}

// RulesError says what is wrong with a file of rules.
type RulesError struct{ Problems []Problem }

// Error implements error.
func (e *RulesError) Error() string {
	lines := make([]string, len(e.Problems))
	for i, p := range e.Problems {
		lines[i] = p.What
		if p.Line > 0 {
			lines[i] = fmt.Sprintf("line %d: %s", p.Line, p.What)
		}
	}
	return strings.Join(lines, "\n")
}

// parser collects problems, so that all of them are told at once.
type parser struct{ problems []Problem }

func (p *parser) bad(n *yaml.Node, format string, args ...any) {
	line := 0
	if n != nil {
		line = n.Line
	}
	p.problems = append(p.problems, Problem{line, fmt.Sprintf(format, args...)})
}

// Parse reads rules. What it does not know it refuses. The error is a *RulesError.
func Parse(in io.Reader) ([]Rule, error) {
	data, err := io.ReadAll(io.LimitReader(in, maxRules+1))
	if err != nil {
		return nil, fmt.Errorf("read rules: %w", err)
	}
	var p parser
	if len(data) > maxRules {
		p.bad(nil, "the rules are longer than %d bytes", maxRules)
		return nil, &RulesError{p.problems}
	}
	var doc yaml.Node
	d := yaml.NewDecoder(bytes.NewReader(data))
	switch err := d.Decode(&doc); {
	case errors.Is(err, io.EOF):
		p.bad(nil, "there are no rules: begin with \"rules:\"")
	case err != nil:
		p.bad(nil, "it is no YAML: %s", strings.TrimPrefix(err.Error(), "yaml: "))
	default:
		if !errors.Is(d.Decode(new(yaml.Node)), io.EOF) {
			p.bad(nil, "it holds several documents, or something behind the first one")
		}
	}
	var rules []Rule
	if len(p.problems) == 0 {
		rules = p.file(doc.Content[0])
	}
	if len(p.problems) > 0 {
		return nil, &RulesError{p.problems}
	}
	return rules, nil
}

func (p *parser) file(n *yaml.Node) []Rule {
	var rules []Rule
	found := false
	p.mapping(n, "the file", []string{"rules"}, func(_, v *yaml.Node) {
		found = true
		if v.Kind != yaml.SequenceNode || len(v.Content) == 0 {
			p.bad(v, "rules is no list, or an empty one")
			return
		}
		for _, item := range v.Content {
			if r, ok := p.rule(item); ok {
				rules = append(rules, r)
			}
		}
	})
	if !found && len(p.problems) == 0 {
		p.bad(n, "there are no rules: begin with \"rules:\"")
	}
	return rules
}

// mapping calls each for the members of a mapping, none of which may be unknown or there twice.
func (p *parser) mapping(n *yaml.Node, what string, known []string, each func(key, value *yaml.Node)) bool {
	if n.Kind != yaml.MappingNode {
		p.bad(n, "%s must be a mapping, as \"key: value\"", what)
		return false
	}
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		switch {
		case value.Kind == yaml.AliasNode || value.Anchor != "" || key.Kind != yaml.ScalarNode:
			p.bad(value, "anchors, aliases and keys that are no text are not supported")
		case !slices.Contains(known, key.Value):
			p.bad(key, "unknown key %q%s", key.Value, suggest(key.Value, known))
		case seen[key.Value]:
			p.bad(key, "%s is there twice", key.Value)
		default:
			seen[key.Value] = true
			each(key, value)
		}
	}
	return true
}

func (p *parser) rule(n *yaml.Node) (r Rule, ok bool) {
	known := []string{"name"}
	for _, k := range kinds() {
		known = append(known, string(k))
	}
	before := len(p.problems)
	r.Line = n.Line
	p.mapping(n, "a rule", known, func(key, value *yaml.Node) {
		if key.Value == "name" {
			r.Name = p.text(value, "name")
			return
		}
		if r.Kind != "" {
			p.bad(key, "a rule asserts one thing, and this one already asserts %s: make %s a rule of its own", r.Kind, key.Value)
			return
		}
		r.Kind = Kind(key.Value)
		p.assertion(&r, value)
	})
	if r.Kind == "" && len(p.problems) == before {
		p.bad(n, "the rule asserts nothing: give it one of %s", strings.Join(known[1:], ", "))
	}
	return r, len(p.problems) == before
}

func (p *parser) assertion(r *Rule, v *yaml.Node) {
	if r.Kind == Exited {
		p.exited(r, v)
		return
	}
	if none := v.Kind == yaml.SequenceNode && len(v.Content) == 0; none && (r.Kind == OnlyChanged || r.Kind == OnlyReached) {
		return // nothing may be
	}
	r.Patterns = p.texts(v, string(r.Kind))
	for _, text := range r.Patterns {
		switch r.Kind {
		case Changed, OnlyChanged, Unchanged:
			g, err := parseGlob(text)
			if err != nil {
				p.bad(v, "%s: %v", r.Kind, err)
			}
			r.globs = append(r.globs, g)
		case Reached, OnlyReached, NotReached:
			if err := checkHost(text); err != nil {
				p.bad(v, "%s: %v", r.Kind, err)
			}
		case NotRefused:
			if known := []string{refusedConnections, refusedCalls}; !slices.Contains(known, text) {
				p.bad(v, "not-refused: unknown %q%s", text, suggest(text, known))
			}
		}
	}
}

func (p *parser) exited(r *Rule, v *yaml.Node) {
	r.Patterns, r.Codes = []string{"*"}, []int{0}
	p.mapping(v, "exited", []string{"command", "code"}, func(key, value *yaml.Node) {
		if key.Value == "command" {
			r.Patterns = p.texts(value, "command")
			return
		}
		r.Codes = nil
		for _, text := range p.texts(value, "code") {
			code, err := strconv.Atoi(text)
			if err != nil || code < 0 || code > 255 {
				p.bad(value, "code %q is no exit code (0 to 255)", text)
			}
			r.Codes = append(r.Codes, code)
		}
	})
}

func (p *parser) text(n *yaml.Node, what string) string {
	if n.Kind != yaml.ScalarNode || n.Tag == "!!null" || n.Value == "" || n.Anchor != "" {
		p.bad(n, "%s must be text", what)
		return ""
	}
	return n.Value
}

// texts reads a text, or a list of them that is not empty.
func (p *parser) texts(n *yaml.Node, what string) []string {
	if n.Kind != yaml.SequenceNode {
		return []string{p.text(n, what)}
	}
	if len(n.Content) == 0 {
		p.bad(n, "%s is an empty list", what)
	}
	var out []string
	for _, item := range n.Content {
		out = append(out, p.text(item, "each of "+what))
	}
	return out
}

// checkHost accepts a host's name, *.suffix, an address, or * alone, each with a port behind it or not.
func checkHost(text string) error {
	host, port := splitHost(text)
	if n, err := strconv.Atoi(port); port != "" && (err != nil || n < 1 || n > 65535) {
		return fmt.Errorf("%q: the port must be a number from 1 to 65535", text)
	}
	if _, err := netip.ParseAddr(host); err == nil || host == "*" {
		return nil
	}
	rest := strings.TrimPrefix(host, "*.")
	if rest == "" || strings.ContainsAny(rest, "*/@ :[]") {
		return fmt.Errorf("%q is no host: use a name, *.name or an address, with :port or without", text)
	}
	return nil
}

// splitHost takes a host and the port behind it apart; "" is none.
func splitHost(text string) (host, port string) {
	if rest, ok := strings.CutPrefix(text, "["); ok {
		host, port, _ = strings.Cut(rest, "]")
		return host, strings.TrimPrefix(port, ":")
	}
	if strings.Count(text, ":") == 1 {
		host, port, _ = strings.Cut(text, ":")
		return host, port
	}
	return text, "" // a name, or an IPv6 address
}

// suggest names what was probably meant.
func suggest(word string, known []string) string {
	best, distance := "", 3
	for _, k := range known {
		if d := edits(word, k); d < distance || d == distance && best == "" && d <= len(k)/2 {
			best, distance = k, d
		}
	}
	if best == "" {
		return ": use " + strings.Join(known, ", ")
	}
	return fmt.Sprintf(": did you mean %q?", best)
}

// edits is how many letters must be put in, taken out or replaced to make b of a (Levenshtein's distance).
func edits(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		last := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := last
			if a[i] != b[j] {
				cost++
			}
			last = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
