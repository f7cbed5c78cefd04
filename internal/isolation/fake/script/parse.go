// Package script is the small shell that the fake backend's processes run: enough of POSIX sh for
// the tests of the layers above, on commands and files that the caller provides.
//
// What belongs here: parsing and running scripts. What does not: the commands themselves, and
// everything that touches a machine; those are package fake's. It knows lists, && and ||, background
// commands, pipelines, redirections, groups and subshells, if, while and for, quotes, variables,
// command substitution and integer arithmetic; it knows no globs, functions or here-documents.
package script

import (
	"fmt"
	"strings"
)

// list is a sequence of and-or chains.
type list []item

// item is a pipeline and what separates it from the next.
type item struct {
	pipeline []node
	negate   bool
	op       string // ";", "&", "&&" or "||"
}

// node is one command of a pipeline.
type node struct {
	kind   string // "simple", "group", "subshell", "if", "while", "until" or "for"
	assign []assignment
	words  []word
	redirs []redirect
	name   string // for: the variable
	cond   list
	body   list
	other  list // else
}

type assignment struct {
	name  string
	value word
}

type redirect struct {
	fd     int
	op     string // ">", ">>", "<" or ">&"
	target word
}

// word is made of parts that are joined after expansion.
type word []part

type part struct {
	kind   string // "text", "var", "command" or "sum"
	text   string
	quoted bool
}

// SyntaxError says that a script can't be parsed.
type SyntaxError struct{ Reason string }

// Error returns the reason.
func (e *SyntaxError) Error() string { return "syntax error: " + e.Reason }

type parser struct {
	src string
	pos int
}

func parse(src string) (l list, err error) {
	p := &parser{src: src}
	defer func() {
		// The parser descends through many calls; a syntax error unwinds them all and nothing else does.
		if e, ok := recover().(*SyntaxError); ok {
			l, err = nil, e
		}
	}()
	l = p.list()
	p.space(true)
	if p.pos < len(p.src) {
		p.fail("unexpected %q", p.rest(10))
	}
	return l, nil
}

func (p *parser) fail(format string, args ...any) {
	panic(&SyntaxError{Reason: fmt.Sprintf(format, args...)})
}

func (p *parser) rest(n int) string { return p.src[p.pos:min(len(p.src), p.pos+n)] }

func (p *parser) has(s string) bool { return strings.HasPrefix(p.src[p.pos:], s) }

func (p *parser) take(s string) bool {
	if !p.has(s) {
		return false
	}
	p.pos += len(s)
	return true
}

// space skips blanks and comments, and with lines also newlines.
func (p *parser) space(lines bool) {
	for p.pos < len(p.src) {
		switch c := p.src[p.pos]; {
		case c == ' ' || c == '\t' || c == '\r' || lines && c == '\n':
			p.pos++
		case p.has("\\\n"):
			p.pos += 2
		case c == '#':
			for p.pos < len(p.src) && p.src[p.pos] != '\n' {
				p.pos++
			}
		default:
			return
		}
	}
}

func (p *parser) list() list {
	var l list
	for {
		p.space(true)
		if p.pos >= len(p.src) || p.closing() {
			return l
		}
		it := item{}
		if p.keyword("!") {
			it.negate = true
		}
		it.pipeline = p.pipeline()
		p.space(false)
		switch {
		case p.take("&&"):
			it.op = "&&"
		case p.take("||"):
			it.op = "||"
		case p.has(";;"):
			p.fail("case is not known here")
		case p.take(";"), p.take("\n"):
			it.op = ";"
		case p.take("&"):
			it.op = "&"
		default:
			it.op = ";"
			if p.pos < len(p.src) && !p.closing() {
				p.fail("unexpected %q", p.rest(10))
			}
		}
		l = append(l, it)
	}
}

// closing reports whether what follows ends the list that is being parsed.
func (p *parser) closing() bool {
	if p.has(")") || p.has("}") {
		return true
	}
	for _, k := range []string{"then", "else", "elif", "fi", "do", "done"} {
		if p.atKeyword(k) {
			return true
		}
	}
	return false
}

func (p *parser) atKeyword(k string) bool {
	if !p.has(k) {
		return false
	}
	end := p.pos + len(k)
	return end >= len(p.src) || strings.IndexByte(" \t\n;&|()", p.src[end]) >= 0
}

func (p *parser) keyword(k string) bool {
	if !p.atKeyword(k) {
		return false
	}
	p.pos += len(k)
	p.space(true)
	return true
}

func (p *parser) expect(k string) {
	p.space(true)
	if !p.keyword(k) {
		p.fail("%q expected at %q", k, p.rest(10))
	}
}

func (p *parser) pipeline() []node {
	var out []node
	for {
		p.space(len(out) > 0)
		out = append(out, p.command())
		p.space(false)
		if p.has("||") || !p.take("|") {
			return out
		}
	}
}

func (p *parser) command() node {
	var n node
	switch {
	case p.take("("):
		n = node{kind: "subshell", body: p.list()}
		p.space(true)
		if !p.take(")") {
			p.fail("\")\" expected")
		}
	case p.keyword("{"):
		n = node{kind: "group", body: p.list()}
		p.space(true)
		if !p.take("}") {
			p.fail("\"}\" expected")
		}
	case p.keyword("if"):
		n = p.condition()
	case p.atKeyword("while"), p.atKeyword("until"):
		n.kind = p.rest(5)
		p.keyword(n.kind)
		n.cond = p.list()
		n.body = p.loopBody()
	case p.keyword("for"):
		n = p.forLoop()
	default:
		return p.simple()
	}
	for {
		p.space(false)
		r, ok := p.redirect()
		if !ok {
			return n
		}
		n.redirs = append(n.redirs, r)
	}
}

func (p *parser) condition() node {
	n := node{kind: "if", cond: p.list()}
	p.expect("then")
	n.body = p.list()
	p.space(true)
	switch {
	case p.keyword("elif"):
		n.other = list{{pipeline: []node{p.condition()}, op: ";"}}
		return n
	case p.keyword("else"):
		n.other = p.list()
	}
	p.endWord("fi")
	return n
}

func (p *parser) loopBody() list {
	p.expect("do")
	body := p.list()
	p.endWord("done")
	return body
}

// endWord takes a closing keyword but not the newline after it, which separates commands.
func (p *parser) endWord(k string) {
	p.space(true)
	if !p.atKeyword(k) {
		p.fail("%q expected at %q", k, p.rest(10))
	}
	p.pos += len(k)
}

func (p *parser) forLoop() node {
	n := node{kind: "for", name: p.identifier()}
	if n.name == "" {
		p.fail("a name expected after for")
	}
	p.space(true)
	p.expect("in")
	for {
		p.space(false)
		w := p.word()
		if w == nil {
			break
		}
		n.words = append(n.words, w)
	}
	if !p.take(";") {
		p.take("\n")
	}
	n.body = p.loopBody()
	return n
}

func (p *parser) simple() node {
	n := node{kind: "simple"}
	for {
		p.space(false)
		if r, ok := p.redirect(); ok {
			n.redirs = append(n.redirs, r)
			continue
		}
		if len(n.words) == 0 {
			if a, ok := p.assignment(); ok {
				n.assign = append(n.assign, a)
				continue
			}
		}
		w := p.word()
		if w == nil {
			break
		}
		n.words = append(n.words, w)
	}
	if len(n.words)+len(n.assign)+len(n.redirs) == 0 {
		p.fail("a command expected at %q", p.rest(10))
	}
	return n
}

func (p *parser) identifier() string {
	start := p.pos
	for p.pos < len(p.src) && nameByte(p.src[p.pos], p.pos > start) {
		p.pos++
	}
	return p.src[start:p.pos]
}

func nameByte(c byte, digits bool) bool {
	return c == '_' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || digits && c >= '0' && c <= '9'
}

func (p *parser) assignment() (assignment, bool) {
	start := p.pos
	name := p.identifier()
	if name == "" || !p.take("=") {
		p.pos = start
		return assignment{}, false
	}
	return assignment{name: name, value: p.word()}, true
}

func (p *parser) redirect() (redirect, bool) {
	start := p.pos
	r := redirect{fd: -1}
	if p.pos+1 < len(p.src) && p.src[p.pos] >= '0' && p.src[p.pos] <= '2' && strings.IndexByte("<>", p.src[p.pos+1]) >= 0 {
		r.fd = int(p.src[p.pos] - '0')
		p.pos++
	}
	switch {
	case p.take("<<"):
		p.fail("here-documents are not known here")
	case p.take(">&"):
		r.op = ">&"
	case p.take(">>"):
		r.op = ">>"
	case p.take(">"):
		r.op = ">"
	case p.take("<"):
		r.op = "<"
	default:
		p.pos = start
		return redirect{}, false
	}
	if r.fd < 0 {
		r.fd = 1
		if r.op == "<" {
			r.fd = 0
		}
	}
	p.space(false)
	if r.target = p.word(); r.target == nil {
		p.fail("a file expected after %q", r.op)
	}
	return r, true
}
