package clients

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha512"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/cgi"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"casemate.dev/internal/testenv"
)

// guarded asks for a credential: it answers 401 where check does not find one.
func guarded(h http.Handler, check func(r *http.Request) bool) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !check(r) {
			w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
			http.Error(w, "who are you?", http.StatusUnauthorized)
			return
		}
		h.ServeHTTP(w, r)
	})
}

// index is a Python package index (PEP 503) of the wheels that `make test-clients` has fetched.
func index(t *testing.T) http.Handler {
	dir := filepath.Join(testenv.Module(t), ".cache/wheels/all")
	wheels, err := filepath.Glob(dir + "/*.whl")
	if err != nil || len(wheels) < 10 {
		t.Fatalf("%d wheels in %s, %v: make test-clients", len(wheels), dir, err)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /files/", http.StripPrefix("/files/", http.FileServer(http.Dir(dir))))
	mux.HandleFunc("GET /simple/{name}/", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		fmt.Fprint(w, "<!DOCTYPE html><html><body>\n")
		for _, path := range wheels {
			file := filepath.Base(path)
			dist, _, _ := strings.Cut(file, "-")
			if strings.ReplaceAll(strings.ToLower(dist), "_", "-") == r.PathValue("name") {
				fmt.Fprintf(w, "<a href=\"/files/%s\">%s</a>\n", file, file)
			}
		}
		fmt.Fprint(w, "</body></html>\n")
	})
	return mux
}

// npmRegistry has one package, greeting, which exports a text.
func npmRegistry(t *testing.T) http.Handler {
	t.Helper()
	var pack bytes.Buffer
	z := gzip.NewWriter(&pack)
	tw := tar.NewWriter(z)
	for name, text := range map[string]string{
		"package/package.json": `{"name":"greeting","version":"1.2.3","main":"index.js"}`, "package/index.js": `module.exports = "hello from npm"`,
	} {
		if err := tw.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(text))}); err != nil {
			t.Fatal(err)
		}
		if _, err := tw.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	_, _ = tw.Close(), z.Close()
	sum := sha512.Sum512(pack.Bytes())
	mux := http.NewServeMux()
	mux.HandleFunc("GET /greeting", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(map[string]any{
			"name": "greeting", "dist-tags": map[string]string{"latest": "1.2.3"},
			"versions": map[string]any{"1.2.3": map[string]any{"name": "greeting", "version": "1.2.3", "dist": map[string]string{
				"tarball": "https://" + r.Host + "/greeting/-/greeting-1.2.3.tgz", "integrity": "sha512-" + base64.StdEncoding.EncodeToString(sum[:]),
			}}},
		})
	})
	mux.HandleFunc("GET /greeting/-/greeting-1.2.3.tgz", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(pack.Bytes()) })
	return mux
}

// gitServer serves a repository, /repo.git, over git's smart HTTP, for reading and writing.
func gitServer(t *testing.T) http.Handler {
	t.Helper()
	dir := t.TempDir()
	script := `set -e; git init -q --bare repo.git; git -C repo.git config http.receivepack true; git -C repo.git config uploadpack.allowFilter true
		git -c init.defaultBranch=main init -q work; cd work; seq 20000 > numbers; git add .
		git -c user.name=a -c user.email=a@example.com commit -q -m one; git push -q ../repo.git HEAD:refs/heads/main; git -C ../repo.git symbolic-ref HEAD refs/heads/main`
	cmd := exec.Command("bash", "-c", script)
	cmd.Dir = dir
	cmd.Env = slices.Concat(os.Environ(), []string{"GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_NOSYSTEM=1"})
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	exe, err := exec.Command("git", "--exec-path").Output()
	if err != nil {
		t.Fatal(err)
	}
	return &cgi.Handler{
		Path: filepath.Join(strings.TrimSpace(string(exe)), "git-http-backend"),
		Env:  []string{"GIT_PROJECT_ROOT=" + dir, "GIT_HTTP_EXPORT_ALL=1", "REMOTE_USER=somebody", "GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_GLOBAL=/dev/null"},
	}
}
