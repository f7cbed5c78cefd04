package template

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"casemate.dev/test/stage"
)

// upstream is a web server whose files a test changes.
type upstream struct {
	mu    sync.Mutex // guards the field below
	files map[string][]byte
}

// ServeHTTP implements http.Handler.
func (u *upstream) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	u.mu.Lock()
	data, ok := u.files[strings.Replace(r.Host+r.URL.Path, "/./", "/", 1)] // apt names a repository's own directory so
	u.mu.Unlock()
	if !ok {
		http.NotFound(w, r)
		return
	}
	if strings.HasSuffix(r.URL.Path, "/") {
		w.Header().Set("Content-Type", "text/html")
	}
	_, _ = w.Write(data) // a client that is gone sees no more
}

// put replaces all files of a host.
func (u *upstream) put(host string, files map[string][]byte) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for name := range u.files {
		if strings.HasPrefix(name, host+"/") {
			delete(u.files, name)
		}
	}
	for name, data := range files {
		u.files[host+"/"+name] = data
	}
}

// release is a package as it is offered: a version and what its one file holds.
type release struct{ version, text string }

// debian offers the package "demo", and "top" that depends on it, as apt's repository in one directory.
func debian(t *testing.T, releases ...release) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	var index strings.Builder
	add := func(name, version, depends, text string) {
		control := fmt.Sprintf("Package: %s\nVersion: %s\nArchitecture: all\nMaintainer: nobody <nobody@deb.test>\n%sDescription: a test\n", name, version, depends)
		data := deb(t, control, "usr/share/"+name, text)
		file := name + "_" + version + ".deb"
		files[file] = data
		fmt.Fprintf(&index, "%sFilename: %s\nSize: %d\nSHA256: %x\n\n", control, file, len(data), sha256.Sum256(data))
	}
	add("top", "1.0", "Depends: demo\n", "top")
	for _, r := range releases {
		add("demo", r.version, "", r.text)
	}
	files["Packages"] = []byte(index.String())
	files["Release"] = fmt.Appendf(nil, "Suite: test\nSHA256:\n %x %d Packages\n", sha256.Sum256(files["Packages"]), index.Len())
	return files
}

// deb makes an archive of dpkg's.
func deb(t *testing.T, control, name, text string) []byte {
	t.Helper()
	dir := t.TempDir()
	for file, data := range map[string]string{
		"DEBIAN/control": control, "DEBIAN/md5sums": fmt.Sprintf("%x  %s\n", sha256.Sum256([]byte(text)), name), name: text,
	} {
		path := filepath.Join(dir, file)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(data), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	out := filepath.Join(t.TempDir(), "x.deb")
	if text, err := exec.CommandContext(t.Context(), "dpkg-deb", "--root-owner-group", "--build", dir, out).CombinedOutput(); err != nil {
		t.Fatalf("dpkg-deb: %v: %s", err, text)
	}
	data, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// index offers the project "demo", and "top" that depends on it, as a Python package index.
func index(t *testing.T, releases ...release) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	links := map[string]string{}
	add := func(name, version, requires, text string) {
		file := name + "-" + version + "-py3-none-any.whl"
		data := stage.Wheel(t, name, version, fmt.Sprintf("text = %q\n", text), requires)
		files["files/"+file] = data
		links[name] += fmt.Sprintf("<a href=\"/files/%s#sha256=%x\">%s</a>\n", file, sha256.Sum256(data), file)
	}
	add("top", "1.0", "demo", "top")
	for _, r := range releases {
		add("demo", r.version, "", r.text)
	}
	for name, list := range links {
		files["simple/"+name+"/"] = []byte("<!DOCTYPE html><html><body>" + list + "</body></html>")
	}
	return files
}

// registry offers the package "demo" as an npm registry.
func registry(t *testing.T, releases ...release) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	versions := map[string]any{}
	latest := ""
	for _, r := range releases {
		manifest := map[string]any{"name": "demo", "version": r.version, "main": "index.js"}
		head, err := json.Marshal(manifest)
		if err != nil {
			t.Fatal(err)
		}
		data := tgz(t, [2]string{"package/package.json", string(head)}, [2]string{"package/index.js", r.text})
		sum := sha512.Sum512(data)
		file := "demo/-/demo-" + r.version + "-" + hex.EncodeToString(sum[:4]) + ".tgz"
		files[file] = data
		manifest["dist"] = map[string]string{
			"tarball": "http://npm.test/" + file, "integrity": "sha512-" + base64.StdEncoding.EncodeToString(sum[:]),
		}
		versions[r.version], latest = manifest, r.version
	}
	doc, err := json.Marshal(map[string]any{"name": "demo", "dist-tags": map[string]string{"latest": latest}, "versions": versions})
	if err != nil {
		t.Fatal(err)
	}
	files["demo"] = doc
	return files
}

func tgz(t *testing.T, files ...[2]string) []byte {
	t.Helper()
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	w := tar.NewWriter(z)
	for _, f := range files {
		if err := w.WriteHeader(&tar.Header{Name: f[0], Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(f[1]))}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(f[1])); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// smallDebian writes an image, as docker save does, with this machine's dpkg and apt, and little beside.
func smallDebian(t *testing.T, file, name string) {
	t.Helper()
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	put := func(h tar.Header, data []byte) {
		h.Size, h.Format = int64(len(data)), tar.FormatPAX
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(data); err != nil {
			t.Fatal(err)
		}
	}
	for _, dir := range []string{
		"etc/apt/apt.conf.d", "etc/apt/preferences.d", "var/lib/dpkg/info", "var/lib/dpkg/updates", "var/lib/dpkg/triggers",
		"var/lib/apt/lists/partial", "var/cache/apt/archives/partial", "var/log/apt", "tmp", "root", "usr/bin", "usr/lib", "usr/lib64", "usr/sbin",
	} {
		put(tar.Header{Name: dir + "/", Typeflag: tar.TypeDir, Mode: 0o755}, nil)
	}
	for _, dir := range []string{"bin", "lib", "lib64", "sbin"} {
		put(tar.Header{Name: dir, Typeflag: tar.TypeSymlink, Linkname: "usr/" + dir}, nil)
	}
	for path, text := range map[string]string{
		"etc/passwd": "root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n", "etc/group": "root:x:0:\nuser:x:1000:\n", "var/lib/dpkg/status": "",
		"etc/apt/apt.conf.d/test": "APT::Sandbox::User \"root\";\nAcquire::Languages \"none\";\n",
		"etc/apt/sources.list":    "deb [trusted=yes] http://deb.test/ ./\n",
		// dpkg wants to see them, and the test's packages use none.
		"usr/sbin/ldconfig": "#!/bin/sh\n", "usr/sbin/start-stop-daemon": "#!/bin/sh\n", "usr/sbin/diff": "#!/bin/sh\n",
		// It finds every user.
		"usr/sbin/id": "#!/bin/sh\n",
	} {
		put(tar.Header{Name: path, Typeflag: tar.TypeReg, Mode: map[bool]int64{true: 0o755, false: 0o644}[strings.HasPrefix(path, "usr/")]}, []byte(text))
	}
	for _, path := range programs(t) {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		put(tar.Header{Name: strings.TrimPrefix(path, "/"), Typeflag: tar.TypeReg, Mode: 0o755}, data)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(layer.Bytes())
	config := fmt.Sprintf(`{"architecture":%q,"os":"linux","config":{"Env":["PATH=/usr/sbin:/usr/bin"]},"rootfs":{"type":"layers","diff_ids":["sha256:%x"]}}`, arch, sum)
	var out bytes.Buffer
	w = tar.NewWriter(&out)
	put(tar.Header{Name: "config.json", Typeflag: tar.TypeReg, Mode: 0o644}, []byte(config))
	put(tar.Header{Name: "layer.tar", Typeflag: tar.TypeReg, Mode: 0o644}, layer.Bytes())
	put(tar.Header{Name: "manifest.json", Typeflag: tar.TypeReg, Mode: 0o644}, fmt.Appendf(nil, `[{"Config":"config.json","RepoTags":[%q],"Layers":["layer.tar"]}]`, name))
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, out.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
}

// programs returns the files of this machine that installing a package takes, with the libraries that they need.
func programs(t *testing.T) []string {
	t.Helper()
	var all []string
	for _, name := range []string{"sh", "dpkg", "dpkg-deb", "dpkg-split", "dpkg-query", "apt-get", "tar", "rm", "cat", "mkdir", "ln"} {
		all = append(all, "/usr/bin/"+name)
	}
	all = append(all, "/usr/lib/apt/methods/http", "/usr/lib/apt/methods/store", "/usr/lib/apt/methods/file")
	tables, err := filepath.Glob("/usr/share/dpkg/*table")
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), "ldd", all...).Output()
	if err != nil {
		t.Fatalf("ldd: %v", err)
	}
	for word := range strings.FieldsSeq(string(out)) {
		if !strings.HasPrefix(word, "/") || strings.HasSuffix(word, ":") {
			continue
		}
		path := word
		if !strings.HasPrefix(path, "/usr/") {
			path = "/usr" + path
		}
		if !slices.Contains(all, path) {
			all = append(all, path)
		}
	}
	return append(all, tables...)
}
