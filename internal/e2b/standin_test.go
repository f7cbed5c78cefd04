package e2b

import "testing"

func TestStandInNotice(t *testing.T) {
	for _, c := range []struct {
		asked, name string
		told        bool
	}{
		{"base", "base", false},
		{"", "host", false},
		{"base", "host", true},
		{"code-interpreter-v1", "base", true},
		{"code-interpreter-v1", "code-interpreter", false}, // the same template by another name
	} {
		if got := standInNotice(c.asked, c.name); (got != "") != c.told {
			t.Errorf("%s by %s: %q", c.asked, c.name, got)
		}
	}
}
