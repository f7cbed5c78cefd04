package oci

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/validate"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/linux/fd"
	"casemate.dev/internal/rootfs"
)

// scan tells everything about a mounted tree, one line a file: types, modes, owners, attributes, contents, and times
// of all but directories, which overlayfs may change.
func scan(t testing.TB, dir string) []string {
	t.Helper()
	var lines []string
	first := map[uint64]string{}
	err := filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st syscall.Stat_t
		if err := syscall.Lstat(path, &st); err != nil {
			return err
		}
		line := fmt.Sprintf("%q %o %d:%d", strings.TrimPrefix(path, dir), st.Mode, st.Uid, st.Gid)
		parent, err := fd.OpenRoot(filepath.Dir(path))
		if err != nil {
			return err
		}
		defer parent.Close()
		attrs, err := fd.Xattrs(parent, filepath.Base(path))
		if err != nil {
			return err
		}
		slices.Sort(attrs)
		for _, a := range attrs {
			v, _, err := fd.XattrBytes(parent, filepath.Base(path), a)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" %s=%x", a, v)
		}
		switch st.Mode & syscall.S_IFMT {
		case syscall.S_IFLNK:
			target, err := os.Readlink(path)
			lines = append(lines, line+" -> "+target)
			return err
		case syscall.S_IFREG:
			if of, ok := first[st.Ino]; ok {
				lines = append(lines, line+" = "+of)
				return nil
			}
			first[st.Ino] = line
			data, err := os.ReadFile(path)
			lines = append(lines, fmt.Sprintf("%s %d.%d %d %x", line, st.Mtim.Sec, st.Mtim.Nsec, len(data), sha256.Sum256(data)))
			return err
		}
		lines = append(lines, line)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return lines
}

// worked is what a sandbox of the image app leaves behind: of everything that files can be.
func (w *world) worked(t testing.TB) (layer string, shown []string) {
	t.Helper()
	p := w.plan(t, "app")
	dir := mountPlan(t, p)
	do := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	do(os.Remove(dir + "/etc/passwd"))
	do(os.RemoveAll(dir + "/app/bin"))
	do(os.Mkdir(dir+"/app/bin", 0o711)) // opaque
	do(os.WriteFile(dir+"/app/bin/tool", []byte("tool"), 0o755))
	do(syscall.Chmod(dir+"/app/bin/tool", 0o4755))
	do(os.Link(dir+"/app/bin/tool", dir+"/app/bin/same"))
	do(os.Symlink("../etc", dir+"/app/link"))
	do(os.WriteFile(dir+"/odd\xff\nname", []byte("odd"), 0o600))
	do(os.Lchown(dir+"/odd\xff\nname", 65535, 1234))
	do(os.Truncate(dir+"/odd\xff\nname", 1<<20))
	do(syscall.Setxattr(dir+"/app/bin/tool", "security.capability", []byte("\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"), 0))
	do(syscall.Setxattr(dir+"/app", "user.note", []byte("n\x00te"), 0))
	do(os.Chmod(dir, 0o750))
	return w.commit(t, p), scan(t, dir)
}

func export(t testing.TB, w *world, src Source, o ExportOptions) ([]byte, Exported) {
	t.Helper()
	var b bytes.Buffer
	e, err := w.Export(t.Context(), src, o, &b, func(Exported) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	return b.Bytes(), e
}

// TestExportImport: a commit goes out as an archive and comes in on another server: the trees are equal in
// everything, a second export is the same bytes, and so is one of what came in.
func TestExportImport(t *testing.T) {
	h := newHub(t)
	h.push(t, "app", app(t))
	w := newWorld(t, trusting(h))
	w.mustPull(t, h.host()+"/app", PullOptions{Name: "app"})
	layer, want := w.worked(t)
	src := Source{Layer: layer, Commit: "cmt_1", Message: "worked"}
	for _, o := range []ExportOptions{{Name: "worked:1"}, {Name: "worked:1", Docker: true}} {
		data, e := export(t, w, src, o)
		if again, e2 := export(t, w, src, o); !bytes.Equal(again, data) || e2 != e {
			t.Errorf("%+v: a second export differs: %+v, %+v", o, e, e2)
		}
		if e.Layers != 5 { // three of the image, the directory that it wants, and the commit
			t.Errorf("%d layers", e.Layers)
		}
		other := newWorld(t)
		got, err := other.Import(t.Context(), bytes.NewReader(data), "", quiet)
		if err != nil {
			t.Fatal(err)
		}
		if got.Template.Name != "worked:1" || got.Template.Digest != e.Digest || len(got.Warnings) != 0 {
			t.Errorf("imported %+v, %v", got.Template, got.Warnings)
		}
		dir, p := other.shown(t, "worked:1")
		if have := scan(t, dir); !slices.Equal(have, want) {
			for i := range min(len(have), len(want)) {
				if have[i] != want[i] {
					t.Errorf("got  %s\nwant %s", have[i], want[i])
				}
			}
			t.Errorf("%d files, want %d", len(have), len(want))
		}
		if p.User != "7:8" || p.Dir != "/app/data" || p.Env["A"] != "b c" {
			t.Errorf("plan %+v", p)
		}
		if back, _ := export(t, other, Source{Template: "worked:1"}, o); !bytes.Equal(back, data) {
			t.Errorf("%+v: what came in goes out differently", o)
		}
		other.nothingHalf(t)
	}
	w.nothingHalf(t)
}

// TestPushPull: a commit goes to a registry, where other programs find it valid, and comes back.
func TestPushPull(t *testing.T) {
	h := newHub(t)
	h.push(t, "app", app(t))
	w := newWorld(t, trusting(h))
	w.mustPull(t, h.host()+"/app", PullOptions{Name: "app"})
	layer, want := w.worked(t)
	src := Source{Layer: layer, Commit: "cmt_1", Message: "worked"}
	e, err := w.Push(t.Context(), src, h.host()+"/worked:1", Auth{}, quiet)
	if err != nil {
		t.Fatal(err)
	}
	img := h.image(t, "worked:1")
	if err := validate.Image(img); err != nil {
		t.Errorf("go-containerregistry finds it invalid: %v", err)
	}
	if d, err := img.Digest(); err != nil || d.String() != e.Digest {
		t.Errorf("digest %s, want %s, %v", d, e.Digest, err)
	}
	cf, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if n := len(cf.RootFS.DiffIDs); n != 5 || told(cf.History) != n || cf.History[n-1].CreatedBy != "casemate commit cmt_1" || cf.History[n-1].Comment != "worked" {
		t.Errorf("history %+v of %d layers", cf.History, n)
	}
	if !slices.Equal(cf.Config.Entrypoint, []string{"/app/bin/run"}) || cf.Config.Labels["org.example"] != "x" {
		t.Errorf("config %+v", cf.Config)
	}
	sent := h.count("PATCH ")
	if again, err := w.Push(t.Context(), src, h.host()+"/worked:1", Auth{}, quiet); err != nil || again != e {
		t.Errorf("again: %+v, %v", again, err)
	}
	if more := h.count("PATCH ") - sent; more != 0 {
		t.Errorf("a second push sent %d blobs", more)
	}
	other := newWorld(t, trusting(h))
	other.mustPull(t, h.host()+"/worked:1", PullOptions{Name: "back"})
	if dir, _ := other.shown(t, "back"); !slices.Equal(scan(t, dir), want) {
		t.Error("the tree differs")
	}
}

// TestImportDockerSave: what docker save wrote before it knew of OCI.
func TestImportDockerSave(t *testing.T) {
	w := newWorld(t)
	tag, err := name.NewTag("example.com/lib/app:2")
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := tarball.Write(tag, app(t), &b); err != nil {
		t.Fatal(err)
	}
	got, err := w.Import(t.Context(), &b, "", quiet)
	if err != nil {
		t.Fatal(err)
	}
	if got.Template.Name != "example.com/lib/app:2" {
		t.Errorf("%+v", got.Template)
	}
	// The oldest form: a folder for each layer, uncompressed, and a link for one that is like another.
	layers := [][]byte{tarOf(t, "{a", "1"), tarOf(t, "b", "2")}
	img := imageOf(t, v1.Config{}, layerOf(t, layers[0]), layerOf(t, layers[1]), layerOf(t, layers[0]))
	config, err := img.RawConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	var old bytes.Buffer
	tw := tar.NewWriter(&old)
	for _, f := range []struct{ name, body string }{
		{"x1/VERSION", "1.0"},
		{"x1/json", "{}"},
		{"x1/layer.tar", string(layers[0])},
		{"x2/layer.tar", string(layers[1])},
		{"abc.json", string(config)},
		{"repositories", `{"old":{"latest":"x2"}}`},
		{"manifest.json", `[{"Config":"abc.json","RepoTags":["old:latest"],"Layers":["x1/layer.tar","x2/layer.tar","x3/layer.tar"]}]`},
	} {
		if err := errors.Join(tw.WriteHeader(&tar.Header{Name: f.name, Mode: 0o644, Size: int64(len(f.body)), Typeflag: tar.TypeReg}), func() error { _, err := io.WriteString(tw, f.body); return err }()); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(tw.WriteHeader(&tar.Header{Name: "x3/layer.tar", Linkname: "../x1/layer.tar", Typeflag: tar.TypeSymlink}), tw.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Import(t.Context(), &old, "", quiet); err != nil {
		t.Fatal(err)
	}
	dir, _ := w.shown(t, "old:latest")
	if data, err := os.ReadFile(dir + "/{a"); err != nil || string(data) != "1" {
		t.Errorf("%q, %v", data, err)
	}
	w.nothingHalf(t)
}

func TestExportRefused(t *testing.T) {
	w := newWorld(t)
	for _, tt := range []struct {
		src  Source
		want errs.Kind
	}{
		{Source{Template: "host"}, errs.FailedPrecondition},
		{Source{Template: "none"}, errs.NotFound},
		{Source{Template: "base"}, errs.FailedPrecondition},
		{Source{Layer: "none"}, errs.NotFound},
	} {
		src, want := tt.src, tt.want
		if _, err := w.Export(t.Context(), src, ExportOptions{}, io.Discard, func(Exported) error { return nil }); !errs.Is(err, want) {
			t.Errorf("%+v: %v", src, err)
		}
	}
	p, err := w.store.Plan(t.Context(), rootfs.Request{ID: newID(), Template: "host", DiskBytes: 32 << 20})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Export(t.Context(), Source{Layer: w.commit(t, p)}, ExportOptions{}, io.Discard, func(Exported) error { return nil }); !errs.Is(err, errs.FailedPrecondition) {
		t.Errorf("a commit on template host: %v", err)
	}
}

func TestImportRefused(t *testing.T) {
	w := newWorld(t)
	layout := func(index string, files ...string) []byte {
		return tarOf(t, append([]string{"oci-layout", layoutText, "index.json", index}, files...)...)
	}
	wrong := digestOf([]byte("x")).Hex
	many := make([]string, 0, 10_000)
	for i := range maxMembers + 2 {
		many = append(many, fmt.Sprintf("f%d", i), "x")
	}
	for what, tt := range map[string]struct {
		data []byte
		want errs.Kind
	}{
		"no archive":       {[]byte(strings.Repeat("no archive ", 100)), errs.InvalidArgument},
		"nothing in it":    {tarOf(t, "readme", "x"), errs.InvalidArgument},
		"cut":              {tarOf(t, "big", strings.Repeat("x", 100_000))[:20_000], errs.InvalidArgument},
		"wrong digest":     {layout(`{"schemaVersion":2,"manifests":[]}`, "blobs/sha256/"+wrong, "y"), errs.InvalidArgument},
		"no manifest":      {layout(`{"schemaVersion":2,"manifests":[{"mediaType":"application/vnd.oci.image.manifest.v1+json","size":1,"digest":"sha256:` + wrong + `"}]}`), errs.InvalidArgument},
		"empty index":      {layout(`{"schemaVersion":2,"manifests":[]}`), errs.Unsupported},
		"index is no JSON": {layout(`nothing`), errs.InvalidArgument},
		"lacks the layer":  {tarOf(t, "c.json", `{}`, "manifest.json", `[{"Config":"c.json","Layers":["../../etc/passwd"]}]`), errs.InvalidArgument},
		"lacks the config": {tarOf(t, "manifest.json", `[{"Config":"/etc/passwd","Layers":[]}]`), errs.InvalidArgument},
		"two images":       {tarOf(t, "manifest.json", `[{},{}]`), errs.InvalidArgument},
		"many files":       {tarOf(t, many...), errs.TooLarge},
	} {
		if _, err := w.Import(t.Context(), bytes.NewReader(tt.data), "x", quiet); !errs.Is(err, tt.want) {
			t.Errorf("%s: %v", what, err)
		}
		w.nothingHalf(t)
	}
	if all, err := w.store.Templates(t.Context()); err != nil || len(all) != 3 {
		t.Errorf("templates: %v, %v", all, err)
	}
}

// TestSettingsGoRoundTrip: what an image says of the processes in it comes in and goes out.
func TestSettingsGoRoundTrip(t *testing.T) {
	want := v1.Config{
		Env: []string{"A=b"}, User: "5:6", WorkingDir: "/w", Entrypoint: []string{"run"}, Cmd: []string{"x"}, Labels: map[string]string{"l": "v"},
		ExposedPorts: map[string]struct{}{"80/tcp": {}}, Volumes: map[string]struct{}{"/v": {}}, Shell: []string{"sh"}, StopSignal: "INT",
		OnBuild:     []string{"RUN true"},
		Healthcheck: &v1.HealthConfig{Test: []string{"CMD", "true"}, Interval: 1, Timeout: 2, StartPeriod: 3, Retries: 4},
	}
	if d := cmp.Diff(want, configOf(settingsOf(want))); d != "" {
		t.Error(d)
	}
	if got := configOf(settingsOf(v1.Config{})); got.Healthcheck != nil {
		t.Errorf("an image without a check has %+v", got.Healthcheck)
	}
}
