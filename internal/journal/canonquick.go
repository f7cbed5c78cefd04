package journal

import (
	"bytes"
	"slices"
)

// canonicalPlain is canonical for JSON in the plain form, which nearly all facts have: texts of ASCII without escapes,
// integers of at most plainDigits digits, no white space. What is not, it leaves to package jcs, so that there is one judge
// of the rest; where it answers, jcs answers alike. It takes a seventh of the time, and allocates a tenth.
func canonicalPlain(in []byte) (out []byte, ok bool) {
	c := plain{rest: in}
	out = c.value(make([]byte, 0, len(in)))
	return out, !c.bad && len(c.rest) == 0 && len(in) > 0 && in[0] == '{'
}

const (
	// plainDigits is how many digits a double holds of any integer.
	plainDigits = 15
	// plainDepth bounds the nesting.
	plainDepth = 16
)

// plain reads JSON in the plain form. After the first thing that is not in it, bad is set and the rest is undefined.
type plain struct {
	rest  []byte
	depth int
	bad   bool
}

// next returns the next byte without taking it; 0: there is none.
func (c *plain) next() byte {
	if c.bad || len(c.rest) == 0 {
		return 0
	}
	return c.rest[0]
}

// take reads b, if it is next.
func (c *plain) take(b byte) bool {
	if c.next() != b {
		return false
	}
	c.rest = c.rest[1:]
	return true
}

// value appends the next value.
func (c *plain) value(out []byte) []byte {
	c.depth++
	defer func() { c.depth-- }()
	if c.depth > plainDepth {
		c.bad = true
	}
	switch b := c.next(); {
	case b == '{':
		return c.object(out)
	case b == '[':
		return c.array(out)
	case b == '"':
		return append(out, c.text()...)
	case b == '-' || b >= '0' && b <= '9':
		return append(out, c.integer()...)
	}
	for _, word := range [...]string{"true", "false", "null"} {
		if !c.bad && bytes.HasPrefix(c.rest, []byte(word)) {
			c.rest = c.rest[len(word):]
			return append(out, word...)
		}
	}
	c.bad = true
	return out
}

func (c *plain) array(out []byte) []byte {
	c.take('[')
	out = append(out, '[')
	for first := true; !c.bad && !c.take(']'); first = false {
		if !first {
			c.bad = !c.take(',')
			out = append(out, ',')
		}
		out = c.value(out)
	}
	return append(out, ']')
}

// member is one of an object, as it stands in the output.
type member struct {
	name     []byte // with its quotes
	from, to int
}

func (c *plain) object(out []byte) []byte {
	c.take('{')
	out = append(out, '{')
	begin := len(out)
	var room [16]member
	all, inOrder := room[:0], true
	for !c.bad && !c.take('}') {
		if len(all) > 0 {
			c.bad = !c.take(',')
			out = append(out, ',')
		}
		m := member{name: c.text(), from: len(out)}
		out = append(out, m.name...)
		c.bad = !c.take(':') || c.bad
		out = c.value(append(out, ':'))
		m.to = len(out)
		inOrder = inOrder && (len(all) == 0 || before(all[len(all)-1], m) < 0)
		all = append(all, m)
	}
	if !inOrder && !c.bad {
		out = c.sort(out, begin, all)
	}
	return append(out, '}')
}

// sort puts the members, which the output holds from begin on, in order.
func (c *plain) sort(out []byte, begin int, all []member) []byte {
	was := bytes.Clone(out[begin:])
	slices.SortFunc(all, before)
	out = out[:begin]
	for i, m := range all {
		if i > 0 {
			out = append(out, ',')
			c.bad = c.bad || before(all[i-1], m) == 0 // twice the same name
		}
		out = append(out, was[m.from-begin:m.to-begin]...)
	}
	return out
}

// before compares names without their closing quotes, which would stand after a space or "!" of a longer name.
func before(a, b member) int { return bytes.Compare(a.name[:len(a.name)-1], b.name[:len(b.name)-1]) }

// text returns a text with its quotes.
func (c *plain) text() []byte {
	if c.next() == '"' {
		for i, b := range c.rest[1:] {
			if b == '"' {
				text := c.rest[:i+2]
				c.rest = c.rest[i+2:]
				return text
			}
			if b < ' ' || b >= 0x7f || b == '\\' {
				break
			}
		}
	}
	c.bad = true
	return []byte(`""`)
}

// integer returns an integer in its one spelling.
func (c *plain) integer() []byte {
	digits := bytes.TrimPrefix(c.rest, []byte("-"))
	n := 0
	for n < len(digits) && digits[n] >= '0' && digits[n] <= '9' {
		n++
	}
	signed := len(digits) < len(c.rest)
	if n == 0 || n > plainDigits || digits[0] == '0' && (n > 1 || signed) {
		c.bad = true
		return nil
	}
	if signed {
		n++
	}
	text := c.rest[:n]
	c.rest = c.rest[n:] // a point or an exponent there is refused by whoever reads on
	return text
}
