package cli

import (
	"fmt"
	"io"
	"strings"
	"unicode"
	"unicode/utf8"
)

// clean makes text that a sandbox may have chosen safe for a terminal and a table: control
// characters, bytes that are no UTF-8 and the characters that reorder text show as escapes.
func clean(s string) string {
	if !strings.ContainsFunc(s, unsafeRune) {
		return s
	}
	var b strings.Builder
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, s[0])
		case r == '\n':
			b.WriteString(`\n`)
		case r == '\t':
			b.WriteString(`\t`)
		case r == '\r':
			b.WriteString(`\r`)
		case r < 0x80 && unsafeRune(r):
			fmt.Fprintf(&b, `\x%02x`, r)
		case unsafeRune(r):
			fmt.Fprintf(&b, `\u%04x`, r)
		default:
			b.WriteString(s[:n])
		}
		s = s[n:]
	}
	return b.String()
}

// unsafeRune reports whether r steers a terminal or hides what stands beside it.
func unsafeRune(r rune) bool {
	switch {
	case r == utf8.RuneError, unicode.IsControl(r):
		return true
	case r == '\u2028' || r == '\u2029': // line and paragraph separator
		return true
	case unicode.Is(unicode.Cf, r): // bidirectional overrides, zero-width characters, tags
		return true
	}
	return false
}

// cleanLines is clean for text of several lines, which stay lines.
func cleanLines(s string) string {
	lines := strings.Split(strings.TrimRight(s, "\n"), "\n")
	for i, l := range lines {
		lines[i] = strings.ReplaceAll(clean(strings.ReplaceAll(l, "\t", "\x00")), `\x00`, "\t")
	}
	return strings.Join(lines, "\n")
}

// shorten cuts s to at most n columns, counting each character as one.
func shorten(s string, n int) string {
	if utf8.RuneCountInString(s) <= n {
		return s
	}
	r := []rune(s)
	return string(r[:n-1]) + "…"
}

// quoteArgv shows a command as one could type it.
func quoteArgv(argv []string) string {
	out := make([]string, len(argv))
	for i, a := range argv {
		if a != "" && !strings.ContainsAny(a, " \t\n'\"\\$&|;<>()*?[]#~`!{}") {
			out[i] = a
			continue
		}
		out[i] = "'" + strings.ReplaceAll(a, "'", `'\''`) + "'"
	}
	return strings.Join(out, " ")
}

// screen passes a process's output to a terminal that is not the process's own. It lets text and
// colours through and drops what could steer the terminal: titles, clipboard writes (OSC 52),
// links (OSC 8), cursor moves, queries whose answer would arrive as typed input.
type screen struct {
	w     io.Writer
	state screenState
	seq   []byte // of the escape sequence being read
}

type screenState uint8

const (
	screenText screenState = iota
	screenEscape
	screenCSI
	screenString    // OSC, DCS, SOS, PM, APC: up to BEL or ST
	screenStringEnd // ESC seen inside one
)

// maxSequence bounds what is held back of a colour sequence; longer ones are dropped.
const maxSequence = 64

// Write implements io.Writer. It always takes all of p.
func (s *screen) Write(p []byte) (int, error) {
	out := make([]byte, 0, len(p))
	for _, c := range p {
		out = s.next(out, c)
	}
	if len(out) > 0 {
		if _, err := s.w.Write(out); err != nil {
			return 0, err
		}
	}
	return len(p), nil
}

// next takes one byte and appends to out what may be shown.
func (s *screen) next(out []byte, c byte) []byte {
	switch s.state {
	case screenEscape:
		return s.escape(out, c)
	case screenCSI:
		return s.csi(out, c)
	case screenString:
		if c == 0x07 {
			s.state = screenText
		} else if c == 0x1b {
			s.state = screenStringEnd
		}
		return out
	case screenStringEnd:
		s.state = screenString
		if c == '\\' {
			s.state = screenText
		}
		return out
	}
	switch {
	case c == 0x1b:
		s.state = screenEscape
	case c == '\n' || c == '\t' || c == '\r':
		out = append(out, c)
	case c < 0x20 || c == 0x7f:
	default:
		// C1 controls as single bytes are no UTF-8, and terminals in UTF-8 mode ignore them.
		out = append(out, c)
	}
	return out
}

// escape handles the byte after ESC.
func (s *screen) escape(out []byte, c byte) []byte {
	switch c {
	case '[':
		s.state, s.seq = screenCSI, append(s.seq[:0], 0x1b, '[')
	case ']', 'P', 'X', '^', '_':
		s.state = screenString
	case 0x1b:
	default:
		if c >= 0x30 { // a final byte; 0x20–0x2f are intermediates of a longer one
			s.state = screenText
		}
	}
	return out
}

// csi handles a byte of a control sequence; only colours and attributes (final byte m) pass.
func (s *screen) csi(out []byte, c byte) []byte {
	switch c {
	case 0x1b:
		s.state = screenEscape
		return out
	case 0x18, 0x1a: // CAN and SUB end a sequence, and what follows is text
		s.state = screenText
		return out
	}
	if len(s.seq) < maxSequence {
		s.seq = append(s.seq, c)
	}
	if c < 0x40 || c > 0x7e {
		return out
	}
	s.state = screenText
	// Nothing but numbers: "<", "=", ">" and "?" mark private sequences, of which none is a colour, and terminals obey
	// other controls in the middle of a sequence.
	if c == 'm' && len(s.seq) < maxSequence && strings.Trim(string(s.seq[2:len(s.seq)-1]), "0123456789;:") == "" {
		out = append(out, s.seq...)
	}
	return out
}
