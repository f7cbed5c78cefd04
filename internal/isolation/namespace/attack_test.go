package namespace

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/conformance"
	"casemate.dev/internal/rootfs"
)

// Every test here is an attack on a real sandbox. Each has a twin: the same act where the defence is
// not there, which must succeed, so that a passing attack test means something.

func profiles() []isolation.Profile { return []isolation.Profile{isolation.Locked, isolation.Standard} }

// VULNERABILITY: inside-uid 0 mapped to host uid 0, as in bubblewrap started as root.
// ATTACK: root inside writes what is guarded by ownership alone, such as core_pattern.
// VERIFIES: every process of a sandbox, PID 1 included, has only ids of the sandbox's own range.
func TestNoProcessHasAHostID(t *testing.T) {
	h := newHost(t)
	b := h.backend()
	for _, p := range profiles() {
		x := start(t, b, conformance.Spec(t, p))
		if _, err := x.client.Start(limited(t), guestwire.StartProcess{ID: "prc_sleeper", Argv: []string{"sleep", "1000"}}, nil); err != nil {
			t.Fatal(err)
		}
		pids, err := x.inst.group.Pids()
		if err != nil || len(pids) < 2 {
			t.Fatalf("pids: %v, %v", pids, err)
		}
		for _, pid := range pids {
			for _, id := range statusIDs(t, pid) {
				if id < uint64(x.inst.first) || id >= uint64(x.inst.first)+rangeSize {
					t.Errorf("%s: process %d has the host id %d", p, pid, id)
				}
			}
		}
		wants(t, string(p)+": write core_pattern", x.sh("test -w /proc/sys/kernel/core_pattern && echo WRITABLE || echo denied"), "denied")
		if p == isolation.Standard {
			wants(t, "as root: write core_pattern", x.shAs("root", "test -w /proc/sys/kernel/core_pattern && echo WRITABLE || echo denied"), "denied")
		}
	}
	// Twin: the host's root, which a wrong map would make of root inside.
	if err := unix.Access("/proc/sys/kernel/core_pattern", unix.W_OK); err != nil {
		t.Errorf("twin: host uid 0 can't write core_pattern either: %v", err)
	}
}

// statusIDs returns all user and group ids of a process as the host sees them.
func statusIDs(t *testing.T, pid int) []uint64 {
	t.Helper()
	b, err := os.ReadFile(procFile(pid, "status"))
	if err != nil {
		t.Fatal(err)
	}
	var ids []uint64
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) == 0 || f[0] != "Uid:" && f[0] != "Gid:" && f[0] != "Groups:" {
			continue
		}
		for _, s := range f[1:] {
			n, err := strconv.ParseUint(s, 10, 32)
			if err != nil {
				t.Fatal(err)
			}
			ids = append(ids, n)
		}
	}
	return ids
}

// VULNERABILITY: a descriptor of a host directory in PID 1 (CVE-2024-21626).
// ATTACK: a symbolic link to /proc/1/fd/N/../../.. or /proc/self/fd/N/../.., followed by a process or
// by the file calls, for every N.
// VERIFIES: no link leads to a directory at all.
func TestLinksToDescriptorsLeadNowhere(t *testing.T) {
	h := newHost(t)
	x := start(t, h.backend(), conformance.Spec(t, isolation.Standard))
	const most = 64
	x.sh(`mkdir -p links && cd links && i=0; while [ $i -lt 64 ]; do
		for p in self 1; do ln -s /proc/$p/fd/$i/.. up-$p-$i; ln -s /proc/$p/fd/$i/../../.. top-$p-$i; done; i=$((i+1)); done`)
	out := x.shAs("root", `cd /home/user/links; for l in *; do [ -d $l/ ] && { [ $l/ -ef / ] || [ $l/ -ef /proc/$$/fd ] || echo "$l: $(ls $l/ | head -3)"; }; done; echo done`)
	wants(t, "links followed by root inside", out, "done")
	for i := range most {
		for _, kind := range []string{"up", "top"} {
			for _, who := range []string{"self", "1"} {
				path := fmt.Sprintf("/home/user/links/%s-%s-%d", kind, who, i)
				list, err := x.client.ListDir(limited(t), guestwire.ListRequest{
					PathRequest: guestwire.PathRequest{Asker: guestwire.Asker{User: "root"}, Path: path, Follow: true}, Depth: 1,
				})
				if err != nil {
					continue
				}
				if info, err := list.Next(); err == nil {
					t.Errorf("list %s: shows %s", path, info.Name)
				}
				list.Close()
			}
		}
	}
	// Twin: a process that does hold a directory, and may be looked into, leads there.
	twin := x.shAs("root", `exec 7</usr; ls -d /proc/$$/fd/7/bin`)
	if !strings.HasSuffix(twin, "/fd/7/bin") {
		t.Errorf("twin: a held directory did not lead anywhere: %q", twin)
	}
}

// VULNERABILITY: PID 1 in the sandbox's own user namespace.
// ATTACK: root inside opens PID 1's memory, root, descriptors, environment, or traces it.
// VERIFIES: all of it is refused, although root inside has every capability that the profile gives.
func TestRootInsideCannotReachPID1(t *testing.T) {
	h := newHost(t)
	x := start(t, h.backend(), conformance.Spec(t, isolation.Standard))
	const attack = `
import os, sys
pid = sys.argv[1]
def attempt(name, f):
    try:
        f()
        print(name, "WORKED")
    except OSError as e:
        print(name, "refused")
def nothing(): pass
attempt("mem", lambda: os.close(os.open(f"/proc/{pid}/mem", os.O_RDWR)))
attempt("environ", lambda: open(f"/proc/{pid}/environ").read())
attempt("maps", lambda: open(f"/proc/{pid}/maps").read())
attempt("fd", lambda: os.listdir(f"/proc/{pid}/fd"))
attempt("root", lambda: os.listdir(f"/proc/{pid}/root/"))
attempt("cwd", lambda: os.listdir(f"/proc/{pid}/cwd/"))
attempt("exe", lambda: os.close(os.open(f"/proc/{pid}/exe", os.O_RDONLY)))
attempt("oom", lambda: open(f"/proc/{pid}/oom_score_adj", "w").write("500"))
`
	got := x.run("root", "python3", "-c", attack, "1")
	for line := range strings.Lines(got.out) {
		if strings.Contains(line, "WORKED") {
			t.Errorf("root inside reached PID 1: %s", line)
		}
	}
	if n := strings.Count(got.out, "refused"); n != 8 {
		t.Errorf("%d of 8 attempts were refused: %s%s", n, got.out, got.err)
	}
	// Twin: the same attempts on a process that belongs to the sandbox.
	const twin = `import subprocess, sys; p = subprocess.Popen(["sleep", "1000"]); sys.argv[1:] = [str(p.pid)]
exec(open("/tmp/attack.py").read()); p.kill()`
	x.run("root", "sh", "-c", "cat > /tmp/attack.py <<'END'\n"+attack+"\nEND")
	if got := x.run("root", "python3", "-c", twin); strings.Count(got.out, "WORKED") != 8 {
		t.Errorf("twin: a process of the sandbox's own is out of reach, too: %s%s", got.out, got.err)
	}
}

// VULNERABILITY: Go's runtime ends the program at several signals, and PID 1's end is the sandbox's.
// ATTACK: root inside sends every signal to PID 1, by kill and by sigqueue.
// VERIFIES: the guest lives and answers.
func TestPID1OutlivesEverySignal(t *testing.T) {
	h := newHost(t)
	x := start(t, h.backend(), conformance.Spec(t, isolation.Standard))
	x.run("root", "python3", "-c", `
import os, ctypes
libc = ctypes.CDLL(None)
for s in range(1, 65):
    for _ in range(3):
        try: os.kill(1, s)
        except OSError: pass
        libc.sigqueue(1, s, None)
`)
	if _, err := x.client.Status(limited(t)); err != nil {
		t.Fatalf("the guest does not answer any more: %v", err)
	}
	wants(t, "a process afterwards", x.sh("echo alive"), "alive")
	// Twin: SIGTERM ends a process that did nothing about it.
	wants(t, "twin", x.sh(`sleep 1000 & p=$!; kill -TERM $p; wait $p; echo $?`)[:3], "143")
}

// VULNERABILITY: mount targets resolved through links of an image (CVE-2025-31133, -52565, -52881,
// CVE-2026-41579).
// ATTACK: an image whose /dev, /proc, /sys, or a directory on the way to a bind or workspace is a
// symbolic link.
// VERIFIES: the start is refused, and nothing was written where the link leads.
func TestLinkedMountTargetsAreRefused(t *testing.T) {
	h := newHost(t)
	b := h.backend()
	for _, tt := range []struct{ name, link, to string }{
		{"dev", "dev", "/tmp/victim"},
		{"dev relative", "dev", "tmp/victim"},
		{"proc", "proc", "/tmp/victim"},
		{"sys", "sys", "tmp/victim"},
		{"target of a bind", "usr", "/tmp/victim"},
		{"on the way to a bind", "opt", "/tmp"},
		{"to a magic link", "dev", "/proc/self/fd/4"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			spec := conformance.Spec(t, isolation.Locked)
			lower := spec.Root.Lowers[0]
			if err := os.MkdirAll(filepath.Join(lower, "tmp/victim"), 0o777); err != nil {
				t.Fatal(err)
			}
			spec.Root.Binds = append(spec.Root.Binds, rootfs.Bind{Source: "/etc", Target: "/opt/x/name"})
			if tt.link != "opt" {
				spec.Root.Binds = spec.Root.Binds[:1]
			}
			_ = os.RemoveAll(filepath.Join(lower, tt.link))
			if err := os.Symlink(tt.to, filepath.Join(lower, tt.link)); err != nil {
				t.Fatal(err)
			}
			if _, err := tryStart(t, b, spec); err == nil {
				t.Fatal("the sandbox started")
			} else if !strings.Contains(err.Error(), "symbolic link") {
				t.Errorf("refused for another reason: %v", err)
			}
			for _, layer := range []string{lower, spec.Root.Upper} {
				if entries, err := os.ReadDir(filepath.Join(layer, "tmp/victim")); err == nil && len(entries) > 0 {
					t.Errorf("something was written behind the link: %v", entries)
				}
			}
			if left := h.leftovers(); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
	// Twin: mount(2) by path does follow.
	inPrivateMounts(t, func(dir string) error {
		if err := os.Mkdir(filepath.Join(dir, "victim"), 0o755); err != nil {
			return err
		}
		if err := os.Symlink("victim", filepath.Join(dir, "dev")); err != nil {
			return err
		}
		if err := unix.Mount("twin", filepath.Join(dir, "dev"), "tmpfs", 0, ""); err != nil {
			return err
		}
		b, err := os.ReadFile("/proc/thread-self/mountinfo")
		if err == nil && !strings.Contains(string(b), filepath.Join(dir, "victim")) {
			t.Error("twin: mount(2) did not follow the link")
		}
		return err
	})
}

// VULNERABILITY: overlayfs mounts read-only and reports success where it can't prepare its work
// directory, as on a full disk (HARDENING 11).
// ATTACK: a layer whose file system has no room left.
// VERIFIES: the start is refused and says why.
func TestReadOnlyOverlayIsRefused(t *testing.T) {
	h := newHost(t)
	spec := conformance.Spec(t, isolation.Locked)
	dir := t.TempDir()
	// Inodes for the root, upper and work, and none for work/work.
	mountFull := func(dir string) error {
		if err := unix.Mount("full", dir, "tmpfs", 0, "mode=700,size=1m,nr_inodes=3"); err != nil {
			return err
		}
		for _, d := range []string{"upper", "work"} {
			if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
				return err
			}
		}
		return nil
	}
	if err := mountFull(dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	spec.Root.Upper, spec.Root.Work = filepath.Join(dir, "upper"), filepath.Join(dir, "work")
	if _, err := tryStart(t, h.backend(), spec); err == nil {
		t.Fatal("the sandbox started")
	} else if !strings.Contains(err.Error(), "read-only") {
		t.Errorf("refused for another reason: %v", err)
	}
	// Twin: mount(2) is content.
	inPrivateMounts(t, func(dir string) error {
		for _, d := range []string{"lower", "full", "merged"} {
			if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
				return err
			}
		}
		if err := mountFull(filepath.Join(dir, "full")); err != nil {
			return err
		}
		options := "lowerdir=" + dir + "/lower,upperdir=" + dir + "/full/upper,workdir=" + dir + "/full/work"
		if err := unix.Mount("overlay", dir+"/merged", "overlay", 0, options); err != nil {
			return err
		}
		var st unix.Statfs_t
		if err := unix.Statfs(dir+"/merged", &st); err != nil {
			return err
		}
		if st.Flags&unix.ST_RDONLY == 0 {
			t.Error("twin: the overlay came up writable")
		}
		return nil
	})
}

// VULNERABILITY: mountinfo tells where the host keeps its layers (HARDENING 8).
// ATTACK: read it.
// VERIFIES: no path of the host is in it, and no name of a sandbox or server.
func TestMountinfoShowsNoHostPath(t *testing.T) {
	h := newHost(t)
	b := h.backend()
	for _, p := range profiles() {
		spec := conformance.Spec(t, p)
		source := t.TempDir()
		upper, work := conformance.Writable(t)
		spec.Root.Workspaces = []rootfs.Workspace{{Source: source, Target: "/home/user/work", Upper: upper, Work: work, OwnerUID: 4242, OwnerGID: 4242}}
		x := start(t, b, spec)
		info := x.sh("cat /proc/self/mountinfo /proc/self/mounts /proc/1/mountinfo")
		for _, secret := range []string{
			spec.ID, h.cfg.ServerID, h.cfg.RunDir, spec.Root.Upper, spec.Root.Lowers[0], source, upper,
			"/tmp/", "casemate", x.inst.name,
		} {
			if strings.Contains(info, secret) {
				t.Errorf("%s: mountinfo shows %q:\n%s", p, secret, info)
			}
		}
		for _, known := range []string{"lowerdir=l0", "/usr"} {
			if !strings.Contains(info, known) {
				t.Errorf("%s: mountinfo lacks %q", p, known)
			}
		}
	}
	// Twin: an overlay mounted by paths shows them.
	inPrivateMounts(t, func(dir string) error {
		for _, d := range []string{"a", "b", "merged"} {
			if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
				return err
			}
		}
		if err := unix.Mount("overlay", dir+"/merged", "overlay", 0, "lowerdir="+dir+"/a:"+dir+"/b"); err != nil {
			return err
		}
		b, err := os.ReadFile("/proc/thread-self/mountinfo")
		if err == nil && !strings.Contains(string(b), "lowerdir="+dir+"/a") {
			t.Error("twin: the overlay's paths don't show")
		}
		return err
	})
}

// VULNERABILITY: setuid files and file capabilities of a sandbox, run by a user of the host through a
// layer (HARDENING 9).
// VERIFIES: the copies of the layers that a guest gets can't be executed from, followed or opened as
// devices, while programs inside run, and in profile standard also setuid ones.
func TestLayersAreInert(t *testing.T) {
	h := newHost(t)
	spec := conformance.Spec(t, isolation.Standard)
	b := &builder{spec: spec}
	defer b.close()
	if _, err := b.overlay(mapped(spec.Root.Lowers, nil), spec.Root.Upper, spec.Root.Work); err != nil {
		t.Fatal(err)
	}
	for _, f := range b.files {
		var st unix.Statfs_t
		if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
			t.Fatal(err)
		}
		const want = unix.ST_NOSUID | unix.ST_NODEV | unix.ST_NOEXEC | 0x2000 // ST_NOSYMFOLLOW
		if st.Flags&want != want {
			t.Errorf("%s: flags %#x", f.Name(), st.Flags)
		}
	}
	x := start(t, h.backend(), spec)
	x.shAs("root", "cp /usr/bin/id /tmp/id && cp /usr/bin/id /tmp/suid && chmod 4755 /tmp/suid")
	wants(t, "a copied program", x.sh("/tmp/id -u"), "1000")
	wants(t, "a setuid program in profile standard", x.sh("/tmp/suid -u"), "0")

	locked := start(t, h.backend(), conformance.Spec(t, isolation.Locked))
	wants(t, "a setuid program in profile locked", locked.sh("cp /usr/bin/id /tmp/suid && chmod 4755 /tmp/suid && /tmp/suid -u"), "1000")
}

// VERIFIES: what may be written may hold no setuid file and no device, except the root in profile
// standard, where sudo works.
func TestWritableMounts(t *testing.T) {
	h := newHost(t)
	b := h.backend()
	for _, p := range profiles() {
		x := start(t, b, conformance.Spec(t, p))
		for line := range strings.Lines(x.sh("cat /proc/mounts")) {
			f := strings.Fields(line)
			options := "," + f[3] + ","
			if !strings.Contains(options, ",rw,") {
				continue
			}
			suid := !strings.Contains(options, ",nosuid,")
			if suid && (p == isolation.Locked || f[1] != "/") {
				t.Errorf("%s: %s is writable and lets setuid files act", p, f[1])
			}
			if !strings.Contains(options, ",nodev,") && f[1] != "/dev/pts" {
				t.Errorf("%s: %s is writable and lets devices act", p, f[1])
			}
		}
		wants(t, string(p)+": writable parts of /proc/sys, /sys and /dev",
			x.sh("find /proc/sys /sys /dev -xdev \\( -type f -o -type d \\) -writable 2>/dev/null | grep -v ^/dev/shm; true"), "")
		wants(t, string(p)+": masked files", x.sh("for f in /proc/kcore /proc/keys /proc/timer_list /proc/interrupts; do head -c1 $f; done 2>/dev/null; ls /proc/acpi /proc/scsi 2>/dev/null | grep -v :; true"), "")
		wants(t, string(p)+": user namespaces", x.sh("unshare -U true 2>/dev/null && echo MADE || echo refused; cat /proc/sys/user/max_user_namespaces"), "refused\n0")
	}
	// Twin: the host's own sysctls are writable for the host's root.
	if err := unix.Access("/proc/sys/kernel/core_pattern", unix.W_OK); err != nil {
		t.Errorf("twin: %v", err)
	}
}

// VULNERABILITY: two sandboxes that share an inode can watch by inotify(7), and signal by flock(2), when
// the other uses it.
// VERIFIES: no file of one is a file of another, also of a directory that a template binds of the host.
func TestSandboxesShareNoFile(t *testing.T) {
	h := newHost(t, func(c *Config) { c.Spares = 2 })
	b := h.backend()
	const look = "stat -c %d:%i / /tmp /dev /dev/null /dev/urandom /dev/shm /dev/pts /proc /proc/sys /proc/kcore /sys /sys/devices/system/cpu/online /usr /usr/bin /usr/bin/env"
	seen := map[string]int{}
	for i := range 4 {
		spec := conformance.Spec(t, isolation.Locked)
		if i%2 == 1 {
			spec.Limits.CPUs = 1
		}
		x := start(t, b, spec)
		for file := range strings.FieldsSeq(x.sh(look + " 2>/dev/null; true")) {
			if before, ok := seen[file]; ok && before != i {
				t.Errorf("sandboxes %d and %d share the file %s", before, i, file)
			}
			seen[file] = i
		}
	}
	if len(seen) < 4*13 {
		t.Errorf("only %d files were looked at", len(seen))
	}
	// Twin: a single file that is bound is shared.
	bound := func() string {
		spec := conformance.Spec(t, isolation.Locked)
		spec.Root.Binds = append(spec.Root.Binds, rootfs.Bind{Source: "/etc/hostname", Target: "/etc/hostname"})
		return start(t, b, spec).sh("stat -c %d:%i /etc/hostname")
	}
	if a, c := bound(), bound(); a != c {
		t.Errorf("twin: a bound file is %s and %s", a, c)
	}
}
