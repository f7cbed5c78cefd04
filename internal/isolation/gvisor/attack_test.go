package gvisor_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/conformance"
	"casemate.dev/internal/isolation/gvisor"
	"casemate.dev/internal/isolation/namespace"
	"casemate.dev/internal/testenv"
)

// ATTACK: an image whose /dev, /proc or /sys is a symbolic link, or that has links in the place of devices and terminals.
// VERIFIES: the start is refused, or for links that the sandbox's own devices hide, it has devices of its own; nothing was
// written where a link leads. That runsc does follow is what happened before the cell looked.
func TestLinkedDevInAnImage(t *testing.T) {
	h := newHost(t)
	b := h.backend()
	for name, links := range map[string]map[string]string{
		"dev":     {"dev": "/tmp/victim"},
		"tmp":     {"tmp": "victim"},
		"proc":    {"proc": "tmp/victim"},
		"sys":     {"sys": "/tmp/victim"},
		"devices": {"dev/null": "/tmp/victim/x", "dev/console": "/proc/sys/kernel/core_pattern", "dev/pts": "/tmp/victim", "dev/ptmx": "/tmp/victim/x"},
	} {
		t.Run(name, func(t *testing.T) {
			spec := conformance.Spec(t, isolation.Standard)
			lower := spec.Root.Lowers[0]
			if err := os.MkdirAll(filepath.Join(lower, "tmp/victim"), 0o777); err != nil {
				t.Fatal(err)
			}
			for link, to := range links {
				if link == "tmp" {
					if err := os.Rename(filepath.Join(lower, "tmp"), filepath.Join(lower, to)); err != nil {
						t.Fatal(err)
					}
				}
				_ = os.Remove(filepath.Join(lower, link))
				if err := os.Symlink(to, filepath.Join(lower, link)); err != nil {
					t.Fatal(err)
				}
			}
			i, err := b.Start(t.Context(), spec)
			if err == nil {
				useDevices(t, i, spec.ID)
				if err := i.Destroy(context.Background()); err != nil {
					t.Errorf("destroy: %v", err)
				}
			}
			if refused := err != nil && strings.Contains(err.Error(), "symbolic link"); refused == (name == "devices") {
				t.Errorf("start: %v", err)
			}
			for _, layer := range []string{lower, spec.Root.Upper} {
				if entries, err := os.ReadDir(filepath.Join(layer, "tmp/victim")); err == nil && len(entries) > 0 {
					t.Errorf("something was written behind a link: %v", entries)
				}
			}
			if left := h.leftovers(); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}

// useDevices writes to what may be a link, with a terminal.
func useDevices(t *testing.T, i isolation.Instance, sandbox string) {
	t.Helper()
	guest := guestwire.NewClient(i.Dial)
	if err := guest.Claim(t.Context(), guestwire.Claim{Sandbox: sandbox, Hostname: "box"}); err != nil {
		t.Fatal(err)
	}
	_, err := guest.Start(t.Context(), guestwire.StartProcess{
		ID: "p", User: "root", TTY: true, Argv: []string{"/bin/sh", "-c", "echo x > /dev/null; echo x > /dev/console; echo x > /dev/tty"},
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := guest.Wait(t.Context(), "p"); err != nil {
		t.Error(err)
	}
}

// leave is what a process does to get out of its control group: with root's rights in a user namespace of its own it mounts
// groups of both versions, goes into each one that it finds or makes, lifts limits, and enters the first process's namespace.
const leave = `
mkdir -p /tmp/cg /tmp/v1
mount -t cgroup2 c /tmp/cg && echo mounted
mkdir /tmp/cg/out && echo made
for g in /tmp/cg/out /tmp/cg/payload /tmp/cg; do
	echo $$ > $g/cgroup.procs
	echo max > $g/pids.max && echo lifted
done
for c in pids memory cpu; do mount -t cgroup -o $c c /tmp/v1 && echo stolen; done
nsenter --cgroup=/proc/1/ns/cgroup true && echo entered
cat /proc/self/cgroup
echo tried
exec sleep 4712`

// groupless makes cells whose guest takes their kernel for one without control group namespaces.
type groupless struct{ isolation.Backend }

func (g groupless) Start(ctx context.Context, s isolation.Spec) (isolation.Instance, error) {
	s.Runtime.GroupNamespaces = false
	return g.Backend.Start(ctx, s)
}

// ATTACK: leave, by everybody of both profiles.
// VERIFIES: nobody gets out: the groups begin at the process's own, and a kill of the process takes all of it. TWIN: root of profile
// standard without control group namespaces gets out, lifts the limit of processes and outlives the kill.
func TestLeavingControlGroups(t *testing.T) {
	h := newHost(t)
	cells, err := namespace.New(h.cfg)
	if err != nil {
		t.Fatal(err)
	}
	twin := gvisor.New(gvisor.Config{Cells: groupless{cells}, Program: testenv.Runsc(t)})
	t.Cleanup(func() { _ = twin.Close() })
	b := h.backend()
	for _, c := range []struct {
		b       isolation.Backend
		profile isolation.Profile
		user    string
		out     bool
	}{
		{b, isolation.Locked, "", false},
		{b, isolation.Standard, "", false},
		{b, isolation.Standard, "root", false},
		{twin, isolation.Standard, "root", true},
	} {
		spec := conformance.Spec(t, c.profile)
		inst, err := c.b.Start(t.Context(), spec)
		if err != nil {
			t.Fatal(err)
		}
		b := newBox(t, inst)
		if err := b.guest.Claim(t.Context(), guestwire.Claim{Sandbox: spec.ID, Hostname: "box", User: c.user}); err != nil {
			t.Fatal(err)
		}
		checkLeaving(b, c.out, fmt.Sprintf("%s, user %q", c.profile, c.user))
	}
}

func checkLeaving(b *box, out bool, who string) {
	b.t.Helper()
	b.start("leaver", "unshare", "-Urm", "sh", "-c", "exec 2>/dev/null; "+leave)
	said := b.until("leaver", "tried\n")
	if err := b.guest.Signal(b.t.Context(), guestwire.SignalRequest{ID: "leaver", Signal: int(unix.SIGKILL), Tree: true}); err != nil {
		b.t.Errorf("%s: kill: %v", who, err)
	}
	if !out { // else it lives on
		if _, err := b.guest.Wait(b.t.Context(), "leaver"); err != nil {
			b.t.Errorf("%s: %v", who, err)
		}
	}
	left := b.run("pgrep", "-f", "^sleep 4712")
	if !strings.Contains(said, "mounted") {
		b.t.Errorf("%s: the attack did not get as far as to mount: %q", who, said)
	}
	if lifted := strings.Contains(said, "lifted"); lifted != out || (left != "") != out {
		b.t.Errorf("%s: %q, and %q is left", who, said, left)
	}
	for _, word := range []string{"made", "stolen", "entered"} {
		if !out && strings.Contains(said, word) {
			b.t.Errorf("%s: %s: %q", who, word, said)
		}
	}
	if !out && !strings.Contains(said, "0::/\n") {
		b.t.Errorf("%s: its group is not where its groups begin: %q", who, said)
	}
}

// trace tries to get at the memory of every thread of a process: by its file, as a tracer, and by what it has open.
const trace = `
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
def trace(pid):
    for tid in os.listdir("/proc/%d/task" % pid):
        for what, path in ("mem", "r+b"), ("fd/0", "rb"):
            try:
                open("/proc/%d/task/%s/%s" % (pid, tid, what), path, buffering=0).close()
                print("opened", what)
            except OSError:
                pass
        if libc.ptrace(16, int(tid), None, None) == 0: # PTRACE_ATTACH
            print("attached")
            os.waitpid(int(tid), 0x40000000) # __WALL
            libc.ptrace(17, int(tid), None, None)
try:
    open("/proc/sys/kernel/yama/ptrace_scope", "w").write("0")
except OSError:
    pass
def child(dumpable):
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        if libc.prctl(4, int(dumpable), 0, 0, 0): # PR_SET_DUMPABLE
            os._exit(1)
        os.write(told, b"x")
        while True:
            signal.pause()
    os.read(ready, 1)
    return pid
traceable, closed = child(True), child(False)
print("guest"); trace(1)
print("traceable"); trace(traceable)
print("closed"); trace(closed)
print("workers")
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if b"casemate-guest\0files" in open("/proc/%s/cmdline" % pid, "rb").read():
            print("worker", open("/proc/%s/cgroup" % pid).read().strip())
    except OSError:
        pass
for pid in traceable, closed:
    os.kill(pid, 9)`

// ATTACK: root of profile standard, which holds as much as the guest's thread that starts its processes, traces the guest.
// VERIFIES: it reaches no thread of it, and the guest's helper for files, which it may trace, sits in a group of its own as
// any of its processes does. TWIN: a process of its own is traced by the same calls, all of them, until it says that nobody
// may, as the guest has.
func TestTracingTheGuest(t *testing.T) {
	h := newHost(t)
	spec := conformance.Spec(t, isolation.Standard)
	inst, err := h.backend().Start(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	b := newBox(t, inst)
	if err := b.guest.Claim(t.Context(), guestwire.Claim{Sandbox: spec.ID, Hostname: "box", User: "root"}); err != nil {
		t.Fatal(err)
	}
	if _, err := b.guest.Stat(t.Context(), guestwire.PathRequest{Path: "/"}); err != nil { // so that there is a helper
		t.Fatal(err)
	}
	said := b.run("python3", "-c", trace)
	rest := "\n" + said
	var of [3]string
	for i, name := range []string{"guest", "traceable", "closed", "workers"} {
		before, after, found := strings.Cut(rest, "\n"+name)
		if !found {
			t.Fatalf("it did not get as far as to %q: %q", name, said)
		}
		if i > 0 {
			of[i-1] = strings.Join(strings.Fields(before), " ")
		}
		rest = after
	}
	if of[0] != "" {
		t.Errorf("of the guest's threads: %s", of[0])
	}
	if of[1] != "opened mem opened fd/0 attached" {
		t.Errorf("a process of its own is not traced either, which proves nothing: %q", said)
	}
	if of[2] != "" {
		t.Errorf("of a process that nobody may trace: %s", of[2])
	}
	if _, group, found := strings.Cut(rest, "worker 0::"); !found || strings.TrimLeft(group, "/.") == "" {
		t.Errorf("the helper is in no group of its own: %q", rest)
	}
}
