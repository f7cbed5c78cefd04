package walls

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/testenv"
)

// takes is what a kernel of one's own gives and the battery therefore can't refuse: namespaces of users with mounts in them,
// limits of the first process. All of it stays until its process is killed.
const takes = `
import ctypes, signal, subprocess
subprocess.Popen(["/usr/bin/unshare", "-Urm", "/bin/sh", "-c", "mount -t tmpfs inside-mount /tmp && echo taken && exec sleep 100000"])
few = (3).to_bytes(8, "little") * 2
ctypes.CDLL(None).syscall(302 if __import__("platform").machine() == "x86_64" else 261, 1, 7, few, None) # prlimit64, RLIMIT_NOFILE
signal.pause()
`

// ATTACK: what attackers can do on gVisor that they can't on a namespace: become root of a user namespace, mount in
// it, change the first process's limits.
// VERIFIES: the host sees none of it: what serves the sandbox has the namespaces, mounts, ids, capabilities and limits that it
// had before. TWIN: the same without a Sentry, where each of these shows.
func TestWhatIsDoneInsideStaysInside(t *testing.T) {
	h := newHostOf(t, gvisorName)
	for profile, user := range map[isolation.Profile]string{isolation.Locked: "", isolation.Standard: "root"} {
		b := h.start(t, profile)
		cell := func() []int {
			all, err := b.inst.(isolation.Cell).HostProcesses()
			if err != nil {
				t.Fatal(err)
			}
			var pids []int
			for _, p := range all {
				pids = append(pids, p.PID)
			}
			return pids
		}
		before := seen(cell())
		_, stream, err := b.client.Run(t.Context(), guestwire.RunProcess{
			Start:  guestwire.StartProcess{ID: "prc_takes", Argv: []string{"/usr/bin/python3", "-c", takes}, User: user},
			Output: guestwire.OutputRequest{Follow: true},
		}, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer stream.Close()
		var text strings.Builder
		for !strings.Contains(text.String(), "taken") {
			piece, err := stream.Next()
			if err != nil {
				t.Fatalf("%s: it took nothing: %q, %v", profile, text.String(), err)
			}
			text.Write(piece.Data)
		}
		// What it took, it keeps; what the Sentry starts for it is on its way for a moment.
		becomes(t, string(profile)+": what the host shows (-before +after)", before, func() []string { return seen(cell()) })
	}
	withoutSentry(t)
}

func withoutSentry(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	twin := exec.CommandContext(ctx, "unshare", "--fork", "--kill-child", "--pid", "--mount", "/usr/bin/python3", "-c", takes)
	out, err := twin.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := twin.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = twin.Process.Kill()
		_ = twin.Wait() // it was killed
	}()
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	var shows []string
	testenv.Eventually(t, patience, "the first process of the twin has few descriptors", func() bool {
		shows = seen(descendants(twin.Process.Pid))
		return strings.Contains(strings.Join(shows, "\n"), "Max open files 3 3 files")
	})
	host := seen([]int{os.Getpid()})
	for _, kind := range []string{"user:[", "mnt:[", "mount "} {
		if !slices.ContainsFunc(shows, func(s string) bool {
			return strings.HasPrefix(s, kind) && !slices.Contains(host, s) && (kind != "mount " || strings.Contains(s, "inside-mount"))
		}) {
			t.Errorf("the twin shows no other %s:\n%s", kind, strings.Join(shows, "\n"))
		}
	}
}

// seen is what the host shows of processes, each thing once, however many have it.
func seen(pids []int) []string {
	var all []string
	add := func(format string, args ...any) {
		if text := fmt.Sprintf(format, args...); !slices.Contains(all, text) {
			all = append(all, text)
		}
	}
	for _, pid := range pids {
		for _, ns := range []string{"user", "mnt", "pid", "net", "ipc", "uts", "cgroup"} {
			if target, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, ns)); err == nil {
				add("%s", target)
			}
		}
		for line := range strings.Lines(read(pid, "mountinfo")) {
			add("mount %s", strings.TrimSpace(line))
		}
		s := status(pid)
		for _, key := range []string{"Uid", "Gid", "CapPrm", "CapEff", "CapBnd", "Seccomp"} {
			if s[key] != "" { // it has not ended meanwhile
				add("%s %s: %s", s["Name"], key, s[key])
			}
		}
		if s["Name"] != "" {
			add("%s %s", s["Name"], limits(pid))
		}
	}
	return all
}

// descendants returns the processes below one.
func descendants(pid int) []int {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	var all []int
	for _, f := range strings.Fields(string(b)) {
		var child int
		if _, err := fmt.Sscan(f, &child); err == nil {
			all = append(append(all, child), descendants(child)...)
		}
	}
	return all
}
