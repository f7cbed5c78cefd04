package selftest

import "time"

// fileCases are section B: files, /proc, /sys, devices.
func fileCases() []Case {
	return []Case{
		both(Case{
			ID: "B01", Class: HostLeak, Title: "masked files of /proc and /sys", Twin: Bare,
			Script: `for f in /proc/kcore /proc/keys /proc/timer_list /proc/sched_debug /proc/kmsg /proc/latency_stats /proc/slabinfo /proc/vmallocinfo; do
  [ -n "$(timeout 2 head -c1 $f 2>/dev/null | tr -d '\0')" ] && echo LEAK $f; done
for d in /sys/firmware/dmi /proc/scsi /proc/acpi /proc/asound /sys/devices/virtual/powercap /proc/driver; do
  [ -n "$(ls -A $d 2>/dev/null)" ] && echo LEAK $d; done; echo done`,
		}, Want{Match: `^done`, Reject: `LEAK`}),
		both(Case{
			ID: "B02", Class: HostDoS, Title: "sysrq, interrupts and buses", Twin: Bare,
			Script: `test -w /proc/sysrq-trigger && echo WRITABLE sysrq
find /proc/irq /proc/bus /proc/fs -type f -writable 2>/dev/null | head -3 | sed 's/^/WRITABLE /'; echo done`,
		}, Want{Match: `^done`, Reject: `WRITABLE`}),
		both(Case{
			ID: "B03", Class: Escape, Title: "core_pattern (CVE-2022-0811)", Twin: Bare,
			Script: `test -w /proc/sys/kernel/core_pattern && echo WRITABLE || echo denied`,
		}, Want{Match: `^denied`}),
		both(Case{
			ID: "B04", Class: Escape, Title: "programs that the kernel runs", Twin: Bare,
			Script: `for f in /proc/sys/kernel/modprobe /sys/kernel/uevent_helper /proc/sys/fs/binfmt_misc/register /proc/sys/kernel/hotplug /proc/sys/kernel/usermodehelper/bset; do
  test -w $f && echo WRITABLE $f; done
find /proc/sys /sys -writable -type f 2>/dev/null | head -3 | sed 's/^/WRITABLE /'; echo done`,
		}, Want{Match: `^done`, Reject: `WRITABLE`}),
		both(Case{
			ID: "B05", Class: Escape, Title: "release_agent (CVE-2022-0492)", Twin: Bare,
			Script: `find /sys/fs/cgroup -name release_agent -writable 2>/dev/null | head -1 | sed 's/^/WRITABLE /'
mkdir -p /tmp/cg; for o in rdma pids memory none,name=x; do mount -t cgroup -o $o c /tmp/cg >/dev/null 2>&1 && echo MOUNTED && umount /tmp/cg; done
mount -t cgroup2 c /tmp/cg >/dev/null 2>&1 && echo MOUNTED && umount /tmp/cg; rmdir /tmp/cg; echo done`,
		}, Want{Match: `^done`, Reject: `WRITABLE|MOUNTED`}),
		both(Case{
			ID: "B06", Class: PeerDoS, Title: "its own limits", Twin: Bare,
			Script: `find /sys/fs/cgroup -name '*.max' -writable 2>/dev/null | head -1 | sed 's/^/WRITABLE /'
find /sys/fs/cgroup \( -name memory.limit_in_bytes -o -name pids.max -o -name cpu.cfs_quota_us \) -writable 2>/dev/null | head -1 | sed 's/^/WRITABLE /'; echo done`,
		}, Want{Match: `^done`, Reject: `WRITABLE`}),
		both(Case{
			ID: "B07", Class: Escape, Title: "device nodes", Twin: Bare,
			Script: `rm -f /tmp/b /tmp/m; mknod /tmp/b b 8 0 2>/dev/null && echo MADE block
mknod /tmp/m c 1 1 2>/dev/null && echo MADE mem; test -r /tmp/m && head -c1 /tmp/m >/dev/null 2>&1 && echo OPENED mem
mknod /tmp/n c 1 3 2>/dev/null && head -c1 /tmp/n && echo OPENED null; rm -f /tmp/b /tmp/m /tmp/n; echo done`,
		}, Want{Match: `^done`, Reject: `MADE|OPENED`}),
		both(Case{
			ID: "B09", Class: Escape, Title: "mounting", Twin: Bare, TwinSpoils: true,
			Script: `mkdir -p /tmp/mnt; mount -t tmpfs n /tmp/mnt 2>/dev/null && echo MOUNTED tmpfs
mount --bind / /tmp/mnt 2>/dev/null && echo MOUNTED bind; mount -o remount,rw / 2>/dev/null && echo REMOUNTED
umount -l /tmp/mnt 2>/dev/null && echo UNMOUNTED; umount -l /proc 2>/dev/null && echo UNMOUNTED proc; echo done`,
		}, Want{Match: `^done`, Reject: `MOUNTED`}),
		both(Case{
			ID: "B10", Class: Escape, Title: "the newer mount calls", Twin: Bare,
			Script: `sc fsopen 0 0; sc open_tree -100 0 1; sc mount_setattr -1 0 0 0 0; sc move_mount -1 0 -1 0 0`,
		}, refusedAll()),
		both(Case{
			ID: "B11", Class: Escape, Title: "breaking out of a chroot", Twin: Chroot,
			Python: `
def root(): s = os.stat("/"); return (s.st_dev, s.st_ino)
before = root()
try:
    os.makedirs("/tmp/jail", exist_ok=True)
    d = os.open("/", 0)
    os.chroot("/tmp/jail")
    os.fchdir(d)
    for _ in range(64): os.chdir("..")
    os.chroot(".")
    print("SAME" if root() == before else "OUTSIDE", os.listdir("/"))
except OSError as e:
    print("refused", errno.errorcode[e.errno])`,
		}, Want{Match: `refused E(PERM|NOSYS|ACCES)|SAME`, Reject: `OUTSIDE`}),
		both(Case{
			ID: "B12", Class: Escape, Title: "a user namespace and a mount in it", Twin: Bare,
			Script: `unshare -Urm sh -c 'mount -t proc p /proc && echo MOUNTED; mount -t tmpfs t /tmp && echo MOUNTED' 2>/dev/null || echo refused`,
		}, Want{Match: `^refused`, Reject: `MOUNTED`}),
		both(Case{
			ID: "B13", Class: Escape, Title: "entering the first process's namespaces", Twin: Bare,
			Script: `nsenter -t 1 -m -p true 2>/dev/null && echo ENTERED || echo refused`,
		}, Want{Match: `^refused`}),
		both(Case{
			ID: "B15", Class: HostLeak, Title: "the first process's root", Twin: Chroot,
			Script: `a=$(stat -Lc %d:%i /proc/1/root/ 2>/dev/null) || { echo denied; exit 0; }
[ "$a" = "$(stat -Lc %d:%i /)" ] && echo SAME || echo OTHER`,
		}, Want{Match: `^(denied|SAME)`}),
		both(Case{
			ID: "B16", Class: HostLeak, Title: "masked files by other names", Twin: Bare,
			Script: `cd /; for p in "" /proc/self/root /proc/self/cwd /proc/thread-self/root /proc/$$/root; do
  [ -n "$(head -c1 $p/proc/kcore 2>/dev/null | tr -d '\0')" ] && echo LEAK $p; test -w $p/proc/sys/kernel/core_pattern && echo WRITABLE $p; done; echo done`,
		}, Want{Match: `^done`, Reject: `LEAK|WRITABLE`}),
		{
			ID: "B17", Class: Integrity, Title: "changing read-only files", Twin: Bare, Python: changeReadOnly,
			Locked:   Want{Match: `^done`, Reject: `CHANGED`},
			Standard: Want{Not: "root inside may change its own copy of every file; the layers below stay as they are"},
		},
		both(Case{
			ID: "B19", Class: Escape, Title: "sockets of the host", Twin: Bare, Timeout: 10 * time.Minute,
			TwinSetup: `python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("/tmp/docker.sock")'`,
			Script:    `find / -xdev -type s 2>/dev/null | grep -v '^/proc' | head -5 | sed 's/^/SOCKET /'; find /run /var/run /tmp -type s 2>/dev/null | head -5 | sed 's/^/SOCKET /'; echo done`,
		}, Want{Match: `^done`, Reject: `SOCKET`}),
		both(Case{
			ID: "B20", Class: Escape, Title: "abstract sockets (CVE-2020-15257)", Twin: Shared,
			Script: `grep -c @ /proc/net/unix`,
		}, Want{Match: `^0$`}),
		both(Case{
			ID: "B22", Class: HostLeak, Title: "kernel log and hardware names", Twin: Bare, TwinSpoils: true,
			TwinSetup: `mount -t tmpfs t /sys/class && mkdir -p /sys/class/dmi/id && echo board > /sys/class/dmi/id/board_name`,
			Script: `dmesg >/dev/null 2>&1 && echo READ kernel log; sc syslog 3 0 0 | grep -v refused
for f in /sys/class/dmi/id/board_name /sys/class/dmi/id/product_name /proc/device-tree/model; do [ -s $f ] && head -c1 $f >/dev/null 2>&1 && echo READ $f; done; echo done`,
		}, Want{Match: `^done`, Reject: `READ|through|answered`}),
		both(Case{
			ID: "B23", Class: HostLeak, Title: "debugfs, tracefs and bpffs", Twin: Bare,
			TwinSetup: `mount -t debugfs d /sys/kernel/debug`,
			Script:    `for d in /sys/kernel/debug /sys/kernel/tracing /sys/fs/bpf /sys/kernel/security; do ls -A $d 2>/dev/null | head -1 | sed "s,^,FOUND $d/,"; done; echo done`,
		}, Want{Match: `^done`, Reject: `FOUND`}),
		both(Case{
			ID: "B30", Class: Escape, Title: "writing to the guest's program (CVE-2019-5736)", Twin: Bare,
			Python: `
for p in ("/proc/1/exe", "/proc/self/exe"):
    try:
        if os.access(p, os.W_OK): print("WRITABLE", p)
        else: print("denied", p)
    except OSError as e:
        print("denied", errno.errorcode[e.errno])
print("done")`,
			Locked: Want{},
		}, Want{Match: `^done`, Reject: `WRITABLE /proc/1`}),
	}
}

// changeReadOnly tries to change a program that the sandbox may only read, in every way there is.
const changeReadOnly = `
import mmap
f = "/usr/bin/env"
def attempt(name, act):
    try:
        act()
        print("CHANGED by", name)
    except OSError as e:
        print("refused", name, errno.errorcode[e.errno])
def mapped():
    fd = os.open(f, os.O_RDWR)
    mmap.mmap(fd, 16, mmap.MAP_SHARED, mmap.PROT_WRITE)[0] = 0x7f
def linked():
    os.link(f, "/tmp/hard"); os.open("/tmp/hard", os.O_WRONLY)
attempt("truncate", lambda: os.truncate(f, 1 << 20))
attempt("write", lambda: os.open(f, os.O_WRONLY))
attempt("append", lambda: os.open(f, os.O_WRONLY | os.O_APPEND))
attempt("chmod", lambda: os.chmod(f, 0o777))
attempt("chown", lambda: os.chown(f, os.getuid(), -1))
attempt("touch", lambda: os.utime(f))
attempt("attribute", lambda: os.setxattr(f, "user.a", b"v"))
attempt("mapping", mapped)
attempt("hard link", linked)
attempt("rename", lambda: os.rename(f, f + ".b"))
attempt("unlink", lambda: os.unlink(f))
print("done")`
