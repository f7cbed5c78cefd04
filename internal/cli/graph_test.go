package cli

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"casemate.dev/client"
)

// history makes commits from lines of "id parent merged", the newest first.
func history(lines ...string) []*client.Commit {
	var all []*client.Commit
	for _, l := range lines {
		f := append(strings.Fields(l), "", "")
		all = append(all, &client.Commit{Id: f[0], Parent: f[1], Merged: f[2]})
	}
	return all
}

func TestGraph(t *testing.T) {
	for name, c := range map[string]struct {
		list []*client.Commit
		want string
	}{
		"line": {history("c b", "b a", "a"), "● c\n● b\n● a"},
		"fork": {history("c a", "b a", "a"), "● c\n│ ● b\n├─┘\n● a"},
		"three forks": {
			history("d a", "c a", "b a", "a"),
			"● d\n│ ● c\n│ │ ● b\n├─┴─┘\n● a",
		},
		"merge": {history("m c b", "c a", "b a", "a"), "● m\n├─┐\n● │ c\n│ ● b\n├─┘\n● a"},
		"merge of a line that is drawn": {
			history("m c b", "d b", "c a", "b a", "a"),
			"● m\n├─┐\n│ │ ● d\n● │ │ c\n│ ├─┘\n│ ● b\n├─┘\n● a",
		},
		"two roots, one removed parent": {history("b gone", "a"), "● b\n● a"},
		"criss-cross": {
			history("y b a", "x a b", "b r", "a r", "r"),
			"● y\n├─┐\n│ │ ● x\n├─┼─┤\n● │ │ b\n│ ├─┘\n│ ● a\n├─┘\n● r",
		},
	} {
		got := (&graph{}).rows(c.list, (*client.Commit).GetId)
		if d := cmp.Diff(c.want, strings.Join(got, "\n")); d != "" {
			t.Errorf("%s (-want +got):\n%s", name, d)
		}
	}
}

func TestFamily(t *testing.T) {
	all := history("e d", "x w", "d b c", "c a", "b a", "w", "a")
	var got []string
	for _, c := range family(all, all[4:5]) { // b
		got = append(got, c.GetId())
	}
	if d := cmp.Diff([]string{"e", "d", "b", "a"}, got); d != "" {
		t.Error(d)
	}
}
