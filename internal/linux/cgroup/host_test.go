package cgroup

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseMounts(t *testing.T) {
	const text = `31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/mem\040ory rw - cgroup cgroup rw,memory
40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
broken line
1 2 - cgroup
`
	got := parseMounts(text)
	want := mounts{
		v1: map[string]string{
			"cpu": "/sys/fs/cgroup/cpu,cpuacct", "cpuacct": "/sys/fs/cgroup/cpu,cpuacct",
			"memory": "/sys/fs/cgroup/mem ory",
		},
		unified: "/sys/fs/cgroup/unified",
	}
	if d := cmp.Diff(want, got, cmp.AllowUnexported(mounts{})); d != "" {
		t.Error(d)
	}
	if !got.hasV1() {
		t.Error("memory is on v1 here")
	}
	if parseMounts("40 31 0:37 / /s rw - cgroup cgroup rw,name=systemd\n41 31 0:38 / /u rw - cgroup2 c rw\n").hasV1() {
		t.Error("a host with only name=systemd on v1 is a v2 host")
	}
}

func TestParseOwn(t *testing.T) {
	got := parseOwn("4:memory:/a/b\n1:cpu,cpuacct:/\n9:name=systemd:/x\n3:pids:/../out\n0::/u\nbroken\n")
	want := map[string]string{"memory": "/a/b", "cpu": "/", "cpuacct": "/", "name=systemd": "/x", "": "/u"}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

func FuzzParse(f *testing.F) {
	f.Add("32 31 0:29 / /c rw - cgroup cgroup rw,cpu\n")
	f.Add("0::/u\n")
	f.Fuzz(func(t *testing.T, s string) {
		parseMounts(s)
		for _, p := range parseOwn(s) {
			if p == "" || p[0] != '/' {
				t.Errorf("path %q", p)
			}
		}
	})
}
