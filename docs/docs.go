// Package docs holds the documentation as files, so that a server can show the pages that belong to its
// own version.
//
// What belongs here: pages, and the handler that shows them. What does not: anything generated at run
// time.
package docs

import (
	"embed"
	"net/http"
	"path"
	"strings"
)

//go:embed *.md llms.txt openapi.yaml cli/*.md
var files embed.FS

// Index is the path of the page that lists the others (llmstxt.org).
const Index = "/llms.txt"

// Prefix is where the pages lie.
const Prefix = "/docs/"

// Serves reports whether a path is one of a page.
func Serves(urlPath string) bool {
	_, ok := page(urlPath)
	return ok
}

// page returns the bytes of a page, and whether there is one.
func page(urlPath string) ([]byte, bool) {
	name := strings.TrimPrefix(Index, "/")
	if urlPath != Index {
		var ok bool
		if name, ok = strings.CutPrefix(urlPath, Prefix); !ok {
			return nil, false
		}
	}
	b, err := files.ReadFile(name)
	return b, err == nil
}

// Handle shows a page to anyone: they hold nothing of this server's.
func Handle(w http.ResponseWriter, r *http.Request) {
	b, ok := page(r.URL.Path)
	if !ok {
		http.NotFound(w, r)
		return
	}
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		http.Error(w, "pages are read with GET", http.StatusMethodNotAllowed)
		return
	}
	kind := "text/plain; charset=utf-8"
	switch path.Ext(r.URL.Path) {
	case ".md":
		kind = "text/markdown; charset=utf-8"
	case ".yaml":
		kind = "application/yaml; charset=utf-8"
	}
	w.Header().Set("Content-Type", kind)
	w.Header().Set("X-Content-Type-Options", "nosniff")
	_, _ = w.Write(b)
}
