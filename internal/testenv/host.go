package testenv

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
)

// HostInfo describes the host in a few lines: what decides whether a test of the kernel can work.
func HostInfo() string {
	var b strings.Builder
	fmt.Fprintf(&b, "host: Linux %s %s, %s, %d CPUs\n", kernelRelease(), runtime.GOARCH, runtime.Version(), runtime.NumCPU())
	fmt.Fprintf(&b, "  uid %d, %s\n", os.Geteuid(), strings.Join(statusLines("CapEff", "CapBnd", "NoNewPrivs", "Seccomp"), ", "))
	fmt.Fprintf(&b, "  cgroups: %s\n", cgroupInfo())
	fmt.Fprintf(&b, "  security modules: %s\n", readLine("/sys/kernel/security/lsm", "unknown (securityfs is not mounted)"))
	fmt.Fprintf(&b, "  file systems: %s\n", strings.Join(fileSystems("overlay", "btrfs", "ext4", "xfs", "tmpfs", "fuse"), " "))
	fmt.Fprintf(&b, "  limits: user namespaces %s, pid_max %s, file-max %s",
		readLine("/proc/sys/user/max_user_namespaces", "none"),
		readLine("/proc/sys/kernel/pid_max", "?"), readLine("/proc/sys/fs/file-max", "?"))
	return b.String()
}

func kernelRelease() string { return readLine("/proc/sys/kernel/osrelease", "0.0") }

func readLine(path, otherwise string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return otherwise
	}
	line, _, _ := strings.Cut(string(b), "\n")
	return strings.TrimSpace(line)
}

func statusLines(keys ...string) []string {
	b, _ := os.ReadFile("/proc/self/status")
	var out []string
	for line := range strings.Lines(string(b)) {
		key, value, _ := strings.Cut(line, ":")
		if slices.Contains(keys, key) {
			out = append(out, key+" "+strings.TrimSpace(value))
		}
	}
	return out
}

func cgroupInfo() string {
	if v2 := readLine("/sys/fs/cgroup/cgroup.controllers", "-"); v2 != "-" {
		return "v2 (" + v2 + ")"
	}
	dirs, _ := filepath.Glob("/sys/fs/cgroup/*/cgroup.procs")
	names := make([]string, 0, len(dirs))
	for _, d := range dirs {
		names = append(names, filepath.Base(filepath.Dir(d)))
	}
	return "v1 (" + strings.Join(names, " ") + ")"
}

func fileSystems(wanted ...string) []string {
	b, _ := os.ReadFile("/proc/filesystems")
	fields := strings.Fields(string(b))
	return slices.DeleteFunc(wanted, func(fs string) bool { return !slices.Contains(fields, fs) })
}
