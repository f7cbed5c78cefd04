package selftest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"
)

// standardCaps is the mask of the capabilities that profile standard holds: CHOWN, DAC_OVERRIDE,
// FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, NET_BIND_SERVICE, SYS_CHROOT and SETFCAP
// (capabilities(7) for the numbers).
const standardCaps = "00000000800405fb"

const noCaps = "0000000000000000"

// identityCases are section A: who the code is, and what it came with.
func identityCases() []Case {
	return []Case{
		{
			ID: "A01", Class: Escape, Title: "effective capabilities", Script: `grep CapEff: /proc/self/status`,
			Locked: Want{Match: noCaps}, Standard: Want{Match: standardCaps}, Twin: Bare,
		},
		{
			ID: "A02", Class: Escape, Title: "bounding set",
			Script: `grep CapBnd: /proc/self/status`,
			Locked: Want{Match: noCaps}, Standard: Want{Match: standardCaps}, Twin: Bare,
		},
		{
			ID: "A03", Class: InternalEsc, Title: "no_new_privs and a system call filter",
			Script:   `grep -E '^(NoNewPrivs|Seccomp):' /proc/self/status`,
			Locked:   Want{Match: `(?s)NoNewPrivs:\s+1.*Seccomp:\s+2`},
			Standard: Want{Match: `(?s)NoNewPrivs:\s+0.*Seccomp:\s+2`}, Twin: Bare,
		},
		both(Case{
			ID: "A05", Class: Escape, Title: "namespaces of its own",
			Script: `for n in mnt pid net ipc uts cgroup user; do readlink /proc/self/ns/$n; done`,
			Check:  otherNamespaces, Twin: Shared,
		}, Want{Match: `user:\[`}),
		both(Case{
			ID: "A06", Class: Escape, Title: "inherited descriptors",
			Python: `
for fd in sorted(os.listdir("/proc/self/fd"), key=int):
    try:
        target = os.readlink("/proc/self/fd/" + fd)
    except FileNotFoundError:
        continue # the directory that was listed
    if int(fd) > 2: print("LEAK", fd, target)
print("done")`,
			Twin: Bare,
		}, Want{Match: `^done`, Reject: `LEAK`}),
		both(Case{
			ID: "A07", Class: Escape, Title: "working directory through a descriptor (CVE-2024-21626)",
			Script: `echo asked`, Check: noDescriptorDirectory, Twin: Bare,
		}, Want{Match: `asked`}),
		both(Case{
			ID: "A08", Class: HostLeak, Title: "secrets in the environment",
			Script: `env | grep -iE 'key|token|secret|passw|aws|gcp|azure' || echo none`, Twin: Bare,
		}, Want{Match: `^none`}),
		both(Case{
			ID: "A10", Class: HostLeak, Title: "values of the environment in argument lists",
			Script: `echo asked`, Check: noSecretInArguments, Untwinned: "the scan itself is tried on a process of the test: TestFindArgument",
		}, Want{Match: `asked`}),
		both(Case{
			ID: "A11", Class: Escape, Title: "typing into the terminal (CVE-2017-5226)",
			TTY: true, Twin: Bare,
			Python: `
import fcntl, termios
try:
    fcntl.ioctl(0, termios.TIOCSTI, b"x"); print("TYPED")
except OSError as e:
    print("refused", errno.errorcode[e.errno])`,
		}, Want{Match: `refused (EPERM|EIO|ENOTTY|EACCES)`, Reject: `TYPED`}),
		{
			ID: "A12", Class: InternalEsc, Title: "set-user-id on writable mounts",
			Python: writableMounts,
			Locked: Want{Match: `^done`, Reject: `LACKS`},
			// sudo needs set-user-id on the root's own files.
			Standard: Want{Match: `^done`, Reject: `LACKS (nodev|nosuid .*/\S)`},
			Twin:     Bare,
		},
		both(Case{
			ID: "A13", Class: Escape, Title: "control group paths",
			Script: `cat /proc/self/cgroup; ls -d /sys/fs/cgroup/* 2>/dev/null; echo done`, Twin: Shared,
		}, Want{Match: `^done`, Reject: `\.slice|\.service|\.scope|docker|kubepods|casemate|/sys/fs/cgroup/`}),
	}
}

// writableMounts names the mounts that may be written and lack nosuid or nodev. A user namespace's own
// mounts can't have devices whatever their flags say (SB_I_NODEV), but flags are what is promised.
const writableMounts = `
for line in open("/proc/self/mountinfo"):
    f = line.split()
    flags, kind = f[5].split(","), f[f.index("-") + 1]
    super = f[-1].split(",")
    if "ro" in flags or "ro" in super or kind in ("proc", "devpts", "mqueue"): continue
    if not os.path.isdir(f[4]) or not os.access(f[4], os.W_OK): continue
    for flag in ("nosuid", "nodev"):
        if flag not in flags: print("LACKS", flag, "at", f[4])
print("done")`

// otherNamespaces compares what the script printed with the battery's own namespaces.
func otherNamespaces(_ context.Context, a *attack) error {
	if !a.local {
		return nil // nothing to compare with; every namespace must still be there, as the Want says
	}
	for line := range strings.Lines(a.result.Output) {
		theirs := strings.TrimSpace(line)
		kind, _, _ := strings.Cut(theirs, ":")
		mine, err := os.Readlink("/proc/self/ns/" + kind)
		if err == nil && mine == theirs {
			return fmt.Errorf("the %s namespace is the host's", kind)
		}
	}
	return nil
}

// climb prints the identity of the root that is reached by climbing from where the process is, and
// of its own root. They differ where the way up leads out.
const climb = `a=$(stat -Lc %d:%i .$(printf '/..%.0s' $(seq 40)) 2>/dev/null); b=$(stat -Lc %d:%i /); [ "$a" = "$b" ] && echo SAME || echo "OUTSIDE $a $b"`

// noDescriptorDirectory starts processes in every directory that an inherited descriptor of whatever
// starts them might be.
func noDescriptorDirectory(ctx context.Context, a *attack) error {
	for n := range 40 {
		dir := fmt.Sprintf("/proc/self/fd/%d", n)
		r, err := a.box.Run(ctx, Command{Argv: []string{"/bin/sh", "-c", climb}, Dir: dir, User: a.user})
		if err != nil {
			continue // refused, which is right
		}
		if strings.Contains(r.Output, "OUTSIDE") {
			return fmt.Errorf("a process started in %s stands outside: %s", dir, excerpt(r.Output))
		}
	}
	return nil
}

// noSecretInArguments looks for a value on the host while a process inside has it.
func noSecretInArguments(ctx context.Context, a *attack) error {
	if !a.local {
		return nil
	}
	const sentinel = "casemate-sentinel-5b1f"
	ended := make(chan error, 1)
	go func() {
		_, err := a.box.Run(ctx, Command{Argv: []string{"/bin/sleep", "0.3"}, Env: map[string]string{"VALUE": sentinel}, User: a.user})
		ended <- err
	}()
	for { // when it begins, nobody here knows
		found := findArgument(sentinel)
		select {
		case err := <-ended:
			return errors.Join(found, err)
		case <-time.After(10 * time.Millisecond):
		}
		if found != nil {
			return errors.Join(found, <-ended)
		}
	}
}

// findArgument returns an error that names the process of this host whose arguments hold text.
func findArgument(text string) error {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return err
	}
	for _, e := range entries {
		b, err := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		if err == nil && strings.Contains(string(b), text) {
			return fmt.Errorf("process %s has it in its arguments", e.Name())
		}
	}
	return nil
}
