package main

import (
	"encoding/json"
	"fmt"
	"strings"
	"unicode"
)

// pair is one entry of an ordered mapping.
type pair struct {
	key   string
	value any // string, bool, int, []any or mapping
}

// mapping is a YAML mapping in a fixed order.
type mapping []pair

// set adds an entry.
func (m *mapping) set(key string, value any) { *m = append(*m, pair{key, value}) }

// write emits v in block style, indented by depth steps of two spaces. Strings are double quoted as
// in JSON, which YAML reads the same.
func write(b *strings.Builder, v any, depth int) {
	indent := strings.Repeat("  ", depth)
	switch v := v.(type) {
	case mapping:
		for _, p := range v {
			b.WriteString(indent + key(p.key) + ":")
			value(b, p.value, depth)
		}
	case []any:
		for _, item := range v {
			b.WriteString(indent + "-")
			if m, ok := item.(mapping); ok && len(m) > 0 {
				var inner strings.Builder
				write(&inner, m, depth+1)
				b.WriteString(" " + strings.TrimLeft(inner.String(), " "))
				continue
			}
			value(b, item, depth)
		}
	}
}

// value emits what follows a key or a dash.
func value(b *strings.Builder, v any, depth int) {
	switch v := v.(type) {
	case mapping:
		if len(v) == 0 {
			b.WriteString(" {}\n")
			return
		}
		b.WriteByte('\n')
		write(b, v, depth+1)
	case []any:
		if len(v) == 0 {
			b.WriteString(" []\n")
			return
		}
		b.WriteByte('\n')
		write(b, v, depth+1)
	case string:
		b.WriteString(" " + quote(v) + "\n")
	default:
		fmt.Fprintf(b, " %v\n", v)
	}
}

func key(s string) string {
	plain := func(r rune) bool {
		return r < 0x80 && (unicode.IsLetter(r) || unicode.IsDigit(r) || strings.ContainsRune("_/{}$.-", r))
	}
	if s == "" || unicode.IsDigit(rune(s[0])) || strings.ContainsFunc(s, func(r rune) bool { return !plain(r) }) {
		return quote(s)
	}
	return s
}

func quote(s string) string {
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	_ = e.Encode(s) // a string can't fail
	return strings.TrimSuffix(b.String(), "\n")
}
