package script

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/rogpeppe/go-internal/testscript"
)

// startRegistry starts an image registry, in plain HTTP, and returns its host.
func startRegistry(t *testing.T) string {
	t.Helper()
	srv := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(srv.Close)
	return strings.TrimPrefix(srv.URL, "http://")
}

// cmdImage is the command "image FILE NAME [PATH]": it writes an image's archive as docker save does, of one layer
// with the program at /bin/app and, if one is named, a file at PATH.
func cmdImage(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 || len(args) > 3 {
		ts.Fatalf("usage: image FILE NAME [PATH]")
	}
	program, err := os.ReadFile(ts.Getenv("PROGRAM"))
	ts.Check(err)
	var layer bytes.Buffer
	files := tar.NewWriter(&layer)
	add := func(w *tar.Writer, name string, mode int64, data []byte) {
		ts.Check(w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: mode, Size: int64(len(data))}))
		_, err := w.Write(data)
		ts.Check(err)
	}
	add(files, "bin/app", 0o755, program)
	add(files, "etc/passwd", 0o644, []byte("root:x:0:0::/:/bin/sh\napp:x:700:700::/data:/bin/sh\n"))
	ts.Check(files.WriteHeader(&tar.Header{Name: "data/", Typeflag: tar.TypeDir, Mode: 0o755, Uid: 700, Gid: 700}))
	if len(args) > 2 {
		add(files, args[2], 0o644, []byte("planted\n"))
	}
	ts.Check(files.Close())
	sum := sha256.Sum256(layer.Bytes())
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux", "rootfs": map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + hex.EncodeToString(sum[:])}},
		"config": map[string]any{"Env": []string{"PATH=/bin", "COLOUR=blue"}, "User": "app", "WorkingDir": "/data", "Entrypoint": []string{"/bin/app"}},
	})
	ts.Check(err)
	list, err := json.Marshal([]map[string]any{{"Config": "config.json", "RepoTags": []string{args[1]}, "Layers": []string{"layer.tar"}}})
	ts.Check(err)
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	add(w, "config.json", 0o644, config)
	add(w, "layer.tar", 0o644, layer.Bytes())
	add(w, "manifest.json", 0o644, list)
	ts.Check(w.Close())
	ts.Check(os.WriteFile(ts.MkAbs(args[0]), out.Bytes(), 0o644))
}
