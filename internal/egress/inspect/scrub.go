package inspect

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"html"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
)

// needles are the forms of values that are looked for in what comes back.
type needles struct {
	forms   [][]byte // longest first, none twice
	longest int
	first   [256]bool // bytes that a form begins with
}

// minForm is how long a form must be: parts of Base64 would otherwise match by chance.
const minForm = 8

// newNeedles returns the forms of values: as they are, and as JSON, URLs, hex and Base64 write them, the
// latter at each of the three offsets that a value can have within a longer text.
func newNeedles(values ...[]byte) *needles {
	n := &needles{}
	add := func(b []byte) {
		if len(b) >= minForm && !slices.ContainsFunc(n.forms, func(f []byte) bool { return bytes.Equal(f, b) }) {
			n.forms = append(n.forms, b)
		}
	}
	for _, v := range values {
		if len(v) == 0 {
			continue
		}
		s := string(v)
		add(bytes.Clone(v))
		if quoted, err := json.Marshal(s); err == nil {
			add(quoted[1 : len(quoted)-1])
			add(bytes.ReplaceAll(quoted[1:len(quoted)-1], []byte("/"), []byte(`\/`))) // PHP's way
		}
		for _, escaped := range []string{url.QueryEscape(s), url.PathEscape(s)} {
			add([]byte(escaped))
			add(lowerEscapes(escaped))
		}
		for _, escape := range []func(string) string{html.EscapeString, slowHTML} {
			add([]byte(escape(s)))
		}
		add([]byte(strings.ToUpper(hex.EncodeToString(v))))
		add([]byte(hex.EncodeToString(v)))
		for offset := range 3 {
			add(base64Core(base64.RawStdEncoding, v, offset))
			add(base64Core(base64.RawURLEncoding, v, offset))
		}
	}
	slices.SortFunc(n.forms, func(a, b []byte) int { return len(b) - len(a) })
	for _, f := range n.forms {
		n.longest = max(n.longest, len(f))
		n.first[f[0]] = true
	}
	return n
}

// lowerEscapes is a URL's text with its escapes in lower case.
func lowerEscapes(s string) []byte {
	b := []byte(s)
	for i := 0; i+2 < len(b); i++ {
		if b[i] == '%' {
			copy(b[i+1:], bytes.ToLower(b[i+1:i+3]))
		}
	}
	return b
}

// slowHTML escapes as templates of Go and of others do, which leave letters and digits only.
func slowHTML(s string) string {
	return strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", `"`, "&quot;", "'", "&#x27;", "/", "&#x2F;", "+", "&#43;", "=", "&#x3D;", "`", "&#x60;").Replace(s)
}

// base64Core returns the characters that encode v and nothing else where offset bytes stand before it.
func base64Core(enc *base64.Encoding, v []byte, offset int) []byte {
	text := enc.EncodeToString(append(make([]byte, offset), v...))
	skip := [3]int{0, 2, 3}[offset] // characters that hold bits of what stands before
	end := (offset + len(v)) * 8 / 6
	if end <= skip {
		return nil
	}
	return []byte(text[skip:end])
}

// mask overwrites in out, which is as long as raw, every form that stands in raw with asterisks, and reports whether
// there was one. Forms may overlap, and be parts of one another.
func (n *needles) mask(raw, out []byte) bool {
	found := false
	for _, f := range n.forms {
		for at := 0; ; at++ {
			i := bytes.Index(raw[at:], f)
			if i < 0 {
				break
			}
			found = true
			at += i
			for j := at; j < at+len(f); j++ {
				out[j] = '*'
			}
		}
	}
	return found
}

// maskText is mask for a string.
func (n *needles) maskText(s string) (string, bool) {
	if n == nil || len(n.forms) == 0 || len(s) < minForm {
		return s, false
	}
	out := []byte(s)
	if !n.mask([]byte(s), out) {
		return s, false
	}
	return string(out), true
}

// maskHeader masks the values of a header's fields, and reports whether there was one.
func (n *needles) maskHeader(h http.Header) bool {
	found := false
	for name, values := range h {
		if _, did := n.maskText(name); did { // as a host may write it that takes the value for a name
			delete(h, name)
			found = true
			continue
		}
		for i := range values {
			masked, did := n.maskText(values[i])
			values[i], found = masked, found || did
		}
	}
	return found
}

// open returns how many bytes at the end of b may be the beginning of a form.
func (n *needles) open(b []byte) int {
	for i := max(0, len(b)-n.longest+1); i < len(b); i++ {
		if !n.first[b[i]] {
			continue
		}
		tail := b[i:]
		for _, f := range n.forms {
			if len(f) > len(tail) && bytes.HasPrefix(f, tail) {
				return len(tail)
			}
		}
	}
	return 0
}

// masker masks a stream piece by piece. What may be the beginning of a form waits for what follows, and nothing else
// does, so that a stream of events is not held up.
type masker struct {
	n *needles
	// raw and out are what waits, as it came and with what was found so far: a form that is masked may be the
	// beginning of a longer one.
	raw, out []byte
	spare    []byte // what add returned before, to be used again
}

// add takes a piece and returns what can go on, which holds until the next call, and whether there was a form in it.
// With the last piece nothing waits any more.
func (m *masker) add(piece []byte, last bool) (ready []byte, found bool) {
	m.raw, m.out = append(m.raw, piece...), append(m.out, piece...)
	found = m.n.mask(m.raw, m.out)
	n := len(m.raw)
	if !last {
		n -= m.n.open(m.raw)
	}
	ready = m.out[:n]
	m.raw, m.out, m.spare = m.raw[:copy(m.raw, m.raw[n:])], append(m.spare[:0], m.out[n:]...), m.out
	return ready, found
}

// scrubber masks a stream that is read.
type scrubber struct {
	m     masker
	src   io.ReadCloser
	buf   []byte // masked, and to be read
	err   error
	found func() // called once, where a form was found
	room  []byte
}

func newScrubber(n *needles, src io.ReadCloser, found func()) io.ReadCloser {
	if n == nil || len(n.forms) == 0 {
		return src
	}
	return &scrubber{m: masker{n: n}, src: src, found: found}
}

// Read implements io.Reader.
func (s *scrubber) Read(p []byte) (int, error) {
	for len(s.buf) == 0 {
		if s.err != nil {
			return 0, s.err
		}
		if s.room == nil {
			s.room = make([]byte, 32<<10)
		}
		n, err := s.src.Read(s.room)
		s.err = err
		var found bool
		if s.buf, found = s.m.add(s.room[:n], err != nil); found && s.found != nil {
			s.found()
			s.found = nil
		}
	}
	n := copy(p, s.buf)
	s.buf = s.buf[n:]
	return n, nil
}

// Close implements io.Closer.
func (s *scrubber) Close() error { return s.src.Close() }

// watcher looks for texts in a stream that it does not change.
type watcher struct {
	io.ReadCloser
	n     *needles
	tail  []byte
	found func(text []byte)
}

// Read implements io.Reader.
func (w *watcher) Read(p []byte) (int, error) {
	n, err := w.ReadCloser.Read(p)
	if w.found == nil || n == 0 {
		return n, err
	}
	joined := append(w.tail, p[:n]...)
	for _, f := range w.n.forms {
		if bytes.Contains(joined, f) {
			w.found(f)
			w.found = nil
			return n, err
		}
	}
	w.tail = append(w.tail[:0], joined[max(0, len(joined)-w.n.longest+1):]...)
	return n, err
}
