package archtest

import (
	"go/ast"
	"go/token"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// list is a function that names every constant of a type: one that is added later and forgotten there would be taken for
// unknown, left out of a bill, or told in no sentence.
type list struct {
	dir, typ string
	function string // or a method of any type in dir
	except   []string
}

func lists() []list {
	return []list{
		{"internal/egress", "EventType", "Known", nil},
		{"internal/egress/rules", "Code", "Known", nil},
		{"internal/journal/check", "Kind", "kinds", nil},
		{"internal/sandbox", "State", "everyState", nil},
		{"internal/sandbox", "Recording", "recording", nil},
		{"internal/sandbox", "FileChanges", "spec", nil},
		{"internal/sandbox", "MeterBy", "check", nil},
		{"internal/replay", "Verdict", "Text", nil},
		{"internal/errs", "Kind", "Table", []string{"numKinds"}},
	}
}

// TestListsNameEveryConstant: whoever adds a constant is told which list lacks it.
func TestListsNameEveryConstant(t *testing.T) {
	files := source(t)
	for _, l := range lists() {
		all := constants(files, l.dir, l.typ)
		if len(all) < 2 {
			t.Errorf("%s: %d constants of type %s were found", l.dir, len(all), l.typ)
		}
		named := namedIn(files, l.dir, l.function)
		if len(named) == 0 {
			t.Errorf("%s has no function %s", l.dir, l.function)
		}
		for name := range all {
			if !named[name] && !slices.Contains(l.except, name) {
				t.Errorf("%s does not name %s, a %s of %s", l.function, name, l.typ, l.dir)
			}
		}
	}
}

// TestEventTypesAreKnown: where a type of event is spelled out, package journal has it. A word of a switch that stands for no
// event would be a rule that never holds.
func TestEventTypesAreKnown(t *testing.T) {
	files := source(t)
	known := map[string]bool{}
	for _, value := range constants(files, "internal/journal", "Type") {
		known[value] = true
	}
	if len(known) < 50 {
		t.Fatalf("%d types of events were found", len(known))
	}
	// The gateway's events go there under types of their own; what it dropped becomes a gap.
	for name, value := range constants(files, "internal/egress", "EventType") {
		if !strings.Contains(value, ".") {
			value = "network." + value
		}
		if !known[value] && name != "EventDropped" {
			t.Errorf("%s becomes %s, which is no type of an event", name, value)
		}
	}
	typ := regexp.MustCompile(`^(sandbox|process|run|context|file|files|directory|network|usage|commit|call|secret|model|document|body|bodies|template|port|journal)\.[a-z]+$`)
	seen := 0
	for _, f := range files {
		if !f.product() || !slices.Contains([]string{"internal/journal/meter", "internal/journal/check", "internal/journal/trajectory", "internal/replay", "internal/journal/bundle"}, f.dir) {
			continue
		}
		ast.Inspect(f.ast, func(n ast.Node) bool {
			lit, ok := n.(*ast.BasicLit)
			if !ok || lit.Kind != token.STRING {
				return true
			}
			text, _ := strconv.Unquote(lit.Value)
			if typ.MatchString(text) {
				if seen++; !known[text] {
					t.Errorf("%s: %s is no type of an event", f.at(lit), text)
				}
			}
			return true
		})
	}
	if seen < 50 {
		t.Errorf("%d types of events are spelled out where records are read", seen)
	}
}

// constants returns the constants of a type in a package, by name, with the texts of those that are texts.
func constants(files []file, dir, typ string) map[string]string {
	out := map[string]string{}
	for _, f := range files {
		if f.dir != dir || !f.product() {
			continue
		}
		for _, d := range f.ast.Decls {
			g, ok := d.(*ast.GenDecl)
			if !ok || g.Tok != token.CONST {
				continue
			}
			implied := ""
			for _, s := range g.Specs {
				v, ok := s.(*ast.ValueSpec)
				if !ok {
					continue
				}
				if name, ok := v.Type.(*ast.Ident); ok {
					implied = name.Name
				} else if len(v.Values) > 0 {
					implied = "" // untyped, or of a type that its value has
				}
				if implied != typ {
					continue
				}
				for i, name := range v.Names {
					out[name.Name] = ""
					if i < len(v.Values) {
						if lit, ok := v.Values[i].(*ast.BasicLit); ok && lit.Kind == token.STRING {
							out[name.Name], _ = strconv.Unquote(lit.Value)
						}
					}
				}
			}
		}
	}
	return out
}

// namedIn returns the identifiers in functions and methods of that name.
func namedIn(files []file, dir, function string) map[string]bool {
	out := map[string]bool{}
	for _, f := range files {
		if f.dir != dir || !f.product() {
			continue
		}
		for _, d := range f.ast.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok || fn.Name.Name != function || fn.Body == nil {
				continue
			}
			ast.Inspect(fn.Body, func(n ast.Node) bool {
				if id, ok := n.(*ast.Ident); ok {
					out[id.Name] = true
				}
				return true
			})
		}
	}
	return out
}
