package replay

import (
	"slices"
	"strings"
	"testing"
	"time"
)

// sides are a recorded process with id 40 and the same one later, with id 52, each of which took 300 ms.
func sides(t testing.TB, argv ...string) (a, b side) {
	var out [2]side
	for i, w := range []*tape{recorded(t, nil), again(t, "web", 1, nil)} {
		w.run(ran{id: "p", argv: argv, pid: 40 + 12*i, took: 300 * time.Millisecond})
		out[i] = side{w.r, w.r.Process("p")}
	}
	return out[0], out[1]
}

func TestNormalisersExplain(t *testing.T) {
	for _, tt := range []struct {
		a, b string
		want string // the normalisers' names
		argv string
	}{
		// The record is of 2026-03-09 11:58:30, the run of 2026-03-11 13:58:30.
		{"at 2026-03-09T11:58:30Z", "at 2026-03-11T13:58:30Z", "times", ""},
		{"2026-03-09 11:58:30.123456", "2026-03-11 13:58:30.9", "times", ""},
		{"2026-03-09 12:58:30 +0100 x", "2026-03-11 13:58:30 +0000 x", "times", ""},
		{"Mon Mar  9 11:58:30 UTC 2026", "Wed Mar 11 13:58:30 UTC 2026", "times", ""},
		{"Mon Mar  9 11:58:30 AM UTC 2026", "Wed Mar 11 01:58:30 PM UTC 2026", "times", ""},
		{"Date:   Mon Mar 9 11:58:30 2026 +0000", "Date:   Wed Mar 11 13:58:30 2026 +0000", "times", ""},
		{"-rw-r--r-- 1 user user 3 Mar  9 11:58 note", "-rw-r--r-- 1 user user 3 Mar 11 13:58 note", "times", ""},
		{"[11:58:30] built", "[13:58:30] built", "times", ""},
		{"1773057510", "1773237510", "times", ""},
		{"1773057510.25 s", "1773237510.5 s", "times", ""},
		{"1773057510123", "1773237510001", "times", ""},
		{"20260309115830.log", "20260311135830.log", "times", ""},
		{"2026-03-09", "2026-03-11", "times", ""},
		{"pid 40 of 41", "pid 52 of 53", "process ids", ""},
		{"/tmp/tmp.Xa8kQ0pL3z", "/tmp/tmp.Bw1mR7tY2c", "temporary names", ""},
		{"/tmp/tmpab12cd34/x.py", "/tmp/tmpzz98yx76/x.py", "temporary names", ""},
		{"as: /tmp/ccXk29Ab.s: 3: Error", "as: /tmp/ccQm83Zt.s: 3: Error", "temporary names", ""},
		{"I am web-host", "I am again1-host", "host name", ""},
		{"box web here", "box again1 here", "host name", ""},
		{"<object at 0x7f2a1c04d310>", "<object at 0x7fb8e2119a90>", "addresses", ""},
		{"ran in 0.012s", "ran in 0.21s", "durations", ""},
		{"real\t0m0.203s", "real\t0m0.18s", "durations", ""},
		{"1 passed in 12 ms", "1 passed in 9.5 ms", "durations", ""},
		{"elapsed: 0.123", "elapsed: 0.098", "durations", ""},
		{"copied, 0.1 s, 10.5 MB/s", "copied, 0.12 s, 8.7 MB/s", "durations", ""},
		{"Device: 0,61\tInode: 1234  Links: 1", "Device: 0,77\tInode: 999999  Links: 1", "inode and device numbers", ""},
		{"257 a", "301 a", "inode and device numbers", "ls -i"},
		{"r--p 00000000 00:38d 10612025", "r--p 00000000 00:370 10612025", "inode and device numbers", "cat /proc/self/maps"},
		{"[main 1a2b3c4] first", "[main 9f8e7d6] first", "git's ids", "git commit -m first"},
		{"pid 40 at 2026-03-09", "pid 52 at 2026-03-11", "times, process ids", ""},
		{"size     40 x", "size    552 x", "", ""},
	} {
		a, b := sides(t, strings.Fields("true "+tt.argv)...)
		n := newNormaliser(a, b, newPairing())
		_, ok := n.line(tt.a, tt.b)
		if got := strings.Join(n.names(), ", "); ok != (tt.want != "") || ok && got != tt.want {
			t.Errorf("%q and %q: %v, %q; want %q", tt.a, tt.b, ok, got, tt.want)
		}
	}
}

// TestNormalisersExplainNoMore: what differs for another reason is told, also where it looks like something that may differ.
func TestNormalisersExplainNoMore(t *testing.T) {
	for _, tt := range []struct{ what, a, b string }{
		{"a time long before", "2025-03-09T11:58:30Z", "2026-03-11T13:58:30Z"},
		{"a time long after", "2026-03-09T11:58:30Z", "2027-03-11T13:58:30Z"},
		{"the recorded time again", "2026-03-09T11:58:30Z", "2026-03-09T11:59:30Z"},
		{"another form", "2026-03-09T11:58:30Z", "2026-03-11 13:58:30"},
		{"zones that differ", "2026-03-09 11:58:30", "2026-03-11 12:58:30"},
		{"a number", "42", "43"},
		{"a count of the size of an id", "40 files", "41 files"},
		{"an id before the process's", "39", "51"},
		{"a chosen name", "/tmp/report-january", "/tmp/report-octobers"},
		{"a chosen name of the same length", "/tmp/alphabet", "/tmp/betabeta"},
		{"a name elsewhere", "/srv/Xa8kQ0pL3z", "/srv/Bw1mR7tY2c"},
		{"a digest", "2c26b46b68ffc68ff99b453c1d304134", "fcde2b2edba56bf408601fb721fe9b5c"},
		{"a duration longer than the process", "ran in 5.012s", "ran in 0.21s"},
		{"money", "12.50 EUR", "12.75 EUR"},
		{"a longer line", "done", "done, with errors"},
		{"a shorter line", "done, with errors", "done"},
		{"a version", "1.26.8", "1.26.9"},
		{"blanks", "a b", "a  b"},
		{"commits without git", "[main 1a2b3c4] first", "[main 9f8e7d6] first"},
	} {
		a, b := sides(t, "true")
		n := newNormaliser(a, b, newPairing())
		if at, ok := n.line(tt.a, tt.b); ok {
			t.Errorf("%s: %q and %q are the same after %q", tt.what, tt.a, tt.b, n.names())
		} else if at < 0 || at > len(tt.a) || at > 0 && tt.a[:min(at, 2)] != tt.b[:min(at, 2)] {
			t.Errorf("%s: they differ at %d", tt.what, at)
		}
	}
}

// TestNamesStandForOneAnother: a made-up name stands for the same one everywhere.
func TestNamesStandForOneAnother(t *testing.T) {
	a, b := sides(t, "git", "log")
	n := newNormaliser(a, b, newPairing())
	if !n.same("/tmp/tmp.Xa8kQ0pL3z 1a2b3c4", "/tmp/tmp.Bw1mR7tY2c 9f8e7d6") {
		t.Fatal("two names don't fit")
	}
	for _, pair := range [][2]string{
		{"/tmp/tmp.Xa8kQ0pL3z", "/tmp/tmp.Zz1mR7tY2c"},
		{"/tmp/tmp.Qq8kQ0pL3z", "/tmp/tmp.Bw1mR7tY2c"},
		{"1a2b3c4", "aaaaaaa"},
		{"bbbbbbb", "9f8e7d6"},
	} {
		if n.same(pair[0], pair[1]) {
			t.Errorf("%q stands for %q, which others stand for", pair[0], pair[1])
		}
	}
	if !n.same("1a2b3c4d5e", "9f8e7d6c5b") {
		t.Error("a longer form of an id does not fit its shorter one")
	}
}

func TestNormaliserNamesAreDistinct(t *testing.T) {
	names := Normalisers()
	slices.Sort(names)
	if len(slices.Compact(slices.Clone(names))) != len(names) {
		t.Error(names)
	}
	a, b := sides(t, "true")
	for _, m := range newNormaliser(a, b, newPairing()).matchers() {
		if !slices.Contains(names, m.name) {
			t.Errorf("%s is no normaliser that is told of", m.name)
		}
	}
}

// FuzzLine: whatever programs say, a line is the same as itself, and where two differ is a place in the first.
func FuzzLine(f *testing.F) {
	f.Add("pid 40 at 11:58:30", "pid 52 at 13:58:30")
	f.Add("/tmp/tmp.Xa8kQ0pL3z", "/tmp/tmp.Bw1mR7tY2c")
	f.Add("0x7f2a1c04d310 1a2b3c4", "0x7fb8e2119a90 9f8e7d6")
	f.Add("ab/cdef0123456789012345678901234567890123", "cd/0123456789012345678901234567890123cdef")
	f.Add("1 MB/s  Jan  1", "Inode: 9999999999999999999999")
	a, b := sides(f, "git", "ls", "-i")
	f.Fuzz(func(t *testing.T, x, y string) {
		n := newNormaliser(a, b, newPairing())
		if _, ok := n.line(x, x); !ok {
			t.Errorf("%q is not itself", x)
		}
		if at, ok := n.line(x, y); at < 0 || at > len(x) || !ok && x == y {
			t.Errorf("%q and %q differ at %d", x, y, at)
		}
	})
}

// FuzzAdd: a record that somebody made up breaks nothing.
func FuzzAdd(f *testing.F) {
	f.Add([]byte(`{"sandbox":"s","seq":1,"type":"sandbox.created","facts":{"server":{"template":"base"}}}`))
	f.Add([]byte(`{"sandbox":"s","seq":1,"type":"process.ended","process":"p","facts":{"guest":{"stdout":{"bytes":-1}}}}`))
	f.Add([]byte(`{"sandbox":"s","seq":1,"type":"files.changed","facts":{"server":{"files":[{"op":"created"}],"more":-1}}}`))
	f.Fuzz(func(t *testing.T, event []byte) {
		w := recorded(t, nil)
		w.run(ran{id: "p", argv: []string{"true"}})
		w.r.Add(event, nil)
		plan := w.r.Plan(Choice{})
		w.r.Judge(plan, Run{w.r}, Run{w.r})
		if _, _, err := w.r.Accept([]*Record{w.r}); err == nil {
			t.Error("a record is a replay of itself")
		}
	})
}
