package oci

import (
	"errors"
	"io/fs"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/compression"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"casemate.dev/internal/testenv"
)

func TestPull(t *testing.T) {
	testenv.NoLeaks(t)
	h := newHub(t)
	img := app(t)
	h.push(t, "lib/app:1.0", img)
	w := newWorld(t, trusting(h))
	got := w.mustPull(t, h.host()+"/lib/app:1.0", PullOptions{Name: "app"})
	digest, err := img.Digest()
	if err != nil {
		t.Fatal(err)
	}
	st := got.Template
	if st.Name != "app" || st.Digest != digest.String() || st.Source != h.host()+"/lib/app:1.0" || len(got.Warnings) != 0 || st.SizeBytes < 400_000 {
		t.Errorf("%+v %v", st, got.Warnings)
	}
	if s := st.Settings; s.User != "7:8" || s.Dir != "/app/data" || !slices.Equal(s.Entrypoint, []string{"/app/bin/run"}) || s.Labels["org.example"] != "x" ||
		!slices.Equal(s.Exposed, []string{"8080/tcp"}) || !slices.Equal(s.Cmd, []string{"--serve"}) {
		t.Errorf("settings %+v", s)
	}
	dir, p := w.shown(t, "app")
	if p.Env["A"] != "b c" || p.User != "7:8" || p.Dir != "/app/data" {
		t.Errorf("plan %+v", p)
	}
	for path, want := range map[string]string{"app/bin/run": "program", "etc/new": strings.Repeat("new ", 100_000)} {
		if data, err := os.ReadFile(dir + "/" + path); err != nil || string(data) != want {
			t.Errorf("%s: %d bytes, %v", path, len(data), err)
		}
	}
	if _, err := os.Lstat(dir + "/etc/old"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a removed file: %v", err)
	}
	if st, err := os.Stat(dir + "/app/data"); err != nil || !st.IsDir() {
		t.Errorf("the working directory was not made: %v", err)
	}
	w.nothingHalf(t)

	// Again: nothing is fetched but the manifest.
	before := h.count("/blobs/")
	w.mustPull(t, h.host()+"/lib/app:1.0", PullOptions{Name: "again"})
	if more := h.count("/blobs/") - before; more != 1 { // the configuration
		t.Errorf("a second pull fetched %d blobs", more)
	}
	// By digest, under the name that people write.
	if _, err := w.pull(t, h.host()+"/lib/app@"+digest.String(), PullOptions{Name: "by-digest"}); err != nil {
		t.Errorf("by digest: %v", err)
	}
	// When nothing needs it any more, it all goes.
	for _, name := range []string{"app", "again", "by-digest"} {
		if err := w.store.DropTemplate(name); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := w.store.Sweep(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	w.begin()()
	if left, err := os.ReadDir(w.blobDir()); err != nil || len(left) != 0 {
		t.Errorf("%d blobs stay, %v", len(left), err)
	}
}

func TestPullZstdAndPlain(t *testing.T) {
	h := newHub(t)
	data := tarOf(t, "a", strings.Repeat("zstandard ", 10_000))
	h.push(t, "z", imageOf(t, v1.Config{}, layerOf(t, data, tarball.WithCompression(compression.ZStd), tarball.WithMediaType("application/vnd.oci.image.layer.v1.tar+zstd")),
		layerOf(t, tarOf(t, "b", "plain"), tarball.WithCompression(compression.None), tarball.WithMediaType("application/vnd.oci.image.layer.v1.tar"))))
	w := newWorld(t, trusting(h))
	w.mustPull(t, h.host()+"/z", PullOptions{Name: "z"})
	dir, p := w.shown(t, "z")
	if got, err := os.ReadFile(dir + "/a"); err != nil || len(got) != 100_000 {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if got, err := os.ReadFile(dir + "/b"); err != nil || string(got) != "plain" {
		t.Errorf("%q, %v", got, err)
	}
	if p.User != "root" || p.Dir != "/" {
		t.Errorf("plan of an image that says nothing: %+v", p)
	}
}
