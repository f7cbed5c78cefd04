package selftest

import (
	"context"
	"fmt"
	"slices"
	"strings"
)

// hardeningCases are section X: traps that were found while Casemate's own parts were built.
func hardeningCases() []Case {
	return []Case{
		both(Case{
			ID: "X01", Class: Escape, Title: "file API through links to descriptors", Twin: Bare,
			Script: `d=$HOME; [ -w "$d" ] || d=/tmp; cd $d; mkdir -p links; for n in $(seq 0 40); do
  ln -sfn /proc/self/fd/$n/../../../../.. links/up$n; ln -sfn /proc/self/fd/$n links/fd$n; ln -sfn /proc/1/fd/$n/../../.. links/one$n; done
ln -sfn /proc/self/root links/root; ln -sfn /proc/1/root links/oneroot; ln -sfn /proc/1/mem links/mem; ln -sfn /proc/self/environ links/environ
echo "planted in $PWD/links"; ls -A / | tr '\n' ' '`,
			Check: noListingOutside,
		}, Want{Match: `^planted in `}),
		both(Case{
			ID: "X02", Class: InternalEsc, Title: "memory, descriptors and environment of the first process", Twin: Bare,
			Python: `
def attempt(name, act):
    try:
        act(); print("REACHED", name)
    except OSError as e:
        print("refused", name, errno.errorcode[e.errno])
attempt("mem", lambda: os.open("/proc/1/mem", os.O_RDWR))
attempt("fd", lambda: os.listdir("/proc/1/fd"))
attempt("maps", lambda: open("/proc/1/maps").read(1) or os.stat("/an empty answer"))
attempt("environ", lambda: open("/proc/1/environ").read(1) or os.stat("/an empty answer"))
attempt("cwd", lambda: os.listdir("/proc/1/cwd/.."))
attempt("exe", lambda: os.readlink("/proc/1/exe"))
attempt("syscall", lambda: open("/proc/1/syscall").read())
call("ptrace", 16, 1, 0, 0)
pid = call("pidfd_open", 1, 0)
if pid >= 0:
    for n in range(8):
        if call("pidfd_getfd", pid, n, 0) >= 0: print("REACHED descriptor", n)
print("done")`,
		}, Want{Match: `^done`, Reject: `REACHED|ptrace (through|answered)|getfd (through|answered)`}),
		both(Case{
			ID: "X03", Class: InternalEsc, Title: "limits of the first process", Twin: Bare,
			Python: `
import resource, struct
buf = ctypes.create_string_buffer(16)
call("prlimit64", 1, 7, 0, ctypes.addressof(buf))`,
		}, refusedAll()),
		both(Case{
			ID: "X04", Class: SelfDoS, Title: "signals to the first process",
			Script: `for s in TERM HUP INT QUIT SEGV ABRT BUS FPE ILL USR1 USR2 PIPE ALRM TRAP SYS STOP TSTP KILL; do kill -$s 1 2>/dev/null; done; echo sent`,
			Check:  stillAnswers, Untwinned: "what a guest that does not catch them does is tried with the guest",
		}, Want{Match: `^sent`}),
		both(Case{
			ID: "X05", Class: HostLeak, Title: "host paths in the mount table", Twin: Shared,
			Script: `cat /proc/self/mountinfo`,
		}, Want{Match: ` / `, Reject: hostPaths + `|casemate`}),
		both(Case{
			ID: "X06", Class: Integrity, Title: "subvolumes and snapshots of the store's file system", Twin: Bare,
			TwinSetup: btrfsTwin,
			Python: `
where = os.environ.get("BTRFS", os.path.expanduser("~"))
fd = os.open(where, os.O_RDONLY)
name = ctypes.create_string_buffer(b"\0" * 8 + b"sub", 4096)
if libc.ioctl(fd, ctypes.c_ulong(0x5000940e), name) == 0: # BTRFS_IOC_SUBVOL_CREATE
    print("MADE")
else:
    print("refused", errno.errorcode[ctypes.get_errno()])`,
			TwinEnv: map[string]string{"BTRFS": "/tmp/btrfs"},
		}, Want{Match: `refused E(NOTTY|PERM|ACCES|INVAL|OPNOTSUPP)`, Reject: `MADE`}),
		both(Case{
			ID: "X07", Class: Lateral, Title: "ways out over the network", Twin: Shared,
			Script: `[ -n "$LOOK_ONLY" ] || for a in "1.1.1.1 443" "8.8.8.8 53" "169.254.169.254 80" "10.0.0.1 80" "100.100.100.200 80"; do tcp $a; done
ip -o link 2>/dev/null | grep -v ' lo:' | sed 's/^/LINK /'; grep -vE '^ *lo:|^Inter|^ face' /proc/net/dev | sed 's/^/LINK /'; echo done`,
			TwinEnv: map[string]string{"LOOK_ONLY": "1"},
		}, Want{Match: `^done`, Reject: `OPEN|LINK`}),
		both(Case{
			ID: "X08", Class: HostLeak, Title: "processes of the host", Twin: Shared,
			Script: `n=$(ls -d /proc/[0-9]* 2>/dev/null | wc -l); [ "$n" -lt 20 ] && echo few || echo MANY $n`,
		}, Want{Match: `^few`}),
		both(Case{
			ID: "X09", Class: HostLeak, Title: "names of the host in /etc", Twin: Bare,
			Script: `for f in /etc/shadow /etc/ssh /etc/sudoers.d/host /root/.ssh /root/.bash_history /etc/machine-id; do
  case $f in /etc/shadow) [ -r $f ] && grep -qE '^[a-z]+:\$' $f && echo HASH $f;; *) [ -e $f ] && [ -r $f ] && [ -n "$(ls -A $f 2>/dev/null)" ] && [ -s $f -o -d $f ] && echo FOUND $f;; esac; done; echo done`,
			TwinSetup: `mkdir -p /root/.ssh; echo key > /root/.ssh/id_test`,
		}, Want{Match: `^done`, Reject: `HASH|FOUND /root|FOUND /etc/ssh`}),
	}
}

// hostPaths matches what tells in a mount table where the host keeps a sandbox: directories of an overlay's layers, where in
// its file system the root lies (the fourth field, proc_pid_mountinfo(5)), and what the host mounts it from.
const hostPaths = `(upper|lower|work)dir=[^, ]*/[^, ]*/|^\d+ \d+ \S+ /\S+ / |/var/lib|/dev/loop`

// btrfsTwin mounts a small btrfs file system directly, as no sandbox may have it.
const btrfsTwin = `truncate -s 128M /tmp/image && mkfs.btrfs -q /tmp/image && mkdir -p /tmp/btrfs && mount -o loop /tmp/image /tmp/btrfs`

// noListingOutside follows the planted links through the file API. Whatever answers must be the
// sandbox's own root, or a refusal.
func noListingOutside(ctx context.Context, a *attack) error {
	first, rest, _ := strings.Cut(a.result.Output, "\n")
	dir := strings.TrimPrefix(first, "planted in ")
	own := strings.Fields(rest)
	names := []string{"root", "oneroot"}
	for n := range 41 {
		names = append(names, fmt.Sprintf("up%d", n), fmt.Sprintf("fd%d", n), fmt.Sprintf("one%d", n))
	}
	for _, n := range names {
		listed, err := a.box.List(ctx, dir+"/"+n)
		if err != nil {
			continue // refused, which is right
		}
		for _, l := range listed {
			if !slices.Contains(own, l) {
				return fmt.Errorf("the file API listed %q through %s, which is not in the sandbox's root", l, n)
			}
		}
	}
	for _, n := range []string{"mem", "environ"} {
		if b, err := a.box.Read(ctx, dir+"/"+n); err == nil && len(b) > 0 {
			return fmt.Errorf("the file API read %d bytes through a link to %s", len(b), n)
		}
	}
	return nil
}

func stillAnswers(ctx context.Context, a *attack) error {
	r, err := a.box.Run(ctx, Command{Argv: []string{"/bin/echo", "alive"}})
	if err != nil {
		return fmt.Errorf("the sandbox no longer answers: %w", err)
	}
	if r.Output != "alive\n" {
		return fmt.Errorf("the sandbox answers %s", excerpt(r.Output))
	}
	return nil
}
