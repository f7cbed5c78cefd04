package walls

import (
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/testenv"
)

var update = flag.Bool("update", false, "write the snapshots of the posture anew")

// TestPosture compares what the host's /proc shows of a sandbox's processes with a snapshot per
// profile: ids, capabilities, namespaces, root, descriptors, limits, system call filter. Whoever
// changes a wall sees it here, and must say so in the snapshot.
func TestPosture(t *testing.T) {
	h := newHost(t)
	for _, p := range []isolation.Profile{isolation.Locked, isolation.Standard} {
		for _, who := range []string{"user", "root"} {
			if p == isolation.Locked && who == "root" {
				continue // there is none
			}
			t.Run(string(p)+"-"+who, func(t *testing.T) {
				b := h.start(t, p)
				payload, guest := sleeper(t, b, who)
				compare(t, string(p)+"-"+who, b, payload)
				if who == "user" {
					compare(t, string(p)+"-guest", b, guest)
				}
			})
		}
	}
}

// TestPostureOfGvisor is the same for what serves a sandbox of isolation gvisor: the cell's first process, the gofer, which
// opens files, and the Sentry, which is the sandbox's kernel.
func TestPostureOfGvisor(t *testing.T) {
	h := newHostOf(t, gvisorName)
	for _, p := range []isolation.Profile{isolation.Locked, isolation.Standard} {
		t.Run(string(p), func(t *testing.T) {
			b := h.start(t, p)
			all, err := b.inst.(isolation.Cell).HostProcesses()
			if err != nil {
				t.Fatal(err)
			}
			found := map[string]int{}
			for _, process := range all {
				if found[process.Name] == 0 {
					found[process.Name] = process.PID
				}
			}
			for name, of := range map[string]string{"runsc-sandbox": "sentry", "runsc-gofer": "gofer"} {
				if found[name] == 0 {
					t.Fatalf("there is no %s: %v", name, found)
				}
				compare(t, string(p)+"-gvisor-"+of, b, found[name])
			}
			compare(t, string(p)+"-gvisor-cell", b, parentOf(t, found["runsc-gofer"]))
			compareStubs(t, string(p), b)
		})
	}
}

// compareStubs compares the processes in which the Sentry lets the sandbox's programs run: one that is copied, and copies of it,
// which may make fewer calls. They are told from the Sentry by their filters, and have no command line.
func compareStubs(t *testing.T, profile string, b *box) {
	t.Helper()
	for filters, of := range map[string]string{"2": "source", "3": "stub"} {
		var stub int
		testenv.Eventually(t, patience, "a process of the Sentry has "+filters+" filters", func() bool {
			for _, pid := range withIDsOf(b) {
				if status(pid)["Seccomp_filters"] == filters {
					stub = pid
					return true
				}
			}
			return false
		})
		compare(t, profile+"-gvisor-"+of, b, stub)
	}
}

// TestNoOtherPosture wants that every process that has an id of a sandbox is as one of the snapshots of its profile, while the
// sandbox is at work: a process that nobody thought of has a posture that nobody looked at.
func TestNoOtherPosture(t *testing.T) {
	for isolationName, prefix := range map[string]string{namespaceName: "", gvisorName: "gvisor-"} {
		h := newHostOf(t, isolationName)
		for _, p := range []isolation.Profile{isolation.Locked, isolation.Standard} {
			t.Run(isolationName+"/"+string(p), func(t *testing.T) {
				known := snapshots(t, string(p)+"-"+prefix)
				b := h.start(t, p)
				users := []string{"user", "root"}
				if p == isolation.Locked {
					users = users[:1]
				}
				for _, user := range users {
					if _, err := b.client.Start(t.Context(), guestwire.StartProcess{ID: "prc_" + user, Argv: []string{"sleep", "100000"}, User: user}, nil); err != nil {
						t.Fatal(err)
					}
				}
				seen := map[string]bool{}
				var others []string
				defer func() {
					for _, o := range others {
						t.Errorf("a process is as no snapshot says: %s", o)
					}
					for _, name := range known {
						if !seen[name] {
							t.Errorf("no process is as %s says", name)
						}
					}
				}()
				testenv.Eventually(t, patience, "each process is as a snapshot says, and each snapshot has one", func() bool {
					if _, err := b.Read(t.Context(), "/etc/passwd"); err != nil { // what serves files is there, and stays for a while
						t.Fatal(err)
					}
					others = nil
					for _, pid := range withIDsOf(b) {
						args := strings.ReplaceAll(read(pid, "cmdline"), "\x00", " ")
						now := posture(t, b, pid)
						if name, ok := known[now]; ok {
							seen[name] = true
						} else if len(status(pid)) > 0 { // it has not ended meanwhile
							others = append(others, args+"\n"+now)
						}
					}
					return len(others) == 0 && len(seen) == len(known)
				})
			})
		}
	}
}

// snapshots returns the names of those that begin with prefix, but for those of another isolation, by what they say.
func snapshots(t *testing.T, prefix string) map[string]string {
	t.Helper()
	paths, err := filepath.Glob("testdata/" + prefix + "*.posture")
	if err != nil || len(paths) == 0 {
		t.Fatal(prefix, err)
	}
	all := map[string]string{}
	for _, p := range paths {
		name := strings.TrimSuffix(filepath.Base(p), ".posture")
		if strings.Contains(strings.TrimPrefix(name, prefix), "-") {
			continue
		}
		b, err := os.ReadFile(p)
		if err != nil {
			t.Fatal(err)
		}
		all[string(b)] = name
	}
	return all
}

// withIDsOf returns the processes of this host that have an id of the sandbox.
func withIDsOf(b *box) []int {
	first := b.inst.Applied().HostUID
	var pids []int
	for _, pid := range hostPIDs() {
		if ids := inside(status(pid)["Uid"], first); ids != "" && ids != "outside" {
			pids = append(pids, pid)
		}
	}
	return pids
}

// parentOf returns the process that waits for a process: in a cell, its first one.
func parentOf(t *testing.T, pid int) int {
	t.Helper()
	parent, err := strconv.Atoi(status(pid)["PPid"])
	if err != nil {
		t.Fatal(err)
	}
	return parent
}

// TestPostureOfTheHost is the twin: this very process must differ from every snapshot in each group
// that matters.
func TestPostureOfTheHost(t *testing.T) {
	h := newHost(t)
	b := h.start(t, isolation.Locked)
	mine := posture(t, b, os.Getpid())
	for _, want := range []string{"uids: outside", "CapEff: 0000000000000000", "Seccomp: 2", "root: own"} {
		if has := strings.Contains(mine, want); has != (want == "uids: outside") {
			t.Errorf("the host's own posture and %q: %v\n%s", want, has, mine)
		}
	}
	if !strings.Contains(mine, "pid: the host's") {
		t.Errorf("the host's own namespaces do not show:\n%s", mine)
	}
}

// sleeper starts a process and returns its number on the host and that of the guest. The process is
// in its sleep by then: while it starts it also has its locale's files open.
func sleeper(t *testing.T, b *box, user string) (payload, guest int) {
	t.Helper()
	seconds := fmt.Sprintf("%d.5", 200000+os.Getpid())
	if _, err := b.client.Start(t.Context(), guestwire.StartProcess{ID: "prc_sleeper", Argv: []string{"sleep", seconds}, User: user}, nil); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, patience, "the process shows on the host", func() bool {
		for _, pid := range hostPIDs() {
			args, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
			if string(args) == "sleep\x00"+seconds+"\x00" && sleeps(pid) {
				payload = pid
				return true
			}
		}
		return false
	})
	// The guest is the ancestor that is process 1 inside.
	for guest = payload; ; {
		s := status(guest)
		if numbers := strings.Fields(s["NSpid"]); len(numbers) > 0 && numbers[len(numbers)-1] == "1" {
			return payload, guest
		}
		parent, err := strconv.Atoi(s["PPid"])
		if err != nil || parent <= 1 {
			t.Fatalf("process %d has no guest above it", payload)
		}
		guest = parent
	}
}

// sleeps tells whether a process waits in a sleep: proc_pid_syscall(5) leads with the call's number.
func sleeps(pid int) bool {
	call, _ := os.ReadFile(fmt.Sprintf("/proc/%d/syscall", pid))
	number, _, _ := strings.Cut(string(call), " ")
	return number == strconv.Itoa(unix.SYS_CLOCK_NANOSLEEP) || number == strconv.Itoa(unix.SYS_NANOSLEEP)
}

func hostPIDs() []int {
	entries, _ := os.ReadDir("/proc")
	var pids []int
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

func status(pid int) map[string]string { return statusOf(fmt.Sprintf("/proc/%d/status", pid)) }

func statusOf(path string) map[string]string {
	b, _ := os.ReadFile(path)
	out := map[string]string{}
	for line := range strings.Lines(string(b)) {
		key, value, _ := strings.Cut(line, ":")
		out[key] = strings.TrimSpace(value)
	}
	return out
}

// posture describes a process without what differs from run to run.
func posture(t *testing.T, b *box, pid int) string {
	t.Helper()
	var out strings.Builder
	first := b.inst.Applied().HostUID
	s := status(pid)
	fmt.Fprintf(&out, "uids: %s\ngids: %s\ngroups: %s\n", inside(s["Uid"], first), inside(s["Gid"], first), inside(s["Groups"], first))
	for _, key := range []string{"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Seccomp_filters"} {
		fmt.Fprintf(&out, "%s: %s\n", key, s[key])
	}
	fmt.Fprintf(&out, "threads: %s\n", strings.Join(threads(pid), "; "))
	for _, ns := range []string{"user", "mnt", "pid", "net", "ipc", "uts", "cgroup"} {
		fmt.Fprintf(&out, "%s: %s\n", ns, whose(pid, ns))
	}
	fmt.Fprintf(&out, "root: %s\nowner: %s\n", rootOf(pid), owner(pid, first))
	fmt.Fprintf(&out, "descriptors: %s\n", strings.Join(descriptors(pid), ", "))
	fmt.Fprintf(&out, "limits:\n%s", limits(pid))
	fmt.Fprintf(&out, "oom_score_adj: %s\n", read(pid, "oom_score_adj"))
	return out.String()
}

// inside shows host ids as those inside.
func inside(ids string, first uint32) string {
	var out []string
	for _, f := range strings.Fields(ids) {
		n, err := strconv.ParseUint(f, 10, 32)
		switch {
		case err != nil:
			out = append(out, f)
		case uint32(n) < first || uint32(n) >= first+65536:
			out = append(out, "outside")
		default:
			out = append(out, strconv.Itoa(int(uint32(n)-first)))
		}
	}
	return strings.Join(slices.Compact(out), " ")
}

// threads tells which walls the threads of a process have, each kind once: the guest's have none but
// the one that forks.
func threads(pid int) []string {
	paths, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	var kinds []string
	for _, p := range paths {
		s := statusOf(p)
		kind := fmt.Sprintf("seccomp %s, no_new_privs %s, bounding %s", s["Seccomp"], s["NoNewPrivs"], s["CapBnd"])
		if s["Seccomp"] != "" && !slices.Contains(kinds, kind) {
			kinds = append(kinds, kind)
		}
	}
	slices.Sort(kinds)
	return kinds
}

func whose(pid int, ns string) string {
	theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, ns))
	if err != nil {
		return err.Error()
	}
	if mine, _ := os.Readlink("/proc/self/ns/" + ns); mine == theirs {
		return "the host's"
	}
	return "own"
}

func rootOf(pid int) string {
	theirs, err := os.Stat(fmt.Sprintf("/proc/%d/root/", pid))
	if err != nil {
		return err.Error()
	}
	if mine, err := os.Stat("/"); err == nil && os.SameFile(mine, theirs) {
		return "the host's"
	}
	return "own"
}

// owner tells whose the files in /proc/PID are: those of a process that is not dumpable belong to root
// outside, so that root inside can't open its memory.
func owner(pid int, first uint32) string {
	info, err := os.Stat(fmt.Sprintf("/proc/%d/mem", pid))
	if err != nil {
		return err.Error()
	}
	return inside(fmt.Sprint(info.Sys().(*syscall.Stat_t).Uid), first)
}

var numbers = regexp.MustCompile(`\d+`)

// descriptors names the kinds of a process's open files, each once.
func descriptors(pid int) []string {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return []string{err.Error()}
	}
	var kinds []string
	for _, e := range entries {
		target, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err != nil {
			continue // closed meanwhile
		}
		kind := kindOf(filepath.Join(dir, e.Name()), target)
		if !slices.Contains(kinds, kind) {
			kinds = append(kinds, kind)
		}
	}
	slices.Sort(kinds)
	return kinds
}

func kindOf(path, target string) string {
	switch {
	case strings.HasPrefix(target, "/sys/fs/cgroup/"), strings.HasPrefix(target, "/payload"), strings.HasPrefix(target, "/casemate"):
		return "control group file " + filepath.Base(target)
	case strings.HasPrefix(target, "/memfd:"):
		return "memory file"
	case target == guestwire.RuntimeRoot, strings.HasPrefix(target, guestwire.RuntimeRoot+"/"):
		return "the sandbox's files" // which of them differs from run to run: the Sentry keeps some open
	case strings.HasPrefix(target, "/"):
		if info, err := os.Stat(path); err == nil && info.Mode().Type() == fs.ModeDir {
			return "directory " + target
		}
		return numbers.ReplaceAllString(target, "N")
	}
	if kind, ok := strings.CutPrefix(target, "anon_inode:"); ok {
		return strings.Trim(kind, "[]")
	}
	kind, _, _ := strings.Cut(target, ":[") // pipe:[1234], socket:[1234]
	return kind
}

// limits shows the limits that the walls set.
func limits(pid int) string {
	var out strings.Builder
	for line := range strings.Lines(read(pid, "limits") + "\n") {
		for _, name := range []string{"Max core file size", "Max open files", "Max file size"} {
			if strings.HasPrefix(line, name) {
				out.WriteString("  " + strings.Join(strings.Fields(line), " ") + "\n")
			}
		}
	}
	return out.String()
}

func read(pid int, name string) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(b))
}

// compare waits until a process is as its snapshot says: while it starts something, or somebody talks to it,
// it has more open for a moment. What stays different is shown.
func compare(t *testing.T, name string, b *box, pid int) {
	t.Helper()
	got := posture(t, b, pid)
	path := filepath.Join("testdata", name+".posture")
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	becomes(t, "the posture of "+name+" (-snapshot +now; if a change is meant, run this test with -update)", string(want), func() string {
		return posture(t, b, pid)
	})
}

// becomes waits until what is seen is as it should be: for a moment, something may be on its way. What stays different is
// shown.
func becomes[T any](t *testing.T, what string, want T, look func() T) {
	t.Helper()
	var diff string
	defer func() {
		if diff != "" {
			t.Errorf("%s:\n%s", what, diff)
		}
	}()
	testenv.Eventually(t, patience, what+" is as it should be", func() bool {
		diff = cmp.Diff(want, look())
		return diff == ""
	})
}
