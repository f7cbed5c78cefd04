package namespace

import (
	"context"
	"strings"
	"testing"

	"casemate.dev/internal/isolation/conformance"
	"casemate.dev/internal/linux/cgroup"
)

// On version 2 everything that does not need a controller works the same: hybrid hosts have the
// hierarchy, with the controllers on version 1.
func TestVersion2Groups(t *testing.T) {
	h := newHost(t)
	b := h.backend()
	v1 := b.groups
	unified, err := cgroup.OpenUnified(h.cfg.ServerID)
	if err != nil {
		t.Fatal(err)
	}
	b.groups = unified
	t.Cleanup(func() {
		if err := unified.RemoveAll(context.Background()); err != nil {
			t.Errorf("remove groups: %v", err)
		}
		if err := unified.Close(); err != nil {
			t.Error(err)
		}
		b.groups = v1
	})
	for _, p := range profiles() {
		spec := conformance.Spec(t, p)
		for _, c := range unified.Missing() {
			spec.AllowMissing = append(spec.AllowMissing, "cgroup-"+c)
		}
		x := start(t, b, spec)
		if a := x.inst.Applied(); a.CgroupVersion != 2 || len(a.Missing) == 0 {
			t.Errorf("%s: applied %+v", p, a)
		}
		group := x.sh("grep ^0: /proc/self/cgroup")
		if !strings.HasPrefix(group, "0::/payload/prc_") {
			t.Errorf("%s: a process sees its group as %q", p, group)
		}
		wants(t, string(p)+": clone3 is closed for processes", x.sh("python3 -c 'import ctypes; l=ctypes.CDLL(None,use_errno=True); print(l.syscall(435,0,0),ctypes.get_errno()==38)'"), "-1 True") // ENOSYS
		if err := x.inst.Freeze(limited(t)); err != nil {
			t.Errorf("%s: freeze: %v", p, err)
		}
		if err := x.inst.Thaw(limited(t)); err != nil {
			t.Errorf("%s: thaw: %v", p, err)
		}
		wants(t, string(p)+": a process afterwards", x.sh("echo works"), "works")
		destroy(t, x.inst)
		if left := h.leftovers(); len(left) > 0 {
			t.Errorf("%s: left behind: %v", p, left)
		}
	}
}
