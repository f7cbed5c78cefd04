package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"casemate.dev/internal/selftest"
	"casemate.dev/internal/testenv"
)

// TestPageIsOfTheseCases holds docs/security.md to the cases: each has its row, in every column of ours what must come of it,
// with the reasons as they stand in the data. What peers gave is taken from the page, since only a run tells.
func TestPageIsOfTheseCases(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(testenv.Module(t), "docs", "security.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, got, _, err := split(string(text))
	if err != nil {
		t.Fatal(err)
	}
	want := asItMust(t, got)
	if diff := cmp.Diff(strings.Split(want.render(), "\n"), strings.Split(got, "\n")); diff != "" {
		t.Errorf("docs/security.md is not of these cases (-cases +page): run make battery\n%s", diff)
	}
}

// asItMust is what a run gives in which every case comes out right, with what the page says of peers.
func asItMust(t *testing.T, page string) *results {
	t.Helper()
	lines := strings.Split(page, "\n")
	if len(lines) < 4 {
		t.Fatal("docs/security.md has an empty table: run make battery")
	}
	r := newResults(lines[1])
	for _, l := range lines {
		cells := strings.Split(strings.Trim(l, "| "), " | ")
		for i, p := range peerNames() {
			if at := len(cells) - len(peerNames()) + i; at > 6 {
				r.beside[p][cells[0]] = cells[at]
			}
		}
	}
	for _, c := range selftest.Cases() {
		for _, isolation := range backends() {
			for _, profile := range profiles() {
				outcome := selftest.Right
				if c.NotApplicable(selftest.Column{Isolation: isolation, Profile: profile}) {
					outcome = selftest.NotApplicable
				}
				r.ours[column{c.ID, isolation, profile}] = outcome
			}
		}
		for _, p := range peerNames() {
			if got := r.beside[p][c.ID]; unfit(p, c) == "" && got != word(c, true) && got != word(c, false) {
				t.Errorf("%s was not tried in %s: the page says %q", c.ID, p, got)
			}
		}
	}
	return r
}

// TestDrivenCases wants of each driven case tests that are there, by file, function and subtest, or a reason, and of every
// backend one of the two. It wants each id of sections A to E that is not among the scripts.
func TestDrivenCases(t *testing.T) {
	ids := map[string]bool{}
	for _, c := range selftest.Cases() {
		ids[c.ID] = true
	}
	for _, d := range drivenCases() {
		if ids[d.id] {
			t.Errorf("two cases are called %s", d.id)
		}
		ids[d.id] = true
		if (len(d.tests) == 0) == (d.not == "") {
			t.Errorf("%s has tests %v and the reason %q: it needs one of the two", d.id, d.tests, d.not)
		}
		if d.not == "" && (len(d.gvisor) == 0) == (d.same == "") {
			t.Errorf("%s has tests %v on gvisor and the reason %q: it needs one of the two", d.id, d.gvisor, d.same)
		}
		for _, name := range append(d.tests, d.gvisor...) {
			if why := lacks(t, d.id, name); why != "" {
				t.Errorf("%s: %s %s", d.id, name, why)
			}
		}
	}
	for _, id := range strings.Fields("A04 B18 B25 B26 B27 B28 B29 B31 E01 E02 E03 E05 E06 E07 E10 E11 E12 E13 E14 E15 E17 E18 E19 E20 E21 E24") {
		if !ids[id] {
			t.Errorf("nothing tries %s", id)
		}
	}
}

// lacks says what a test is short of; "" where it is there.
func lacks(t *testing.T, id, name string) string {
	t.Helper()
	file, test, isTest := strings.Cut(name, " ")
	text, err := os.ReadFile(filepath.Join(testenv.Module(t), file))
	test, sub, _ := strings.Cut(test, "/")
	switch {
	case err != nil:
		return err.Error()
	case !isTest && !strings.HasSuffix(file, ".txtar"):
		return "names no test"
	case isTest && !strings.Contains(string(text), "func "+test+"("):
		return "is not there"
	case sub != "" && !strings.Contains(string(text), `"`+sub):
		return "has no such subtest"
	case test == "TestDriven" && !strings.Contains(string(text), `"`+id+" "):
		return "has no subtest of this id"
	}
	return ""
}
