package layer

import (
	"archive/tar"
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/linux/fd"
	"casemate.dev/internal/testenv"
)

// capNetBind is cap_net_bind_service+ep, as setcap writes it.
const capNetBind = "\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"

// sparse is an archive with a file that claims a size of 8 EB and holds nothing (GNU format 1.0).
func sparse(t testing.TB) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	body := "0\n"
	body += strings.Repeat("\x00", 512-len(body))
	h := &tar.Header{Name: "GNUSparseFile.0/huge", Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(body)), Format: tar.FormatPAX, PAXRecords: map[string]string{
		"XYZ.sparse.major": "1", "XYZ.sparse.minor": "0", "XYZ.sparse.name": "huge", "XYZ.sparse.realsize": "8000000000000000000",
	}}
	if err := w.WriteHeader(h); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write([]byte(body)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	// The writer refuses the real keys.
	return bytes.ReplaceAll(b.Bytes(), []byte(" XYZ.sparse."), []byte(" GNU.sparse."))
}

// zippedZeros compresses head and so many zeros.
func zippedZeros(t testing.TB, head []byte, n int) []byte {
	t.Helper()
	var b bytes.Buffer
	z, err := gzip.NewWriterLevel(&b, gzip.BestSpeed)
	if err != nil {
		t.Fatal(err)
	}
	block := make([]byte, 1<<20)
	_, err = z.Write(head)
	for n > 0 && err == nil {
		_, err = z.Write(block)
		n -= len(block)
	}
	if err == nil {
		_, err = z.Write(make([]byte, 1024))
	}
	if err == nil {
		err = z.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// everything is an archive with what real ones have.
func everything(t testing.TB) []byte {
	long := strings.Repeat("long/", 60) + strings.Repeat("n", 200)
	return newArchive().
		add(t, tar.Header{Name: "./", Typeflag: tar.TypeDir, Mode: 0o711}, "").
		add(t, tar.Header{Name: "./usr/bin/sudo", Mode: 0o4755}, "program").
		add(t, tar.Header{Name: "usr/bin/server", Mode: 0o755, PAXRecords: map[string]string{xattrPrefix + "security.capability": capNetBind}}, "program").
		add(t, tar.Header{Name: "srv", Typeflag: tar.TypeDir, Mode: 0o2770, Uid: 65534, Gid: 65535, PAXRecords: map[string]string{xattrPrefix + "user.note": "a\x00b"}}, "").
		add(t, tar.Header{Name: "srv/f", Uid: 7, Gid: 8, Mode: 0o640}, "owned").
		add(t, tar.Header{Name: "tmp", Typeflag: tar.TypeDir, Mode: 0o1777}, "").
		symlink(t, "lib", "usr/lib").symlink(t, "abs", "/etc/passwd").symlink(t, "up", "../../../x").
		file(t, "lib/libc.so", "by the link").
		file(t, "bytes\xff\xfe\n", "odd name").file(t, long, "long name").
		file(t, "a", "first").link(t, "b", "a").link(t, "c", "./b").
		add(t, tar.Header{Name: "pipe", Typeflag: tar.TypeFifo, Mode: 0o600}, "").
		file(t, "hole", strings.Repeat("\x00", 1<<20)+"end").
		file(t, "twice", "old").file(t, "twice", "new").
		file(t, "was/dir/f", "x").file(t, "was/dir", "now a file").
		file(t, "sub/.wh.gone", "").file(t, "sub/.wh..wh.plnk", "").
		dir(t, "fresh").file(t, "fresh/.wh..wh..opq", "").file(t, "fresh/x", "x").
		file(t, ".wh.both", "").dir(t, "both").file(t, "both/x", "x").
		dir(t, "turn").file(t, ".wh.turn", "").
		add(t, tar.Header{Name: "foreign", Uid: 70000, Gid: 3_000_000, Mode: 0o6755}, "x").
		done(t)
}

func TestUnpackEverything(t *testing.T) {
	dir, r := mustUnpack(t, everything(t))
	long := strings.Repeat("long/", 60) + strings.Repeat("n", 200)
	for path, want := range map[string]string{
		"usr/lib/libc.so": "by the link", "bytes\xff\xfe\n": "odd name", long: "long name", "twice": "new", "was/dir": "now a file",
		"c": "first", "both/x": "x",
	} {
		if got := read(t, dir, path); got != want {
			t.Errorf("%q holds %q", path, got)
		}
	}
	stat := func(path string) (st syscall.Stat_t) {
		if err := syscall.Lstat(dir+"/"+path, &st); err != nil {
			t.Errorf("%s: %v", path, err)
		}
		return st
	}
	for path, want := range map[string]uint32{".": 0o711, "usr/bin/sudo": 0o4755, "srv": 0o2770, "tmp": 0o1777, "srv/f": 0o640, "foreign": 0o755} {
		if got := stat(path).Mode & 0o7777; got != want {
			t.Errorf("%s has mode %o, want %o", path, got, want)
		}
	}
	if st := stat("srv"); st.Uid != 65534 || st.Gid != 65535 || st.Mtim.Sec != 1_700_000_000 || st.Mtim.Nsec != 123_456_789 {
		t.Errorf("srv: %+v", st)
	}
	if st := stat("foreign"); st.Uid != nobody || st.Gid != nobody || r.Nobodies != 1 {
		t.Errorf("foreign: %d:%d, %d nobodies", st.Uid, st.Gid, r.Nobodies)
	}
	if a, c := stat("a"), stat("c"); a.Ino != c.Ino || a.Nlink != 3 {
		t.Errorf("hard links: %d, %d", a.Ino, a.Nlink)
	}
	if st := stat("hole"); st.Size != 1<<20+3 || st.Blocks*512 > 512<<10 {
		t.Errorf("hole: %d bytes in %d", st.Size, st.Blocks*512)
	}
	if st := stat("sub/gone"); st.Mode&syscall.S_IFMT != syscall.S_IFCHR || st.Rdev != 0 {
		t.Errorf("whiteout: %o %d", st.Mode, st.Rdev)
	}
	opaque := func(path string) bool {
		n, err := syscall.Getxattr(dir+"/"+path, opaqueAttr, make([]byte, 4))
		return err == nil && n == 1
	}
	if !opaque("fresh") || !opaque("both") || !opaque("turn") || opaque("sub") || opaque("srv") {
		t.Error("opaque directories are wrong")
	}
	buf := make([]byte, 64)
	if n, err := syscall.Getxattr(dir+"/usr/bin/server", "security.capability", buf); err != nil || string(buf[:n]) != capNetBind {
		t.Errorf("capability: %x, %v", buf[:max(n, 0)], err)
	}
	if !slices.Equal(r.Whiteouts, []string{"sub/gone"}) {
		t.Errorf("whiteouts %q", r.Whiteouts)
	}
	for _, path := range []string{"usr", "usr/bin", "usr/lib", "long", "sub", "was"} {
		if !slices.Contains(r.Implied, path) {
			t.Errorf("%s is implied, and not in %q", path, r.Implied)
		}
	}
	for _, path := range []string{".", "srv", "fresh", "both"} {
		if slices.Contains(r.Implied, path) {
			t.Errorf("%s is described", path)
		}
	}
}

func TestCompressions(t *testing.T) {
	plain := everything(t)
	var z bytes.Buffer
	w, err := zstd.NewWriter(&z)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(plain); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	skipped := append([]byte{0x50, 0x2a, 0x4d, 0x18, 4, 0, 0, 0, 'a', 'b', 'c', 'd'}, z.Bytes()...)
	members := slices.Concat(zipped(t, plain[:1000]), zipped(t, plain[1000:]))
	dir, first := mustUnpack(t, plain)
	want := scan(t, dir)
	for what, data := range map[string][]byte{"gzip": zipped(t, plain), "zstd": z.Bytes(), "zstd with a skippable frame": skipped, "gzip of two members": members} {
		dir, r := mustUnpack(t, data)
		if r.DiffID != first.DiffID {
			t.Errorf("%s: diff id %s, want %s", what, r.DiffID, first.DiffID)
		}
		if got := scan(t, dir); !slices.Equal(got, want) {
			t.Errorf("%s gives another tree", what)
		}
	}
	if _, err := unpack(t, []byte("BZh91AY&SY"), t.TempDir(), Limits{}); !errs.Is(err, errs.Unsupported) {
		t.Errorf("bzip2: %v", err)
	}
}

func TestDamaged(t *testing.T) {
	plain := newArchive().file(t, "a", strings.Repeat("some text", 1000)).file(t, "b", "x").done(t)
	z := zipped(t, plain)
	flipped := slices.Clone(z)
	flipped[len(flipped)-6] ^= 1 // in the checksum
	for what, data := range map[string][]byte{
		"cut archive": plain[:2000], "cut gzip": z[:len(z)/2], "wrong checksum": flipped, "no archive": []byte(strings.Repeat("hello ", 200)),
		"garbage after gzip": append(slices.Clone(z), "garbage"...), "no frame": {0x28, 0xb5, 0x2f, 0xfd, 1, 2, 3},
	} {
		if _, err := unpack(t, data, t.TempDir(), Limits{}); !errs.Is(err, errs.InvalidArgument) {
			t.Errorf("%s: %v", what, err)
		}
	}
	for what, data := range map[string][]byte{
		"file below a file":   newArchive().file(t, "f", "").file(t, "f/g", "").done(t),
		"link to a directory": newArchive().dir(t, "d").link(t, "l", "d").done(t),
		"link to nothing":     newArchive().link(t, "l", "none").done(t),
		"link to itself":      newArchive().file(t, "l", "").link(t, "l", "l").done(t),
		"link loop":           newArchive().symlink(t, "x", "y").symlink(t, "y", "x").file(t, "x/f", "").done(t),
		"long name":           newArchive().file(t, strings.Repeat("n", 300), "").done(t),
		"negative owner":      newArchive().add(t, tar.Header{Name: "f", Uid: -1}, "").done(t),
		"bad capability":      newArchive().add(t, tar.Header{Name: "f", PAXRecords: map[string]string{xattrPrefix + "security.capability": "x"}}, "").done(t),
		"root as a file":      newArchive().file(t, ".", "").done(t),
		"empty whiteout":      newArchive().file(t, "d/.wh.", "").done(t),
	} {
		if _, err := unpack(t, data, t.TempDir(), Limits{}); !errs.Is(err, errs.InvalidArgument) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// TestRoundTrip packs random layers and unpacks them again: the trees are equal in everything, and so are the
// archives.
func TestRoundTrip(t *testing.T) {
	testenv.Root(t)
	for seed := range uint64(20) {
		dir := t.TempDir()
		randomLayer(t, rand.New(rand.NewPCG(seed, 1)), dir)
		first := pack(t, dir)
		copied, _ := mustUnpack(t, first)
		if got, want := scan(t, copied), scan(t, dir); !slices.Equal(got, want) {
			for i := range got {
				if i >= len(want) || got[i] != want[i] {
					t.Fatalf("seed %d: got\n%s\nwant\n%s", seed, got[i], want[min(i, len(want)-1)])
				}
			}
			t.Fatalf("seed %d: %d files, want %d", seed, len(got), len(want))
		}
		if !bytes.Equal(pack(t, copied), first) {
			t.Fatalf("seed %d: the archive differs", seed)
		}
	}
}

// randomLayer makes a tree as a sandbox and overlayfs leave it.
func randomLayer(t testing.TB, r *rand.Rand, dir string) {
	t.Helper()
	dirs, files := []string{dir}, []string{}
	names := []string{"a", "b", "not\xff\xfeutf8", "new\nline", strings.Repeat("n", 255), "c d", "é", "-x"}
	for i := range 60 {
		parent := dirs[r.IntN(len(dirs))]
		path := fmt.Sprintf("%s/%02d%s", parent, i, names[r.IntN(len(names))])
		path = path[:min(len(path), len(parent)+256)]
		var err error
		switch r.IntN(9) {
		case 0, 1:
			if err = os.Mkdir(path, 0o755); err == nil {
				dirs = append(dirs, path)
				if r.IntN(4) == 0 {
					err = syscall.Setxattr(path, opaqueAttr, []byte("y"), 0)
				}
			}
		case 2:
			err = os.Symlink(names[r.IntN(len(names))], path)
		case 3:
			err = syscall.Mknod(path, syscall.S_IFCHR, 0)
		case 4:
			err = syscall.Mkfifo(path, 0o600)
		case 5:
			if len(files) > 0 {
				err = os.Link(files[r.IntN(len(files))], path)
			}
		default:
			err = os.WriteFile(path, bytes.Repeat([]byte(names[r.IntN(3)]), r.IntN(5000)), 0o600)
			files = append(files, path)
			if err == nil && r.IntN(3) == 0 {
				err = os.Truncate(path, 1<<20)
			}
			_ = syscall.Setxattr(path, "user.note", []byte(names[r.IntN(len(names))]), 0)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range append(slices.Clone(files), dirs...) {
		_ = os.Lchown(path, r.IntN(65536), r.IntN(65536))
		_ = syscall.Chmod(path, uint32(r.IntN(0o10000)))
		if r.IntN(5) == 0 && slices.Contains(files, path) {
			_ = syscall.Setxattr(path, "security.capability", []byte(capNetBind), 0)
		}
	}
}

func TestPackRefuses(t *testing.T) {
	for what, fill := range map[string]func(dir string) error{
		"a name like a whiteout's": func(dir string) error { return os.WriteFile(dir+"/.wh.x", nil, 0o644) },
		"a device":                 func(dir string) error { return syscall.Mknod(dir+"/d", syscall.S_IFCHR, 1<<8|3) },
		"a redirect": func(dir string) error {
			if err := os.Mkdir(dir+"/r", 0o755); err != nil {
				return err
			}
			return syscall.Setxattr(dir+"/r", "user.overlay.redirect", []byte("/etc"), 0)
		},
	} {
		testenv.Root(t)
		dir := t.TempDir()
		if err := fill(dir); err != nil {
			t.Fatal(err)
		}
		root, err := fd.OpenRoot(dir)
		if err != nil {
			t.Fatal(err)
		}
		if err := Pack(t.Context(), root, &bytes.Buffer{}); !errs.Is(err, errs.FailedPrecondition) {
			t.Errorf("%s: %v", what, err)
		}
		_ = root.Close()
	}
}

// FuzzUnpack: whatever the bytes are, nothing outside of the root changes and nothing panics.
func FuzzUnpack(f *testing.F) {
	f.Add(everything(f))
	f.Add(zipped(f, newArchive().symlink(f, "l", "..").file(f, "l/x", "x").done(f)))
	f.Add(sparse(f))
	f.Add([]byte{0x28, 0xb5, 0x2f, 0xfd})
	f.Fuzz(func(t *testing.T, data []byte) {
		p := place{root: t.TempDir() + "/root"}
		p.victim = strings.TrimSuffix(p.root, "/root") + "/victim"
		for _, d := range []string{p.root, p.victim} {
			if err := os.Mkdir(d, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(p.victim+"/secret", []byte("untouched"), 0o600); err != nil {
			t.Fatal(err)
		}
		r, err := unpack(t, data, p.root, Limits{Bytes: 1 << 20, Files: 100})
		if p.hurt(t) {
			t.Fatalf("it reached what lies outside: %v", err)
		}
		if err == nil && (r.Files > 100 || r.Bytes > 1<<20) {
			t.Fatalf("limits: %+v", r)
		}
		if st, err := os.Lstat(p.root + "/dev"); err == nil && !st.IsDir() {
			t.Fatalf("/dev is %s", st.Mode())
		}
	})
}
