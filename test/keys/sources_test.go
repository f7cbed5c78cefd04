package keys

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"casemate.dev/internal/testenv"
)

// variable is one of the server's environment, which a secret comes from.
const variable = "CASEMATE_TEST_EXTERNAL"

// sources: values that the server reads itself, from a file, its environment and a program, and again when they have
// changed; all by the command line, which tells when they were used and never what they are.
func sources(t *testing.T, s *play, box string) {
	dir := t.TempDir()
	file, other := filepath.Join(dir, "file"), filepath.Join(dir, "other")
	write := func(text string) {
		for _, path := range []string{file, other} {
			// Put in place whole, as programs that rotate keys do.
			if err := os.WriteFile(path+".new", []byte(filepath.Base(path)+text+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(path+".new", path); err != nil {
				t.Fatal(err)
			}
		}
	}
	cli := func(args ...string) string {
		t.Helper()
		out, err := s.CLI("", append([]string{"secrets"}, args...)...)
		if err != nil {
			t.Fatalf("%v: %v %s", args, err, out)
		}
		return out
	}
	write("-external-one")
	for name, source := range map[string][]string{
		"X-File": {"--source-file", file}, "X-Env": {"--source-env", variable}, "X-Command": {"--source-command", "/bin/cat", "--source-command", other},
	} {
		cli(append([]string{"set", name, "--refresh", "1s"}, source...)...)
		cli("bind", name, "--host", api, "--sandbox", box, "--scheme", "header", "--header", name, "--always")
	}
	arrives := func(file, command string) {
		t.Helper()
		testenv.Eventually(t, patience, "the values arrive", func() bool {
			s.Sh(box, `curl -sS -m 60 https://`+api+`/sources`)
			h := s.api.Last(t).Header
			return h.Get("X-File") == file && h.Get("X-Command") == command && h.Get("X-Env") == "external-variable"
		})
	}
	arrives("file-external-one", "other-external-one")
	write("-external-two")
	arrives("file-external-two", "other-external-two")
	// What can't be read any more stays, and says so.
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, patience, "the lack is told", func() bool { return strings.Contains(cli("ls", "--json"), "can't be read") })
	arrives("file-external-two", "other-external-two")
	list := cli("ls")
	for _, name := range []string{"X-File", "X-Env", "X-Command"} {
		if sec, err := s.Secrets.Get(t.Context(), name); err != nil || sec.GetUsedAt() == nil {
			t.Errorf("%s was used, and it says %v, %v", name, sec, err)
		}
	}
	if text := list + cli("ls", "--json") + cli("ls", "--sandbox", box); strings.Contains(text, "external-two") || strings.Contains(text, "external-variable") || !strings.Contains(list, "X-File") {
		t.Errorf("the list tells %s", text)
	}
	cli("rm", "X-File", "X-Env", "X-Command")
	testenv.Eventually(t, patience, "removed ones are not put on", func() bool {
		s.Sh(box, `curl -sS -m 60 https://`+api+`/sources`)
		h := s.api.Last(t).Header
		return h.Get("X-File")+h.Get("X-Command")+h.Get("X-Env") == ""
	})
}
