package oci

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/rootfs"
	"casemate.dev/internal/testenv/scramble"
)

// scrambled commits what random programs leave of a template: hard links, holes, attributes, capabilities, lists of
// access, removed files, replaced directories, setuid files, long names and ones that are no UTF-8, FIFOs.
func (w *world) scrambled(t *testing.T, template string, seed uint64) (layer string, shown []string) {
	t.Helper()
	p := w.plan(t, template)
	dir := mountPlan(t, p)
	for n, at := range []string{dir + "/app", dir + "/etc", dir} {
		s := scramble.New(at, seed, uint64(n))
		s.Names = slices.DeleteFunc(s.Names, func(s string) bool { return strings.HasPrefix(s, ".wh.") }) // no image can hold it
		s.Do(150)
	}
	// What the kernel escapes, since overlayfs takes it for its own.
	if err := syscall.Setxattr(dir+"/etc", "user.overlay.opaque", []byte("y"), 0); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Unmount(dir, 0); err != nil { // overlayfs shows names of one file that was copied up as two
		t.Fatal(err)
	}
	layer = w.commit(t, p)
	p, err := w.store.Plan(t.Context(), rootfs.Request{ID: newID(), Layer: layer, DiskBytes: 32 << 20})
	if err != nil {
		t.Fatal(err)
	}
	return layer, scan(t, mountPlan(t, p))
}

// TestSoakTreeDigest: random trees go out, come in on another server, go out from there, and come in again: the
// tree is the same each time, and its digest as well, which is also the commit's.
func TestSoakTreeDigest(t *testing.T) {
	h := newHub(t)
	h.push(t, "app", app(t))
	seeds := uint64(3)
	if os.Getenv("CASEMATE_SOAK") != "" {
		seeds = 100
	}
	w, other := newWorld(t, trusting(h)), newWorld(t)
	w.mustPull(t, h.host()+"/app", PullOptions{Name: "app"})
	for seed := range seeds {
		layer, want := w.scrambled(t, "app", seed)
		data, e := export(t, w, Source{Layer: layer}, ExportOptions{Name: "odd", Docker: seed%2 == 0})
		if d, err := w.store.Digest(t.Context(), layer); err != nil || d.Text != e.Tree {
			t.Fatalf("seed %d: the commit has %s, %v; its image has %s", seed, d.Text, err, e.Tree)
		}
		if err := there(t, other, data, e.Tree, want); err != "" {
			t.Fatalf("seed %d: %s", seed, err)
		}
		// What came in goes out, with a commit on it that changes nothing.
		changed := other.commit(t, other.plan(t, "odd"))
		again, e2 := export(t, other, Source{Layer: changed}, ExportOptions{Name: "odd"})
		if e2.Tree != e.Tree || e2.Layers != e.Layers+1 {
			t.Fatalf("seed %d: %+v went out, and then %+v", seed, e, e2)
		}
		if err := there(t, w, again, e.Tree, want); err != "" {
			t.Fatalf("seed %d, back: %s", seed, err)
		}
	}
}

// there imports an archive as "odd", and tells what is wrong with what is there then.
func there(t *testing.T, w *world, data []byte, tree string, want []string) string {
	t.Helper()
	got, err := w.Import(t.Context(), bytes.NewReader(data), "odd", quiet)
	if err != nil {
		t.Fatal(err)
	}
	if got.Template.Tree != tree || len(got.Warnings) > 0 {
		return "imported as " + got.Template.Tree + ", " + strings.Join(got.Warnings, ", ")
	}
	dir, _ := w.shown(t, "odd")
	have := scan(t, dir)
	for i := range want {
		if i >= len(have) || have[i] != want[i] {
			return "shows " + strings.Join(have[min(i, len(have)):min(i+1, len(have))], "") + ", want " + want[i]
		}
	}
	return ""
}

// TestTreeDigestRefused: an image whose files are not those that its annotation names does not come in, however well
// all of its other digests fit; without the annotation it does.
func TestTreeDigestRefused(t *testing.T) {
	h := newHub(t)
	h.push(t, "app", app(t))
	w := newWorld(t, trusting(h))
	w.mustPull(t, h.host()+"/app", PullOptions{Name: "app"})
	layer, _ := w.worked(t)
	e, err := w.Push(t.Context(), Source{Layer: layer}, h.host()+"/worked:1", Auth{}, quiet)
	if err != nil {
		t.Fatal(err)
	}
	img := h.image(t, "worked:1")
	with := func(base v1.Image, tree string) v1.Image {
		out, ok := mutate.Annotations(base, map[string]string{treeDigest: tree}).(v1.Image)
		if !ok {
			t.Fatal("no image")
		}
		return out
	}
	more, err := mutate.AppendLayers(img, layerOf(t, tarOf(t, "app/planted", "x")))
	if err != nil {
		t.Fatal(err)
	}
	other := newWorld(t, trusting(h))
	for what, bad := range map[string]v1.Image{
		"a layer more":      with(more, e.Tree),
		"another digest":    with(img, "sha256:"+strings.Repeat("0", 64)),
		"no digest":         with(img, "sha256:../../etc"),
		"capital letters":   with(img, strings.ToUpper(e.Tree)),
		"without algorithm": with(img, strings.TrimPrefix(e.Tree, "sha256:")),
	} {
		h.push(t, "bad:1", bad)
		if _, err := other.pull(t, h.host()+"/bad:1", PullOptions{Name: "bad"}); !errs.Is(err, errs.InvalidArgument) || !strings.Contains(err.Error(), "digest") {
			t.Errorf("%s: %v", what, err)
		}
		if _, err := other.store.StoredTemplate("bad"); !errs.Is(err, errs.NotFound) {
			t.Errorf("%s: a template all the same: %v", what, err)
		}
		other.nothingHalf(t)
	}
	for what, good := range map[string]v1.Image{"as it was": img, "a layer more, and no annotation": with(more, "")} {
		h.push(t, "good:1", good)
		if _, err := other.pull(t, h.host()+"/good:1", PullOptions{Name: "good"}); err != nil {
			t.Errorf("twin: %s: %v", what, err)
		}
	}
}

// TestSocketsStayBehind: no image holds a socket, and its digest says so.
func TestSocketsStayBehind(t *testing.T) {
	h := newHub(t)
	h.push(t, "app", app(t))
	w := newWorld(t, trusting(h))
	w.mustPull(t, h.host()+"/app", PullOptions{Name: "app"})
	p := w.plan(t, "app")
	if err := unix.Mknod(filepath.Join(p.Upper, "socket"), unix.S_IFSOCK|0o666, 0); err != nil {
		t.Fatal(err)
	}
	layer := w.commit(t, p)
	data, e := export(t, w, Source{Layer: layer}, ExportOptions{Name: "odd"})
	if d, err := w.store.Digest(t.Context(), layer); err != nil || d.Text == e.Tree {
		t.Errorf("the commit, which has one, has the image's digest: %s, %v", d.Text, err)
	}
	if _, err := newWorld(t).Import(t.Context(), bytes.NewReader(data), "", quiet); err != nil {
		t.Error(err)
	}
}
