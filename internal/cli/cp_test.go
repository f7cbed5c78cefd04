package cli

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"
)

func TestParsePlace(t *testing.T) {
	for in, want := range map[string]place{
		"web:/tmp/x": {"web", "/tmp/x"}, "web:": {"web", ""}, "file": {"", "file"}, "/a:b": {"", "/a:b"},
		"./a:b": {"", "./a:b"}, "dir/a:b": {"", "dir/a:b"}, ":x": {"", ":x"}, "web:a:b": {"web", "a:b"}, "-": {"", "-"},
	} {
		if got := parsePlace(in); got != want {
			t.Errorf("parsePlace(%q) = %v, want %v", in, got, want)
		}
	}
}

func TestStaysBelow(t *testing.T) {
	for _, tc := range []struct {
		top, name, target string
		want              bool
	}{
		{"out", "out/l", "file", true},
		{"out", "out/d/l", "../file", true},
		{"out", "out/d/l", "../..", false},
		{"out", "out/l", "..", false},
		{"out", "out/l", "../outside", false},
		{"out", "out/l", "/etc/passwd", false},
		{"out", "out/l", "", false},
		{"out", "out/l", ".", true},
		// A link on the way could make d/.. something else than the link's own directory.
		{"out", "out/l", "d/../x", false},
		{"out", "out/l", "d/..", false},
		{"out", "out/l", "..x/y", true},
		{".", "l", "file", true},
		{".", "d/l", "../file", true},
		{".", "l", "../file", false},
		{".", "d/l", "../../x", false},
	} {
		if got := staysBelow(tc.top, tc.name, tc.target); got != tc.want {
			t.Errorf("staysBelow(%q, %q, %q) = %v", tc.top, tc.name, tc.target, got)
		}
	}
}

func TestReplaceFileIsAllOrNothingAndFollowsNoLink(t *testing.T) {
	dir := t.TempDir()
	outside := filepath.Join(t.TempDir(), "outside")
	write(t, outside, "untouched")
	if err := os.Symlink(outside, filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	if _, err := replaceFile(root, "link", strings.NewReader("new"), 0o444); err != nil {
		t.Fatal(err)
	}
	if got := read(t, outside); got != "untouched" {
		t.Errorf("the link was followed: outside now holds %q", got)
	}
	if got := read(t, filepath.Join(dir, "link")); got != "new" {
		t.Errorf("link = %q", got)
	}
	if st, _ := os.Lstat(filepath.Join(dir, "link")); st.Mode() != 0o444 {
		t.Errorf("mode = %v", st.Mode())
	}
	// The writer fails half way: what was there stays, and nothing is left beside it.
	boom := errors.New("cut")
	if _, err := replaceFile(root, "link", iotest.ErrReader(boom), 0o644); !errors.Is(err, boom) {
		t.Errorf("error = %v", err)
	}
	if got := read(t, filepath.Join(dir, "link")); got != "new" {
		t.Errorf("after a failure: %q", got)
	}
	if list, _ := os.ReadDir(dir); len(list) != 1 {
		t.Errorf("left behind: %v", list)
	}
}

// A directory on the way that is a link out of the destination is refused, which is what docker cp
// and its kin got wrong again and again (CVE-2018-15664).
func TestReplaceFileRefusesToLeaveItsRoot(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	if err := os.Symlink(outside, filepath.Join(dir, "d")); err != nil {
		t.Fatal(err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	for _, name := range []string{"d/x", "../x", "/x"} {
		if _, err := replaceFile(root, name, strings.NewReader("evil"), 0o644); err == nil {
			t.Errorf("%s was written", name)
		}
		if err := replaceLink(root, name, "y"); err == nil {
			t.Errorf("%s was linked", name)
		}
	}
	if list, _ := os.ReadDir(outside); len(list) != 0 {
		t.Errorf("written outside: %v", list)
	}
	// The twin: without the root the same write lands outside.
	write(t, filepath.Join(dir, "d", "x"), "evil")
	if got := read(t, filepath.Join(outside, "x")); got != "evil" {
		t.Errorf("the attack does not work even without the defence: %q", got)
	}
}

func write(t *testing.T, name, text string) {
	t.Helper()
	if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
