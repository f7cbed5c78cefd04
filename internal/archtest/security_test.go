package archtest

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"casemate.dev/internal/selftest"
	"casemate.dev/internal/testenv"
)

// TestSecurityPageNamesRealTests holds docs/security.md to what is there: each link leads to a file
// that has the test it names, and each case is one of the battery.
func TestSecurityPageNamesRealTests(t *testing.T) {
	docs := filepath.Join(testenv.Module(t), "docs")
	page, err := os.ReadFile(filepath.Join(docs, "security.md"))
	if err != nil {
		t.Fatal(err)
	}
	links := regexp.MustCompile("\\[`?([\\w-]+)`?\\]\\((\\.\\./[^)]+)\\)").FindAllSubmatch(page, -1)
	if len(links) < 10 {
		t.Errorf("%d links to tests: the table has lost some", len(links))
	}
	for _, l := range links {
		name, file := string(l[1]), string(l[2])
		text, err := os.ReadFile(filepath.Join(docs, file))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if strings.HasPrefix(name, "Test") && !strings.Contains(string(text), "func "+name+"(") {
			t.Errorf("%s has no %s", file, name)
		}
	}
	var ids []string
	for _, c := range selftest.Cases() {
		ids = append(ids, c.ID)
	}
	// Some are seen from the host, by tests that have a row of their own.
	for _, row := range regexp.MustCompile(`(?m)^\| ([A-F]\d\d) \|`).FindAllSubmatch(page, -1) {
		ids = append(ids, string(row[1]))
	}
	for _, id := range regexp.MustCompile(`\b[A-FX]\d\d\b`).FindAllString(string(page), -1) {
		if !slices.Contains(ids, id) {
			t.Errorf("the battery has no case %s", id)
		}
	}
}
