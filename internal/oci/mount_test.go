package oci

import (
	"errors"
	"strings"
	"syscall"
	"testing"

	"casemate.dev/internal/id"
	"casemate.dev/internal/rootfs"
)

func newID() string { return id.Sandbox() }

// mountPlan mounts a plan's root as a sandbox would see it, without its walls.
func mountPlan(t testing.TB, p rootfs.Plan) string {
	t.Helper()
	dir := t.TempDir()
	options := "userxattr,lowerdir=" + strings.Join(p.Lowers, ":") + ",upperdir=" + p.Upper + ",workdir=" + p.Work
	if err := syscall.Mount("overlay", dir, "overlay", 0, options); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil && !errors.Is(err, syscall.EINVAL) { // it was unmounted
			t.Error(err)
		}
	})
	return dir
}
