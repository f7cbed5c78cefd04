package rootfs

import (
	"os"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"casemate.dev/internal/linux/btrfs"
	"casemate.dev/internal/testenv"
)

// The kernel can stop counting what sandboxes write; their limits hold again soon after.
func TestLimitsComeBack(t *testing.T) {
	testenv.NoLeaks(t)
	s := open(t, Config{Mechanism: byBtrfs})
	d := s.disk.(*btrfsDisk)
	_, p := plan(t, s, Request{DiskBytes: 64 << 20})
	if err := write(t, p.Upper+"/first", 8<<20); err != nil {
		t.Fatal(err)
	}
	stopCount(t, d)
	testenv.Eventually(t, time.Minute, "the kernel counts", func() bool { return !d.counters.Astray() })
	if err := write(t, p.Upper+"/second", 80<<20); !full(err) {
		t.Errorf("88 MB into 64: %v", err)
	}
}

// stopCount has the kernel give up counting: a quota group that shares what it holds gets a parent.
func stopCount(t *testing.T, d *btrfsDisk) {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	for path, g := range d.layers {
		dir, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer dir.Close()
		if err := btrfs.Snapshot(dir, d.rootDir, "shares"); err != nil {
			t.Fatal(err)
		}
		if err := btrfs.Sync(d.rootDir); err != nil {
			t.Fatal(err)
		}
		const parent = 1<<48 | 1
		create := struct{ create, group uint64 }{1, parent}
		assign := struct{ assign, source, destination uint64 }{1, g.id, parent}
		// BTRFS_IOC_QGROUP_CREATE and BTRFS_IOC_QGROUP_ASSIGN
		if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, d.rootDir.Fd(), 0x4010942a, uintptr(unsafe.Pointer(&create))); errno != 0 {
			t.Fatal(errno)
		}
		if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, d.rootDir.Fd(), 0x40189429, uintptr(unsafe.Pointer(&assign))); errno != 0 {
			t.Fatal(errno)
		}
		return
	}
}
