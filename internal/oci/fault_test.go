package oci

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/oci/layer"
	"casemate.dev/internal/oci/worker"
	"casemate.dev/internal/testenv"
)

// faults sets what answers in the registry's place.
func (h *hub) faults(f func(w http.ResponseWriter, r *http.Request) bool) { h.fault.Store(&f) }

func isBlob(r *http.Request) bool {
	return r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/")
}

// cutting writes the first bytes of what the registry answers, and breaks the connection.
func (h *hub) cutting(w http.ResponseWriter, r *http.Request, after int) {
	rec := httptest.NewRecorder()
	h.registry.ServeHTTP(rec, r)
	for k, v := range rec.Header() {
		w.Header()[k] = v
	}
	w.Header().Set("Content-Length", fmt.Sprint(rec.Body.Len()))
	w.WriteHeader(rec.Code)
	_, _ = w.Write(rec.Body.Bytes()[:min(after, rec.Body.Len())])
	if rec.Body.Len() > after {
		panic(http.ErrAbortHandler)
	}
}

// noise is text that does not compress, so that a layer has many bytes.
func noise(n int) string {
	b := make([]byte, n)
	x := uint64(88172645463325252)
	for i := range b {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		b[i] = byte(x >> 32)
	}
	return string(b)
}

// TestFlaky: connections that break, a registry that is busy, one that starts from the beginning: the image comes.
func TestFlaky(t *testing.T) {
	h := newHub(t)
	h.push(t, "big", imageOf(t, v1.Config{}, layerOf(t, tarOf(t, "big", noise(3<<20)))))
	w := newWorld(t, trusting(h))
	var blobs atomic.Int32
	var ranged atomic.Int32
	h.faults(func(rw http.ResponseWriter, r *http.Request) bool {
		if !isBlob(r) {
			return false
		}
		if r.Header.Get("Range") != "" {
			ranged.Add(1)
		}
		switch n := blobs.Add(1); n {
		case 1:
			rw.Header().Set("Retry-After", "0")
			http.Error(rw, "busy", http.StatusTooManyRequests)
		case 2:
			http.Error(rw, "gone for a moment", http.StatusBadGateway)
		case 3, 4, 5:
			h.cutting(rw, r, 600_000)
		default:
			return false
		}
		return true
	})
	w.mustPull(t, h.host()+"/big", PullOptions{Name: "big"})
	dir, _ := w.shown(t, "big")
	if data, err := os.ReadFile(dir + "/big"); err != nil || string(data) != noise(3<<20) {
		t.Errorf("%d bytes, %v", len(data), err)
	}
	if ranged.Load() == 0 {
		t.Error("nothing was taken up where it broke")
	}
	w.nothingHalf(t)
}

// TestResume: what a server fetched before it was killed is not fetched again.
func TestResume(t *testing.T) {
	h := newHub(t)
	img := imageOf(t, v1.Config{}, layerOf(t, tarOf(t, "big", noise(3<<20))))
	h.push(t, "big", img)
	dir := t.TempDir()
	w := openWorld(t, dir, trusting(h))
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	digest, err := layers[0].Digest()
	if err != nil {
		t.Fatal(err)
	}
	rc, err := layers[0].Compressed()
	if err != nil {
		t.Fatal(err)
	}
	whole, err := io.ReadAll(rc)
	if err != nil {
		t.Fatal(err)
	}
	var asked atomic.Pointer[string]
	asked.Store(new(string))
	h.faults(func(_ http.ResponseWriter, r *http.Request) bool {
		if isBlob(r) && strings.Contains(r.URL.Path, digest.Hex) {
			s := r.Header.Get("Range")
			asked.Store(&s)
		}
		return false
	})
	for what, tt := range map[string]struct {
		left []byte
		want string
	}{
		"half":    {whole[:2<<20], fmt.Sprintf("bytes=%d-%d", 2<<20, len(whole)-1)},
		"damaged": {append([]byte("x"), whole[1:2<<20]...), ""},
		"longer":  {append(append([]byte{}, whole...), "more"...), ""},
	} {
		if err := os.WriteFile(filepath.Join(w.partialDir(), digest.Hex), tt.left, 0o600); err != nil {
			t.Fatal(err)
		}
		w.mustPull(t, h.host()+"/big", PullOptions{Name: "big"})
		if got := asked.Load(); *got != tt.want { // the last request
			t.Errorf("%s: the registry was asked for %q, want %q", what, *got, tt.want)
		}
		if err := w.store.DropTemplate("big"); err != nil {
			t.Fatal(err)
		}
		w.begin()()
	}
}

// TestKilled: a server that was killed in the midst of an import leaves nothing half imported, and the next one has
// what was fetched.
func TestKilled(t *testing.T) {
	w := newWorld(t)
	h, _, err := w.takeBlob(strings.NewReader("fetched, and not unpacked yet"), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.store.NewDraft(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(w.workDir(), "left"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	again, err := New(w.cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if !again.hasBlob(h) {
		t.Error("what was fetched is gone")
	}
	again.begin()() // nothing came of it
	if again.hasBlob(h) {
		t.Error("a blob that nothing needs stays")
	}
	w.nothingHalf(t)
}

// TestHostileRegistry: what a registry answers that means ill, or is broken.
func TestHostileRegistry(t *testing.T) {
	testenv.NoLeaks(t)
	h := newHub(t)
	good := app(t)
	h.push(t, "good", good)
	manifest, err := good.RawManifest()
	if err != nil {
		t.Fatal(err)
	}
	answer := func(body []byte) func(w http.ResponseWriter, r *http.Request) bool {
		return func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.Contains(r.URL.Path, "/manifests/") {
				return false
			}
			w.Header().Set("Content-Type", string(types.OCIManifestSchema1))
			_, _ = w.Write(body)
			return true
		}
	}
	changed := func(f func(m *v1.Manifest)) func(w http.ResponseWriter, r *http.Request) bool {
		var m v1.Manifest
		if err := json.Unmarshal(manifest, &m); err != nil {
			t.Fatal(err)
		}
		f(&m)
		body, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		return answer(body)
	}
	w := newWorld(t, trusting(h))
	for what, tt := range map[string]struct {
		fault func(w http.ResponseWriter, r *http.Request) bool
		want  errs.Kind
	}{
		"huge manifest":    {answer(bytes.Repeat([]byte(" "), 5<<20)), errs.TooLarge},
		"no JSON":          {answer([]byte("<html>")), errs.Unavailable},
		"old schema":       {answer([]byte(`{"schemaVersion":1}`)), errs.Unsupported},
		"no layers":        {changed(func(m *v1.Manifest) { m.Layers = nil }), errs.InvalidArgument},
		"too many layers":  {changed(func(m *v1.Manifest) { m.Layers = make([]v1.Descriptor, 500) }), errs.InvalidArgument},
		"foreign layer":    {changed(func(m *v1.Manifest) { m.Layers[0].MediaType = types.DockerForeignLayer }), errs.Unsupported},
		"layer with a URL": {changed(func(m *v1.Manifest) { m.Layers[0].URLs = []string{"http://169.254.169.254/latest"} }), errs.Unsupported},
		"an artifact":      {changed(func(m *v1.Manifest) { m.Config.MediaType = "application/vnd.example" }), errs.Unsupported},
		"huge image":       {changed(func(m *v1.Manifest) { m.Layers[0].Size = 1 << 50 }), errs.TooLarge},
		"negative size":    {changed(func(m *v1.Manifest) { m.Layers[0].Size = -1 }), errs.InvalidArgument},
		"digest is a path": {changed(func(m *v1.Manifest) { m.Layers[0].Digest = v1.Hash{Algorithm: "sha256", Hex: "../../../etc/passwd"} }), errs.InvalidArgument},
		"huge config":      {changed(func(m *v1.Manifest) { m.Config.Size = 1 << 40 }), errs.TooLarge},
		"one layer less":   {changed(func(m *v1.Manifest) { m.Layers = m.Layers[1:] }), errs.InvalidArgument},
		"size too large":   {changed(func(m *v1.Manifest) { m.Layers[0].Size++ }), errs.Unavailable},
		"size too small":   {changed(func(m *v1.Manifest) { m.Layers[0].Size-- }), errs.Unavailable},
		"layers swapped":   {changed(func(m *v1.Manifest) { m.Layers[0], m.Layers[1] = m.Layers[1], m.Layers[0] }), errs.InvalidArgument},
		"other bytes": {func(w http.ResponseWriter, r *http.Request) bool {
			if isBlob(r) {
				rec := httptest.NewRecorder()
				h.registry.ServeHTTP(rec, r)
				body := rec.Body.Bytes()
				body[len(body)/2] ^= 1
				_, _ = w.Write(body)
			}
			return isBlob(r)
		}, errs.Unavailable},
		"truncated blobs": {func(w http.ResponseWriter, r *http.Request) bool {
			if isBlob(r) {
				h.cutting(w, r, 0)
			}
			return isBlob(r)
		}, errs.Unavailable},
		"never ready": {func(w http.ResponseWriter, r *http.Request) bool {
			if isBlob(r) {
				http.Error(w, "", http.StatusServiceUnavailable)
			}
			return isBlob(r)
		}, errs.Unavailable},
		"refuses": {func(w http.ResponseWriter, r *http.Request) bool {
			http.Error(w, "", http.StatusForbidden)
			return true
		}, errs.PermissionDenied},
	} {
		h.faults(tt.fault)
		_, err := w.pull(t, h.host()+"/good", PullOptions{Name: "bad"})
		if !errs.Is(err, tt.want) {
			t.Errorf("%s: %v", what, err)
		}
		w.nothingHalf(t)
	}
	h.faults(func(http.ResponseWriter, *http.Request) bool { return false })
	// A digest that was asked for is the one that comes.
	wrong := v1.Hash{Algorithm: "sha256", Hex: strings.Repeat("0", 64)}
	h.faults(answer(manifest))
	if _, err := w.pull(t, h.host()+"/good@"+wrong.String(), PullOptions{Name: "bad"}); !errs.Is(err, errs.Unavailable) {
		t.Errorf("another digest: %v", err)
	}
	if _, err := w.store.StoredTemplate("bad"); !errs.Is(err, errs.NotFound) {
		t.Errorf("a template came of it: %v", err)
	}
}

func TestPlatforms(t *testing.T) {
	h := newHub(t)
	index := mutate.AppendManifests(mutate.IndexMediaType(empty.Index, types.OCIImageIndex),
		mutate.IndexAddendum{Add: imageOf(t, v1.Config{}, layerOf(t, tarOf(t, "other", "x"))), Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "s390x"}}},
		mutate.IndexAddendum{Add: imageOf(t, v1.Config{}, layerOf(t, tarOf(t, "mine", "x"))), Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: hostPlatform().Architecture}}},
		mutate.IndexAddendum{Add: imageOf(t, v1.Config{}, layerOf(t, tarOf(t, "attest", "x"))), Descriptor: v1.Descriptor{
			Platform: &v1.Platform{OS: "unknown", Architecture: "unknown"}, Annotations: map[string]string{"vnd.docker.reference.type": "attestation-manifest"},
		}})
	h.pushIndex(t, "multi", index)
	w := newWorld(t, trusting(h))
	w.mustPull(t, h.host()+"/multi", PullOptions{Name: "multi"})
	dir, _ := w.shown(t, "multi")
	if _, err := os.Stat(dir + "/mine"); err != nil {
		t.Error(err)
	}
	h.pushIndex(t, "elsewhere", mutate.RemoveManifests(index, func(d v1.Descriptor) bool { return d.Platform.Architecture == hostPlatform().Architecture }))
	if _, err := w.pull(t, h.host()+"/elsewhere", PullOptions{}); !errs.Is(err, errs.Unsupported) || !strings.Contains(err.Error(), "linux/s390x") {
		t.Errorf("%v", err)
	}
}

// TestTLS: a certificate that nobody vouches for, and plain HTTP, are refused, on loopback as well, unless the
// host is named as insecure.
func TestTLS(t *testing.T) {
	h := newHub(t)
	h.push(t, "app", app(t))
	w := newWorld(t)
	if _, err := w.pull(t, h.host()+"/app", PullOptions{Name: "app"}); !errs.Is(err, errs.Unavailable) || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("an unknown certificate: %v", err)
	}
	plain := httptest.NewServer(h)
	defer plain.Close()
	host := strings.TrimPrefix(plain.URL, "http://")
	_, err := w.pull(t, host+"/app", PullOptions{Name: "app"})
	if err == nil {
		t.Error("plain HTTP was taken")
	}
	insecure := newWorld(t, func(c *Config) { c.Registry.Insecure = []string{host, h.host()} })
	for _, at := range []string{host, h.host()} { // twin
		insecure.mustPull(t, at+"/app", PullOptions{Name: "app"})
	}
}

// door is a registry that asks for a token, and its token service.
type door struct {
	*hub
	realm atomic.Pointer[string]
	mu    sync.Mutex
	creds []string // credentials that anybody was sent
}

// newDoor makes a registry ask for tokens of a realm, which is its own unless realm is set.
func newDoor(t *testing.T) *door {
	t.Helper()
	d := &door{hub: newHub(t)}
	own := d.URL + "/token"
	d.realm.Store(&own)
	d.faults(func(w http.ResponseWriter, r *http.Request) bool {
		if r.URL.Path == "/token" {
			d.token(w, r)
			return true
		}
		if r.Header.Get("Authorization") == "Bearer opened" {
			return false
		}
		w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm=%q,service="registry"`, *d.realm.Load()))
		w.WriteHeader(http.StatusUnauthorized)
		return true
	})
	return d
}

func (d *door) token(w http.ResponseWriter, r *http.Request) {
	user, password, ok := r.BasicAuth()
	d.mu.Lock()
	if ok {
		d.creds = append(d.creds, user+":"+password)
	}
	d.mu.Unlock()
	if ok && (user != "me" || password != "open sesame") {
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	token := "opened"
	if !ok {
		token = "anonymous"
	}
	_, _ = fmt.Fprintf(w, `{"token":%q}`, token)
}

func TestCredentials(t *testing.T) {
	d := newDoor(t)
	plain := httptest.NewServer(d.registry) // by the back door
	defer plain.Close()
	d.pushPlain(t, strings.TrimPrefix(plain.URL, "http://")+"/app", app(t))
	config := filepath.Join(t.TempDir(), "config.json")
	w := newWorld(t, trusting(d.hub), func(c *Config) { c.DockerConfig = config })
	if err := os.WriteFile(config, []byte(`{"auths":{"other.example":{"auth":"eDp5"}}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := w.pull(t, d.host()+"/app", PullOptions{Name: "app"}); !errs.Is(err, errs.Unauthenticated) {
		t.Errorf("without credentials: %v", err)
	}
	if _, err := w.pull(t, d.host()+"/app", PullOptions{Name: "app", Auth: ParseAuth("me:wrong")}); !errs.Is(err, errs.Unauthenticated) {
		t.Errorf("with wrong ones: %v", err)
	}
	w.mustPull(t, d.host()+"/app", PullOptions{Name: "app", Auth: ParseAuth("me:open sesame\n")})
	file := fmt.Sprintf(`{"auths":{"https://%s/v2/":{"auth":"bWU6b3BlbiBzZXNhbWU="}},"credsStore":"never-run"}`, d.host())
	if err := os.WriteFile(config, []byte(file), 0o600); err != nil {
		t.Fatal(err)
	}
	w.mustPull(t, d.host()+"/app", PullOptions{Name: "by-file"})
	if _, err := w.Push(t.Context(), Source{Template: "app"}, d.host()+"/copy:1", Auth{}, quiet); err != nil {
		t.Errorf("push: %v", err)
	}
}

// ATTACK: a registry names a token service elsewhere, to be sent the credentials, or sends the server on to one of
// the machine's own services.
func TestCredentialsStay(t *testing.T) {
	d := newDoor(t)
	thief := &door{hub: newHub(t)}
	thief.faults(func(w http.ResponseWriter, r *http.Request) bool { thief.token(w, r); return true })
	w := newWorld(t, trusting(d.hub), func(c *Config) { c.Registry.Insecure = []string{thief.host()} })
	realm := thief.URL + "/token"
	d.realm.Store(&realm)
	_, err := w.pull(t, d.host()+"/app", PullOptions{Name: "app", Auth: ParseAuth("me:open sesame")})
	if err == nil {
		t.Error("it was let in")
	}
	if len(thief.creds) != 0 {
		t.Errorf("credentials were sent elsewhere: %q", thief.creds)
	}
	// Twin: a client that asks nobody sends them.
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, realm, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.SetBasicAuth("me", "open sesame")
	resp, err := thief.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if len(thief.creds) != 1 {
		t.Errorf("twin: %q", thief.creds)
	}
}

// ATTACK: a registry redirects a blob's request to a service of the machine's own.
func TestRedirects(t *testing.T) {
	h := newHub(t)
	h.push(t, "app", app(t))
	var reached atomic.Int32
	var header atomic.Pointer[http.Header]
	inner := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		reached.Add(1)
		head := r.Header.Clone()
		header.Store(&head)
		h.registry.ServeHTTP(w, r)
	}))
	inner.TLS = &tls.Config{Certificates: h.TLS.Certificates, MinVersion: tls.VersionTLS12}
	inner.Config.ErrorLog = log.New(io.Discard, "", 0)
	inner.StartTLS()
	defer inner.Close()
	h.faults(func(w http.ResponseWriter, r *http.Request) bool {
		if isBlob(r) {
			http.Redirect(w, r, inner.URL+r.URL.Path, http.StatusTemporaryRedirect)
		}
		return isBlob(r)
	})
	w := newWorld(t, trusting(h))
	if _, err := w.pull(t, h.host()+"/app", PullOptions{Name: "app"}); !errs.Is(err, errs.PermissionDenied) || !strings.Contains(err.Error(), "loopback") {
		t.Errorf("%v", err)
	}
	if reached.Load() != 0 {
		t.Error("the service was reached")
	}
	// Twin, and what a registry does that keeps its blobs elsewhere: no credentials go along.
	open := newWorld(t, trusting(h), func(c *Config) { c.Registry.Insecure = []string{strings.TrimPrefix(inner.URL, "https://")} })
	open.mustPull(t, h.host()+"/app", PullOptions{Name: "app", Auth: ParseAuth("me:open sesame")})
	if reached.Load() == 0 || header.Load().Get("Authorization") != "" {
		t.Errorf("twin: reached %d times, with %v", reached.Load(), header.Load())
	}
}

// TestTogether: whoever wants the same image at the same time shares the work; one that leaves does not end it.
func TestTogether(t *testing.T) {
	h := newHub(t)
	h.push(t, "app", app(t))
	gate := make(chan struct{})
	var unpacked atomic.Int32
	w := newWorld(t, trusting(h), func(c *Config) {
		c.Unpack = func(ctx context.Context, j worker.Job) (layer.Result, error) {
			unpacked.Add(1)
			select {
			case <-gate:
			case <-ctx.Done():
				return layer.Result{}, ctx.Err()
			}
			return worker.Unpack(ctx, j)
		}
	})
	before := h.count("GET /v2/app/blobs/")
	leaver, leave := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() {
		_, err := w.Pull(leaver, h.host()+"/app", PullOptions{Name: "left"}, quiet)
		left <- err
	}()
	testenv.Eventually(t, limit, "the first import to unpack", func() bool { return unpacked.Load() > 0 })
	const n = 6
	all := make(chan error, n)
	joined := make(chan struct{}, n)
	for i := range n {
		go func() {
			_, err := w.Pull(t.Context(), h.host()+"/app", PullOptions{Name: fmt.Sprintf("app%d", i)}, func(p Progress) {
				if len(p.Layers) == 3 {
					select {
					case joined <- struct{}{}:
					default:
					}
				}
			})
			all <- err
		}()
	}
	for range n {
		testenv.Receive(t, "the others join", joined)
	}
	leave()
	if err := testenv.Receive(t, "who left is told", left); !errors.Is(err, context.Canceled) {
		t.Errorf("who left: %v", err)
	}
	close(gate)
	for range n {
		if err := testenv.Receive(t, "the others have their image", all); err != nil {
			t.Error(err)
		}
	}
	if got := unpacked.Load(); got != 3 {
		t.Errorf("%d layers were unpacked for an image of 3", got)
	}
	if got := h.count("GET /v2/app/blobs/") - before; got > 3+n+1 { // a configuration each
		t.Errorf("%d blobs were fetched", got)
	}
	w.nothingHalf(t)
}

// TestCanceled: a pull that nobody waits for any more ends, and leaves nothing.
func TestCanceled(t *testing.T) {
	h := newHub(t)
	h.push(t, "app", app(t))
	w := newWorld(t, trusting(h))
	ctx, cancel := context.WithCancel(t.Context())
	release := make(chan struct{})
	defer close(release)
	h.faults(func(_ http.ResponseWriter, r *http.Request) bool {
		if isBlob(r) && !strings.Contains(r.URL.Path, "none") {
			cancel()
			select {
			case <-release:
			case <-r.Context().Done():
			}
			panic(http.ErrAbortHandler)
		}
		return false
	})
	if _, err := w.Pull(ctx, h.host()+"/app", PullOptions{Name: "app"}, quiet); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	w.nothingHalf(t)
}

// TestStalled: a registry that says nothing any more is asked again.
func TestStalled(t *testing.T) {
	h := newHub(t)
	h.push(t, "app", app(t))
	w := newWorld(t, trusting(h), func(c *Config) { c.Registry.Stall = 2 * time.Second })
	var silent atomic.Int32
	h.faults(func(rw http.ResponseWriter, r *http.Request) bool {
		if !isBlob(r) || silent.Add(1) != 2 {
			return false
		}
		rw.Header().Set("Content-Length", "1000")
		rw.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(rw).Flush()
		<-r.Context().Done()
		panic(http.ErrAbortHandler)
	})
	w.mustPull(t, h.host()+"/app", PullOptions{Name: "app"})
}

func TestLimitsOfImages(t *testing.T) {
	h := newHub(t)
	h.push(t, "zeros", imageOf(t, v1.Config{}, layerOf(t, tarOf(t, "zeros", strings.Repeat("\x00", 4<<20)))))
	h.push(t, "hostile", imageOf(t, v1.Config{}, layerOf(t, tarOf(t, "../../etc/cron.d/x", "x"))))
	h.push(t, "implied", imageOf(t, v1.Config{}, layerOf(t, tarOf(t, "lib", "x")), layerOf(t, tarOf(t, "a", "x"))))
	w := newWorld(t, trusting(h), func(c *Config) { c.Limits = layer.Limits{Bytes: 1 << 20} })
	_, err := w.pull(t, h.host()+"/zeros", PullOptions{})
	if _, hint := errs.PublicText(err); !errs.Is(err, errs.TooLarge) || !strings.Contains(hint, "--max-image-size") {
		t.Errorf("a bomb: %v", err)
	}
	if _, err := w.pull(t, h.host()+"/hostile", PullOptions{}); !errs.Is(err, errs.InvalidArgument) {
		t.Errorf("a path that leads out: %v", err)
	}
	if _, err := w.pull(t, h.host()+"/implied", PullOptions{Name: "Not A Name"}); !errs.Is(err, errs.InvalidArgument) {
		t.Errorf("a bad name: %v", err)
	}
	if _, err := w.pull(t, "NOT a name", PullOptions{}); !errs.Is(err, errs.InvalidArgument) {
		t.Errorf("a bad reference: %v", err)
	}
	w.nothingHalf(t)
}
