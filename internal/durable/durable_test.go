package durable

import (
	"os"
	"path/filepath"
	"testing"
)

func TestReplace(t *testing.T) {
	dir := t.TempDir()
	path, other := filepath.Join(dir, "f"), filepath.Join(dir, "other")
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write(path, "open to all")
	write(other, "another's")
	// What a crash, or somebody else, left where the new file is written.
	if err := os.Symlink(other, path+suffix); err != nil {
		t.Fatal(err)
	}
	if err := Replace(path, []byte("new")); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{path: "new", other: "another's"} {
		if got, err := os.ReadFile(name); err != nil || string(got) != want {
			t.Errorf("%s holds %q (%v), want %q", name, got, err, want)
		}
	}
	if fi, err := os.Lstat(path); err != nil || fi.Mode() != 0o600 {
		t.Errorf("mode %v (%v)", fi.Mode(), err)
	}
	if _, err := os.Lstat(path + suffix); !os.IsNotExist(err) {
		t.Errorf("%s is left: %v", suffix, err)
	}
}

// What can't be renamed leaves the old file, and says so.
func TestReplaceRefused(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "d")
	if err := os.MkdirAll(filepath.Join(path, "full"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := Replace(path, []byte("x")); err == nil {
		t.Error("a file replaced a directory")
	}
	if err := Replace(filepath.Join(dir, "no", "f"), nil); err == nil {
		t.Error("a directory that is not there")
	}
	if _, err := os.Stat(filepath.Join(path, "full")); err != nil {
		t.Error(err)
	}
}
