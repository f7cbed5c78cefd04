package gvisor_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/conformance"
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

// ATTACK: a process becomes root of a user namespace, mounts the control groups that its guest counts with, leaves its
// own, and lifts the limit of processes.
// VERIFIES: both are refused to everybody but root, and there is no root in profile locked. TWIN: root of profile standard,
// who may take over the guest as well; then the cell's limits hold (TestOuterLimit).
func TestLeavingControlGroups(t *testing.T) {
	const leave = `mkdir -p /tmp/cg && mount -t cgroup2 c /tmp/cg || exit
echo 0 > /tmp/cg/cgroup.procs && echo left; echo max > /tmp/cg/payload/pids.max && echo lifted; cat /proc/self/cgroup`
	for _, c := range []struct {
		profile    isolation.Profile
		user, want string
	}{
		{isolation.Locked, "", "0::/payload/1"},
		{isolation.Standard, "", "0::/payload/1"},
		{isolation.Standard, "root", "left\nlifted\n0::/"},
	} {
		h := newHost(t)
		spec := conformance.Spec(t, c.profile)
		inst, err := h.backend().Start(t.Context(), spec)
		if err != nil {
			t.Fatal(err)
		}
		b := newBox(t, inst)
		if err := b.guest.Claim(t.Context(), guestwire.Claim{Sandbox: spec.ID, Hostname: "box", User: c.user}); err != nil {
			t.Fatal(err)
		}
		if got := b.run("unshare", "-Urm", "sh", "-c", "exec 2>/dev/null; "+leave); got != c.want {
			t.Errorf("%s, user %q: %q, want %q", c.profile, c.user, got, c.want)
		}
	}
}
