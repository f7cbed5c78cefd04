package rootfs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/linux/btrfs"
	"casemate.dev/internal/linux/loop"
)

// Bounds of an image whose size nobody set. btrfs needs a few hundred MB to divide itself sensibly.
const (
	minImage = 512 << 20
	maxImage = 32 << 30
)

// mkfsTimeout is far above what mkfs.btrfs takes, which does not depend on the size.
const mkfsTimeout = time.Minute

// makeImage makes a btrfs image at path, unless there is one. All of its blocks are allocated: with a
// sparse one, a host that fills up loses what sandboxes have already synced.
func makeImage(path string, size int64) error {
	if _, err := os.Stat(path); err == nil {
		return nil
	}
	mkfs, err := findProgram("mkfs.btrfs")
	if err != nil {
		return errs.Wrap(err, errs.Unsupported, "mkfs.btrfs is not installed").WithHint("apt-get install btrfs-progs")
	}
	if size, err = imageSize(filepath.Dir(path), size); err != nil {
		return err
	}
	// Under another name until it is complete, so that a killed server leaves no half image.
	tmp := path + ".new"
	if err := writeImage(tmp, size, mkfs); err != nil {
		_ = os.Remove(tmp)
		return err
	}
	return os.Rename(tmp, path)
}

func writeImage(path string, size int64, mkfs string) error {
	_ = os.Remove(path)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	// Where the data directory is on btrfs itself: copy on write would need new blocks for each write.
	if err := btrfs.NoCopyOnWrite(f); err != nil {
		return err
	}
	if err := syscall.Fallocate(int(f.Fd()), 0, 0, size); err != nil {
		return errs.Wrap(err, errs.Unsupported, "the data directory's file system can't preallocate a file")
	}
	var st syscall.Stat_t
	if err := syscall.Fstat(int(f.Fd()), &st); err != nil {
		return err
	}
	if st.Blocks*512 < size {
		return errs.New(errs.Unsupported, "the data directory's file system claims to preallocate, and does not")
	}
	ctx, cancel := context.WithTimeout(context.Background(), mkfsTimeout)
	defer cancel()
	// No discard (-K), which would give the preallocated blocks back. Single copies: below lies a file.
	cmd := exec.CommandContext(ctx, mkfs, "-q", "-K", "-m", "single", "-d", "single", path)
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("mkfs.btrfs: %w: %s", err, strings.TrimSpace(string(out)))
	}
	return f.Sync()
}

// imageSize checks a given size against what is free, or chooses one.
func imageSize(dir string, size int64) (int64, error) {
	free, err := FreeBytes(dir)
	if err != nil {
		return 0, err
	}
	asked := size != 0
	if !asked {
		size = min(free/4, maxImage)
	}
	size &^= 1<<20 - 1
	switch {
	case asked && size < minImage:
		return 0, errs.New(errs.InvalidArgument, "a store of %d MB is too small", size>>20).WithHint("--store-size takes 512m or more")
	case asked && size > free:
		return 0, errs.New(errs.InvalidArgument, "a store of %d MB does not fit into the %d MB that are free in the data directory", size>>20, free>>20).
			WithHint("choose a smaller --store-size, or a --data-dir with more room")
	case size < minImage:
		return 0, errs.New(errs.ResourceExhausted, "the store's image needs %d MB free in the data directory, and there are %d",
			4*minImage>>20, free>>20)
	}
	return size, nil
}

// findProgram looks also where root's programs are: a service's PATH may lack those.
func findProgram(name string) (string, error) {
	for _, dir := range []string{"/usr/sbin", "/sbin", "/usr/bin", "/bin"} {
		path := filepath.Join(dir, name)
		if st, err := os.Stat(path); err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0 {
			return path, nil
		}
	}
	return exec.LookPath(name)
}

// mountImage mounts an image, whose store the caller has locked, and returns its root directory. A
// server that was killed may have left the image attached, held by the mounts of sandboxes that go on:
// then it is the same device and the same file system, never a second one over one file.
func mountImage(image, dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	if err := unmount(dir); err != nil { // of an earlier server, in the same mount namespace
		return nil, err
	}
	f, err := os.OpenFile(image, os.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	dev, err := loop.Attach(f)
	if err != nil {
		return nil, err
	}
	defer dev.Close() // the mount holds it from now on
	// nodiscard: freed blocks stay allocated in the image file.
	if err := syscall.Mount(dev.Path, dir, "btrfs", layerFlags, "nodiscard"); err != nil {
		return nil, errs.Wrap(fmt.Errorf("mount %s: %w", dev.Path, err), errs.Unsupported, "this kernel can't mount btrfs")
	}
	root, err := os.Open(dir)
	if err != nil {
		return nil, errors.Join(err, unmount(dir))
	}
	return root, nil
}

// unmount takes away every mount on dir, also one that is in use: users keep it until they are done.
func unmount(dir string) error {
	for {
		err := syscall.Unmount(dir, syscall.MNT_DETACH)
		if errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.ENOENT) {
			return nil // nothing (more) is mounted
		}
		if err != nil {
			return fmt.Errorf("unmount %s: %w", dir, err)
		}
	}
}
