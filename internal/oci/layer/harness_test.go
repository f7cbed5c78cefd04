package layer

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
	"testing"
	"time"

	"github.com/klauspost/compress/gzip"

	"casemate.dev/internal/linux/fd"
	"casemate.dev/internal/testenv"
)

// when is the time of made-up entries.
func when() time.Time { return time.Unix(1_700_000_000, 123_456_789) }

// archive makes one of headers; a header's contents are in body, or else its size in zeros.
type archive struct {
	bytes.Buffer
	w *tar.Writer
}

func newArchive() *archive {
	a := &archive{}
	a.w = tar.NewWriter(&a.Buffer)
	return a
}

func (a *archive) add(t testing.TB, h tar.Header, body string) *archive {
	t.Helper()
	if h.Typeflag == 0 {
		h.Typeflag = tar.TypeReg
	}
	if h.Mode == 0 {
		h.Mode = 0o644
		if h.Typeflag == tar.TypeDir {
			h.Mode = 0o755
		}
	}
	if h.ModTime.IsZero() {
		h.ModTime = when()
	}
	h.Size, h.Format = int64(len(body)), tar.FormatPAX
	if err := a.w.WriteHeader(&h); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(a.w, body); err != nil {
		t.Fatal(err)
	}
	return a
}

func (a *archive) file(t testing.TB, name, body string) *archive {
	return a.add(t, tar.Header{Name: name}, body)
}

func (a *archive) dir(t testing.TB, name string) *archive {
	return a.add(t, tar.Header{Name: name, Typeflag: tar.TypeDir}, "")
}

func (a *archive) symlink(t testing.TB, name, target string) *archive {
	return a.add(t, tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: target, Mode: 0o777}, "")
}

func (a *archive) link(t testing.TB, name, target string) *archive {
	return a.add(t, tar.Header{Name: name, Typeflag: tar.TypeLink, Linkname: target}, "")
}

func (a *archive) done(t testing.TB) []byte {
	t.Helper()
	if err := a.w.Close(); err != nil {
		t.Fatal(err)
	}
	return a.Bytes()
}

func zipped(t testing.TB, data []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	if _, err := z.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// unpack unpacks into dir.
func unpack(t testing.TB, data []byte, dir string, lim Limits) (Result, error) {
	t.Helper()
	testenv.Root(t)
	root, err := fd.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	return Unpack(t.Context(), bytes.NewReader(data), int64(len(data)), root, lim)
}

func mustUnpack(t testing.TB, data []byte) (string, Result) {
	t.Helper()
	dir := t.TempDir()
	r, err := unpack(t, data, dir, Limits{})
	if err != nil {
		t.Fatal(err)
	}
	return dir, r
}

func pack(t testing.TB, dir string) []byte {
	t.Helper()
	root, err := fd.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	var b bytes.Buffer
	if err := Pack(t.Context(), root, &b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// scan tells everything about a tree, one line a file: types, modes, owners, times, attributes, contents, links.
func scan(t testing.TB, dir string) []string {
	t.Helper()
	root, err := fd.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	var lines []string
	links := map[uint64]string{}
	self, err := fd.Stat(root)
	if err != nil {
		t.Fatal(err)
	}
	visit := func(e fd.Entry) error {
		i := e.Info
		if i.IsWhiteout() { // nothing of it shows but that it is there
			lines = append(lines, fmt.Sprintf("%q is gone", e.Path))
			return nil
		}
		line := fmt.Sprintf("%q %o %d:%d %d %d.%09d", e.Path, i.Mode, i.UID, i.GID, i.Rdev, i.Modified.Sec, i.Modified.Nsec)
		names, err := fd.Xattrs(e.Dir, e.Name)
		if err != nil {
			return err
		}
		slices.Sort(names)
		for _, x := range names {
			v, _, err := fd.XattrBytes(e.Dir, e.Name, x)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" %s=%x", x, v)
		}
		if first, ok := links[i.Ino]; ok && !i.IsDir() {
			lines = append(lines, line+" = "+first)
			return nil
		}
		links[i.Ino] = e.Path
		switch {
		case i.IsSymlink():
			target, err := fd.Readlink(e.Dir, e.Name)
			lines = append(lines, fmt.Sprintf("%s -> %q", line, target))
			return err
		case i.IsRegular():
			f, err := fd.OpenFile(e.Dir, e.Name)
			if err != nil {
				return err
			}
			sum := sha256.New()
			_, err = io.Copy(sum, f)
			line += fmt.Sprintf(" %d %x", i.Size, sum.Sum(nil))
			lines = append(lines, line)
			return errors.Join(err, f.Close())
		}
		lines = append(lines, line)
		return nil
	}
	if err := visit(fd.Entry{Path: ".", Name: ".", Dir: root, Info: self}); err != nil {
		t.Fatal(err)
	}
	if err := fd.Walk(t.Context(), root, visit); err != nil {
		t.Fatal(err)
	}
	return lines
}

func read(t testing.TB, path ...string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(path...))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}
