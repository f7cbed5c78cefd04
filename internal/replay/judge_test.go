package replay

import (
	"strings"
	"testing"
	"time"
)

// holding is a run that makes a file, /h, of which the record has a hash unless it is "".
func holding(hash string) ran {
	r := ran{files: []object{{"op": "created", "path": "/h", "type": "file", "size": 3}}}
	if hash != "" {
		r.hashes = []string{hash}
	}
	return r
}

// TestVerdicts judges one process with a recorded outcome and two others.
func TestVerdicts(t *testing.T) {
	file := func(op, path string, size int) object {
		return object{"op": op, "path": path, "type": "file", "size": size}
	}
	for _, tt := range []struct {
		name          string
		was, one, two ran
		want          string
		sensitive     bool
	}{
		{name: "the same", was: ran{out: "hi\n"}, one: ran{out: "hi\n"}, two: ran{out: "hi\n"}, want: "reproduced"},
		{name: "times", was: ran{out: "2026-03-09\n"}, one: ran{out: "2026-03-11\n"}, two: ran{out: "2026-03-11\n"}, want: "reproduced after normalising times"},
		{name: "another exit", was: ran{code: 1}, want: "diverged at its end"},
		{name: "another end", was: ran{}, one: ran{end: "timed_out"}, two: ran{end: "timed_out"}, want: "diverged at its end"},
		{name: "other output", was: ran{out: "a\nbc\n"}, one: ran{out: "a\nbd\n"}, two: ran{out: "a\nbd\n"}, want: "diverged at byte 3 of stdout"},
		{name: "no output any more", was: ran{err: "oh\n"}, want: "diverged at byte 0 of stderr"},
		{name: "more output", was: ran{out: "a\n"}, one: ran{out: "a\nb\n"}, two: ran{out: "a\nb\n"}, want: "diverged at byte 2 of stdout"},
		{name: "no line feed", was: ran{out: "a\n"}, one: ran{out: "a"}, two: ran{out: "a"}, want: "diverged at byte 1 of stdout"},
		{name: "random", was: ran{out: "1\n"}, one: ran{out: "2\n"}, two: ran{out: "3\n"}, want: "unstable: its runs differ from each other"},
		{name: "random lines", was: ran{out: "1\n"}, one: ran{out: "2\n2\n"}, two: ran{out: "3\n"}, want: "unstable: its runs differ from each other"},
		{name: "once as recorded", was: ran{out: "1\n"}, one: ran{out: "2\n"}, two: ran{out: "1\n"}, want: "unstable: the second run had the recorded outcome"},
		{name: "random, and wrong", was: ran{out: "1\nok\n"}, one: ran{out: "2\nno\n"}, two: ran{out: "3\nno\n"}, want: "diverged at byte 2 of stdout"},
		{name: "random, and another exit", was: ran{out: "1\n", code: 1}, one: ran{out: "2\n"}, two: ran{out: "3\n"}, want: "diverged at its end"},
		{name: "sensitive", was: ran{out: "1\n"}, one: ran{out: "1\n"}, two: ran{out: "2\n"}, want: "reproduced", sensitive: true},
		{
			name: "files", was: ran{files: []object{file("created", "/a", 3), file("modified", "/b", 1)}},
			one: ran{files: []object{file("created", "/a", 3), file("modified", "/b", 1)}}, two: ran{files: []object{file("created", "/a", 3), file("modified", "/b", 1)}},
			want: "reproduced",
		},
		{
			name: "temporary files", was: ran{files: []object{file("created", "/tmp/tmp.Xa8kQ0pL3z", 3)}},
			one: ran{files: []object{file("created", "/tmp/tmp.Bw1mR7tY2c", 3)}}, two: ran{files: []object{file("created", "/tmp/tmp.Cd2nS8uZ3d", 3)}},
			want: "reproduced after normalising temporary names",
		},
		{
			name: "another size", was: ran{files: []object{file("created", "/a", 3)}},
			one: ran{files: []object{file("created", "/a", 4)}}, two: ran{files: []object{file("created", "/a", 4)}}, want: "diverged at file /a",
		},
		{
			name: "an archive of another size", was: ran{files: []object{file("created", "/a.tgz", 187)}},
			one: ran{files: []object{file("created", "/a.tgz", 188)}}, two: ran{files: []object{file("created", "/a.tgz", 188)}},
			want: "reproduced after normalising sizes of compressed files",
		},
		{
			name: "an archive of quite another size", was: ran{files: []object{file("created", "/a.tgz", 187)}},
			one: ran{files: []object{file("created", "/a.tgz", 288)}}, two: ran{files: []object{file("created", "/a.tgz", 288)}}, want: "diverged at file /a.tgz",
		},
		{name: "the same contents", was: holding("a"), one: holding("a"), two: holding("a"), want: "reproduced"},
		{name: "other contents", was: holding("a"), one: holding("b"), two: holding("b"), want: "diverged at file /h"},
		{name: "other contents each time", was: holding("a"), one: holding("b"), two: holding("c"), want: "reproduced after normalising contents of files"},
		{name: "other contents once", was: holding("a"), one: holding("b"), two: holding("a"), want: "reproduced after normalising contents of files"},
		{name: "other contents where varied", was: holding("a"), one: holding("a"), two: holding("b"), want: "reproduced", sensitive: true},
		{name: "contents that are not recorded", was: holding(""), one: holding("b"), two: holding("b"), want: "reproduced"},
		{
			name: "a file less", was: ran{files: []object{file("created", "/a", 3), file("created", "/b", 3)}},
			one: ran{files: []object{file("created", "/a", 3)}}, two: ran{files: []object{file("created", "/a", 3)}}, want: "diverged at file /b",
		},
		{
			name: "a file more", one: ran{files: []object{file("created", "/a", 3)}}, two: ran{files: []object{file("created", "/a", 3)}}, want: "diverged at file /a",
		},
		{
			name: "another file each time", was: ran{files: []object{file("created", "/a", 3)}},
			one: ran{files: []object{file("created", "/b", 3)}}, two: ran{files: []object{file("created", "/c", 3)}},
			want: "unstable: its runs differ from each other where they differ from the record, at file /a",
		},
		{name: "files not recorded", was: ran{unknown: true}, one: ran{files: []object{file("created", "/b", 3)}}, want: "reproduced"},
		{name: "killed from outside", was: ran{end: "canceled"}, want: "not attempted because it was ended from outside"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var tapes []*tape
			for i, p := range []ran{tt.was, tt.one, tt.two} {
				w := recorded(t, nil)
				if i > 0 {
					w = again(t, "web", i, nil)
				}
				p.id, p.argv = "p", []string{"sh", "-c", "x"}
				w.run(p)
				tapes = append(tapes, w)
			}
			got := tapes[0].r.Judge(tapes[0].r.Plan(Choice{}), Run{tapes[1].r}, Run{tapes[2].r})
			if len(got) != 1 || !strings.HasPrefix(got[0].Text(), tt.want) || (got[0].Sensitive != nil) != tt.sensitive {
				t.Errorf("%+v: %s; want %s", got, got[0].Text(), tt.want)
			}
			if tt.want == "reproduced" && got[0].Text() != tt.want {
				t.Errorf("%s; want it exactly", got[0].Text())
			}
		})
	}
}

// TestLongOutput compares what is kept of output, its beginning and its end, and how much there was.
func TestLongOutput(t *testing.T) {
	long := func(w *tape, text string, size int64) {
		w.start(ran{id: "p", argv: []string{"yes"}})
		ref, body := put("guest.stdout", []byte(text))
		ref.Bytes, ref.Kept, ref.Tail, ref.Head = size, int64(len(text)), 4, "h"
		w.add("process.ended", "p", object{"guest": object{"end": "exited", "code": 0, "stdout": ref}}, body)
	}
	for _, tt := range []struct {
		text string
		size int64
		want string
	}{
		{"aaa\nzzz\n", 1000, "reproduced"},
		{"aaa\nzzz\n", 1001, "diverged at byte 4 of stdout"},
		{"aaa\nzzy\n", 1000, "diverged at byte 998 of stdout"},
		{"aab\nzzz\n", 1000, "diverged at byte 2 of stdout"},
	} {
		was, one, two := recorded(t, nil), again(t, "web", 1, nil), again(t, "web", 2, nil)
		long(was, "aaa\nzzz\n", 1000)
		long(one, tt.text, tt.size)
		long(two, tt.text, tt.size)
		got := was.r.Judge(was.r.Plan(Choice{}), Run{one.r}, Run{two.r})[0]
		if got.Text() != tt.want || !got.Partly {
			t.Errorf("%q of %d: %s, %+v; want %s", tt.text, tt.size, got.Text(), got, tt.want)
		}
	}
}

// TestMadeUpNamesLast: a name that one process made up and another one uses stands for the same one.
func TestMadeUpNamesLast(t *testing.T) {
	var tapes []*tape
	for i, name := range []string{"/tmp/tmp.Xa8kQ0pL3z", "/tmp/tmp.Bw1mR7tY2c", "/tmp/tmp.Cd2nS8uZ3d"} {
		w := recorded(t, nil)
		if i > 0 {
			w = again(t, "web", i, nil)
		}
		w.run(ran{id: "a", argv: []string{"mktemp"}, out: name + "\n"})
		if i == 0 {
			w.run(ran{id: "b", argv: []string{"ls"}, out: name + "\n"})
		} else {
			w.run(ran{id: "b", argv: []string{"ls"}, out: "/tmp/tmp.Qq9mR7tY2c\n"})
		}
		tapes = append(tapes, w)
	}
	got := tapes[0].r.Judge(tapes[0].r.Plan(Choice{}), Run{tapes[1].r}, Run{tapes[2].r})
	if got[0].Verdict != Normalised || got[1].Verdict != Diverged {
		t.Errorf("%s; %s", got[0].Text(), got[1].Text())
	}
}

// TestRunsThatStopped: a process that a run did not come to is none that diverged.
func TestRunsThatStopped(t *testing.T) {
	was, one, two := recorded(t, nil), again(t, "web", 1, nil), again(t, "web", 2, nil)
	for _, w := range []*tape{was, one, two} {
		w.run(ran{id: "a", argv: []string{"true"}})
	}
	was.run(ran{id: "b", argv: []string{"true"}})
	one.run(ran{id: "b", argv: []string{"true"}})
	got := was.r.Judge(was.r.Plan(Choice{}), Run{one.r}, Run{two.r})
	if got[0].Verdict != Reproduced || got[1].Verdict != NotAttempted || got[1].Reason != "run 2 did not come to it" {
		t.Errorf("%+v", got)
	}
	for _, r := range was.r.Judge(was.r.Plan(Choice{})) {
		if r.Verdict != NotAttempted {
			t.Errorf("without a run: %+v", r)
		}
	}
}

// BenchmarkJudge compares 64 KiB of lines that all have a time.
func BenchmarkJudge(b *testing.B) {
	text := func(at string) string { return strings.Repeat("at "+at+" something was done\n", 1500) }
	was, one, two := recorded(b, nil), again(b, "web", 1, nil), again(b, "web", 2, nil)
	was.run(ran{id: "p", argv: []string{"log"}, out: text("2026-03-09T11:58:30Z"), took: time.Second})
	one.run(ran{id: "p", argv: []string{"log"}, out: text("2026-03-11T13:58:30Z"), took: time.Second})
	two.run(ran{id: "p", argv: []string{"log"}, out: text("2026-03-11T14:58:30Z"), took: time.Second})
	plan := was.r.Plan(Choice{})
	for b.Loop() {
		if got := was.r.Judge(plan, Run{one.r}, Run{two.r}); got[0].Verdict != Normalised {
			b.Fatal(got[0].Text())
		}
	}
}
