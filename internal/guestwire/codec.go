package guestwire

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"unicode/utf8"
)

// maxDepth bounds how deep a message may nest; ours nest four levels.
const maxDepth = 16

// quickSize is what most of the messages take that are encoded by hand.
const quickSize = 320

// Marshal encodes a message.
func Marshal(v any) ([]byte, error) {
	switch v := v.(type) {
	case nil:
		return nil, nil
	case RunProcess:
		return appendRun(make([]byte, 0, quickSize), &v), nil
	case ProcessInfo:
		return appendInfo(make([]byte, 0, quickSize), &v), nil
	}
	return json.Marshal(v)
}

// Unmarshal decodes one message and nothing else: valid UTF-8, bounded nesting, no second value.
// Unknown fields are ignored, as the version rule says.
func Unmarshal(b []byte, v any) error {
	switch v := v.(type) {
	case *RunProcess:
		if parseRun(b, v) {
			return nil
		}
	case *ProcessInfo:
		if parseInfo(b, v) {
			return nil
		}
	}
	if !utf8.Valid(b) {
		return broken("message is not UTF-8")
	}
	if Depth(b) > maxDepth {
		return broken("message nests deeper than %d", maxDepth)
	}
	if err := json.Unmarshal(b, v); err != nil {
		return broken("message: %v", err)
	}
	return nil
}

// callHead is the length of what stands before a call's own JSON.
const callHead = 2

// AppendCall appends the payload of a call to b.
func AppendCall(b []byte, c Call) ([]byte, error) {
	head, err := Marshal(c)
	if err != nil {
		return b, err
	}
	if len(head) > math.MaxUint16 {
		return b, fmt.Errorf("call of %d bytes beside its body", len(head))
	}
	b = binary.BigEndian.AppendUint16(b, uint16(len(head)))
	return append(append(b, head...), c.Body...), nil
}

// parseCall reads what AppendCall wrote. Body lies in p.
func parseCall(p []byte) (Call, error) {
	var c Call
	if len(p) < callHead {
		return c, broken("call of %d bytes", len(p))
	}
	end := callHead + int(binary.BigEndian.Uint16(p))
	if end > len(p) {
		return c, broken("call of %d bytes that says %d", len(p), end)
	}
	if err := Unmarshal(p[callHead:end], &c); err != nil {
		return Call{}, err
	}
	c.Body = p[end:]
	return c, nil
}

// Depth returns how deep arrays and objects nest in b, counting brackets outside strings. It needs
// no valid JSON: what is malformed is left to the decoder.
func Depth(b []byte) int {
	deepest, now := 0, 0
	inString := false
	for i := 0; i < len(b); i++ {
		switch c := b[i]; {
		case inString && c == '\\':
			i++
		case c == '"':
			inString = !inString
		case inString:
		case c == '{' || c == '[':
			now++
			deepest = max(deepest, now)
		case c == '}' || c == ']':
			now--
		}
	}
	return deepest
}

const hexDigits = "0123456789abcdef"

// Escape returns the bytes of a path, an argument or an environment value as text for the wire:
// each byte that is not part of valid UTF-8 as NUL and two hexadecimal digits.
func Escape(raw string) string {
	if utf8.ValidString(raw) {
		return raw
	}
	var b strings.Builder
	for i := 0; i < len(raw); {
		r, n := utf8.DecodeRuneInString(raw[i:])
		if r == utf8.RuneError && n == 1 {
			b.WriteByte(0)
			b.WriteByte(hexDigits[raw[i]>>4])
			b.WriteByte(hexDigits[raw[i]&15])
		} else {
			b.WriteString(raw[i : i+n])
		}
		i += n
	}
	return b.String()
}

// Unescape reverses Escape. It refuses a NUL that begins no escape, and an escape of an ASCII byte:
// those have one spelling only, so that nothing slips past a check as "\x002e".
func Unescape(text string) (string, bool) {
	if strings.IndexByte(text, 0) < 0 {
		return text, true
	}
	b := make([]byte, 0, len(text))
	for i := 0; i < len(text); i++ {
		if text[i] != 0 {
			b = append(b, text[i])
			continue
		}
		if i+2 >= len(text) {
			return "", false
		}
		hi := strings.IndexByte(hexDigits, text[i+1])
		lo := strings.IndexByte(hexDigits, text[i+2])
		if hi < 8 || lo < 0 {
			return "", false
		}
		b = append(b, byte(hi<<4|lo))
		i += 2
	}
	return string(b), true
}

// escaped returns r with every text that may hold bytes escaped. It copies nothing where there is
// nothing to escape, which is nearly always.
func (r StartProcess) escaped() StartProcess {
	r.Dir = Escape(r.Dir)
	for i, arg := range r.Argv {
		if !utf8.ValidString(arg) {
			r.Argv = slices.Clone(r.Argv)
			for j := i; j < len(r.Argv); j++ {
				r.Argv[j] = Escape(r.Argv[j])
			}
			break
		}
	}
	for _, v := range r.Env {
		if !utf8.ValidString(v) {
			env := make(map[string]string, len(r.Env))
			for k, v := range r.Env {
				env[Escape(k)] = Escape(v)
			}
			r.Env = env
			break
		}
	}
	return r
}
