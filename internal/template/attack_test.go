package template

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/testenv"
)

// packed is an archive of headers, each with so many bytes as it says.
func packed(t testing.TB, headers ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range headers {
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(make([]byte, h.Size)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// block is a header as no writer of today would make it, and what follows it. size is what it says.
func block(name string, kind byte, size int64, more func(header []byte), data string) []byte {
	h := make([]byte, 512)
	copy(h, name)
	copy(h[100:], "0000644\x000000000\x000000000\x00")
	copy(h[124:], fmt.Sprintf("%011o\x0000000000000\x00        ", size))
	h[156] = kind
	copy(h[257:], "ustar  \x00")
	if more != nil {
		more(h)
	}
	sum := 0
	for _, c := range h {
		sum += int(c)
	}
	copy(h[148:], fmt.Sprintf("%06o\x00 ", sum))
	return slices.Concat(h, []byte(data), make([]byte, (512-len(data)%512)%512))
}

func pax(records ...string) []byte {
	var b strings.Builder
	for _, r := range records {
		n := len(r) + 3 // a space, a line feed, and a digit at least
		for len(fmt.Sprint(n))+len(r)+2 != n {
			n++
		}
		fmt.Fprintf(&b, "%d %s\n", n, r)
	}
	return block("pax", tar.TypeXHeader, int64(b.Len()), nil, b.String())
}

func gzipped(t testing.TB, b []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	if _, err := w.Write(b); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// zstdOfWindow is a stream that its reader must keep so many bytes of.
func zstdOfWindow(t testing.TB, size int) []byte {
	t.Helper()
	var out bytes.Buffer
	w, err := zstd.NewWriter(&out, zstd.WithWindowSize(size), zstd.WithEncoderConcurrency(1))
	if err != nil {
		t.Fatal(err)
	}
	for range 1024 { // longer than what is sent as one block
		if _, err := w.Write(make([]byte, 2048)); err != nil {
			t.Fatal(err)
		}
		if err := w.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// hostile are uploads that are refused, by what the error says.
func hostile(t testing.TB) map[string]struct {
	want string
	data []byte
} {
	deep := make([]tar.Header, 260)
	for i := range deep {
		deep[i] = tar.Header{Name: fmt.Sprint(i, strings.Repeat("/d", 2000)), Typeflag: tar.TypeReg}
	}
	whole := packed(t, tar.Header{Name: "f", Typeflag: tar.TypeReg, Size: 3000})
	sparseMap := func(h []byte) { copy(h[483:], fmt.Sprintf("%011o\x00", int64(1)<<32)) }
	return map[string]struct {
		want string
		data []byte
	}{
		"up":                 {"leads out", packed(t, tar.Header{Name: "../evil", Typeflag: tar.TypeReg})},
		"up from inside":     {"leads out", packed(t, tar.Header{Name: "a/b/../../../evil", Typeflag: tar.TypeReg})},
		"up, absolute":       {"leads out", packed(t, tar.Header{Name: "//../evil", Typeflag: tar.TypeReg})},
		"only up":            {"leads out", packed(t, tar.Header{Name: "..", Typeflag: tar.TypeDir})},
		"a long name":        {"leads out", packed(t, tar.Header{Name: strings.Repeat("x/", 2500), Typeflag: tar.TypeDir})},
		"a device":           {"is a device", packed(t, tar.Header{Name: "sda", Typeflag: tar.TypeBlock, Devmajor: 8})},
		"memory":             {"is a device", packed(t, tar.Header{Name: "mem", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 1})},
		"a pipe":             {"is a device, a pipe", packed(t, tar.Header{Name: "p", Typeflag: tar.TypeFifo})},
		"link to nothing":    {"leads nowhere", block("l", tar.TypeSymlink, 0, nil, "")},
		"hard link out":      {"leads out", packed(t, tar.Header{Name: "h", Typeflag: tar.TypeLink, Linkname: "../../etc/shadow"})},
		"hard link absolute": {"not in the archive", packed(t, tar.Header{Name: "h", Typeflag: tar.TypeLink, Linkname: "/etc/shadow"})},
		"hard link to self":  {"not in the archive", packed(t, tar.Header{Name: "h", Typeflag: tar.TypeLink, Linkname: "h"})},
		"hard link to a link": {"not in the archive", packed(t, tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "/etc/shadow"},
			tar.Header{Name: "h", Typeflag: tar.TypeLink, Linkname: "l"})},
		"NUL in a name":       {"no tar archive", append(pax("path=a\x00b"), block("x", tar.TypeReg, 0, nil, "")...)},
		"sparse, old":         {"sparse", block("s", tar.TypeGNUSparse, 0, sparseMap, "")},
		"sparse, in a record": {"sparse", append(pax("GNU.sparse.major=1", "GNU.sparse.minor=0", "GNU.sparse.name=s", "GNU.sparse.realsize=1125899906842624"), block("x", tar.TypeReg, 512, nil, "0\n")...)},
		"cut off":             {"cut off", whole[:1024]},
		"cut off in a header": {"no tar archive", whole[:100]},
		"a size that lies":    {"cut off", block("f", tar.TypeReg, 8<<30-1, nil, "little")},
		"too many folders":    {"more than 500000", packed(t, deep...)},
		"no archive":          {"no tar archive", []byte(strings.Repeat("no archive ", 100))},
		"half a gzip":         {"could not be read", gzipped(t, whole)[:30]},
		"only gzip's magic":   {"no whole gzip", []byte{0x1f, 0x8b, 8}},
		"a bomb":              {"more than 8 MiB", gzipped(t, packed(t, tar.Header{Name: "zeros", Typeflag: tar.TypeReg, Size: 9 << 20}))},
		"much memory":         {"could not be read", zstdOfWindow(t, 64<<20)},
		"xz":                  {"by xz", []byte{0xfd, '7', 'z', 'X', 'Z', 0, 1, 2}},
	}
}

// TestHostileUploads: none of them is kept, each is told why, and nothing is left of it.
func TestHostileUploads(t *testing.T) {
	w := newWorld(t)
	s := w.serve(func(c *Config) { c.MaxFiles = 8 << 20 })
	for name, c := range hostile(t) {
		_, err := s.PutFiles(context.Background(), alice, name, bytes.NewReader(c.data))
		text, _ := errs.PublicText(err)
		if k := errs.KindOf(err); err == nil || k == errs.Internal || !strings.Contains(text, c.want) {
			t.Errorf("%s: %v does not say %q", name, err, c.want)
		}
	}
	if _, err := s.PutFiles(context.Background(), alice, "broken", io.MultiReader(bytes.NewReader(packed(t)), lost{})); err == nil {
		t.Error("an upload that broke off is kept")
	}
	if left, err := os.ReadDir(s.files.dir); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

type lost struct{}

func (lost) Read([]byte) (int, error) { return 0, errors.New("the connection is gone") }

// TestArchiveNamesMeanNothing: what an archive calls its files is found by those names alone.
func TestArchiveNamesMeanNothing(t *testing.T) {
	s := newWorld(t).serve()
	data := packed(t,
		tar.Header{Name: "/etc/absolute", Typeflag: tar.TypeReg, Size: 1}, tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "/etc"},
		tar.Header{Name: "l/passwd", Typeflag: tar.TypeReg, Size: 2}, tar.Header{Name: "out", Typeflag: tar.TypeSymlink, Linkname: "../../../../../etc/passwd"},
		tar.Header{Name: "a\nb", Typeflag: tar.TypeReg}, tar.Header{Name: "caf\xe9", Typeflag: tar.TypeReg, Format: tar.FormatGNU},
		tar.Header{Name: "loop", Typeflag: tar.TypeSymlink, Linkname: "loop"})
	name, err := s.PutFiles(context.Background(), alice, "../../../../../../tmp/evil", bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	if all, err := os.ReadDir(s.files.dir); err != nil || len(all) != 1 {
		t.Fatalf("%v, %v", all, err)
	}
	if _, err := s.files.open(bob.ID, name); !errs.Is(err, errs.NotFound) {
		t.Errorf("another's files: %v", err)
	}
	a, err := s.files.open(alice.ID, name)
	if err != nil {
		t.Fatal(err)
	}
	defer a.close()
	a.room = newRoom()
	if err := a.index(context.Background()); err != nil {
		t.Fatal(err)
	}
	for p, want := range map[string]string{
		"etc/absolute": "etc/absolute", "l/passwd": "l/passwd", "a\nb": "a\nb", "caf\xe9": "caf\xe9", "../../etc/absolute": "etc/absolute", "out": "",
		"loop": "", "etc/passwd": "",
	} {
		got, err := resolve(a, p)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%q leads to %q, %v", p, got, err)
		}
	}
	if _, err := a.open("out"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a link is opened: %v", err)
	}
}

// TestUploadsAreBounded: one principal's uploads take neither the disk nor the server's memory, nor another's place.
func TestUploadsAreBounded(t *testing.T) {
	s := newWorld(t).serve(func(c *Config) { c.MaxFiles = 1 << 20 })
	ctx := context.Background()
	data := packed(t, tar.Header{Name: "f", Typeflag: tar.TypeReg, Size: 900 << 10})
	if _, err := s.PutFiles(ctx, bob, "kept", bytes.NewReader(data)); err != nil {
		t.Fatal(err)
	}
	for i := range 8 {
		if _, err := s.PutFiles(ctx, alice, fmt.Sprint(i), bytes.NewReader(data)); err != nil {
			t.Fatal(err)
		}
	}
	there := ""
	for i := range 8 {
		if ok, err := s.HasFiles(ctx, alice, fmt.Sprint(i)); err != nil {
			t.Error(err)
		} else if ok {
			there += fmt.Sprint(i)
		}
	}
	if ok, err := s.HasFiles(ctx, bob, "kept"); there != "4567" || !ok {
		t.Errorf("of alice's there are %q; bob's: %v, %v", there, ok, err)
	}
	over := make(chan error)
	hold, release := io.Pipe()
	for i := range maxUploads {
		go func() {
			_, err := s.PutFiles(ctx, alice, fmt.Sprint("slow", i), hold)
			over <- err
		}()
	}
	testenv.Eventually(t, time.Minute, "uploads wait", func() bool {
		s.files.mu.Lock()
		defer s.files.mu.Unlock()
		return s.files.uploads[alice.ID] == maxUploads
	})
	if _, err := s.PutFiles(ctx, alice, "more", bytes.NewReader(data)); !errs.Is(err, errs.ResourceExhausted) {
		t.Errorf("one more upload: %v", err)
	}
	if _, err := s.PutFiles(ctx, bob, "more", bytes.NewReader(data)); err != nil {
		t.Errorf("another's upload: %v", err)
	}
	_ = release.CloseWithError(io.ErrUnexpectedEOF)
	for range maxUploads {
		if err := testenv.Receive(t, "the upload ends", over); err == nil {
			t.Error("an upload that broke off is kept")
		}
	}
	if _, err := s.PutFiles(ctx, alice, "afterwards", bytes.NewReader(data)); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}

// TestGlobOfManyWays: a pattern that leads to each directory in very many ways tries each once.
func TestGlobOfManyWays(t *testing.T) {
	a := &archive{entries: map[string]*archived{"": newDir("")}, room: newRoom()}
	if err := a.add(newDir(strings.Repeat("a/", 200) + "x")); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	for pattern, want := range map[string]int{strings.Repeat("**/", 30) + "x": 1, strings.Repeat("**/a/", 20) + "**/y": 0, "**": 202} {
		if got, err := glob(ctx, a, pattern); err != nil || len(got) != want {
			t.Errorf("%q: %d, %v", pattern, len(got), err)
		}
	}
	if _, err := glob(ctx, a, strings.Repeat("**/", 20_000)+"x"); !errs.Is(err, errs.InvalidArgument) {
		t.Errorf("a very long pattern: %v", err)
	}
}

// TestDockerfileBombs: a short text does not make a long one of itself in the server's memory.
func TestDockerfileBombs(t *testing.T) {
	s := newWorld(t).serve()
	doubling := "FROM base\nENV V0=xxxxxxxxxxxxxxxx\n"
	for i := range 60 {
		doubling += fmt.Sprintf("ENV V%d=$V%d$V%d\n", i+1, i, i)
	}
	long := "FROM base\nENV A=" + strings.Repeat("a", 60_000) + "\n"
	for name, text := range map[string]string{
		"doubling":  doubling,
		"many":      long + "ENV B=" + strings.Repeat("$A", 30_000) + "\n",
		"replacing": long + "ENV B=${A//a/$A}\n",
		"a heredoc": long + "COPY <<END /x\n" + strings.Repeat("$A\n", 100_000) + "END\n",
	} {
		b := s.build(alice, Request{Name: "web", Dockerfile: &Dockerfile{Text: text}})
		if b.State != Failed || !strings.Contains(b.Reason.Message, "too long") && !strings.Contains(b.Reason.Message, "longer than") {
			t.Errorf("%s: %s, %+v", name, b.State, b.Reason)
		}
	}
}

// TestCopyFromAnothers: what another committed is no source, nor a base.
func TestCopyFromAnothers(t *testing.T) {
	s := newWorld(t).serve()
	made := s.build(alice, Request{Name: "hers", From: "base", Steps: []Step{run("echo one")}})
	if made.State != Ready {
		t.Fatalf("%+v", made.Reason)
	}
	for _, text := range []string{"FROM base\nCOPY --from=%s /home/user/new /x\n", "FROM %s\n", "FROM base\nRUN --mount=type=bind,from=%s,target=/x true\n"} {
		for _, ref := range []string{made.Commit, "hers"} {
			b := s.build(bob, Request{Name: "his", Dockerfile: &Dockerfile{Text: fmt.Sprintf(text, ref)}})
			if b.State != Failed {
				t.Errorf("%q of %s is %s", text, ref, b.State)
			}
		}
	}
}

func FuzzArchive(f *testing.F) {
	for _, c := range hostile(f) {
		if len(c.data) < 64<<10 {
			f.Add(c.data)
		}
	}
	f.Add(packed(f, tar.Header{Name: "d/f", Typeflag: tar.TypeReg, Size: 3}, tar.Header{Name: "d/h", Typeflag: tar.TypeLink, Linkname: "d/f"},
		tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "d"}))
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := openFiles(dir, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		owner := t.TempDir() // no other process has it
		if err := s.put(t.Context(), owner, "x", bytes.NewReader(b)); err != nil {
			if errs.KindOf(err) == errs.Internal {
				t.Fatal(err)
			}
			return
		}
		defer os.Remove(s.path(owner, "x"))
		a, err := s.open(owner, "x")
		if err != nil {
			t.Fatal(err)
		}
		defer a.close()
		a.room = newRoom()
		if err := a.index(t.Context()); err != nil {
			t.Fatalf("kept, and then: %v", err)
		}
		whole := &copyJob{a: &copyAction{}}
		err = whole.each(t.Context(), a, "", func(rel string, n node) error {
			if rel != "" && (rel[0] == '/' || strings.HasPrefix(rel+"/", "../") || strings.Contains("/"+rel+"/", "/../") || strings.Contains(rel, "\x00")) {
				t.Errorf("the name %q", rel)
			}
			if n.Size == 0 {
				return nil
			}
			in, err := a.open(rel)
			if err != nil {
				return err
			}
			got, err := sumOf(in)
			if err == nil && got != n.sum {
				t.Errorf("%q holds other than what was summed", rel)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	})
}
