package secret

import (
	"crypto/subtle"
	"fmt"
	"io"
	"log/slog"
	"sync"
)

// Mask is what a Value shows instead of itself.
const Mask = "[secret]"

// The bounds of a value. A shorter one can't be taken out of responses without tearing them, and can
// be guessed; a longer one fits no header.
const (
	MinValue = 8
	MaxValue = 16 << 10
)

// Value is a secret in memory. Its zero value is empty.
//
// Whatever prints, formats, logs or encodes it gets Mask. The bytes are behind a function, because
// printers that walk a struct's fields by reflection (fmt's %+v on an unexported field, go-cmp) can't
// look into one. Copies share the bytes, so that Wipe reaches them all.
type Value struct {
	do func(wipe bool) []byte
}

// NewValue returns a value that holds b. It takes b over: the caller must not use it again.
func NewValue(b []byte) Value {
	var mu sync.Mutex
	return Value{do: func(wipe bool) []byte {
		mu.Lock()
		defer mu.Unlock()
		if wipe {
			clear(b)
			b = nil
			return nil
		}
		return append([]byte(nil), b...)
	}}
}

// Reveal returns a copy of the bytes; nil where the value is empty or wiped. It is for the moment of
// use: what it returns is not kept, and cleared where that is possible.
func (v Value) Reveal() []byte {
	if v.do == nil {
		return nil
	}
	return v.do(false)
}

// Wipe overwrites the bytes, in every copy of the value. Copies that Reveal has returned, and strings
// made of them, stay until the garbage collector takes them: Go offers nothing better.
func (v Value) Wipe() {
	if v.do != nil {
		v.do(true)
	}
}

// Empty reports whether there is nothing in it.
func (v Value) Empty() bool {
	b := v.Reveal()
	defer clear(b)
	return len(b) == 0
}

// Equal compares in constant time for values of the same length.
func (v Value) Equal(o Value) bool {
	a, b := v.Reveal(), o.Reveal()
	defer clear(a)
	defer clear(b)
	return subtle.ConstantTimeCompare(a, b) == 1
}

var (
	_ fmt.Formatter  = Value{}
	_ fmt.Stringer   = Value{}
	_ fmt.GoStringer = Value{}
	_ slog.LogValuer = Value{}
)

// String implements fmt.Stringer.
func (v Value) String() string { return Mask }

// GoString implements fmt.GoStringer.
func (v Value) GoString() string { return Mask }

// Format implements fmt.Formatter, for every verb.
func (v Value) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, Mask) }

// LogValue implements slog.LogValuer.
func (v Value) LogValue() slog.Value { return slog.StringValue(Mask) }

// MarshalJSON implements json.Marshaler.
func (v Value) MarshalJSON() ([]byte, error) { return []byte(`"` + Mask + `"`), nil }

// MarshalText implements encoding.TextMarshaler.
func (v Value) MarshalText() ([]byte, error) { return []byte(Mask), nil }

// MarshalBinary implements encoding.BinaryMarshaler, which encoding/gob uses.
func (v Value) MarshalBinary() ([]byte, error) { return []byte(Mask), nil }
