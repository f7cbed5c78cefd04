package btrfs

import (
	"bytes"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

func TestSameBlocks(t *testing.T) {
	root := fresh(t)
	dir := root.Name()
	large := bytes.Repeat([]byte("0123456789abcdef"), 1<<16) // 1 MB
	write := func(name string, data []byte) *os.File {
		t.Helper()
		if err := os.WriteFile(dir+"/"+name, data, 0o600); err != nil {
			t.Fatal(err)
		}
		return reopened(t, dir+"/"+name)
	}
	a := write("a", large)
	clone := func(name string) *os.File {
		t.Helper()
		f := write(name, nil)
		if err := unix.IoctlFileClone(int(f.Fd()), int(a.Fd())); err != nil {
			t.Fatal(err)
		}
		return f
	}
	same, changed, sparse := clone("same"), clone("changed"), clone("sparse")
	if _, err := changed.WriteAt([]byte("X"), 512<<10); err != nil {
		t.Fatal(err)
	}
	if err := unix.Fallocate(int(sparse.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 64<<10); err != nil {
		t.Fatal(err)
	}
	equal := write("equal", large)
	tiny, twin := write("tiny", []byte("x")), write("twin", []byte("x"))
	if err := Sync(root); err != nil {
		t.Fatal(err)
	}
	elsewhere := reopened(t, "/proc/self/exe")
	for name, c := range map[string]struct {
		b    *os.File
		want bool
	}{
		"itself": {a, true}, "a clone": {same, true}, "a changed clone": {changed, false}, "a clone with a hole": {sparse, false},
		"equal contents elsewhere": {equal, false}, "another file system's": {elsewhere, false},
	} {
		if got, err := SameBlocks(a, c.b); err != nil || got != c.want {
			t.Errorf("%s: %v, %v; want %v", name, got, err, c.want)
		}
	}
	if got, err := SameBlocks(tiny, twin); err != nil || got {
		t.Errorf("contents that lie in the tree: %v, %v", got, err)
	}
}

func reopened(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		f, err = os.Open(path)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}
