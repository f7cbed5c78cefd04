package testenv

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

// leakGrace is how long things may take to go by themselves: a kernel frees a namespace's mounts and
// a control group's members after the last process was reaped.
const leakGrace = busy

// NoLeaks compares the host before and after the test, and fails it for what is new: mounts, control
// groups, loop devices, network namespaces kept by a mount, processes, descriptors and goroutines.
// Call it first, so that its check runs after every other cleanup. It counts only what this test
// binary made (by descent, tag or directory), and it must not be used in a test that runs beside
// others of its binary.
func NoLeaks(t testing.TB, dirs ...string) {
	t.Helper()
	dirs = append(slices.Clone(dirs), t.TempDir())
	before := snapshot(dirs)
	routines := goleak.IgnoreCurrent()
	t.Cleanup(func() {
		var left []string
		if !poll(leakGrace, func() bool {
			left = snapshot(dirs).since(before)
			return len(left) == 0
		}) {
			t.Errorf("left behind:\n  %s", strings.Join(left, "\n  "))
		}
		// Its own patience is a second, which says nothing on a busy machine.
		var err error
		if !poll(leakGrace, func() bool { err = goleak.Find(routines); return err == nil }) {
			t.Errorf("goroutines left behind: %v", err)
		}
	})
}

// Leftovers lists what carries needle on the host: mounts, control groups, loop devices and
// processes. Tests of crash recovery use it for a server's id or a run directory.
func Leftovers(needle string) []string {
	match := func(s string) bool { return strings.Contains(s, needle) }
	out := slices.Concat(mounts(match), controlGroups(match), loops(match), taggedProcesses(match))
	slices.Sort(out)
	return out
}

// state is what the leak checks look at, each thing as one line.
type state map[string]bool

func snapshot(dirs []string) state {
	mine := func(s string) bool { return ours(s, dirs) }
	everyMount := mine
	if private() {
		// Nobody else mounts in a namespace of our own, so that every new mount counts.
		everyMount = func(string) bool { return true }
	}
	s := state{}
	for _, list := range [][]string{
		mounts(everyMount), controlGroups(mine), loops(mine),
		descendants(), taggedProcesses(mine), descriptors(),
	} {
		for _, line := range list {
			s[line] = true
		}
	}
	return s
}

func (s state) since(before state) []string {
	var out []string
	for line := range s {
		if !before[line] {
			out = append(out, line)
		}
	}
	slices.Sort(out)
	return out
}

func private() bool {
	a, errA := os.Readlink("/proc/self/ns/mnt")
	b, errB := os.Readlink("/proc/1/ns/mnt")
	return errA == nil && errB == nil && a != b
}

// mounts returns the mounts of this mount namespace whose line in mountinfo matches. A kept network
// namespace is a mount too (type nsfs).
func mounts(match func(string) bool) []string {
	b, _ := os.ReadFile("/proc/self/mountinfo")
	var out []string
	for line := range strings.Lines(string(b)) {
		if match(line) {
			out = append(out, "mount "+strings.TrimSpace(line))
		}
	}
	return out
}

func controlGroups(match func(string) bool) []string {
	var out []string
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil // groups of others come and go while we walk
		}
		if d.IsDir() && match(path) {
			out = append(out, "control group "+path)
		}
		return nil
	})
	return out
}

func loops(match func(string) bool) []string {
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	var out []string
	for _, f := range files {
		if backing := readLine(f, ""); match(backing) {
			out = append(out, "loop device "+filepath.Base(filepath.Dir(filepath.Dir(f)))+" of "+backing)
		}
	}
	return out
}

// descendants lists the processes below this one, zombies too: those say that nobody waited.
func descendants() []string {
	parents := map[int]int{}
	names := map[int]string{}
	for _, pid := range pids() {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			continue // ended meanwhile
		}
		// The name may hold spaces and parentheses; the fields after the last ")" can't.
		end := bytes.LastIndexByte(b, ')')
		fields := strings.Fields(string(b[end+1:]))
		if end < 0 || len(fields) < 2 {
			continue
		}
		parents[pid], _ = strconv.Atoi(fields[1])
		names[pid] = string(b[bytes.IndexByte(b, '(') : end+1])
	}
	self := os.Getpid()
	var out []string
	for pid := range parents {
		for p := parents[pid]; p > 1; p = parents[p] {
			if p == self {
				out = append(out, fmt.Sprintf("process %d %s", pid, names[pid]))
				break
			}
		}
	}
	return out
}

func taggedProcesses(match func(string) bool) []string {
	var out []string
	for _, pid := range pids() {
		if pid == os.Getpid() {
			continue
		}
		env, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		args, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if match(string(env)) || match(string(args)) {
			out = append(out, fmt.Sprintf("process %d (%s)", pid, readLine(fmt.Sprintf("/proc/%d/comm", pid), "?")))
		}
	}
	return out
}

func pids() []int {
	entries, _ := os.ReadDir("/proc")
	var out []int
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			out = append(out, pid)
		}
	}
	return out
}

// descriptors lists this process's open files. Sockets, pipes and anonymous files are told apart by
// number, other files by number and path.
func descriptors() []string {
	entries, _ := os.ReadDir("/proc/self/fd")
	var out []string
	for _, e := range entries {
		target, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err != nil {
			continue // the descriptor that listed the directory
		}
		if strings.HasSuffix(target, "[eventpoll]") || strings.HasSuffix(target, "[eventfd]") {
			continue // the runtime's poller, made at its first use
		}
		out = append(out, "descriptor "+e.Name()+" "+target)
	}
	return out
}
