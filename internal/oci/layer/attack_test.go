package layer

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/linux/fd"
	"casemate.dev/internal/testenv"
)

// naive unpacks as a program does that thinks nothing ill of an archive: paths are joined, and the kernel follows
// what it finds. What it follows may lead anywhere, and this runs as root: so an entry whose directory does not
// lie below within is not acted on.
func naive(t *testing.T, data []byte, dir, within string) {
	t.Helper()
	if !strings.HasPrefix(within, os.TempDir()+"/Test") || !strings.HasPrefix(dir, within) {
		t.Fatalf("a naive unpack of %s within %s is too dangerous", dir, within)
	}
	in := tar.NewReader(bytes.NewReader(data))
	for {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil && !errors.Is(err, tar.ErrInsecurePath) {
			t.Fatal(err)
		}
		path := dir + "/" + h.Name
		if filepath.IsAbs(h.Name) {
			path = h.Name
		}
		if !leadsBelow(path, within) {
			continue
		}
		_ = os.MkdirAll(filepath.Dir(path), 0o755)
		switch h.Typeflag {
		case tar.TypeDir:
			_ = os.Mkdir(path, 0o755)
		case tar.TypeSymlink:
			_ = os.RemoveAll(path)
			_ = os.Symlink(h.Linkname, path)
		case tar.TypeLink:
			target := h.Linkname
			if !filepath.IsAbs(target) {
				target = dir + "/" + target
			}
			_ = os.Link(target, path)
		case tar.TypeChar:
			_ = syscall.Mknod(path, syscall.S_IFCHR|0o666, int(h.Devmajor<<8|h.Devminor))
		default:
			body, _ := io.ReadAll(in)
			if name, ok := strings.CutPrefix(filepath.Base(path), whiteoutPrefix); ok {
				_ = os.RemoveAll(filepath.Dir(path) + "/" + name)
				continue
			}
			_ = os.WriteFile(path, body, 0o644)
		}
		for k, v := range h.PAXRecords {
			if attr, ok := strings.CutPrefix(k, xattrPrefix); ok {
				_ = syscall.Setxattr(path, attr, []byte(v), 0)
			}
		}
	}
}

// leadsBelow reports whether what an operation on path touches lies below within, links followed.
func leadsBelow(path, within string) bool {
	for dir := filepath.Dir(path); ; dir = filepath.Dir(dir) {
		real, err := filepath.EvalSymlinks(dir)
		if errors.Is(err, fs.ErrNotExist) && dir != "/" {
			continue // it will be made
		}
		if err != nil || !strings.HasPrefix(real+"/", within+"/") {
			return false
		}
		break
	}
	if _, err := os.Lstat(path); err != nil {
		return true
	}
	real, err := filepath.EvalSymlinks(path)
	return err == nil && strings.HasPrefix(real, within+"/")
}

// place is where an attack happens: a root to unpack into, and beside it what the attack is after.
type place struct{ root, victim string }

func newPlace(t *testing.T) place {
	t.Helper()
	dir := t.TempDir()
	p := place{dir + "/root", dir + "/victim"}
	for _, d := range []string{p.root, p.victim} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(p.victim+"/secret", []byte("untouched"), 0o600); err != nil {
		t.Fatal(err)
	}
	return p
}

// hurt reports whether the attack reached what lies outside of the root, in any way.
func (p place) hurt(t *testing.T) bool {
	t.Helper()
	entries, err := os.ReadDir(p.victim)
	if err != nil || len(entries) != 1 {
		return true
	}
	var st syscall.Stat_t
	if err := syscall.Lstat(p.victim+"/secret", &st); err != nil {
		return true
	}
	if st.Nlink != 1 || st.Mode&0o7777 != 0o600 || read(t, p.victim, "secret") != "untouched" {
		return true
	}
	beside, err := os.ReadDir(filepath.Dir(p.victim))
	return err != nil || len(beside) != 2
}

// attacks are archives that try to get out of the root, by what they try. Each is refused, or does what it
// says inside of the root.
func attacks(t *testing.T, p place) map[string][]byte {
	t.Helper()
	deep := strings.Repeat("../", 40) + strings.TrimPrefix(p.victim, "/")
	return map[string][]byte{
		"parent names":                  newArchive().file(t, "../victim/new", "x").done(t),
		"parent names in the middle":    newArchive().dir(t, "a").file(t, "a/../../victim/secret", "x").done(t),
		"absolute name":                 newArchive().file(t, p.victim+"/new", "x").done(t),
		"symbolic link to outside":      newArchive().symlink(t, "l", p.victim).file(t, "l/secret", "x").done(t),
		"symbolic link with parents":    newArchive().symlink(t, "l", deep).file(t, "l/new", "x").done(t),
		"symbolic link to /":            newArchive().symlink(t, "etc", "/").file(t, "etc"+p.victim+"/secret", "x").done(t),
		"chain of symbolic links":       newArchive().symlink(t, "a", "..").symlink(t, "b", "a/victim").file(t, "b/new", "x").done(t),
		"file over a symbolic link":     newArchive().symlink(t, "l", p.victim+"/secret").file(t, "l", "x").done(t),
		"directory over a link":         newArchive().symlink(t, "l", p.victim).add(t, tar.Header{Name: "l", Typeflag: tar.TypeDir, Mode: 0o777}, "").file(t, "l/new", "x").done(t),
		"directory replaced by a link":  newArchive().dir(t, "d").file(t, "d/a", "a").symlink(t, "d", p.victim).file(t, "d/new", "x").done(t),
		"hard link to outside":          newArchive().link(t, "l", "../victim/secret").done(t),
		"absolute hard link":            newArchive().link(t, "l", p.victim+"/secret").done(t),
		"hard link through a link":      newArchive().symlink(t, "s", p.victim).link(t, "l", "s/secret").done(t),
		"hard link to a symbolic link":  newArchive().symlink(t, "s", p.victim+"/secret").link(t, "l", "s").file(t, "l", "x").done(t),
		"whiteout of parent":            newArchive().file(t, "a/.wh...", "").done(t),
		"whiteout through a link":       newArchive().symlink(t, "l", p.victim).file(t, "l/.wh.secret", "").done(t),
		"opaque mark through a link":    newArchive().symlink(t, "l", p.victim).file(t, "l/.wh..wh..opq", "").file(t, "l/x", "x").done(t),
		"attributes through a link":     newArchive().symlink(t, "l", p.victim).add(t, tar.Header{Name: "l/secret", PAXRecords: map[string]string{xattrPrefix + "user.x": "y"}}, "").done(t),
		"mode of a directory by a link": newArchive().symlink(t, "l", "../victim").add(t, tar.Header{Name: "l/.", Typeflag: tar.TypeDir, Mode: 0o777}, "").file(t, "l/n", "x").done(t),
	}
}

// harmless are those that do nothing in a naive program either; they are here for what a cleverer one may do.
func harmless(what string) bool {
	return what == "hard link to a symbolic link" || what == "whiteout of parent"
}

func TestAttacksStayInside(t *testing.T) {
	testenv.Root(t)
	for what := range attacks(t, newPlace(t)) {
		t.Run(what, func(t *testing.T) {
			p := newPlace(t)
			_, err := unpack(t, attacks(t, p)[what], p.root, Limits{})
			if err != nil && !errs.Is(err, errs.InvalidArgument) {
				t.Errorf("error %v", err)
			}
			if p.hurt(t) {
				t.Error("it reached what lies outside")
			}
			// Twin: the archive does get out of a program that follows what it finds.
			twin := newPlace(t)
			naive(t, attacks(t, twin)[what], twin.root, filepath.Dir(twin.root))
			if !twin.hurt(t) && !harmless(what) {
				t.Error("twin: the attack does nothing without the defence")
			}
		})
	}
}

// TestDevicesAreLeftOut: a device would be the host's, and a raw whiteout would hide what its maker has no right to.
func TestDevicesAreLeftOut(t *testing.T) {
	data := newArchive().
		add(t, tar.Header{Name: "mem", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 1}, "").
		add(t, tar.Header{Name: "gone", Typeflag: tar.TypeChar}, "").
		add(t, tar.Header{Name: "dev/sda", Typeflag: tar.TypeBlock, Devmajor: 8}, "").
		file(t, "after", "x").done(t)
	dir, r := mustUnpack(t, data)
	if r.Devices != 3 {
		t.Errorf("%d devices", r.Devices)
	}
	for _, name := range []string{"mem", "gone", "dev/sda"} {
		if _, err := os.Lstat(dir + "/" + name); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is there: %v", name, err)
		}
	}
	twin := t.TempDir()
	naive(t, data, twin, twin)
	if st, err := os.Lstat(twin + "/mem"); err != nil || st.Mode()&os.ModeCharDevice == 0 {
		t.Errorf("twin: no device without the defence: %v", err)
	}
}

func TestKernelDirectoriesStayDirectories(t *testing.T) {
	for what, data := range map[string][]byte{
		"dev":              newArchive().symlink(t, "dev", "etc").done(t),
		"proc":             newArchive().symlink(t, "./proc", "/").done(t),
		"sys":              newArchive().file(t, "/sys", "x").done(t),
		"dev after a dir":  newArchive().dir(t, "dev").symlink(t, "dev", "tmp").done(t),
		"dev by way of":    newArchive().symlink(t, "x", "/").symlink(t, "x/dev", "tmp").done(t),
		"dev as hard link": newArchive().file(t, "f", "x").link(t, "dev", "f").done(t),
		"whiteout":         newArchive().file(t, ".wh.proc", "").done(t),
	} {
		if _, err := unpack(t, data, t.TempDir(), Limits{}); !errs.Is(err, errs.InvalidArgument) {
			t.Errorf("%s: %v", what, err)
		}
	}
	twin := t.TempDir()
	naive(t, newArchive().symlink(t, "./proc", "etc").done(t), twin, twin)
	if st, err := os.Lstat(twin + "/proc"); err != nil || st.Mode()&os.ModeSymlink == 0 {
		t.Errorf("twin: %v", err)
	}
}

// TestOverlayAttributesAreStripped: overlayfs obeys them in a lower layer.
func TestOverlayAttributesAreStripped(t *testing.T) {
	records := map[string]string{}
	for _, attr := range []string{
		"user.overlay.redirect", "user.overlay.opaque", "user.overlay.metacopy", "user.overlay.whiteout", "trusted.overlay.opaque",
		"security.selinux", "trusted.x", "user.kept",
	} {
		records[xattrPrefix+attr] = "y"
	}
	data := newArchive().
		add(t, tar.Header{Name: "f", PAXRecords: records}, "").
		add(t, tar.Header{Name: "d", Typeflag: tar.TypeDir, PAXRecords: records}, "").done(t)
	dir, r := mustUnpack(t, data)
	if r.Attributes != 14 {
		t.Errorf("%d attributes were left out", r.Attributes)
	}
	root, err := fd.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	for _, name := range []string{"f", "d"} {
		if got, err := fd.Xattrs(root, name); err != nil || len(got) != 1 || got[0] != "user.kept" {
			t.Errorf("%s has %v, %v", name, got, err)
		}
	}
	twin := t.TempDir()
	naive(t, data, twin, twin)
	if n, err := syscall.Getxattr(twin+"/d", "user.overlay.opaque", make([]byte, 8)); err != nil || n != 1 {
		t.Errorf("twin: %d, %v", n, err)
	}
}

func TestBombs(t *testing.T) {
	zeros := newArchive().file(t, "zeros", strings.Repeat("\x00", 9<<20)).done(t)
	many := newArchive()
	for i := range 200 {
		many.file(t, strings.Repeat("n", i+1), "")
	}
	again := newArchive() // one name, over and over: what is counted is work, not what is left
	for range 200 {
		again.file(t, "n", "x")
	}
	for what, tt := range map[string]struct {
		data []byte
		lim  Limits
	}{
		"size":             {zeros, Limits{Bytes: 1 << 20}},
		"compressed size":  {zipped(t, zeros), Limits{Bytes: 1 << 20}},
		"many files":       {many.done(t), Limits{Files: 100}},
		"one file, often":  {again.done(t), Limits{Files: 100}},
		"claimed size":     {sparse(t), Limits{Bytes: 1 << 20}},
		"zeros at the end": {append(newArchive().done(t), make([]byte, 4<<20)...), Limits{Bytes: 1 << 20}},
	} {
		_, err := unpack(t, tt.data, t.TempDir(), tt.lim)
		if !errs.Is(err, errs.TooLarge) {
			t.Errorf("%s: %v", what, err)
		} else if _, hint := errs.PublicText(err); hint == "" {
			t.Errorf("%s: %v has no hint", what, err)
		}
		if what != "claimed size" { // twin: without the limit it all goes to disk
			if _, err := unpack(t, tt.data, t.TempDir(), Limits{}); err != nil {
				t.Errorf("twin of %s: %v", what, err)
			}
		}
	}
}

// TestRatio: 300 MB of zeros from 300 KB.
func TestRatio(t *testing.T) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.WriteHeader(&tar.Header{Name: "zeros", Size: 300 << 20, Typeflag: tar.TypeReg, Mode: 0o644}); err != nil {
		t.Fatal(err)
	}
	data := zippedZeros(t, b.Bytes(), 300<<20)
	if _, err := unpack(t, data, t.TempDir(), Limits{}); !errs.Is(err, errs.TooLarge) || !strings.Contains(err.Error(), "200 times") {
		t.Errorf("%d bytes: %v", len(data), err)
	}
	if r, err := unpack(t, data, t.TempDir(), Limits{Ratio: 5000}); err != nil || r.Bytes != 300<<20 {
		t.Errorf("twin: %+v, %v", r, err)
	}
}
