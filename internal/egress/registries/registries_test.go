package registries

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func write(t *testing.T, root, path, text string) {
	t.Helper()
	p := filepath.Join(root, path)
	if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestRead(t *testing.T) {
	root := t.TempDir()
	write(t, root, "etc/apt/sources.list", "# deb http://old.example/debian x\ndeb [arch=amd64] http://apt.example:3142/debian stable main\n")
	write(t, root, "etc/apt/sources.list.d/a.sources", "Types: deb\nURIs: https://one.example/d https://two.example/e\n")
	write(t, root, "root/.config/pip/pip.conf", "[global]\nindex-url = https://user:word@pip.example/simple\n")
	write(t, root, "usr/lib/python3/dist-packages/pip/_internal/models/index.py", `PyPI = P("https://default.example/", file_storage_domain="files.example")`)
	write(t, root, "root/.npmrc", "registry=https://npm.example/\n@corp:registry=https://corp.example/npm\n//npm.example/:_authToken=x\n")
	write(t, root, "usr/local/go/go.env", "GOPROXY=https://go.example,direct\nGOSUMDB=sum.example\n")
	want := []string{
		"http://apt.example:3142", "https://corp.example", "https://files.example", "https://go.example", "https://npm.example",
		"https://one.example", "https://pip.example", "https://sum.example", "https://two.example",
	}
	if got := Read(root, "/root"); !slices.Equal(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
}

// A host without package managers has an empty set, which allows nothing.
func TestReadNothing(t *testing.T) {
	if got := Read(t.TempDir(), "/root"); len(got) != 0 {
		t.Errorf("got %v", got)
	}
}
