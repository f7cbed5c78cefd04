package cli

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// TestReferenceIsFresh compares docs/cli with what the commands say of themselves.
func TestReferenceIsFresh(t *testing.T) {
	dir := filepath.Join("..", "..", "docs", "cli")
	pages := Reference()
	for name, want := range pages {
		got, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("docs/cli/%s is not what the command says: run make docs", name)
		}
	}
	files, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if pages[f.Name()] == nil {
			t.Errorf("docs/cli/%s is of no command: remove it", f.Name())
		}
	}
}

// TestEveryCommandDocumentsItself checks what a person relies on: a short and a long text, and exit
// codes.
func TestEveryCommandDocumentsItself(t *testing.T) {
	a := &app{getenv: func(string) string { return "" }}
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		for _, sub := range c.Commands() {
			walk(sub)
		}
		if c.Hidden {
			return
		}
		if c.Short == "" || strings.HasSuffix(c.Short, ".") {
			t.Errorf("%s: short text %q", c.CommandPath(), c.Short)
		}
		if !strings.Contains(c.Long, "Exit codes: ") {
			t.Errorf("%s: the long text tells no exit codes", c.CommandPath())
		}
		for _, line := range strings.Split(c.Long, "\n") {
			if len([]rune(line)) > 110 {
				t.Errorf("%s: line of %d characters: %s", c.CommandPath(), len([]rune(line)), line)
			}
		}
	}
	walk(a.root())
}
