package inspect

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
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
		add([]byte(url.QueryEscape(s)))
		add([]byte(url.PathEscape(s)))
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

// mask overwrites every form in b with asterisks and reports whether there was one.
func (n *needles) mask(b []byte) bool {
	found := false
	for _, f := range n.forms {
		for at := 0; ; {
			i := bytes.Index(b[at:], f)
			if i < 0 {
				break
			}
			found = true
			for j := at + i; j < at+i+len(f); j++ {
				b[j] = '*'
			}
			at += i + len(f)
		}
	}
	return found
}

// maskText is mask for a string.
func (n *needles) maskText(s string) (string, bool) {
	if n == nil || len(n.forms) == 0 || len(s) < minForm {
		return s, false
	}
	b := []byte(s)
	if !n.mask(b) {
		return s, false
	}
	return string(b), true
}

// maskHeader masks the values of a header's fields, and reports whether there was one.
func (n *needles) maskHeader(h http.Header) bool {
	found := false
	for _, values := range h {
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

// scrubber masks a stream. What may be the beginning of a form waits for what follows, and nothing else
// does, so that a stream of events is not held up.
type scrubber struct {
	n     *needles
	src   io.ReadCloser
	buf   []byte // masked and not read yet, then what waits
	ready int    // of buf
	err   error
	found func() // called once, where a form was found
	room  []byte
}

func newScrubber(n *needles, src io.ReadCloser, found func()) io.ReadCloser {
	if n == nil || len(n.forms) == 0 {
		return src
	}
	return &scrubber{n: n, src: src, found: found}
}

// Read implements io.Reader.
func (s *scrubber) Read(p []byte) (int, error) {
	for s.ready == 0 {
		if s.err != nil {
			return 0, s.err
		}
		if s.room == nil {
			s.room = make([]byte, 32<<10)
		}
		n, err := s.src.Read(s.room)
		s.buf = append(s.buf, s.room[:n]...)
		s.err = err
		if s.n.mask(s.buf) && s.found != nil {
			s.found()
			s.found = nil
		}
		s.ready = len(s.buf)
		if err == nil {
			s.ready -= s.n.open(s.buf)
		}
	}
	n := copy(p, s.buf[:s.ready])
	s.buf = s.buf[:copy(s.buf, s.buf[n:])]
	s.ready -= n
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
