package journal

import (
	"bytes"
	"testing"

	"github.com/gowebpki/jcs"
)

// samples are facts as they occur, and what only looks like them.
func samples() []string {
	return []string{
		`{}`, `{"server":{}}`, `{"a":[]}`, `{"a":[[],{}]}`, `{"a":1,"b":2}`, `{"b":2,"a":1}`, `{"a":null,"b":true,"c":false}`,
		`{"guest":{"pid":12,"dir":"/home/user","user":"user"},"server":{"argv":["/bin/true"],"timeout_ms":30000}}`,
		`{"guest":{"end":"exited","code":0,"bytes":0,"user_ms":0,"system_ms":1,"max_rss":1523712},"server":{"duration_ms":1}}`,
		`{"z":1,"y":{"b":[{"d":1,"c":2}],"a":-5},"x":"!"}`, `{"a":1,"a !":2,"a\"":3}`, `{"ab":1,"a":2,"a b":3,"a!":4,"":5}`, `{"a":1,"a":2}`,
		`{"a":0}`, `{"a":-0}`, `{"a":01}`, `{"a":-1}`, `{"a":1.0}`, `{"a":1e3}`, `{"a":999999999999999}`, `{"a":9999999999999999}`, `{"a":-}`,
		`{"a":"\u003c"}`, `{"a":"ä"}`, "{\"a\":\"\x7f\"}", "{\"a\":\"\n\"}", `{"a":"x}`, `{"a" :1}`, `{"a":1} `, ` {}`, `{"a":1,}`, `{,"a":1}`,
		`{"a":[1,]}`, `{"a":[,1]}`, `{"a":[1 ]}`, `{"a"}`, `{"a":}`, `{"a":tru}`, `{"a":nullx}`, `{`, `[`, ``, `[]`, `"a"`, `1`, `{}{}`, `{"a":1"b":2}`,
		`{"a":[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]}`,
	}
}

// alike checks that what canonicalPlain takes comes out as package jcs has it.
func alike(t *testing.T, in []byte) (taken bool) {
	t.Helper()
	given := bytes.Clone(in)
	got, ok := canonicalPlain(in)
	if !bytes.Equal(in, given) {
		t.Errorf("%q was changed to %q", given, in)
	}
	if !ok {
		return false
	}
	if want, err := jcs.Transform(in); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%q became %q; jcs: %q, %v", in, got, want, err)
	}
	return true
}

func TestPlainFactsAreCanonical(t *testing.T) {
	taken := 0
	for _, s := range samples() {
		if alike(t, []byte(s)) {
			taken++
		}
	}
	if taken < 12 {
		t.Errorf("only %d were taken", taken)
	}
}

func FuzzCanonicalPlain(f *testing.F) {
	for _, s := range samples() {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, in []byte) { alike(t, in) })
}

func BenchmarkCanonical(b *testing.B) {
	in := []byte(samples()[8])
	b.Run("plain", func(b *testing.B) {
		for b.Loop() {
			if _, ok := canonicalPlain(in); !ok {
				b.Fatal("not taken")
			}
		}
	})
	b.Run("jcs", func(b *testing.B) {
		for b.Loop() {
			if _, err := jcs.Transform(in); err != nil {
				b.Fatal(err)
			}
		}
	})
}
