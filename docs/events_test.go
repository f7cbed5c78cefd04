package docs

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// eventsPage is the catalogue of the journal's events. It is made of the code: of the constants of package journal, and of
// directives beside the facts:
//
//	//casemate:facts OBSERVER TYPE… [= NAME,…]          above a struct: its fields, or those named, or but for -NAME,…
//	//casemate:fact OBSERVER TYPE[,TYPE…] NAME KIND …   anywhere: one fact, and what it says
const eventsPage = "events.md"

// eventDirs hold what records events.
func eventDirs() []string {
	return []string{"journal", "sandbox", "secret", "state", "egress", "isolation", "server"}
}

// catalogue is what the code says of events.
type catalogue struct {
	order []string          // the types, as package journal lists them
	what  map[string]string // of a type
	facts map[string][]eventFact
	bad   []string
}

type eventFact struct{ observer, name, kind, what string }

func readCatalogue(t *testing.T) *catalogue {
	t.Helper()
	c := &catalogue{what: map[string]string{}, facts: map[string][]eventFact{}}
	for _, dir := range eventDirs() {
		root := filepath.Join("..", "internal", dir)
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ParseComments)
			if err != nil {
				return err
			}
			if path == filepath.Join(root, "event.go") && dir == "journal" {
				c.types(f)
			}
			c.file(f)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for typ := range c.facts {
		if !slices.Contains(c.order, typ) {
			c.bad = append(c.bad, "a directive names the type "+typ+", which package journal does not have")
		}
	}
	return c
}

// types reads the constants of type Type, and the comments behind them.
func (c *catalogue) types(f *ast.File) {
	ast.Inspect(f, func(n ast.Node) bool {
		v, ok := n.(*ast.ValueSpec)
		if !ok || len(v.Values) != 1 {
			return true
		}
		if name, ok := v.Type.(*ast.Ident); !ok || name.Name != "Type" {
			return true
		}
		lit, ok := v.Values[0].(*ast.BasicLit)
		if !ok {
			return true
		}
		typ, _ := strconv.Unquote(lit.Value)
		c.order = append(c.order, typ)
		c.what[typ] = oneLine(v.Comment.Text())
		return true
	})
}

func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }

// file reads the directives of a file.
func (c *catalogue) file(f *ast.File) {
	for _, group := range f.Comments {
		for _, line := range group.List {
			if rest, ok := strings.CutPrefix(line.Text, "//casemate:fact "); ok {
				c.fact(rest)
			}
		}
	}
	ast.Inspect(f, func(n ast.Node) bool {
		g, ok := n.(*ast.GenDecl)
		if !ok || g.Doc == nil || len(g.Specs) != 1 {
			return true
		}
		spec, ok := g.Specs[0].(*ast.TypeSpec)
		if !ok {
			return true
		}
		s, ok := spec.Type.(*ast.StructType)
		for _, line := range g.Doc.List {
			if rest, found := strings.CutPrefix(line.Text, "//casemate:facts "); found && ok {
				c.fields(rest, s)
			}
		}
		return true
	})
}

func (c *catalogue) fact(line string) {
	parts := strings.Fields(line)
	if len(parts) < 4 || !observes(parts[0]) {
		c.bad = append(c.bad, "//casemate:fact "+line)
		return
	}
	for typ := range strings.SplitSeq(parts[1], ",") {
		c.facts[typ] = append(c.facts[typ], eventFact{parts[0], parts[2], strings.ReplaceAll(parts[3], "_", " "), strings.Join(parts[4:], " ")})
	}
}

func observes(s string) bool { return s == "kernel" || s == "server" || s == "guest" }

func (c *catalogue) fields(line string, s *ast.StructType) {
	line, names, _ := strings.Cut(line, " = ")
	parts := strings.Fields(line)
	if len(parts) < 2 || !observes(parts[0]) {
		c.bad = append(c.bad, "//casemate:facts "+line)
		return
	}
	without := strings.HasPrefix(names, "-")
	list := strings.Split(strings.TrimPrefix(names, "-"), ",")
	for _, f := range s.Fields.List {
		if f.Tag == nil {
			continue
		}
		tag, _ := strconv.Unquote(f.Tag.Value)
		name, _, _ := strings.Cut(reflect.StructTag(tag).Get("json"), ",")
		if name == "" || name == "-" || names != "" && slices.Contains(list, name) == without {
			continue
		}
		what := oneLine(f.Comment.Text())
		if what == "" {
			what = oneLine(f.Doc.Text())
		}
		for _, typ := range parts[1:] {
			c.facts[typ] = append(c.facts[typ], eventFact{parts[0], name, kindOf(f.Type), what})
		}
	}
}

// kindOf says what JSON a field becomes, as far as its type tells.
func kindOf(e ast.Expr) string {
	switch t := e.(type) {
	case *ast.StarExpr:
		return kindOf(t.X)
	case *ast.ArrayType:
		return "list"
	case *ast.MapType, *ast.StructType:
		return "object"
	case *ast.SelectorExpr:
		return map[string]string{"Time": "time", "Duration": "number", "Verdict": "object", "RawMessage": "object"}[t.Sel.Name]
	case *ast.Ident:
		switch t.Name {
		case "int", "int32", "int64", "uint64", "uint32", "float64":
			return "number"
		case "bool":
			return "yes or no"
		case "Limits", "Network", "Calls":
			return "object"
		}
		return "text"
	}
	return ""
}

func (c *catalogue) markdown() []byte {
	var b bytes.Buffer
	b.WriteString("# The journal's events\n\nThis page is made of the code (`make docs`). Every event has a sandbox (or `@server`), a counter `seq`, a `time`, an\n" +
		"`actor` and often a `process`; its facts stand under who observed them. [The journal](journal.md) says what that is worth, and\n" +
		"what a *body* is: content that lies beside the log, behind a salted hash.\n")
	for _, typ := range c.order {
		fmt.Fprintf(&b, "\n## %s\n\n", typ)
		if what := c.what[typ]; what != "" {
			fmt.Fprintf(&b, "%s.\n\n", strings.ToUpper(what[:1])+what[1:])
		}
		facts := slices.Clone(c.facts[typ])
		if len(facts) == 0 {
			b.WriteString("It has no facts of its own.\n")
			continue
		}
		slices.SortStableFunc(facts, func(a, b eventFact) int { return strings.Compare(a.observer, b.observer) })
		b.WriteString("| observer | fact | kind | |\n|---|---|---|---|\n")
		for _, f := range facts {
			fmt.Fprintf(&b, "| %s | `%s` | %s | %s |\n", f.observer, f.name, f.kind, strings.ReplaceAll(f.what, "|", `\|`))
		}
	}
	return b.Bytes()
}

// TestEventsPage holds the catalogue of events against the code: whatever the page says is so. That it says all is asked
// at night, so that an event that was added a minute ago is no fault of anybody else's change. UPDATE_DOCS=1 writes it.
func TestEventsPage(t *testing.T) {
	c := readCatalogue(t)
	for _, b := range c.bad {
		t.Error(b)
	}
	if len(c.order) < 50 {
		t.Fatalf("%d types of events were found", len(c.order))
	}
	want := c.markdown()
	if os.Getenv("UPDATE_DOCS") != "" {
		if err := os.WriteFile(eventsPage, want, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(eventsPage)
	if err != nil {
		t.Fatal(err)
	}
	section := ""
	said := map[string]bool{}
	for line := range strings.Lines(string(want)) {
		if strings.HasPrefix(line, "## ") {
			section = line
		}
		said[section+line] = true
	}
	section = ""
	for line := range strings.Lines(string(got)) {
		if strings.HasPrefix(line, "## ") {
			section = line
		}
		if !said[section+line] && !strings.Contains(line, "no facts of its own") && !strings.HasPrefix(line, "| observer") && !strings.HasPrefix(line, "|---") {
			t.Errorf("the code does not say of %s: %s (make docs)", strings.TrimSpace(section), line)
		}
	}
	if !bytes.Equal(got, want) {
		if os.Getenv("CASEMATE_TEST_NIGHTLY") != "" {
			t.Error("events.md does not say all that the code says: run make docs")
		}
		t.Log("events.md does not say all that the code says: run make docs")
	}
}
