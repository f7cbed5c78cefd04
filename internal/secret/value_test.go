package secret

import (
	"bytes"
	"encoding/gob"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// canary is what no output may hold. It is made when the tests run, so that no file of the
// repository holds it either.
func canary() string { return "canary-" + strings.Repeat("q7Z", 6) + "-value" }

// outer has the value where printers can call its methods and where they can't.
type outer struct {
	Shown  Value
	hidden Value
	List   []Value
	Map    map[string]Value
	Ptr    *Value
	any    any
}

func TestValueShowsNothing(t *testing.T) {
	v := NewValue([]byte(canary()))
	o := outer{Shown: v, hidden: v, List: []Value{v}, Map: map[string]Value{"a": v}, Ptr: &v, any: v}
	var out []string
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d", "%T", "%08.3f", "%!"} {
		for _, x := range []any{v, &v, o, &o, []any{o, &v}, errors.Join(fmt.Errorf("%v", v))} {
			out = append(out, fmt.Sprintf(verb, x))
		}
	}
	for _, x := range []any{v, o, &o} {
		j, err := json.Marshal(x)
		out = append(out, string(j), fmt.Sprint(err))
		var g bytes.Buffer
		out = append(out, fmt.Sprint(gob.NewEncoder(&g).Encode(x)), g.String())
		for _, h := range []func(*bytes.Buffer) slog.Handler{
			func(b *bytes.Buffer) slog.Handler { return slog.NewTextHandler(b, nil) },
			func(b *bytes.Buffer) slog.Handler { return slog.NewJSONHandler(b, nil) },
		} {
			var b bytes.Buffer
			slog.New(h(&b)).Error("m", "v", x, slog.Any("w", x))
			out = append(out, b.String())
		}
	}
	x, _ := xml.Marshal(v)
	text, _ := v.MarshalText()
	out = append(out, string(x), string(text), v.String(), v.GoString())
	out = append(out, cmp.Diff(o, outer{}, cmp.Exporter(func(reflect.Type) bool { return true })))
	for _, s := range out {
		if bytes.Contains([]byte(s), []byte(canary())) || strings.Contains(s, fmt.Sprintf("%x", canary())) ||
			strings.Contains(s, "99 97 110 97 114 121") { // as a list of numbers
			t.Errorf("the value shows in %q", s)
		}
	}
	if got := fmt.Sprintf("%v %d %+v", v, v, struct{ V Value }{v}); got != Mask+" "+Mask+" {V:"+Mask+"}" {
		t.Errorf("got %q", got)
	}
	if string(v.Reveal()) != canary() {
		t.Error("Reveal gives something else")
	}
}

// TestPlainBytesWouldShow is the twin: the same printers show what is no Value.
func TestPlainBytesWouldShow(t *testing.T) {
	type plain struct{ hidden string }
	if s := fmt.Sprintf("%+v", plain{canary()}); !strings.Contains(s, canary()) {
		t.Error("fmt does not look into unexported fields: the test above proves nothing")
	}
	j, _ := json.Marshal(struct{ V string }{canary()})
	if !strings.Contains(string(j), canary()) {
		t.Error("json shows nothing: the test above proves nothing")
	}
}

func TestValueWipe(t *testing.T) {
	raw := []byte(canary())
	v := NewValue(raw)
	c := v
	if !c.Equal(v) || c.Equal(NewValue([]byte("something else"))) || !(Value{}).Empty() || v.Empty() {
		t.Error("Equal or Empty is wrong")
	}
	v.Wipe()
	if !bytes.Equal(raw, make([]byte, len(raw))) {
		t.Error("the bytes are still there")
	}
	if c.Reveal() != nil || !c.Empty() {
		t.Error("a copy still has the value")
	}
	(Value{}).Wipe()
}
