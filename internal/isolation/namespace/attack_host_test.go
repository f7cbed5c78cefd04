package namespace

import (
	"os"
	"strconv"
	"strings"
	"testing"

	"casemate.dev/internal/isolation"
)

// VULNERABILITY: all terminals of a host come from one pool (kernel.pty.max).
// ATTACK: one sandbox opens as many as it can and holds them.
// VERIFIES: it gets few, and another sandbox still gets one.
func TestTerminalsAreShared(t *testing.T) {
	h := newHost(t)
	b := h.backend()
	const grab = `
import os
n = 0
try:
    while n < 1000:
        os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
        n += 1
except OSError: pass
print(n)
`
	if max, err := os.ReadFile("/proc/sys/kernel/pty/max"); err != nil || len(strings.TrimSpace(string(max))) < 3 {
		t.Errorf("twin: the pool that all share is %q, hardly more than one may have: %v", max, err)
	}
	greedy, other := start(t, b, newSpec(t, isolation.Locked)), start(t, b, newSpec(t, isolation.Locked))
	got := greedy.run("", "python3", "-c", grab)
	if n, err := strconv.Atoi(strings.TrimSpace(got.out)); err != nil || n < 16 || n > 64 {
		t.Errorf("one sandbox got %q terminals: %s", got.out, got.err)
	}
	wants(t, "the other sandbox", other.sh(`python3 -c 'import os; os.openpty(); print("got one")'`), "got one")
}

// VULNERABILITY: /proc tells about the host in files that no namespace changes: how it was booted (the
// command line may hold keys), its disks, its kernel's addresses.
// ATTACK: reading them.
// VERIFIES: they are empty. The twin is the host, where they are not.
func TestHostFilesOfProcAreEmpty(t *testing.T) {
	h := newHost(t)
	x := start(t, h.backend(), newSpec(t, isolation.Standard))
	for _, name := range []string{
		"/proc/cmdline", "/proc/config.gz", "/proc/kallsyms", "/proc/partitions", "/proc/diskstats",
		"/proc/swaps", "/proc/iomem", "/proc/ioports", "/proc/slabinfo", "/proc/vmallocinfo", "/proc/kpageflags",
		"/proc/interrupts", "/proc/timer_list", "/proc/keys",
	} {
		host, err := os.ReadFile(name)
		if os.IsNotExist(err) {
			continue // this kernel has none
		}
		if name == "/proc/cmdline" && len(host) == 0 {
			t.Error("twin: the host's command line is empty, too")
		}
		wants(t, name, x.shAs("root", "head -c 64 "+name+" | wc -c"), "0")
	}
}

// VULNERABILITY: huge pages come from a pool that the host sets aside, say for its databases, and are
// counted by no memory limit.
// ATTACK: mapping them, by mmap and by a memory file.
// VERIFIES: both fail as on a host without a pool, while plain memory still maps.
func TestNoHugePages(t *testing.T) {
	h := newHost(t)
	for _, p := range profiles() {
		x := start(t, h.backend(), newSpec(t, p))
		got := x.sh(`python3 -c '
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True); libc.mmap.restype = ctypes.c_void_p
for flags in (0x22, 0x22 | 0x40000):
    p = libc.mmap(None, ctypes.c_size_t(2 << 20), 3, flags, -1, ctypes.c_long(0))
    print("mapped" if p != ctypes.c_void_p(-1).value else os.strerror(ctypes.get_errno()), end=", ")
for flags in (0, 4):
    f = libc.memfd_create(b"x", flags)
    print("made" if f >= 0 else os.strerror(ctypes.get_errno()), end=", ")
'`)
		wants(t, string(p), got, "mapped, Cannot allocate memory, made, Cannot allocate memory,")
	}
}
