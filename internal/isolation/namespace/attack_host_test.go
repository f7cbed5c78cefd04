package namespace

import (
	"bufio"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/id"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/conformance"
	"casemate.dev/internal/linux/cgroup"
	"casemate.dev/internal/testenv"
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
	greedy, other := start(t, b, conformance.Spec(t, isolation.Locked)), start(t, b, conformance.Spec(t, isolation.Locked))
	got := greedy.run("", "python3", "-c", grab)
	if n, err := strconv.Atoi(strings.TrimSpace(got.out)); err != nil || n < 16 || n > 64 {
		t.Errorf("one sandbox got %q terminals: %s", got.out, got.err)
	}
	wants(t, "the other sandbox", other.sh(`python3 -c 'import os; os.openpty(); print("got one")'`), "got one")
}

// VULNERABILITY: the kernel counts watches of files with the owner of the user namespace that they are taken in, and gives
// each user few (fs.inotify.max_user_instances); one user owned the namespaces of all sandboxes.
// ATTACK: one sandbox takes all that it gets and holds them.
// VERIFIES: another sandbox gets as many. The twin are two that are observed, whose namespaces have to be the keeper's.
func TestWatchesOfFilesAreApart(t *testing.T) {
	b := newHost(t, withKeeper).backend()
	const grab = `python3 -c "
import ctypes, time
libc, n = ctypes.CDLL(None), 0
while n < 100_000 and libc.inotify_init() >= 0: n += 1
open('/tmp/taken', 'w').write('%d.' % n)
time.sleep(1000)"`
	grabs := func(x *box) (got string) {
		t.Helper()
		x.begin("prc_grab", grab)
		testenv.Eventually(t, patience, "it has taken all", func() bool {
			got = x.sh("cat /tmp/taken 2>/dev/null")
			return strings.HasSuffix(got, ".")
		})
		return strings.TrimSuffix(got, ".")
	}
	pair := func(c isolation.Calls) (first, second string) {
		t.Helper()
		one, other := start(t, b, observed(conformance.Spec(t, isolation.Locked), c)), start(t, b, observed(conformance.Spec(t, isolation.Locked), c))
		return grabs(one), grabs(other)
	}
	if first, second := pair(isolation.Calls{}); first != second || first == "0" {
		t.Errorf("one sandbox got %s instances of inotify, another then %s", first, second)
	}
	if first, second := pair(isolation.Calls{Attempts: true}); first == "0" || second != "0" {
		t.Errorf("twin: one got %s, another then %s", first, second)
	}
}

// VULNERABILITY: as watches of files, the kernel counts queued signals, which timers are made of, with the owner of a user namespace.
// ATTACK: one sandbox queues as many as it can, and holds them.
// VERIFIES: another one can queue some. The twin are two that are observed.
func TestQueuedSignalsAreApart(t *testing.T) {
	var limit unix.Rlimit // few are enough, and are taken in no time
	if err := unix.Getrlimit(unix.RLIMIT_SIGPENDING, &limit); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Setrlimit(unix.RLIMIT_SIGPENDING, &limit); err != nil {
			t.Error(err)
		}
	}()
	if err := unix.Setrlimit(unix.RLIMIT_SIGPENDING, &unix.Rlimit{Cur: 2000, Max: limit.Max}); err != nil {
		t.Fatal(err)
	}
	b := newHost(t, withKeeper).backend()
	const take = `
import ctypes, os, signal, sys, time
libc, n = ctypes.CDLL(None), 0
class Value(ctypes.Union): _fields_ = [("i", ctypes.c_int), ("p", ctypes.c_void_p)]
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
while n < 5000 and libc.sigqueue(os.getpid(), signal.SIGRTMIN, Value(i=1)) == 0: n += 1
if n or len(sys.argv) == 1: print("some" if n else "none", flush=True)
if len(sys.argv) > 1: time.sleep(1000)
`
	for want, calls := range map[string]isolation.Calls{"some": {}, "none": {Attempts: true}} {
		greedy, other := start(t, b, observed(conformance.Spec(t, isolation.Locked), calls)), start(t, b, observed(conformance.Spec(t, isolation.Locked), calls))
		p := guestwire.StartProcess{ID: id.New(id.Process), Argv: []string{"python3", "-c", take, "hold"}}
		if _, err := greedy.client.Start(limited(t), p, nil); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, patience, "all is taken", func() bool {
			i, err := greedy.client.Get(limited(t), p.ID)
			return err == nil && i.Bytes > 0
		})
		wants(t, "what the other gets", strings.TrimSpace(other.run("", "python3", "-c", take).out), want)
		destroy(t, greedy.inst)
	}
}

// VULNERABILITY: requests of asynchronous I/O are counted for the whole host, whoever makes them (fs.aio-max-nr).
// ATTACK: a sandbox takes all.
// VERIFIES: it gets none. Twin: the host gets some.
func TestAsynchronousIOIsTheHosts(t *testing.T) {
	const take = `
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
number = {"x86_64": 206, "aarch64": 0}[os.uname().machine]
context = ctypes.c_ulong(0)
print("taken" if libc.syscall(number, 1, ctypes.byref(context)) == 0 else errno.errorcode[ctypes.get_errno()])
`
	b := newHost(t).backend()
	for _, p := range profiles() {
		wants(t, string(p), strings.TrimSpace(start(t, b, conformance.Spec(t, p)).run("", "python3", "-c", take).out), "ENOSYS")
	}
	twin, err := exec.Command("python3", "-c", take).Output()
	if err != nil || strings.TrimSpace(string(twin)) != "taken" {
		t.Errorf("twin: %q, %v", twin, err)
	}
}

// VULNERABILITY: whoever watches a file learns when somebody else opens it (inotify(7)), and sandboxes share the host's programs.
// ATTACK: one sandbox watches them while the host and another sandbox run some.
// VERIFIES: it learns of its own alone. Twin: on the host the same watch tells of what the host runs.
func TestWatchingSharedPrograms(t *testing.T) {
	const watch = `
import ctypes, os, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
fd = libc.inotify_init1(os.O_NONBLOCK)
assert libc.inotify_add_watch(fd, b"/usr/bin", 0x20) > 0 # IN_OPEN
print("watching", flush=True)
sys.stdin.readline()
subprocess.run(["/usr/bin/true"])
seen = b""
try: # what was opened by now is told of by now
    while True: seen += os.read(fd, 1 << 16)
except BlockingIOError: pass
print(*[name for name in ("true", "factor") if name.encode() in seen])
`
	b := newHost(t).backend()
	spy, other := start(t, b, conformance.Spec(t, isolation.Locked)), start(t, b, conformance.Spec(t, isolation.Locked))
	p := guestwire.StartProcess{ID: id.New(id.Process), Argv: []string{"python3", "-c", watch}, Stdin: guestwire.StdinPipe}
	if _, err := spy.client.Start(limited(t), p, nil); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, patience, "the programs are watched", func() bool {
		i, err := spy.client.Get(limited(t), p.ID)
		return err == nil && i.Bytes > 0
	})
	wants(t, "the other sandbox's", other.sh("/usr/bin/factor 15"), "15: 3 5")
	twin := exec.Command("python3", "-c", watch)
	in, err := twin.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := twin.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := twin.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	lines.Scan()
	if err := exec.Command("/usr/bin/factor", "15").Run(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(in, "\n"); err != nil {
		t.Fatal(err)
	}
	lines.Scan()
	wants(t, "twin", lines.Text(), "true factor")
	if err := twin.Wait(); err != nil {
		t.Error(err)
	}
	if _, err := spy.client.Input(limited(t), guestwire.InputRequest{ID: p.ID, Offset: -1, Close: true}, strings.NewReader("\n")); err != nil {
		t.Fatal(err)
	}
	if _, err := spy.client.Wait(limited(t), p.ID); err != nil {
		t.Fatal(err)
	}
	said, err := spy.client.Output(limited(t), guestwire.OutputRequest{ID: p.ID})
	if err != nil {
		t.Fatal(err)
	}
	defer said.Close()
	var learnt strings.Builder
	for {
		item, err := said.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		learnt.Write(item.Data)
	}
	wants(t, "what a sandbox learns", learnt.String(), "watching\ntrue\n")
}

// VULNERABILITY: /proc tells about the host in files that no namespace changes: how it was booted (the
// command line may hold keys), its disks, its kernel's addresses.
// ATTACK: reading them.
// VERIFIES: they are empty. The twin is the host, where they are not.
func TestHostFilesOfProcAreEmpty(t *testing.T) {
	h := newHost(t)
	x := start(t, h.backend(), conformance.Spec(t, isolation.Standard))
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
		x := start(t, h.backend(), conformance.Spec(t, p))
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

// VULNERABILITY: what a reader does not take is queued by the kernel at the guest's expense: 200 KB for
// each connection, so that 300 slow clients of a port ended a sandbox for want of memory.
// ATTACK: as many connections as there may be, to a port and to a process's output, that nobody reads.
// VERIFIES: the guest lives, and a process still starts and tells its output.
func TestSlowReadersDoNotEndTheGuest(t *testing.T) {
	h := newHost(t)
	spec := conformance.Spec(t, isolation.Locked)
	spec.Limits.OpenFiles = 1024
	x := start(t, h.backend(), spec)
	const dials, followers = 300, 400
	const pour = `
import socket, threading
l = socket.create_server(("127.0.0.1", 8000), backlog=512)
def talk(c):
    try:
        while True: c.sendall(b"x" * 65536)
    except OSError: pass
while True: threading.Thread(target=talk, args=(l.accept()[0],), daemon=True).start() if threading.active_count() < 90 else held.append(l.accept()[0])
`
	server := guestwire.StartProcess{ID: id.New(id.Process), Argv: []string{"python3", "-c", "held = []\n" + pour}}
	noise := guestwire.StartProcess{ID: id.New(id.Process), Argv: []string{"sh", "-c", "yes | head -c 8000000; sleep 1000"}, Buffer: 8 << 20}
	for _, p := range []guestwire.StartProcess{server, noise} {
		if _, err := x.client.Start(limited(t), p, nil); err != nil {
			t.Fatal(err)
		}
	}
	testenv.Eventually(t, patience, "the port listens", func() bool {
		ports, err := x.client.Listenings(limited(t))
		return err == nil && len(ports) == 1
	})
	open, refused := 0, 0
	for range dials {
		c, err := x.client.DialPort(limited(t), guestwire.DialRequest{Port: 8000})
		if errs.Is(err, errs.ResourceExhausted) {
			refused++
			continue
		}
		if err != nil {
			t.Fatalf("connection %d: %v", open, err)
		}
		open++
		t.Cleanup(func() { _ = c.Close() })
	}
	if refused == 0 {
		t.Errorf("all of %d connections to ports are open", open)
	}
	for range followers {
		s, err := x.client.Output(t.Context(), guestwire.OutputRequest{ID: noise.ID, Follow: true})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(s.Close)
	}
	wants(t, "a process beside them", x.sh("echo alive"), "alive")
	// Twin: without bounds of their own, the queues alone would be more than the guest may use.
	def, err := os.ReadFile("/proc/sys/net/core/wmem_default")
	if err != nil {
		t.Fatal(err)
	}
	each, _ := strconv.ParseInt(strings.TrimSpace(string(def)), 10, 64)
	if most := cgroup.GuestReserve().MemoryBytes * 4 / 5; each*int64(open+followers) < most {
		t.Errorf("twin: %d queues of %d bytes are less than %d", open+followers, each, most)
	}
}

// VULNERABILITY: protocols that the kernel puts on top of a socket's own had holes year after year.
// ATTACK: asking for TLS on TCP and for ESP on UDP.
// VERIFIES: both fail as on a kernel without them; a plain option still works. The twin is the host, which
// takes the option on UDP.
func TestNoProtocolsOnTopOfSockets(t *testing.T) {
	const script = `
import socket, errno
t, u = socket.socket(socket.AF_INET, socket.SOCK_STREAM), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for s, level, option, value in (t, 6, 31, b"tls"), (u, 17, 100, 2), (t, 6, 1, 1):
    try:
        s.setsockopt(level, option, value); print("taken", end=" ")
    except OSError as e:
        print(errno.errorcode[e.errno], end=" ")
`
	h := newHost(t)
	x := start(t, h.backend(), conformance.Spec(t, isolation.Standard))
	got := x.run("root", "python3", "-c", script)
	wants(t, "inside", strings.TrimSpace(got.out), "ENOPROTOOPT ENOPROTOOPT taken")
	twin, err := exec.Command("python3", "-c", script).Output()
	if err != nil || !strings.HasSuffix(strings.TrimSpace(string(twin)), "taken taken") {
		t.Errorf("twin: %q %v", twin, err)
	}
}
