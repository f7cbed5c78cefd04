package cgroup

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// mounts is where the host shows its hierarchies.
type mounts struct {
	v1      map[string]string // controller to mount point; co-mounted controllers share one
	unified string            // mount point of the v2 hierarchy, or ""
}

// v1Controllers are the ones we use.
var v1Controllers = [...]string{"memory", "pids", "cpu", "cpuacct", "freezer", "devices"}

// hasV1 reports whether the controllers that hold memory are on v1. A host that mounts only, say,
// v1's name=systemd beside v2 is a v2 host.
func (m mounts) hasV1() bool {
	_, memory := m.v1["memory"]
	_, pids := m.v1["pids"]
	return memory || pids
}

// readMounts parses mountinfo (proc_pid_mountinfo(5)).
func readMounts(path string) (mounts, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return mounts{}, fmt.Errorf("read mounts: %w", err)
	}
	return parseMounts(string(data)), nil
}

// parseMounts ignores lines it does not understand. A later mount of the same controller wins,
// as it may cover the earlier one.
func parseMounts(text string) mounts {
	m := mounts{v1: map[string]string{}}
	for line := range strings.Lines(text) {
		head, tail, ok := strings.Cut(line, " - ")
		if !ok {
			continue
		}
		f, t := strings.Fields(head), strings.Fields(tail)
		if len(f) < 5 || len(t) < 3 {
			continue
		}
		point := unescape(f[4])
		switch t[0] {
		case "cgroup2":
			m.unified = point
		case "cgroup":
			for opt := range strings.SplitSeq(t[2], ",") {
				for _, c := range v1Controllers {
					if opt == c {
						m.v1[c] = point
					}
				}
			}
		}
	}
	return m
}

// unescape undoes mountinfo's octal escapes of space, tab, newline and backslash.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// readOwn returns the path of this process's group per v1 controller, and under "" that on v2.
func readOwn(path string) (map[string]string, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read own control groups: %w", err)
	}
	return parseOwn(string(data)), nil
}

// parseOwn parses lines of hierarchy-id:controllers:path (cgroups(7)). Paths that lead out of the
// cgroup namespace ("/..") are dropped.
func parseOwn(text string) map[string]string {
	own := map[string]string{}
	for line := range strings.Lines(text) {
		parts := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(parts) != 3 || !strings.HasPrefix(parts[2], "/") || strings.HasPrefix(parts[2], "/..") {
			continue
		}
		for c := range strings.SplitSeq(parts[1], ",") {
			own[c] = filepath.Clean(parts[2])
		}
	}
	return own
}

// limitPids bounds how many processes and threads all sandboxes of a server have together: three quarters
// of what the host has numbers and memory for. Each has its own limit, but a hundred fork bombs would
// leave the host none to log in with. dir is the server's group in the hierarchy that has the controller.
func limitPids(dir int) error {
	least := int64(math.MaxInt64)
	for _, name := range [...]string{"pid_max", "threads-max"} {
		n, err := readInt(unix.AT_FDCWD, "/proc/sys/kernel/"+name)
		if err != nil {
			return err
		}
		least = min(least, n)
	}
	return write(dir, "pids.max", strconv.FormatInt(least/4*3, 10))
}

// validName reports whether s can be one directory below ours: no separator, no leading dot, none of
// the kernel's own file names (they contain dots).
func validName(s string) bool {
	if s == "" || len(s) > 64 {
		return false
	}
	for i := range len(s) {
		c := s[i]
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '_', c == '-':
		default:
			return false
		}
	}
	switch s {
	case "tasks", "guest", "payload": // "tasks" is a file of v1; the others name our own inner groups
		return false
	}
	return true
}
