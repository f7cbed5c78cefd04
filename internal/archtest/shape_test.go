package archtest

import (
	"go/ast"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const maxLines = 800

func TestFilesAreShort(t *testing.T) {
	for _, f := range source(t) {
		if !f.generated && f.lines > maxLines {
			t.Errorf("%s has %d lines, limit %d: split it by topic", f.path, f.lines, maxLines)
		}
	}
}

func TestUnsafeIsNamed(t *testing.T) {
	for _, f := range source(t) {
		name := strings.TrimSuffix(strings.TrimSuffix(f.path, ".go"), "_test")
		named := strings.HasSuffix(name, "_unsafe")
		uses := false
		for _, i := range f.imports() {
			uses = uses || i == "unsafe"
		}
		switch {
		case uses && !named && !f.generated:
			t.Errorf("%s imports unsafe: only files named *_unsafe.go do, so that reviewers find them all", f.path)
		case named && !uses:
			t.Errorf("%s is named unsafe and imports no unsafe", f.path)
		}
	}
}

// TestNothingRegistersItself forbids init: what a program does must follow from main, and each
// start of the guest pays for every one.
func TestNothingRegistersItself(t *testing.T) {
	for _, f := range source(t) {
		if f.generated {
			continue
		}
		for _, d := range f.ast.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil && fn.Name.Name == "init" {
				t.Errorf("%s: an init function; call it from main", f.at(d))
			}
		}
	}
}

// TestPackageVariables allows a package variable where it can't change and its initialisation does
// no work: a guard of an interface, an embedded file, an error, a OnceValue, or plain values that
// nobody assigns. State belongs in a value that somebody made.
func TestPackageVariables(t *testing.T) {
	for _, f := range source(t) {
		if !f.product() {
			continue
		}
		for _, d := range f.ast.Decls {
			g, ok := d.(*ast.GenDecl)
			if !ok || g.Tok != token.VAR {
				continue
			}
			for _, s := range g.Specs {
				spec := s.(*ast.ValueSpec)
				if reason := badVariable(f, g, spec); reason != "" {
					t.Errorf("%s: variable %s %s", f.at(spec), spec.Names[0].Name, reason)
				}
			}
		}
	}
}

func badVariable(f file, g *ast.GenDecl, spec *ast.ValueSpec) string {
	if spec.Names[0].Name == "_" || embedded(g.Doc) || embedded(spec.Doc) {
		return ""
	}
	if len(spec.Values) == 0 {
		return "has no value: it is there to be changed"
	}
	for _, v := range spec.Values {
		switch e := v.(type) {
		case *ast.BasicLit:
		case *ast.CompositeLit:
			if _, ok := e.Type.(*ast.MapType); ok {
				return "is a map, which anybody may change and every start builds; make it a function with a switch"
			}
		case *ast.CallExpr:
			name := callee(e)
			isError := strings.HasPrefix(strings.ToLower(spec.Names[0].Name), "err")
			if !isError && name != "sync.OnceValue" && name != "sync.OnceValues" && name != "sync.OnceFunc" {
				return "is made by a call when the program starts; use sync.OnceValue or a function"
			}
		default:
			return "is neither a literal, an error nor a OnceValue"
		}
	}
	for _, n := range spec.Names {
		if at := assigned(f, n.Name); at != "" {
			return "is changed at " + at
		}
	}
	return ""
}

func embedded(doc *ast.CommentGroup) bool {
	if doc == nil {
		return false
	}
	for _, c := range doc.List {
		if strings.HasPrefix(c.Text, "//go:embed ") {
			return true
		}
	}
	return false
}

func callee(c *ast.CallExpr) string {
	fun := c.Fun
	if i, ok := fun.(*ast.IndexExpr); ok {
		fun = i.X
	}
	s, ok := fun.(*ast.SelectorExpr)
	if !ok {
		return ""
	}
	x, ok := s.X.(*ast.Ident)
	if !ok {
		return ""
	}
	return x.Name + "." + s.Sel.Name
}

// assigned returns where the file changes a package variable or takes its address. Names of local
// variables hide it, which the parser's own resolution tells.
func assigned(f file, name string) string {
	at := ""
	isVar := func(e ast.Expr) bool {
		for {
			switch x := e.(type) {
			case *ast.IndexExpr:
				e = x.X
			case *ast.SelectorExpr:
				e = x.X
			case *ast.Ident:
				if x.Name != name {
					return false
				}
				if x.Obj == nil {
					return true
				}
				_, local := x.Obj.Decl.(*ast.AssignStmt)
				_, field := x.Obj.Decl.(*ast.Field)
				return !local && !field
			default:
				return false
			}
		}
	}
	ast.Inspect(f.ast, func(n ast.Node) bool {
		switch s := n.(type) {
		case *ast.AssignStmt:
			for _, l := range s.Lhs {
				if s.Tok != token.DEFINE && isVar(l) {
					at = f.at(s)
				}
			}
		case *ast.IncDecStmt:
			if isVar(s.X) {
				at = f.at(s)
			}
		case *ast.UnaryExpr:
			if s.Op == token.AND && isVar(s.X) {
				at = f.at(s)
			}
		}
		return true
	})
	return at
}

// TestSkipsAreGated finds calls that skip a test. Package testenv decides about that alone, so that
// a lost kernel feature is red and not silent.
func TestSkipsAreGated(t *testing.T) {
	for _, f := range source(t) {
		if strings.HasPrefix(f.dir, "internal/testenv") {
			continue
		}
		ast.Inspect(f.ast, func(n ast.Node) bool {
			s, ok := n.(*ast.SelectorExpr)
			if ok && (s.Sel.Name == "Skip" || s.Sel.Name == "Skipf" || s.Sel.Name == "SkipNow") {
				if x, isName := s.X.(*ast.Ident); isName && (x.Name == "t" || x.Name == "b" || x.Name == "f" || x.Name == "tb") {
					t.Errorf("%s: a skip outside package testenv; state what the test needs with testenv.Need", f.at(n))
				}
			}
			return true
		})
	}
}

// noisePrefix matches error texts that say only that something went wrong, at every level again.
var noisePrefix = regexpOnce(`(?i)^"(failed|unable|error|could not|couldn't|cannot|can't) (to |in |while |when |occurred|be )`)

func TestErrorTexts(t *testing.T) {
	for _, f := range source(t) {
		if !f.product() {
			continue
		}
		ast.Inspect(f.ast, func(n ast.Node) bool {
			c, ok := n.(*ast.CallExpr)
			if !ok || len(c.Args) == 0 {
				return true
			}
			switch name := callee(c); name {
			case "errors.New", "fmt.Errorf":
				lit, ok := c.Args[0].(*ast.BasicLit)
				if !ok || lit.Kind != token.STRING {
					return true
				}
				if noisePrefix().MatchString(lit.Value) {
					t.Errorf("%s: %s says that something went wrong, which every level would repeat; name the operation (\"mount %%s: %%w\")", f.at(c), lit.Value)
				}
				if text := strings.Trim(lit.Value, "\"`"); strings.HasSuffix(text, ".") && !strings.HasSuffix(text, "…") {
					t.Errorf("%s: %s ends with a period; it will be part of a longer text", f.at(c), lit.Value)
				}
			}
			return true
		})
	}
}

// strayText matches what belongs to the making of the project and not to the project. The parts are
// joined here, so that this file does not match itself.
var strayText = regexpOnce(strings.Join([]string{
	`/wor` + `k/(main|coord|shared|\.)`, `\.libr` + `ary/`, `before` + `-stop`, `developer'?s? ` + `session`,
	`\b(TO` + `DO|FIX` + `ME|HA` + `CK)\b`, `\bXX` + `X\b`, `not imple` + `mented`, `\b(HARD` + `ENING|DES` + `IGN|STY` + `LE)\.md\b`,
	`\bChat` + `GPT\b`, `\bCl` + `aude\b`, `the le` + `ad\b`, `manager_` + `sketch`,
}, "|"))

func TestTextsSpeakOfTheProduct(t *testing.T) {
	root, err := moduleRoot()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range textFiles(t, root) {
		b, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		for i, line := range strings.Split(string(b), "\n") {
			// The name of a client that the documentation tells how to set up.
			line = strings.ReplaceAll(line, "Cl"+"aude Code", "")
			if m := strayText().FindString(line); m != "" {
				t.Errorf("%s:%d: %q does not belong in the repository", name, i+1, m)
			}
		}
	}
}

// textFiles lists what people write: everything but generated code, vendored schemas and checksums.
func textFiles(t *testing.T, root string) []string {
	t.Helper()
	var out []string
	for _, f := range source(t) {
		if !f.generated {
			out = append(out, f.path)
		}
	}
	for _, pattern := range []string{
		"*.md", "docs/*.md", "Makefile", "*.sh", "deploy/*", ".ci/*", "proto/casemate/v1/*.proto", "test/script/*.txtar", "bench/*/*.c",
	} {
		names, _ := filepath.Glob(filepath.Join(root, pattern))
		for _, n := range names {
			if st, err := os.Stat(n); err == nil && st.Mode().IsRegular() {
				rel, _ := filepath.Rel(root, n)
				out = append(out, rel)
			}
		}
	}
	return out
}

// regexpOnce compiles a pattern when it is first used.
func regexpOnce(pattern string) func() *regexp.Regexp {
	var re *regexp.Regexp
	return func() *regexp.Regexp {
		if re == nil {
			re = regexp.MustCompile(pattern)
		}
		return re
	}
}
