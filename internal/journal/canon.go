package journal

import (
	"encoding/json"
	"fmt"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/gowebpki/jcs"

	"casemate.dev/internal/store"
)

// canonicalFacts joins what the observers say into one canonical JSON object (RFC 8785): members in order,
// one way to write each value.
func canonicalFacts(facts map[Observer]json.RawMessage) ([]byte, error) {
	b := []byte{'{'}
	for _, o := range []Observer{Guest, Kernel, Server} {
		if len(facts[o]) == 0 {
			continue
		}
		if len(b) > 1 {
			b = append(b, ',')
		}
		b = append(append(append(b, '"'), o...), '"', ':')
		b = append(b, facts[o]...)
	}
	out, err := canonical(append(b, '}'))
	if err != nil {
		return nil, fmt.Errorf("canonical facts: %w", err)
	}
	return out, nil
}

func canonical(b []byte) ([]byte, error) {
	if out, ok := canonicalPlain(b); ok {
		return out, nil
	}
	return jcs.Transform(b)
}

// Line returns an event as its leaf holds it: canonical JSON. Preconditions: e.Facts is canonical.
func line(e store.Event) []byte {
	b := make([]byte, 0, 192+len(e.Facts))
	b = appendString(append(b, `{"actor":`...), e.Actor)
	b = append(append(b, `,"facts":`...), e.Facts...)
	if e.Process != "" {
		b = appendString(append(b, `,"process":`...), e.Process)
	}
	b = appendString(append(b, `,"sandbox":`...), e.Sandbox)
	b = strconv.AppendUint(append(b, `,"seq":`...), e.Seq, 10)
	b = append(b, `,"time":"`...)
	b = time.Unix(0, e.Time).UTC().AppendFormat(b, time.RFC3339Nano)
	b = appendString(append(b, `","type":`...), e.Type)
	return append(b, '}')
}

// appendString appends a string as RFC 8785, section 3.2.2.2, writes it. What is no UTF-8 becomes U+FFFD.
func appendString(b []byte, s string) []byte {
	const hex = "0123456789abcdef"
	b = append(b, '"')
	for i := 0; i < len(s); {
		c := s[i]
		switch {
		case c == '"' || c == '\\':
			b = append(b, '\\', c)
		case c == '\b':
			b = append(b, `\b`...)
		case c == '\t':
			b = append(b, `\t`...)
		case c == '\n':
			b = append(b, `\n`...)
		case c == '\f':
			b = append(b, `\f`...)
		case c == '\r':
			b = append(b, `\r`...)
		case c < ' ':
			b = append(b, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
		case c < utf8.RuneSelf:
			b = append(b, c)
		default:
			r, size := utf8.DecodeRuneInString(s[i:])
			b = utf8.AppendRune(b, r)
			i += size
			continue
		}
		i++
	}
	return append(b, '"')
}
