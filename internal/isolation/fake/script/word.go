package script

import "strings"

// word parses one word, or returns nil where none begins.
func (p *parser) word() word {
	var w word
	for p.pos < len(p.src) {
		switch c := p.src[p.pos]; {
		case strings.IndexByte(" \t\r\n;&|()<>", c) >= 0:
			return w
		case c == '}' && len(w) == 0:
			return w
		case c == '\'':
			w = append(w, p.single())
		case c == '"':
			w = append(w, p.double()...)
		case c == '\\':
			p.pos++
			if p.pos < len(p.src) {
				w = append(w, part{kind: "text", text: p.src[p.pos : p.pos+1], quoted: true})
				p.pos++
			}
		case c == '$':
			w = append(w, p.dollar(false))
		default:
			start := p.pos
			for p.pos < len(p.src) && strings.IndexByte(" \t\r\n;&|()<>'\"\\$", p.src[p.pos]) < 0 {
				p.pos++
			}
			w = append(w, part{kind: "text", text: p.src[start:p.pos]})
		}
	}
	return w
}

func (p *parser) single() part {
	p.pos++
	end := strings.IndexByte(p.src[p.pos:], '\'')
	if end < 0 {
		p.fail("a quote is not closed")
	}
	text := p.src[p.pos : p.pos+end]
	p.pos += end + 1
	return part{kind: "text", text: text, quoted: true}
}

func (p *parser) double() word {
	p.pos++
	// An empty pair of quotes is a word too.
	w := word{{kind: "text", quoted: true}}
	var b strings.Builder
	flush := func() {
		if b.Len() > 0 {
			w = append(w, part{kind: "text", text: b.String(), quoted: true})
			b.Reset()
		}
	}
	for p.pos < len(p.src) {
		switch c := p.src[p.pos]; {
		case c == '"':
			p.pos++
			flush()
			return w
		case c == '\\' && p.pos+1 < len(p.src) && strings.IndexByte("$`\"\\\n", p.src[p.pos+1]) >= 0:
			if p.src[p.pos+1] != '\n' {
				b.WriteByte(p.src[p.pos+1])
			}
			p.pos += 2
		case c == '$':
			flush()
			w = append(w, p.dollar(true))
		default:
			b.WriteByte(c)
			p.pos++
		}
	}
	p.fail("a double quote is not closed")
	return nil
}

// dollar parses what begins with "$": a variable, a substitution, a sum, or the character itself.
func (p *parser) dollar(quoted bool) part {
	p.pos++
	switch {
	case p.has("(("):
		end := strings.Index(p.src[p.pos:], "))")
		if end < 0 {
			p.fail("\"))\" expected")
		}
		text := p.src[p.pos+2 : p.pos+end]
		p.pos += end + 2
		return part{kind: "sum", text: text, quoted: quoted}
	case p.take("("):
		start := p.pos
		p.list() // only to find its end
		p.space(true)
		text := p.src[start:p.pos]
		if !p.take(")") {
			p.fail("\")\" expected")
		}
		return part{kind: "command", text: text, quoted: quoted}
	case p.take("{"):
		end := strings.IndexByte(p.src[p.pos:], '}')
		if end < 0 {
			p.fail("\"}\" expected")
		}
		text := p.src[p.pos : p.pos+end]
		p.pos += end + 1
		return part{kind: "var", text: text, quoted: quoted}
	}
	if p.pos < len(p.src) && strings.IndexByte("?$!#@*0123456789", p.src[p.pos]) >= 0 {
		p.pos++
		return part{kind: "var", text: p.src[p.pos-1 : p.pos], quoted: quoted}
	}
	if name := p.identifier(); name != "" {
		return part{kind: "var", text: name, quoted: quoted}
	}
	return part{kind: "text", text: "$", quoted: quoted}
}
