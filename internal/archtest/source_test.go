package archtest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"casemate.dev/internal/testenv"
)

const module = "casemate.dev/"

// file is one Go file of the repository.
type file struct {
	path      string // relative to the module's directory
	dir       string
	test      bool
	generated bool
	lines     int
	text      string
	ast       *ast.File
	fset      *token.FileSet
}

// imports returns the paths that the file imports.
func (f file) imports() []string {
	var out []string
	for _, i := range f.ast.Imports {
		p, _ := strconv.Unquote(i.Path.Value) // a parsed file holds only valid literals
		out = append(out, p)
	}
	return out
}

func (f file) at(n ast.Node) string {
	return f.path + ":" + strconv.Itoa(f.fset.Position(n.Pos()).Line)
}

// product reports whether the file is written by hand and part of a program.
func (f file) product() bool { return !f.test && !f.generated }

var parsed = sync.OnceValues(func() ([]file, error) {
	root, err := moduleRoot()
	if err != nil {
		return nil, err
	}
	var files []file
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(root, path)
		if d.IsDir() {
			if skipDir(rel, d.Name()) {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(rel, ".go") {
			return nil
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		fset := token.NewFileSet()
		tree, err := parser.ParseFile(fset, rel, b, parser.ParseComments)
		if err != nil {
			return err
		}
		files = append(files, file{
			path: rel, dir: filepath.Dir(rel), test: strings.HasSuffix(rel, "_test.go"), generated: ast.IsGenerated(tree),
			lines: strings.Count(string(b), "\n"), text: string(b), ast: tree, fset: fset,
		})
		return nil
	})
	return files, err
})

// skipDir leaves out what is not this module's source.
func skipDir(rel, name string) bool {
	if rel == "." {
		return false
	}
	return strings.HasPrefix(name, ".") || name == "testdata" || rel == "bin" || rel == "dist" || rel == "tools"
}

func moduleRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	return filepath.Dir(filepath.Dir(dir)), nil // this package lies two levels below
}

func source(t *testing.T) []file {
	t.Helper()
	files, err := parsed()
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// TestSourceIsSeen keeps the other tests from passing because they look at nothing.
func TestSourceIsSeen(t *testing.T) {
	if root, err := moduleRoot(); err != nil || root != testenv.Module(t) {
		t.Errorf("the module's directory is %s, not %s (%v)", testenv.Module(t), root, err)
	}
	dirs := map[string]bool{}
	for _, f := range source(t) {
		dirs[f.dir] = true
	}
	for _, want := range []string{"internal/errs", "internal/isolation", "internal/guestwire", "internal/archtest"} {
		if !dirs[want] {
			t.Errorf("no file of %s was read", want)
		}
	}
}
