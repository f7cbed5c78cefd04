package interpreter

import (
	"bytes"
	"encoding/json"
	"unicode/utf16"
	"unicode/utf8"
)

const hexDigits = "0123456789abcdef"

// line encodes v as one line of JSON in ASCII: an SDK decodes what comes piece by piece, and would tear
// longer characters apart.
func line(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return ascii(b.Bytes()), nil
}

// ascii escapes what is not ASCII in JSON; that stands in strings only.
func ascii(text []byte) []byte {
	i := bytes.IndexFunc(text, func(r rune) bool { return r >= utf8.RuneSelf })
	if i < 0 {
		return text
	}
	out := make([]byte, 0, len(text)*3)
	out = append(out, text[:i]...)
	for i < len(text) {
		if c := text[i]; c < utf8.RuneSelf {
			out = append(out, c)
			i++
			continue
		}
		r, n := utf8.DecodeRune(text[i:])
		i += n
		if hi, lo := utf16.EncodeRune(r); hi != utf8.RuneError {
			out = escape(escape(out, hi), lo)
			continue
		}
		out = escape(out, r)
	}
	return out
}

func escape(b []byte, r rune) []byte {
	return append(b, '\\', 'u', hexDigits[r>>12&15], hexDigits[r>>8&15], hexDigits[r>>4&15], hexDigits[r&15])
}
