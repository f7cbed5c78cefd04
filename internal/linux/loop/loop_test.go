package loop

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/testenv"
)

func image(t *testing.T, name string, size int64) *os.File {
	t.Helper()
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	return f
}

func TestAttachFindDetach(t *testing.T) {
	testenv.Root(t)
	testenv.NoLeaks(t)
	f := image(t, t.TempDir()+"/img", 8<<20)
	if d, err := Find(f); d != nil || err != nil {
		t.Fatalf("found %v %v before attaching", d, err)
	}
	d, err := Attach(f)
	if err != nil {
		t.Fatal(err)
	}
	if d.Existing {
		t.Error("a fresh device says that it existed")
	}
	// What is written to the device is in the file.
	block := make([]byte, blockSize)
	copy(block, "through the device")
	if _, err := d.File.WriteAt(block, blockSize); err != nil {
		t.Fatal(err)
	}
	if err := d.File.Sync(); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 18)
	if _, err := f.ReadAt(got, blockSize); err != nil || string(got) != "through the device" {
		t.Errorf("file holds %q %v", got, err)
	}
	// By another name, as in another mount namespace, it is the same file: no second device.
	link := f.Name() + "-link"
	if err := os.Link(f.Name(), link); err != nil {
		t.Fatal(err)
	}
	other, err := os.OpenFile(link, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	again, err := Attach(other)
	if err != nil {
		t.Fatal(err)
	}
	if again.Path != d.Path || !again.Existing {
		t.Errorf("attached twice: %s and %s", d.Path, again.Path)
	}
	for _, x := range []*Device{again, d, d} {
		if err := x.Close(); err != nil {
			t.Error(err)
		}
	}
	testenv.Eventually(t, 5e9, "autoclear", func() bool { x, err := Find(f); return x == nil && err == nil })
}

func TestDeviceHasTheWholeFile(t *testing.T) {
	testenv.Root(t)
	testenv.NoLeaks(t)
	d, err := Attach(image(t, t.TempDir()+"/img", 5<<20))
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	n, err := unix.Seek(int(d.File.Fd()), 0, unix.SEEK_END)
	if err != nil || n != 5<<20 {
		t.Errorf("size %d %v, want 5 MiB", n, err)
	}
}

func TestAttachRefusesWhatIsNoFile(t *testing.T) {
	testenv.Root(t)
	dir, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if d, err := Attach(dir); err == nil {
		_ = d.Close()
		t.Error("attached a directory")
	}
}
