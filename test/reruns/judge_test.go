package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// told is what "go test -json" says of one run of package p, as "ACTION TEST [OUTPUT]" lines.
func told(lines ...string) string {
	var b strings.Builder
	for _, l := range lines {
		action, rest, _ := strings.Cut(l, " ")
		test, output, _ := strings.Cut(rest, " ")
		if output != "" {
			output += "\n"
		}
		raw, _ := json.Marshal(event{Action: action, Package: "p", Test: test, Output: output})
		b.Write(append(raw, '\n'))
	}
	return b.String()
}

func TestJudge(t *testing.T) {
	const racy = "WARNING: DATA " + "RACE"
	fails := []string{"run TestA", "output TestA     a_test.go:3: bad", "fail TestA", "run TestB", "pass TestB", "output  FAIL", "output  FAIL\tp\t0.1s", "fail"}
	passes := []string{"run TestA", "pass TestA", "output  PASS", "pass"}
	for name, tt := range map[string]struct {
		lines []string
		want  verdict
	}{
		"passes":                 {passes, verdict{}},
		"fails":                  {fails, verdict{}},
		"fails twice":            {append(fails[:len(fails):len(fails)], fails...), verdict{}},
		"fails, then passes":     {append(fails[:len(fails):len(fails)], passes...), verdict{Unsteady: []string{"p.TestA"}}},
		"a race, then passes":    {append([]string{"run TestA", "output TestA " + racy, "fail TestA", "output  FAIL", "fail"}, passes...), verdict{[]string{"p.TestA"}, []string{"p: a data race"}}},
		"a race in no test":      {append([]string{"run TestA", "pass TestA", "output  " + racy, "output  FAIL", "fail"}, passes...), verdict{nil, []string{"p: a data race"}}},
		"a race without failing": {append([]string{"output  " + racy}, passes...), verdict{}},
		"crashes": {
			append([]string{"run TestA", "output TestA fatal error: concurrent map writes", "output  FAIL\tp\t0.1s", "fail"}, passes...),
			verdict{nil, []string{"p: it failed outside of its tests, or was not built"}},
		},
		"a failed test, then a crash": {
			append([]string{"run TestA", "fail TestA", "run TestB", "output TestB signal: killed", "output  FAIL\tp\t0.1s", "fail"}, passes...),
			verdict{[]string{"p.TestA"}, []string{"p: its test program crashed or was killed, so that other tests of it may not have run"}},
		},
		"panics": {
			append([]string{"run TestA", "output TestA panic: x", "fail TestA", "output  FAIL\tp\t0.1s", "fail"}, passes...),
			verdict{[]string{"p.TestA"}, []string{"p: its test program crashed or was killed, so that other tests of it may not have run"}},
		},
		"TestMain fails": {
			append([]string{"run TestA", "pass TestA", "output  PASS", "output  leak", "output  FAIL\tp\t0.1s", "fail"}, passes...),
			verdict{nil, []string{"p: it failed outside of its tests, or was not built"}},
		},
		"a test and TestMain": {
			append([]string{"run TestA", "fail TestA", "output  FAIL", "output  leak", "output  FAIL\tp\t0.1s", "fail"}, passes...),
			verdict{[]string{"p.TestA"}, []string{"p: it failed outside of its tests as well"}},
		},
		"is not built":   {[]string{"output  FAIL\tp [build failed]", "fail"}, verdict{nil, []string{"p: it failed outside of its tests, or was not built"}}},
		"has not ended":  {[]string{"run TestA", "pass TestA"}, verdict{nil, []string{"p: the run ended before its tests"}}},
		"nothing at all": {nil, verdict{}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := judge(strings.NewReader(told(tt.lines...)))
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Errorf("verdict (-want +got):\n%s", d)
			}
		})
	}
}
