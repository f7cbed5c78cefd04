package oci

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/x509"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	ggcr "github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"casemate.dev/internal/oci/registry"
	"casemate.dev/internal/oci/worker"
	"casemate.dev/internal/rootfs"
	"casemate.dev/internal/testenv"
	"casemate.dev/internal/testenv/mounts"
)

// TestMain is also the unpacking process, and moves into a mount namespace of its own, as a server does.
func TestMain(m *testing.M) {
	testenv.WithoutCgo()
	if len(os.Args) > 1 && os.Args[1] == worker.Verb {
		if err := worker.Main(os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(mounts.Main(m))
}

// limit bounds every wait.
const limit = 2 * time.Minute

// hub is a registry with faults on purpose.
type hub struct {
	*httptest.Server
	registry http.Handler
	// fault, where it is set, may answer a request; it reports whether it did.
	fault atomic.Pointer[func(w http.ResponseWriter, r *http.Request) bool]
	// mu guards the field below.
	mu   sync.Mutex
	seen []string // requests, as METHOD PATH
}

// newHub starts a registry that speaks TLS.
func newHub(t testing.TB) *hub {
	t.Helper()
	h := &hub{registry: ggcr.New(ggcr.Logger(log.New(io.Discard, "", 0)))}
	h.Server = httptest.NewTLSServer(h)
	h.Server.Config.ErrorLog = log.New(io.Discard, "", 0)
	t.Cleanup(h.Server.Close)
	return h
}

// ServeHTTP implements http.Handler.
func (h *hub) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h.mu.Lock()
	h.seen = append(h.seen, r.Method+" "+r.URL.Path)
	h.mu.Unlock()
	if f := h.fault.Load(); f != nil && (*f)(w, r) {
		return
	}
	h.registry.ServeHTTP(w, r)
}

func (h *hub) host() string { return strings.TrimPrefix(h.URL, "https://") }

// count tells how many requests had something in them.
func (h *hub) count(what string) (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, s := range h.seen {
		if strings.Contains(s, what) {
			n++
		}
	}
	return n
}

func (h *hub) roots() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(h.Certificate())
	return pool
}

// image is an image that is there, as another program sees it.
func (h *hub) image(t testing.TB, ref string) v1.Image {
	t.Helper()
	tag, err := name.NewTag(h.host() + "/" + ref)
	if err != nil {
		t.Fatal(err)
	}
	img, err := remote.Image(tag, remote.WithTransport(h.Client().Transport))
	if err != nil {
		t.Fatal(err)
	}
	return img
}

// push puts an image into the registry, by another program's means.
func (h *hub) push(t testing.TB, ref string, img v1.Image) {
	t.Helper()
	tag, err := name.NewTag(h.host() + "/" + ref)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(tag, img, remote.WithTransport(h.Client().Transport)); err != nil {
		t.Fatal(err)
	}
}

// pushIndex puts an index of images into the registry.
func (h *hub) pushIndex(t testing.TB, ref string, index v1.ImageIndex) {
	t.Helper()
	tag, err := name.NewTag(h.host() + "/" + ref)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.WriteIndex(tag, index, remote.WithTransport(h.Client().Transport)); err != nil {
		t.Fatal(err)
	}
}

// pushPlain puts an image into a registry that asks nothing.
func (h *hub) pushPlain(t testing.TB, ref string, img v1.Image) {
	t.Helper()
	tag, err := name.NewTag(ref, name.Insecure)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(tag, img); err != nil {
		t.Fatal(err)
	}
}

// tarOf makes a layer's archive of names and contents; a name that ends in / is a directory.
func tarOf(t testing.TB, files ...string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for i := 0; i+1 < len(files); i += 2 {
		h := &tar.Header{Name: files[i], Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(files[i+1])), ModTime: time.Unix(1_700_000_000, 0), Format: tar.FormatPAX}
		if strings.HasSuffix(files[i], "/") {
			h.Typeflag, h.Mode = tar.TypeDir, 0o755
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, files[i+1]); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func layerOf(t testing.TB, data []byte, options ...tarball.LayerOption) v1.Layer {
	t.Helper()
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil }, options...)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// imageOf makes an image of layers for this machine.
func imageOf(t testing.TB, config v1.Config, layers ...v1.Layer) v1.Image {
	t.Helper()
	img, err := mutate.AppendLayers(mutate.MediaType(empty.Image, types.OCIManifestSchema1), layers...)
	if err != nil {
		t.Fatal(err)
	}
	cf, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	cf = cf.DeepCopy()
	cf.Config, cf.OS, cf.Architecture = config, "linux", hostPlatform().Architecture
	if img, err = mutate.ConfigFile(img, cf); err != nil {
		t.Fatal(err)
	}
	return img
}

// app is an image of three layers, of which the third is empty of files and the second removes one.
func app(t testing.TB) v1.Image {
	t.Helper()
	return imageOf(t, v1.Config{
		Env: []string{"PATH=/app/bin:/bin", "A=b c"}, User: "7:8", WorkingDir: "/app/data", Entrypoint: []string{"/app/bin/run"},
		Cmd: []string{"--serve"}, Labels: map[string]string{"org.example": "x"}, ExposedPorts: map[string]struct{}{"8080/tcp": {}},
	},
		layerOf(t, tarOf(t, "app/", "", "app/bin/run", "program", "etc/old", "old", "etc/passwd", "root:x:0:0::/root:/bin/sh\n")),
		layerOf(t, tarOf(t, "etc/.wh.old", "", "etc/new", strings.Repeat("new ", 100_000))),
		layerOf(t, tarOf(t)))
}

// world is a service with its store.
type world struct {
	*Service
	store *rootfs.Store
	dir   string
	cfg   Config
}

func newWorld(t testing.TB, change ...func(*Config)) *world {
	t.Helper()
	return openWorld(t, t.TempDir(), change...)
}

func openWorld(t testing.TB, dir string, change ...func(*Config)) *world {
	t.Helper()
	testenv.Root(t)
	store, err := rootfs.Open(t.Context(), rootfs.Config{DataDir: dir, ImageBytes: 512 << 20, Spares: 1})
	if err != nil {
		t.Fatal(err)
	}
	w := &world{store: store, dir: dir}
	var ids atomic.Uint32
	ids.Store(0x7e000000)
	w.cfg = Config{
		Dir: filepath.Join(dir, "oci"), Store: store,
		ReserveID: func() (uint32, func(), error) { return ids.Add(65536), func() {}, nil },
		Registry:  registry.Config{Backoff: time.Millisecond, Proxy: func(*http.Request) (*url.URL, error) { return nil, nil }},
	}
	for _, f := range change {
		f(&w.cfg)
	}
	if w.Service, err = New(w.cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		w.Service.Close()
		_, _ = store.Sweep(context.Background(), nil)
		if err := store.Close(); err != nil {
			t.Error(err)
		}
	})
	return w
}

// trusting makes a service trust a registry's certificate.
func trusting(h *hub) func(*Config) {
	return func(c *Config) { c.Registry.Roots = h.roots() }
}

func quiet(Progress) {}

func (w *world) pull(t testing.TB, ref string, o PullOptions) (Imported, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	return w.Pull(ctx, ref, o, quiet)
}

func (w *world) mustPull(t testing.TB, ref string, o PullOptions) Imported {
	t.Helper()
	got, err := w.pull(t, ref, o)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// shown mounts what a template's sandbox would see.
func (w *world) shown(t testing.TB, template string) (string, rootfs.Plan) {
	t.Helper()
	p := w.plan(t, template)
	return mountPlan(t, p), p
}

// nothingHalf fails if something is left of operations that have ended.
func (w *world) nothingHalf(t testing.TB) {
	t.Helper()
	for _, pattern := range []string{"oci/tmp/*", "rootfs/templates/tmp-*"} {
		if left, err := filepath.Glob(filepath.Join(w.dir, pattern)); err != nil || len(left) > 0 {
			t.Errorf("left: %v, %v", left, err)
		}
	}
}

// plan is the root of a new sandbox of a template in profile standard.
func (w *world) plan(t testing.TB, template string) rootfs.Plan {
	t.Helper()
	p, err := w.store.Plan(t.Context(), rootfs.Request{ID: newID(), Template: template, Profile: "standard", DiskBytes: 64 << 20})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// commit commits what the files of a plan are, to which nobody writes, and returns the layer's id.
func (w *world) commit(t testing.TB, p rootfs.Plan) string {
	t.Helper()
	still := func() error { return nil }
	l, err := w.store.Commit(t.Context(), filepath.Base(filepath.Dir(p.Upper)), p, still, still)
	if err != nil {
		t.Fatal(err)
	}
	return l.ID
}
