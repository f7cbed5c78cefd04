package archtest

import (
	"go/ast"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// minDocumented is the share of exports that must carry a comment.
const minDocumented = 0.95

// TestPackageDocs wants one package comment per package, and for internal packages an admission
// rule: what belongs there, so that nobody has to guess where new code goes.
func TestPackageDocs(t *testing.T) {
	docs := map[string][]string{}
	packages := map[string]bool{}
	for _, f := range source(t) {
		if !f.product() {
			continue
		}
		packages[f.dir] = true
		if f.ast.Doc != nil {
			docs[f.dir] = append(docs[f.dir], f.ast.Doc.Text())
		}
	}
	for dir := range packages {
		switch texts := docs[dir]; {
		case len(texts) == 0:
			t.Errorf("%s has no package comment: say what belongs in it", dir)
		case len(texts) > 1:
			t.Errorf("%s has %d package comments; godoc would join them", dir, len(texts))
		case !strings.HasPrefix(texts[0], "Package ") && !strings.HasPrefix(texts[0], "Command "):
			t.Errorf("%s: its comment begins %.30q, not with \"Package\" or \"Command\"", dir, texts[0])
		case strings.HasPrefix(dir, "internal/") && !strings.Contains(texts[0], "belong"):
			t.Errorf("%s: its comment states no admission rule: what belongs here, and what does not", dir)
		}
	}
}

func TestExportsAreDocumented(t *testing.T) {
	total, bare := 0, []string{}
	for _, f := range source(t) {
		if !f.product() || f.ast.Name.Name == "main" {
			continue
		}
		for _, e := range exports(f) {
			total++
			if !e.documented {
				bare = append(bare, f.path+": "+e.name)
			}
		}
	}
	slices.Sort(bare)
	share := 1 - float64(len(bare))/float64(total)
	t.Logf("%d exports, %.1f %% with a comment", total, 100*share)
	if share < minDocumented {
		t.Errorf("%.1f %% of the exports carry a comment, want %.0f %%; without one:\n%s", 100*share, 100*minDocumented, strings.Join(bare, "\n"))
	}
}

type export struct {
	name       string
	documented bool
}

func exports(f file) []export {
	var out []export
	for _, d := range f.ast.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if name, ok := exportedFunc(d); ok {
				out = append(out, export{name, d.Doc != nil})
			}
		case *ast.GenDecl:
			for _, s := range d.Specs {
				out = append(out, exportedSpec(d, s)...)
			}
		}
	}
	return out
}

func exportedFunc(d *ast.FuncDecl) (string, bool) {
	if !d.Name.IsExported() {
		return "", false
	}
	if d.Recv == nil {
		return d.Name.Name, true
	}
	typ := d.Recv.List[0].Type
	for {
		switch t := typ.(type) {
		case *ast.StarExpr:
			typ = t.X
		case *ast.IndexExpr:
			typ = t.X
		case *ast.IndexListExpr:
			typ = t.X
		case *ast.Ident:
			return t.Name + "." + d.Name.Name, t.IsExported()
		default:
			return "", false
		}
	}
}

func exportedSpec(d *ast.GenDecl, s ast.Spec) []export {
	switch s := s.(type) {
	case *ast.TypeSpec:
		if !s.Name.IsExported() {
			return nil
		}
		out := []export{{s.Name.Name, s.Doc != nil || d.Doc != nil}}
		if i, ok := s.Type.(*ast.InterfaceType); ok {
			for _, m := range i.Methods.List {
				for _, n := range m.Names {
					out = append(out, export{s.Name.Name + "." + n.Name, m.Doc != nil || m.Comment != nil})
				}
			}
		}
		return out
	case *ast.ValueSpec:
		var out []export
		for _, n := range s.Names {
			if n.IsExported() {
				out = append(out, export{n.Name, s.Doc != nil || s.Comment != nil || d.Doc != nil})
			}
		}
		return out
	}
	return nil
}

// synonyms are words that docs/terms.md has another word for. They are looked for in the names that
// callers see: exports of the public packages and fields of the API.
var synonyms = [...]struct{ word, use string }{
	{"Container", "sandbox"},
	{"Workload", "process"},
	{"Tenant", "principal"},
	{"Snapshot", "commit"},
	{"Daemon", "server"},
	{"Quota", "limits"},
	{"AuditLog", "journal"},
}

func TestTerms(t *testing.T) {
	root, err := moduleRoot()
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(root, "docs/terms.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, word := range []string{"sandbox", "isolation", "guest", "process", "template", "principal", "journal", "profile", "workspace"} {
		if !strings.Contains(string(b), "| "+word+" |") {
			t.Errorf("docs/terms.md does not define %q", word)
		}
	}
	for _, f := range source(t) {
		public := f.dir == "client" || f.dir == "internal/sandbox" || strings.HasPrefix(f.dir, "proto/")
		if !public || f.test {
			continue
		}
		for _, e := range exports(f) {
			for _, s := range synonyms {
				if strings.Contains(e.name, s.word) {
					t.Errorf("%s: %s says %q; the word of docs/terms.md is %q", f.path, e.name, s.word, s.use)
				}
			}
		}
	}
}
