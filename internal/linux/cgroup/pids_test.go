package cgroup

import (
	"testing"

	"golang.org/x/sys/unix"
)

// Fork bombs in all sandboxes at once must leave the host room: the limit that they share is below what
// the host has.
func TestAllSandboxesTogetherAreBounded(t *testing.T) {
	var dir int
	switch d := open(t, Open).driver.(type) {
	case *v1:
		dir = d.dirs["pids"]
	case *v2:
		dir = d.dir
	}
	all, err := readInt(dir, "pids.max")
	if err != nil {
		t.Fatal(err)
	}
	host, err := readInt(unix.AT_FDCWD, "/proc/sys/kernel/pid_max")
	if err != nil {
		t.Fatal(err)
	}
	if all < 1 || all > host*3/4 {
		t.Errorf("all together may have %d processes of the host's %d", all, host)
	}
}
