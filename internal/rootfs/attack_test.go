package rootfs

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"casemate.dev/internal/linux/btrfs"
	"casemate.dev/internal/testenv"
)

// VULNERABILITY: a sandbox makes a setuid file, which lies with its bits in the store.
// ATTACK SCENARIO: a user of the host runs it and becomes the file's owner.
// VERIFIES: nobody but root gets to the store, and even who does can't run anything in it.
func TestSetuidFileInTheStoreIsNotHonoured(t *testing.T) {
	every(t, func(t *testing.T, s *Store) {
		_, p := plan(t, s, Request{})
		plant := func(path string) {
			t.Helper()
			if err := copyFile("/usr/bin/id", path); err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(os.Chown(path, 4711, 4711), os.Chmod(path, os.ModeSetuid|0o755)); err != nil {
				t.Fatal(err)
			}
		}
		inside := p.Upper + "/id"
		plant(inside)
		if out, err := exec.Command(inside, "-u").CombinedOutput(); !errors.Is(err, syscall.EACCES) {
			t.Errorf("ran: %s %v", out, err)
		}
		cmd := exec.Command("/bin/sh", "-c", "exec "+inside)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 54321, Gid: 54321}}
		if out, err := cmd.CombinedOutput(); err == nil {
			t.Errorf("a user of the host ran it: %s", out)
		}
		if st, err := os.Stat(s.dir); err != nil || st.Mode().Perm() != 0o700 {
			t.Errorf("the store is open to others: %v %v", st.Mode(), err)
		}
		twin := testenv.RunDir(t) + "/id"
		plant(twin)
		cmd = exec.Command(twin, "-u")
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 54321, Gid: 54321}}
		if out, err := cmd.Output(); err != nil || string(bytes.TrimSpace(out)) != "4711" {
			t.Errorf("twin: %q %v, want 4711", out, err)
		}
	})
}

// ATTACK: a symlink and a device that a sandbox made, met by a program of the host.
func TestLinksAndDevicesInTheStoreMeanNothing(t *testing.T) {
	every(t, func(t *testing.T, s *Store) {
		_, p := plan(t, s, Request{})
		twin := t.TempDir()
		for _, dir := range []string{p.Upper, twin} {
			if err := errors.Join(
				os.Symlink("/etc/passwd", dir+"/link"),
				syscall.Mknod(dir+"/zero", syscall.S_IFCHR|0o666, 1<<8|5)); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := os.ReadFile(p.Upper + "/link"); !errors.Is(err, syscall.ELOOP) {
			t.Errorf("link followed: %v", err)
		}
		if f, err := os.Open(p.Upper + "/zero"); !errors.Is(err, syscall.EACCES) {
			_ = f.Close()
			t.Errorf("device opened: %v", err)
		}
		if _, err := os.ReadFile(twin + "/link"); err != nil {
			t.Errorf("twin: %v", err)
		}
		f, err := os.Open(twin + "/zero")
		if err != nil {
			t.Errorf("twin: %v", err)
		}
		_ = f.Close()
	})
}

// overlay mounts a plan's root as a sandbox would see it, without its walls.
func overlay(t *testing.T, p Plan) string {
	t.Helper()
	dir := t.TempDir()
	options := "userxattr,lowerdir=" + strings.Join(p.Lowers, ":") + ",upperdir=" + p.Upper + ",workdir=" + p.Work
	if err := syscall.Mount("overlay", dir, "overlay", 0, options); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unmount(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func readOnly(t *testing.T, dir string) bool {
	t.Helper()
	var st syscall.Statfs_t
	if err := syscall.Statfs(dir, &st); err != nil {
		t.Fatal(err)
	}
	return st.Flags&syscall.MS_RDONLY != 0
}

// ATTACK: make a subvolume, whose contents no limit holds and no snapshot shows.
func TestSubvolumesCantBeMadeThroughAnOverlay(t *testing.T) {
	testenv.NoLeaks(t)
	s := open(t, Config{Mechanism: byBtrfs})
	_, p := plan(t, s, Request{})
	root := openDir(t, overlay(t, p)+"/tmp")
	if err := btrfs.CreateSubvolume(root, "hidden"); !errors.Is(err, syscall.ENOTTY) {
		t.Errorf("subvolume through the overlay: %v, want ENOTTY", err)
	}
	if err := btrfs.Limit(root, 0); !errors.Is(err, syscall.ENOTTY) {
		t.Errorf("limit lifted through the overlay: %v, want ENOTTY", err)
	}
	if err := btrfs.CreateSubvolume(openDir(t, p.Upper), "hidden"); err != nil {
		t.Errorf("twin: a direct bind allows it: %v", err)
	}
}

func openDir(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func TestNestedSubvolumesAreDeleted(t *testing.T) {
	testenv.NoLeaks(t)
	s := open(t, Config{Mechanism: byBtrfs})
	box, p := plan(t, s, Request{})
	dir, err := os.Open(p.Upper)
	if err != nil {
		t.Fatal(err)
	}
	if err := btrfs.CreateSubvolume(dir, "hidden"); err != nil {
		t.Fatal(err)
	}
	_ = dir.Close()
	if err := s.Release(t.Context(), box); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, limit, "trash is empty", func() bool {
		left, err := os.ReadDir(s.area("trash"))
		return err == nil && len(left) == 0
	})
}

// VULNERABILITY: overlayfs needs to write when it is mounted and when a file is removed.
// ATTACK SCENARIO: a sandbox fills its disk to the last byte; its next mount silently is read-only.
// VERIFIES: with the lent reserve it mounts writable and can be cleaned up; the twin shows the fault.
func TestFullLayerCanBeUsedAndDeleted(t *testing.T) {
	every(t, func(t *testing.T, s *Store) {
		box, p := plan(t, s, Request{DiskBytes: 16 << 20})
		root := overlay(t, p)
		if err := write(t, root+"/tmp/big", 64<<20); !full(err) {
			t.Fatal(err)
		}
		for i := 0; ; i++ { // what is left of metadata, too
			if err := os.WriteFile(root+"/tmp/small"+itoa(i), make([]byte, 1000), 0o644); err != nil {
				break
			}
		}
		if _, err := os.ReadFile(root + "/etc/passwd"); err != nil {
			t.Errorf("read when full: %v", err)
		}
		if err := os.Remove(root + "/tmp/big"); err != nil {
			t.Errorf("remove an own file when full: %v", err)
		}
		if err := write(t, root+"/tmp/again", 1<<20); err != nil {
			t.Errorf("write after making room: %v", err)
		}
		_ = write(t, root+"/tmp/big", 64<<20)
		back, err := s.Lend(box)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(root + "/etc/hosts"); err != nil { // a whiteout is written
			t.Errorf("remove a file of the template with the reserve: %v", err)
		}
		if again := overlay(t, Plan{Lowers: p.Lowers, Upper: p.Upper, Work: p.Work}); readOnly(t, again) {
			t.Error("read-only in spite of the reserve")
		}
		if err := back(); err != nil {
			t.Error(err)
		}
		if err := write(t, root+"/tmp/more", 64<<20); !full(err) {
			t.Errorf("the limit after giving back: %v", err)
		}
	})
}

// VULNERABILITY: a sparse image promises blocks that the host does not have.
// ATTACK SCENARIO: somebody fills the host's disk; a sandbox that did nothing loses what it had synced.
// VERIFIES: with the preallocated image writes go on; the twin loses them.
func TestHostFullBelowTheImage(t *testing.T) {
	testenv.NoLeaks(t)
	for _, sparse := range []bool{false, true} {
		name := map[bool]string{false: "preallocated", true: "twin, sparse"}[sparse]
		t.Run(name, func(t *testing.T) {
			host := t.TempDir()
			if err := syscall.Mount("none", host, "tmpfs", 0, "size=900m"); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := unmount(host); err != nil {
					t.Error(err)
				}
			})
			cfg := Config{DataDir: host + "/data", Mechanism: byBtrfs, ImageBytes: minImage, Spares: -1}
			if sparse {
				s := open(t, cfg)
				if err := s.Close(); err != nil {
					t.Fatal(err)
				}
				punch(t, filepath.Join(host, "data/rootfs/layers.img"))
			}
			s := open(t, cfg)
			_, p := plan(t, s, Request{DiskBytes: 200 << 20})
			_ = write(t, host+"/hog", 900<<20)
			err := write(t, p.Upper+"/mine", 100<<20)
			if err == nil {
				err = syncFile(p.Upper + "/mine")
			}
			if !sparse && err != nil {
				t.Errorf("an innocent sandbox lost its data: %v", err)
			}
			if sparse && err == nil {
				t.Error("twin: expected to lose data")
			}
		})
	}
}

// punch makes an image sparse: it gives every block of zeros back.
func punch(t *testing.T, path string) {
	t.Helper()
	out, err := exec.Command("/bin/cp", "--sparse=always", path, path+".sparse").CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v", out, err)
	}
	if err := os.Rename(path+".sparse", path); err != nil {
		t.Fatal(err)
	}
}

func syncFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}
