package state

import (
	"strings"
	"testing"

	"casemate.dev/internal/errs"
)

// TestPatch holds the examples of RFC 7396, appendix A, and RFC 6902, appendix A, and what they leave out.
func TestPatch(t *testing.T) {
	for _, c := range []struct{ doc, patch, want string }{
		{`{"a":"b"}`, `{"a":"c"}`, `{"a":"c"}`},
		{`{"a":"b"}`, `{"b":"c"}`, `{"a":"b","b":"c"}`},
		{`{"a":"b"}`, `{"a":null}`, `{}`},
		{`{"a":"b","b":"c"}`, `{"a":null}`, `{"b":"c"}`},
		{`{"a":["b"]}`, `{"a":"c"}`, `{"a":"c"}`},
		{`{"a":"c"}`, `{"a":["b"]}`, `{"a":["b"]}`},
		{`{"a":{"b":"c"}}`, `{"a":{"b":"d","c":null}}`, `{"a":{"b":"d"}}`},
		{`{"a":[{"b":"c"}]}`, `{"a":[1]}`, `{"a":[1]}`},
		{`["a","b"]`, `{"a":"b"}`, `{"a":"b"}`},
		{`{"e":null}`, `{"a":1}`, `{"a":1,"e":null}`},
		{`[1,2]`, `{"a":"b","c":null}`, `{"a":"b"}`},
		{`{}`, `{"a":{"bb":{"ccc":null}}}`, `{"a":{"bb":{}}}`},
		{`{"n":12345678901234567890.5}`, `{"m":1e400}`, `{"m":1e400,"n":12345678901234567890.5}`},

		{`{"foo":"bar"}`, `[{"op":"add","path":"/baz","value":"qux"}]`, `{"baz":"qux","foo":"bar"}`},
		{`{"foo":["bar","baz"]}`, `[{"op":"add","path":"/foo/1","value":"qux"}]`, `{"foo":["bar","qux","baz"]}`},
		{`{"baz":"qux","foo":"bar"}`, `[{"op":"remove","path":"/baz"}]`, `{"foo":"bar"}`},
		{`{"foo":["bar","qux","baz"]}`, `[{"op":"remove","path":"/foo/1"}]`, `{"foo":["bar","baz"]}`},
		{`{"baz":"qux","foo":"bar"}`, `[{"op":"replace","path":"/baz","value":"boo"}]`, `{"baz":"boo","foo":"bar"}`},
		{`{"foo":{"bar":"baz","waldo":"fred"},"qux":{"corge":"grault"}}`, `[{"op":"move","from":"/foo/waldo","path":"/qux/thud"}]`, `{"foo":{"bar":"baz"},"qux":{"corge":"grault","thud":"fred"}}`},
		{`{"foo":["all","grass","cows","eat"]}`, `[{"op":"move","from":"/foo/1","path":"/foo/3"}]`, `{"foo":["all","cows","eat","grass"]}`},
		{`{"baz":"qux","foo":["a",2,"c"]}`, `[{"op":"test","path":"/baz","value":"qux"},{"op":"test","path":"/foo/1","value":2.0}]`, `{"baz":"qux","foo":["a",2,"c"]}`},
		{`{"foo":"bar"}`, `[{"op":"add","path":"/child","value":{"grandchild":{}}}]`, `{"child":{"grandchild":{}},"foo":"bar"}`},
		{`{"/":9,"~1":10}`, `[{"op":"test","path":"/~01","value":10}]`, `{"/":9,"~1":10}`},
		{`{"foo":["bar"]}`, `[{"op":"add","path":"/foo/-","value":["abc","def"]}]`, `{"foo":["bar",["abc","def"]]}`},
		{`{"a":[1]}`, `[{"op":"copy","from":"/a","path":"/b"},{"op":"add","path":"/b/-","value":2}]`, `{"a":[1],"b":[1,2]}`},
		{`{"a":1}`, `[{"op":"replace","path":"","value":null}]`, `null`},
		{`{"a":"<&>"}`, `[]`, `{"a":"<&>"}`},
	} {
		apply, err := parsePatch([]byte(c.patch))
		if err != nil {
			t.Errorf("%s: %v", c.patch, err)
			continue
		}
		v, err := decode([]byte(c.doc))
		if err != nil {
			t.Fatal(err)
		}
		if v, err = apply(v); err != nil {
			t.Errorf("%s on %s: %v", c.patch, c.doc, err)
			continue
		}
		if got, err := encode(v); err != nil || string(got) != c.want {
			t.Errorf("%s on %s gives %s, %v, want %s", c.patch, c.doc, got, err, c.want)
		}
	}
}

func TestPatchRefuses(t *testing.T) {
	for _, c := range []struct {
		doc, patch string
		want       errs.Kind
	}{
		{`{}`, `1`, errs.InvalidArgument},
		{`{}`, `{`, errs.InvalidArgument},
		{`{}`, `[1]`, errs.InvalidArgument},
		{`{}`, `[{"op":"add","path":"/a"}]`, errs.InvalidArgument},
		{`{}`, `[{"op":"add","value":1}]`, errs.InvalidArgument},
		{`{}`, `[{"op":"add","path":"a","value":1}]`, errs.InvalidArgument},
		{`{}`, `[{"op":"add","path":"/a/b","value":1}]`, errs.InvalidArgument},
		{`{}`, `[{"op":"remove","path":"/a"}]`, errs.InvalidArgument},
		{`{}`, `[{"op":"replace","path":"/a","value":1}]`, errs.InvalidArgument},
		{`{}`, `[{"op":"spam","path":"/a","value":1}]`, errs.InvalidArgument},
		{`{}`, `[{"op":"move","path":"/a"}]`, errs.InvalidArgument},
		{`{"a":{}}`, `[{"op":"move","from":"/a","path":"/a/b"}]`, errs.InvalidArgument},
		{`[1]`, `[{"op":"add","path":"/2","value":1}]`, errs.InvalidArgument},
		{`[1]`, `[{"op":"add","path":"/01","value":1}]`, errs.InvalidArgument},
		{`[1]`, `[{"op":"remove","path":"/-"}]`, errs.InvalidArgument},
		{`[1]`, `[{"op":"add","path":"/-1","value":1}]`, errs.InvalidArgument},
		{`1`, `[{"op":"add","path":"/a","value":1}]`, errs.InvalidArgument},
		{`{"a":"x"}`, `[{"op":"test","path":"/a","value":"y"}]`, errs.FailedPrecondition},
		{`{"a":"x"}`, `[{"op":"test","path":"/b","value":"y"}]`, errs.InvalidArgument},
		// Each copies all that the one before has made: 2 to the power of 40.
		{`{"a":["` + strings.Repeat("x", 1000) + `"]}`, `[` + strings.Repeat(`{"op":"copy","from":"/a","path":"/a/-"},`, 40) + `{"op":"test","path":"","value":1}]`, errs.ResourceExhausted},
		{`{}`, `[` + strings.Repeat(`{"op":"add","path":"/a","value":1},`, maxOperations) + `{"op":"remove","path":"/a"}]`, errs.InvalidArgument},
		{`{}`, `[{"op":"test","path":"` + strings.Repeat("/a", maxDepth+1) + `","value":1}]`, errs.InvalidArgument},
	} {
		apply, err := parsePatch([]byte(c.patch))
		if err == nil {
			v, derr := decode([]byte(c.doc))
			if derr != nil {
				t.Fatal(derr)
			}
			_, err = apply(v)
		}
		kind(t, c.patch[:min(len(c.patch), 80)], err, c.want)
	}
}

func TestPatchOfADocument(t *testing.T) {
	w, ctx := open(t, t.TempDir(), 0), t.Context()
	patch := func(text string, expect *uint64) (Document, error) {
		return w.Patch(ctx, me, PatchRequest{Ref: plan(), Patch: []byte(text), Expect: expect})
	}
	if d, err := patch(`{"messages":[]}`, at(0)); err != nil || d.Version != 1 || d.ContentType != JSON {
		t.Fatalf("%+v, %v", d, err)
	}
	for range 3 {
		if _, err := patch(`[{"op":"add","path":"/messages/-","value":{"role":"user"}}]`, nil); err != nil {
			t.Fatal(err)
		}
	}
	const want = `{"messages":[{"role":"user"},{"role":"user"},{"role":"user"}]}`
	if d, err := w.Get(ctx, me, plan(), 0); err != nil || d.Version != 4 || string(d.Content) != want {
		t.Errorf("%s, %+v, %v", d.Content, d, err)
	}
	_, err := patch(`[{"op":"add","path":"/messages/-","value":1},{"op":"test","path":"/messages","value":[]}]`, nil)
	kind(t, "a test that fails", err, errs.FailedPrecondition)
	if d, err := w.Get(ctx, me, plan(), 0); err != nil || d.Version != 4 || string(d.Content) != want {
		t.Errorf("after a patch that failed: %s, %+v, %v", d.Content, d, err)
	}
	_, err = patch(`{}`, at(3))
	kind(t, "an old version", err, errs.Conflict)
	if _, err := w.Set(ctx, me, SetRequest{Ref: plan(), Content: []byte("x"), ContentType: Bytes}); err != nil {
		t.Fatal(err)
	}
	_, err = patch(`{}`, nil)
	kind(t, "a document that is no JSON", err, errs.FailedPrecondition)
}

// FuzzPatch: whatever comes in, a patch gives JSON or an error.
func FuzzPatch(f *testing.F) {
	f.Add(`{"a":[1,{"b":null}]}`, `[{"op":"move","from":"/a/1","path":"/a/-"}]`)
	f.Add(`[]`, `{"a":{"b":1}}`)
	f.Fuzz(func(t *testing.T, doc, patch string) {
		v, err := decode([]byte(doc))
		if err != nil {
			return
		}
		apply, err := parsePatch([]byte(patch))
		if err != nil {
			return
		}
		if v, err = apply(v); err != nil {
			return
		}
		out, err := encode(v)
		if err != nil {
			t.Fatal(err)
		}
		if err := checkJSON(out); err != nil {
			t.Fatalf("%s: %v", out, err)
		}
	})
}
