package rootfs

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/testenv"
)

// stage returns a directory in memory with an image of so many bytes.
func stage(t *testing.T, s *Store, size int) string {
	t.Helper()
	dir, drop, err := s.StageMemory(int64(size) + 1<<20)
	must(t, err)
	t.Cleanup(func() {
		must(t, drop())
		if _, err := os.Lstat(dir); err == nil {
			t.Errorf("%s is left", dir)
		}
	})
	must(t, os.WriteFile(filepath.Join(dir, "pages"), bytes.Repeat([]byte("page"), size/4), 0o600))
	return dir
}

// An image that was made in memory comes into a layer beside the files, and the layer without it goes.
func TestAddMemory(t *testing.T) {
	every(t, func(t *testing.T, s *Store) {
		box, p := plan(t, s, Request{DiskBytes: 32 << 20})
		must(t, os.WriteFile(p.Upper+"/f", []byte("file"), 0o644))
		first := commit(t, s, box, p)
		dir := stage(t, s, 4<<20)
		l, err := s.AddMemory(t.Context(), first.ID, dir, p.Disk.Bytes)
		must(t, err)
		if _, err := s.Layer(first.ID); !errs.Is(err, errs.NotFound) {
			t.Errorf("the layer without image: %v", err)
		}
		kept, err := s.LayerMemory(l.ID)
		must(t, err)
		want, err := os.ReadFile(dir + "/pages")
		must(t, err)
		if got, err := os.ReadFile(kept + "/pages"); err != nil || !bytes.Equal(got, want) {
			t.Errorf("the image has %d bytes, %v", len(got), err)
		}
		if info, err := os.Stat(kept); err != nil || info.Mode().Perm() != 0o700 {
			t.Errorf("%v, %v", info.Mode(), err)
		}
		if got, err := os.ReadFile(s.keptPath(l.ID) + "/upper/f"); err != nil || string(got) != "file" {
			t.Errorf("the file is %q, %v", got, err)
		}
		if _, err := s.Memory(box); !errs.Is(err, errs.NotFound) {
			t.Errorf("the sandbox itself has an image: %v", err)
		}
	})
}

// An image counts on the disk limit of its sandbox, and leaves nothing where it does not fit.
func TestAddMemoryHoldsTheLimit(t *testing.T) {
	every(t, func(t *testing.T, s *Store) {
		box, p := plan(t, s, Request{DiskBytes: 32 << 20})
		must(t, write(t, p.Upper+"/big", 24<<20))
		first := commit(t, s, box, p)
		_, err := s.AddMemory(t.Context(), first.ID, stage(t, s, 16<<20), p.Disk.Bytes)
		text, hint := errs.PublicText(err)
		if !errs.Is(err, errs.ResourceExhausted) || text == "" || hint == "" {
			t.Errorf("40 MB of 32: %v, %q, %q", err, text, hint)
		}
		if _, err := s.Layer(first.ID); !errs.Is(err, errs.NotFound) {
			t.Errorf("the layer without image: %v", err)
		}
		left, err := os.ReadDir(s.area("snapshots"))
		must(t, err)
		if len(left) != 0 {
			t.Errorf("%v are left", left)
		}
		again := commit(t, s, box, p)
		if _, err := s.AddMemory(t.Context(), again.ID, stage(t, s, 4<<20), p.Disk.Bytes); err != nil {
			t.Errorf("28 MB of 32: %v", err)
		}
	})
}

// What the host's memory has no room for is refused before anything is written, and a server that was killed leaves nothing.
func TestStageMemory(t *testing.T) {
	testenv.NoLeaks(t)
	s := open(t, Config{Mechanism: byBtrfs})
	total, _, err := hostMemory()
	must(t, err)
	if _, _, err := s.StageMemory(total); !errs.Is(err, errs.ResourceExhausted) {
		t.Errorf("all of the host's memory: %v", err)
	}
	dir, _, err := s.StageMemory(1 << 20)
	must(t, err)
	if err := os.WriteFile(dir+"/f", make([]byte, 8<<20), 0o600); !full(err) {
		t.Errorf("8 MB where 1 was asked for: %v", err)
	}
	must(t, s.dropStages())
	if left, err := os.ReadDir(s.stageDir()); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}
