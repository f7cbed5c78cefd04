package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestRequirementsOf(t *testing.T) {
	sum := strings.Repeat("0a", 32)
	brings := func(more string) string {
		return `{"steps":[{"text":"RUN a"},{"brings":[
			{"manager":"dpkg","name":"curl","version":"7"},
			{"manager":"pip","name":"pip","version":"23.0"},
			{"manager":"pip","name":"x","version":"1.0+local","place":"/v","archive":"sha256:` + sum + `"}` + more + `]}]}`
	}
	for _, c := range []struct{ more, want, unknown string }{
		{"", "x==1.0+local \\\n    --hash=sha256:" + sum + "\n", ""},
		// Also of several environments, each with an archive of its own.
		{
			`,{"manager":"pip","name":"x","version":"1.0+local","place":"/w","archive":"sha256:` + strings.Repeat("ff", 32) + `"}`,
			"x==1.0+local \\\n    --hash=sha256:" + sum + " \\\n    --hash=sha256:" + strings.Repeat("ff", 32) + "\n", "",
		},
		// pip takes digests of all or of none.
		{`,{"manager":"pip","name":"a","version":"2"}`, "a==2\nx==1.0+local\n", "a==2"},
		{`,{"manager":"pip","name":"a","version":"2","archive":"sha256:0\n-r b"}`, "a==2\nx==1.0+local\n", "a==2"},
		// Nothing becomes a line of its own, or an option.
		{`,{"manager":"pip","name":"evil\n-r x","version":"1"},{"manager":"pip","name":"-r","version":"1"}`, "x==1.0+local \\\n    --hash=sha256:" + sum + "\n", ""},
	} {
		got, unknown, err := requirementsOf(brings(c.more))
		if err != nil || got != c.want || strings.Join(unknown, " ") != c.unknown {
			t.Errorf("%q, %q, %v; want %q, %q", got, unknown, err, c.want, c.unknown)
		}
	}
	for _, bad := range []string{"", "{", `{"steps":1}`} {
		if _, _, err := requirementsOf(bad); err == nil {
			t.Errorf("%q is a lock file", bad)
		}
	}
}

func TestCheckRequirements(t *testing.T) {
	lock := `{"steps":[{"brings":[{"manager":"pip","name":"x","version":"1","archive":"sha256:` + strings.Repeat("0a", 32) + `"}]}]}`
	good, _, err := requirementsOf(lock)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "requirements.lock")
	if err := checkRequirements(file, lock); err == nil || !strings.Contains(err.Error(), "there is no ") {
		t.Errorf("without the file: %v", err)
	}
	for _, c := range []struct{ text, want string }{
		{good, ""},
		{strings.Replace(good, "==1", "==2", 1), "it has x==2"},
		{"", "it lacks x==1"},
		{strings.Replace(good, "0a", "0b", 1), "digests are others"},
	} {
		if err := os.WriteFile(file, []byte(c.text), 0o644); err != nil {
			t.Fatal(err)
		}
		err := checkRequirements(file, lock)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: %v, want %q", c.text, err, c.want)
		}
	}
}
