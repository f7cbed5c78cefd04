package rootfs

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/testenv"
)

// hex8 is the id of a made-up layer or image.
func hex8(n int) string { return fmt.Sprintf("%08x", n) }

// importLayer imports a layer that fill fills, on those below.
func importLayer(t testing.TB, s *Store, id string, fit Fit, fill func(root string)) {
	t.Helper()
	d, err := s.NewDraft()
	if err != nil {
		t.Fatal(err)
	}
	fill(d.Root())
	if err := d.Finish(t.Context(), id, fit, LayerNote{SizeBytes: 1}); err != nil {
		t.Fatal(err)
	}
}

func put(t testing.TB, path, text string, mode os.FileMode) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
}

// twoLayers imports an image of two layers: the upper one removes a file and describes no directory.
func twoLayers(t testing.TB, s *Store) Image {
	t.Helper()
	importLayer(t, s, hex8(1), Fit{}, func(root string) {
		put(t, root+"/etc/passwd", "app:x:7:8::/srv:/bin/sh\n", 0o644)
		put(t, root+"/srv/old", "old", 0o644)
		put(t, root+"/srv/kept", "kept", 0o640)
		for _, err := range []error{
			os.Chmod(root, 0o751), os.Lchown(root+"/srv", 7, 8), syscall.Chmod(root+"/srv", 0o2770), syscall.Setxattr(root+"/srv", "user.note", []byte("x"), 0),
		} {
			if err != nil {
				t.Fatal(err)
			}
		}
	})
	fit := Fit{Below: []string{hex8(1)}, Implied: []string{".", "srv"}, Whiteouts: []string{"srv/old", "srv/none"}}
	importLayer(t, s, hex8(2), fit, func(root string) {
		put(t, root+"/srv/new", "new", 0o4755)
		for _, name := range []string{"old", "none"} {
			if err := syscall.Mknod(root+"/srv/"+name, syscall.S_IFCHR, 0); err != nil {
				t.Fatal(err)
			}
		}
	})
	img := Image{ID: hex8(3), Layers: []string{hex8(1), hex8(2)}, Extra: []byte(`{"x":1}`)}
	if err := s.PutImage(t.Context(), img); err != nil {
		t.Fatal(err)
	}
	return img
}

func TestStoredTemplate(t *testing.T) {
	dir := t.TempDir()
	s := open(t, Config{DataDir: dir, Mechanism: light(t)})
	img := twoLayers(t, s)
	stored := Stored{Name: "lib/app:1.0", Image: img.ID, Settings: Settings{
		Env: []string{"A=1", "B=x=y"}, User: "app:8", Dir: "srv", Labels: map[string]string{"l": "v"},
	}, Source: "example.com/lib/app:1.0", Digest: "sha256:00"}
	if err := s.PutTemplate(stored); err != nil {
		t.Fatal(err)
	}
	id, p := plan(t, s, Request{Template: "lib/app:1.0"})
	if p.User != "app:8" || p.Dir != "/srv" || p.Env["B"] != "x=y" || len(p.Lowers) != 2 || len(p.Committed) != 0 {
		t.Errorf("plan %+v", p)
	}
	shown := overlay(t, p)
	if st, err := os.Stat(shown); err != nil || st.Mode().Perm() != 0o751 {
		t.Errorf("root: %v, %v", st.Mode(), err)
	}
	var st syscall.Stat_t
	if err := syscall.Lstat(shown+"/srv", &st); err != nil || st.Mode&0o7777 != 0o2770 || st.Uid != 7 || st.Gid != 8 {
		t.Errorf("/srv, which the upper layer implies: %o %d:%d, %v", st.Mode, st.Uid, st.Gid, err)
	}
	if _, err := os.Lstat(shown + "/srv/old"); !notThere(err) {
		t.Errorf("a removed file shows: %v", err)
	}
	if _, err := os.Lstat(p.Lowers[0] + "/srv/none"); !notThere(err) {
		t.Errorf("a whiteout of nothing stays: %v", err)
	}
	// Names lead somewhere else at once; sandboxes and commits keep what they stand on.
	l := commit(t, s, id, p)
	if l.Base != img.base() || l.Plan.User != "app:8" {
		t.Errorf("commit stands on %+v", l)
	}
	if err := s.DropTemplate("lib/app:1.0"); err != nil {
		t.Fatal(err)
	}
	if err := s.Release(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	s.dropTemplates()
	if _, err := s.Image(img.ID); err != nil {
		t.Fatalf("the image below a commit is gone: %v", err)
	}
	again, q := plan(t, s, Request{Layer: l.ID})
	if len(q.Lowers) != 3 || q.User != "app:8" {
		t.Errorf("plan of the commit: %+v", q)
	}
	if err := s.Release(t.Context(), again); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Collect(t.Context(), nil, false); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Image(img.ID); !errs.Is(err, errs.NotFound) {
		t.Errorf("an image that nothing needs stays: %v", err)
	}
	if _, err := os.Stat(s.importedDir(hex8(1))); !notThere(err) {
		t.Errorf("its layer stays: %v", err)
	}
}

// TestStoredSurvives closes the store in between: names lead to the same files, and what was half imported
// is gone.
func TestStoredSurvives(t *testing.T) {
	dir := t.TempDir()
	cfg := Config{DataDir: dir, Mechanism: light(t), ImageBytes: testImage}
	testenv.Root(t)
	s, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	img := twoLayers(t, s)
	if err := s.PutTemplate(Stored{Name: "app", Image: img.ID}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.NewDraft(); err != nil { // as a server leaves it that is killed
		t.Fatal(err)
	}
	importLayer(t, s, hex8(9), Fit{}, func(string) {}) // of an image that never was complete
	if err := os.WriteFile(s.notePath("half")+".new", []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, cfg)
	if got, err := s.StoredTemplate("app"); err != nil || got.Image != img.ID {
		t.Fatalf("%+v, %v", got, err)
	}
	_, p := plan(t, s, Request{Template: "app", Profile: "locked"})
	if p.User != "1000" || p.Dir != "/" || p.Env["HOME"] != "/tmp" {
		t.Errorf("an image whose user is root, in locked: %+v", p)
	}
	_, p = plan(t, s, Request{Template: "app", Profile: "standard"})
	if p.User != "root" {
		t.Errorf("an image whose user is root, in standard: %+v", p)
	}
	left, err := filepath.Glob(s.templateDir() + "/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range left {
		if name := filepath.Base(path); strings.HasPrefix(name, "tmp-") || name == layerPrefix+hex8(9) {
			t.Errorf("%s is left", name)
		}
	}
	if names, err := os.ReadDir(s.nameDir()); err != nil || len(names) != 1 {
		t.Errorf("names: %v, %v", names, err)
	}
}

func TestStoredRefused(t *testing.T) {
	s := open(t, Config{Mechanism: light(t)})
	for _, bad := range []Stored{
		{Name: "host", Image: hex8(3)},
		{Name: "base", Image: hex8(3)},
		{Name: "", Image: hex8(3)},
		{Name: "x"},
		{Name: "x", Image: hex8(3)},
		{Name: "x", Layer: "none"},
		{Name: "x", Image: hex8(3), Layer: "none"},
	} {
		if err := s.PutTemplate(bad); !errs.Is(err, errs.NotFound) && !errs.Is(err, errs.InvalidArgument) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	if err := s.DropTemplate("base"); !errs.Is(err, errs.FailedPrecondition) {
		t.Errorf("drop base: %v", err)
	}
	if err := s.DropTemplate("none"); !errs.Is(err, errs.NotFound) {
		t.Errorf("drop none: %v", err)
	}
	if err := s.PutImage(t.Context(), Image{ID: hex8(4), Layers: []string{hex8(77)}}); !errs.Is(err, errs.NotFound) {
		t.Errorf("an image without its layer: %v", err)
	}
	d, err := s.NewDraft()
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Finish(t.Context(), "../../x", Fit{}, LayerNote{}); !errs.Is(err, errs.InvalidArgument) {
		t.Errorf("an id that is a path: %v", err)
	}
}

// TestImpliedBelowLink: files that a layer puts below a symbolic link of a layer beneath it would hide the link.
func TestImpliedBelowLink(t *testing.T) {
	s := open(t, Config{Mechanism: light(t)})
	importLayer(t, s, hex8(1), Fit{}, func(root string) {
		put(t, root+"/usr/lib/a", "a", 0o644)
		if err := os.Symlink("usr/lib", root+"/lib"); err != nil {
			t.Fatal(err)
		}
	})
	d, err := s.NewDraft()
	if err != nil {
		t.Fatal(err)
	}
	put(t, d.Root()+"/lib/b", "b", 0o644)
	err = d.Finish(t.Context(), hex8(2), Fit{Below: []string{hex8(1)}, Implied: []string{"lib"}}, LayerNote{})
	if !errs.Is(err, errs.InvalidArgument) || !strings.Contains(err.Error(), "/lib") {
		t.Errorf("%v", err)
	}
}

// TestManyLayers: an image of many layers shows as one, which was merged of them.
func TestManyLayers(t *testing.T) {
	s := open(t, Config{Mechanism: light(t)})
	var layers []string
	for i := range maxShown + 2 {
		importLayer(t, s, hex8(i), Fit{Below: layers}, func(root string) {
			put(t, fmt.Sprintf("%s/d/%d", root, i), "x", 0o644)
			if i > 0 {
				if err := syscall.Mknod(fmt.Sprintf("%s/d/%d", root, i-1), syscall.S_IFCHR, 0); err != nil {
					t.Fatal(err)
				}
			}
		})
		layers = append(layers, hex8(i))
	}
	img := Image{ID: hex8(99), Layers: layers}
	if err := s.PutImage(t.Context(), img); err != nil {
		t.Fatal(err)
	}
	if err := s.PutTemplate(Stored{Name: "many", Image: img.ID}); err != nil {
		t.Fatal(err)
	}
	_, p := plan(t, s, Request{Template: "many"})
	if len(p.Lowers) != 1 {
		t.Fatalf("%d layers are mounted", len(p.Lowers))
	}
	names, err := os.ReadDir(overlay(t, p) + "/d")
	if err != nil || len(names) != 1 || names[0].Name() != fmt.Sprint(maxShown+1) {
		t.Errorf("shown: %v, %v", names, err)
	}
}
