package main

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestGeneratedCodeIsFresh generates everything anew and compares. Without the tools (make tools)
// there is nothing to compare with, and the log says so; continuous integration has them.
func TestGeneratedCodeIsFresh(t *testing.T) {
	root, err := filepath.Abs(filepath.Join("..", ".."))
	if err != nil {
		t.Fatal(err)
	}
	tools := filepath.Join(root, "bin", "tools")
	for _, tool := range []string{"buf", "protoc-gen-go", "protoc-gen-connect-go"} {
		if _, err := os.Stat(filepath.Join(tools, tool)); err != nil {
			t.Logf("not compared: %v; run make tools", err)
			return
		}
	}
	out := t.TempDir()
	cmd := exec.CommandContext(t.Context(), filepath.Join(root, "proto", "generate.sh"), out)
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("generate: %v\n%s", err, text)
	}
	n := 0
	err = filepath.WalkDir(out, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		n++
		rel := strings.TrimPrefix(path, out+string(filepath.Separator))
		fresh, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		committed, err := os.ReadFile(filepath.Join(root, rel))
		if err != nil || string(committed) != string(fresh) {
			t.Errorf("%s is stale (%v): run make generate", rel, err)
		}
		return nil
	})
	if err != nil || n < 10 {
		t.Errorf("compared %d files, %v", n, err)
	}
}
