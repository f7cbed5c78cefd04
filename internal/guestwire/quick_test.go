package guestwire

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func quickRuns() []RunProcess {
	return []RunProcess{
		{},
		{Start: StartProcess{ID: "p", Argv: []string{}, Env: map[string]string{}, Scope: []string{}}},
		{
			Start: StartProcess{
				ID: "prc_a", Argv: []string{"sh", "-c", "a < b && c > \"d\\\"", "é\n\u2028\x00ff", "\x7f", ""},
				Env: map[string]string{"B": "2", "A": "<", "": "\x01"}, Dir: "/tmp", User: "root", Stdin: StdinPipe, TTY: true,
				Rows: 24, Cols: 65535, TimeoutMS: 30_000, GraceMS: -1, Buffer: 1 << 40, Hold: true, Scope: []string{"tasks", "procs"},
			},
			Output: OutputRequest{ID: "x", Offset: 1 << 62, Follow: true, Hold: true, Limit: 7},
		},
		{Start: StartProcess{ID: "p", Argv: []string{"true"}, TimeoutMS: 30_000}, Output: OutputRequest{ID: "p", Follow: true}},
	}
}

func quickInfos() []ProcessInfo {
	return []ProcessInfo{
		{},
		{
			ID: "prc_a", Argv: []string{"a", "ü"}, Dir: "/", User: "user", PID: 7, TTY: true, Attached: true, Started: 1 << 60, Ended: 2,
			End: EndExited, Code: 3, Signal: 9, Error: "x\"y", UserMS: 1, SystemMS: 2, MaxRSS: 1 << 30, Bytes: 5, Dropped: 6,
			Complete: true, Leftover: 8,
		},
		{ID: "p", Argv: []string{"true"}, Dir: "/home/user", User: "user", PID: 12, Started: 1_764_000_000_123_456_789, End: EndExited},
	}
}

// TestQuickFormsAreJSON: what is encoded by hand is what package json encodes, and comes back the same.
func TestQuickFormsAreJSON(t *testing.T) {
	for _, r := range quickRuns() {
		want, err := json.Marshal(r)
		if got := appendRun(nil, &r); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s, want %s", got, want)
		}
		quickRun(t, want)
	}
	for _, i := range quickInfos() {
		want, err := json.Marshal(i)
		if got := appendInfo(nil, &i); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s, want %s", got, want)
		}
		quickInfo(t, want)
	}
}

func quickRun(t *testing.T, b []byte) {
	t.Helper()
	quickly(t, b, parseRun)
}

func quickInfo(t *testing.T, b []byte) {
	t.Helper()
	quickly(t, b, parseInfo)
}

// quickly fails if parse takes b otherwise than package json, or leaves something behind of what it does not take.
func quickly[T any](t *testing.T, b []byte, parse func([]byte, *T) bool) {
	t.Helper()
	var got, want, none T
	if !parse(b, &got) {
		if d := cmp.Diff(none, got); d != "" {
			t.Errorf("of %q something was taken:\n%s", b, d)
		}
		return
	}
	if err := json.Unmarshal(b, &want); err != nil {
		t.Errorf("%q was taken, which is malformed: %v", b, err)
	} else if d := cmp.Diff(want, got); d != "" {
		t.Errorf("%q:\n%s", b, d)
	}
}

// TestQuickTakesThePlainForm: the usual messages do not need package json.
func TestQuickTakesThePlainForm(t *testing.T) {
	runs, infos := quickRuns(), quickInfos()
	if b := appendRun(nil, &runs[3]); !parseRun(b, new(RunProcess)) {
		t.Errorf("%s was not taken", b)
	}
	if b := appendInfo(nil, &infos[2]); !parseInfo(b, new(ProcessInfo)) {
		t.Errorf("%s was not taken", b)
	}
}

func TestQuickLeavesTheRest(t *testing.T) {
	for _, text := range []string{
		"", "{", "{}x", "{} ", " {}", "null", "[]", `{"id":null}`, `{"ID":"x"}`, `{"id":"x",}`, `{,"id":"x"}`, `{"id""x"}`, `{"id":"x"`,
		`{"pid":01}`, `{"pid":-}`, `{"pid":1.5}`, `{"pid":1e3}`, `{"pid":9223372036854775808}`, `{"pid":10000000000000000000}`, `{"pid":99999999999999999999}`,
		`{"argv":["a",]}`, `{"argv":[,"a"]}`, `{"argv":["a""b"]}`, `{"argv":null}`, `{"tty":1}`, `{"tty":tru}`, `{"id":"a\u0062"}`,
		"{\"id\":\"\xff\"}", `{"unknown":1}`, `{"start":{"rows":65536}}`, `{"start":{"rows":-1}}`, `{"start":{"env":{"A":"1"},"env":{"B":"2"}}}`,
	} {
		if parseInfo([]byte(text), new(ProcessInfo)) || parseRun([]byte(text), new(RunProcess)) && text != "{}" {
			t.Errorf("%s was taken", text)
		}
		quickInfo(t, []byte(text))
		quickRun(t, []byte(text))
	}
}

// FuzzQuick: whatever the decoders take, package json takes alike.
func FuzzQuick(f *testing.F) {
	for _, r := range quickRuns() {
		f.Add(appendRun(nil, &r))
	}
	for _, i := range quickInfos() {
		f.Add(appendInfo(nil, &i))
	}
	f.Add([]byte(`{"start":{"env":{"A":"1","A":"2"},"argv":["a"],"argv":[]},"start":{"id":"-0"}}`))
	f.Add([]byte(`{"pid":-0,"bytes":9223372036854775807,"code":-9223372036854775808}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		quickRun(t, b)
		quickInfo(t, b)
	})
}

func BenchmarkQuick(b *testing.B) {
	run, info := quickRuns()[3], quickInfos()[2]
	text, told := appendRun(nil, &run), appendInfo(nil, &info)
	b.Run("run", func(b *testing.B) {
		for b.Loop() {
			var r RunProcess
			if Unmarshal(text, &r) != nil {
				b.Fatal("malformed")
			}
		}
	})
	b.Run("info", func(b *testing.B) {
		for b.Loop() {
			var i ProcessInfo
			if Unmarshal(told, &i) != nil {
				b.Fatal("malformed")
			}
		}
	})
	b.Run("info-json", func(b *testing.B) {
		for b.Loop() {
			var i ProcessInfo
			if json.Unmarshal(told, &i) != nil {
				b.Fatal("malformed")
			}
		}
	})
}
