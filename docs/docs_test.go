package docs

import (
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"
)

// TestIndexLeadsToPages: every link of llms.txt, and of the pages for agents, leads somewhere.
func TestIndexLeadsToPages(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)#:]+)\)`)
	for _, from := range []string{Index, "/docs/agents-quickstart.md", "/docs/mcp.md"} {
		text, ok := page(from)
		if !ok {
			t.Fatalf("no %s", from)
		}
		links := link.FindAllStringSubmatch(string(text), -1)
		if from == Index && len(links) < 8 {
			t.Errorf("%s has %d links", from, len(links))
		}
		for _, m := range links {
			to := "/" + m[1]
			if from != Index {
				to = Prefix + m[1]
			}
			if !Serves(to) {
				t.Errorf("%s links to %s, which is not there", from, to)
			}
		}
	}
}

func TestHandle(t *testing.T) {
	for _, tt := range []struct {
		method, path, kind string
		status             int
	}{
		{"GET", "/llms.txt", "text/plain; charset=utf-8", 200},
		{"GET", "/docs/mcp.md", "text/markdown; charset=utf-8", 200},
		{"GET", "/docs/openapi.yaml", "application/yaml; charset=utf-8", 200},
		{"POST", "/docs/mcp.md", "", 405},
		{"GET", "/docs/docs.go", "", 404},
		{"GET", "/docs/../go.mod", "", 404},
		{"GET", "/docs/", "", 404},
	} {
		w := httptest.NewRecorder()
		Handle(w, httptest.NewRequest(tt.method, tt.path, nil))
		if w.Code != tt.status || tt.kind != "" && w.Header().Get("Content-Type") != tt.kind {
			t.Errorf("%s %s: %d %s", tt.method, tt.path, w.Code, w.Header().Get("Content-Type"))
		}
		if tt.status == 200 && !strings.Contains(w.Body.String(), "asemate") {
			t.Errorf("%s shows %.60q", tt.path, w.Body)
		}
	}
}
