package spawn_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/guest/spawn"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/walls"
	"casemate.dev/internal/linux/caps"
	"casemate.dev/internal/testenv"
)

// TestPosture compares what /proc shows of a process with what its profile says, from outside.
func TestPosture(t *testing.T) {
	for _, c := range []struct {
		name     string
		profile  isolation.Profile
		uid      uint32
		eff, bnd caps.Set
		nnp      bool
	}{
		{"locked", isolation.Locked, 1000, 0, 0, true},
		{"standard root", isolation.Standard, 0, standardSet(), standardSet(), false},
		{"standard user", isolation.Standard, 1000, 0, standardSet(), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			g := newGuest(t)
			x := run{Name: "held", Paths: []string{"/bin/sleep"}, Argv: []string{"sleep", "100"}, UID: c.uid, GID: c.uid}
			g.start(script{Walls: profile(t, c.profile, walls.Options{OpenFiles: 99, CPUs: []int{0}}, false), Runs: []run{x}, Hold: true})
			held := g.held()
			st, err := caps.ReadStatus(fmt.Sprintf("/proc/%d/status", held))
			if err != nil {
				t.Fatal(err)
			}
			want := caps.Status{Permitted: c.eff, Effective: c.eff, Bounding: c.bnd, NoNewPrivs: c.nnp, SeccompMode: 2, SeccompFilters: 1}
			if st != want {
				t.Errorf("privileges %+v, want %+v", st, want)
			}
			status := readFile(t, fmt.Sprintf("/proc/%d/status", held))
			uid := strconv.Itoa(g.base + int(c.uid))
			for _, line := range []string{
				"Uid:\t" + strings.Repeat(uid+"\t", 3) + uid, "Gid:\t" + strings.Repeat(uid+"\t", 3) + uid,
				"SigBlk:\t0000000000000000", "SigIgn:\t0000000000000000", "Umask:\t0022", "Cpus_allowed_list:\t0",
			} {
				if !strings.Contains(status, line+"\n") {
					t.Errorf("status lacks %q:\n%s", line, status)
				}
			}
			if l := readFile(t, fmt.Sprintf("/proc/%d/limits", held)); !slices.Contains(strings.Fields(l), "99") {
				t.Errorf("limits lack 99 open files:\n%s", l)
			}
			g.checkThreads()
			if r := g.wait(); r.Status["held"] != "signal 9" {
				t.Errorf("the process ended with %q", r.Status["held"])
			}
		})
	}
}

func standardSet() caps.Set { return caps.Of(walls.Capabilities(isolation.Standard)...) }

// held waits until the guest holds its processes and returns the first one's pid as the host sees it.
func (g *guest) held() int {
	g.t.Helper()
	var children []int
	testenv.Eventually(g.t, 20*time.Second, "the guest holds a process", func() bool {
		children = g.children()
		return len(children) > 0 && strings.Contains(g.said(), "held")
	})
	return children[0]
}

// children returns the pids of PID 1's children. A child belongs to the thread that forked it.
func (g *guest) children() []int {
	var out []int
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", g.cmd.Process.Pid))
	for _, f := range files {
		b, _ := os.ReadFile(f)
		for word := range strings.FieldsSeq(string(b)) {
			pid, _ := strconv.Atoi(word)
			out = append(out, pid)
		}
	}
	return out
}

// checkThreads looks at PID 1: one thread, not the main one, stands behind the walls.
func (g *guest) checkThreads() {
	g.t.Helper()
	walled := 0
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", g.cmd.Process.Pid))
	if err != nil || len(files) == 0 {
		g.t.Fatal("no threads", err)
	}
	for _, f := range files {
		st, err := caps.ReadStatus(f)
		if err != nil {
			continue // ended meanwhile
		}
		if st.SeccompMode != 0 {
			walled++
			if strings.Contains(f, fmt.Sprintf("/task/%d/", g.cmd.Process.Pid)) {
				g.t.Error("the main thread stands behind the walls")
			}
		}
	}
	if walled != 1 {
		g.t.Errorf("%d threads behind the walls, want 1", walled)
	}
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestApplied compares what the guest says with what was asked for.
func TestApplied(t *testing.T) {
	w := profile(t, isolation.Standard, walls.Options{CPUs: []int{1}}, true)
	a := inGuest(t, script{Walls: w}).Applied
	if !slices.Equal(a.Capabilities, w.Capabilities) || a.NoNewPrivs || a.SeccompMode != 2 ||
		!a.SeccompExec || a.LandlockABI != w.Landlock.ABI || !slices.Equal(a.CPUs, []int{1}) {
		t.Errorf("%+v", a)
	}
}

// TestNothingInherited shows that a process sees three descriptors and none of the guest's, not even
// while its working directory and program are looked up (CVE-2024-21626).
func TestNothingInherited(t *testing.T) {
	w := profile(t, isolation.Standard, walls.Options{}, false)
	s := script{Walls: w, Runs: []run{{
		Name: "list", Paths: []string{"/bin/sh"}, UID: 1000, GID: 1000,
		Argv: []string{"sh", "-c", `for f in 0 1 2 3 4 5 6 7 8 9; do [ -e /proc/self/fd/$f ] && printf %s, $f; done`},
	}}}
	for fd := 3; fd < 32; fd++ {
		s.Runs = append(s.Runs,
			run{Name: fmt.Sprint("dir", fd), Dir: fmt.Sprint("/proc/self/fd/", fd), Paths: []string{"/bin/pwd"}, Argv: []string{"pwd"}},
			run{Name: fmt.Sprint("exec", fd), Paths: []string{fmt.Sprint("/proc/self/fd/", fd)}, Argv: []string{"x"}})
	}
	r := inGuest(t, s)
	if got := r.Output["list"]; got != "0,1,2," {
		t.Errorf("open: %s", got)
	}
	for fd := 3; fd < 32; fd++ {
		if got := r.Status[fmt.Sprint("dir", fd)]; got != "dir: no such file or directory" {
			t.Errorf("working directory at descriptor %d: %s", fd, got)
		}
		if got := r.Status[fmt.Sprint("exec", fd)]; got != "exec: no such file or directory" {
			t.Errorf("program at descriptor %d: %s", fd, got)
		}
	}
}

// TestReach shows that a process which reaches a descriptor has a table of that size from the start, with threads to come, and that
// a child of it has, too, after a program that closed the descriptor as it was executed. Without, the child begins with 64.
func TestReach(t *testing.T) {
	const sizes = `import os, sys
def size():
    return next(l for l in open("/proc/self/status") if l.startswith("FDSize")).split()[1]
print(size(), len(os.listdir("/proc/self/fd")) - 1, end=" ")
sys.stdout.flush()
if len(sys.argv) > 1:
    os.set_inheritable(int(sys.argv[1]), False)
os.execv("/usr/bin/python3", ["python3", "-c", "import os; print(next(l for l in open('/proc/self/status') if l.startswith('FDSize')).split()[1], len(os.listdir('/proc/self/fd')) - 1)"]) if os.fork() == 0 else os.wait()`
	python := []string{"/usr/bin/python3"}
	r := inGuest(t, script{Walls: profile(t, isolation.Standard, walls.Options{}, false), Runs: []run{
		{Name: "reaching", Paths: python, Argv: []string{"python3", "-c", sizes, "255"}, UID: 1000, GID: 1000, Reach: 255},
		{Name: "not reaching", Paths: python, Argv: []string{"python3", "-c", sizes}, UID: 1000, GID: 1000},
		{Name: "below others", Paths: python, Argv: []string{"python3"}, UID: 1000, GID: 1000, Reach: 2},
	}})
	if got := r.Output["reaching"]; got != "256 4 256 3" {
		t.Errorf("sizes and open descriptors of a process that reaches 255, and of its child: %q", got)
	}
	if got := r.Output["not reaching"]; !strings.HasSuffix(got, " 3 64 3") { // its own may be what the test was started with
		t.Errorf("sizes and open descriptors of a process that does not, and of its child: %q", got)
	}
	if got := r.Status["below others"]; !strings.HasPrefix(got, "check: ") {
		t.Errorf("to reach one of its own files is %q", got)
	}
}

// TestStarts covers what a start answers, good and bad.
func TestStarts(t *testing.T) {
	sh := []string{"/bin/sh"}
	echo := func(s string) []string { return []string{"sh", "-c", "echo " + s} }
	const unset = ^uint32(0)
	cases := []struct {
		run    run
		status string
		output string
	}{
		{run{Name: "plain", Paths: sh, Argv: echo("$0 $PWD $(id -u) $(id -g) $(id -G)"), UID: 1000, GID: 1001, Groups: []uint32{5, 7}}, "exit 0", "sh / 1000 1001 1001 5 7"},
		{run{Name: "dir", Paths: sh, Argv: echo("$PWD"), Dir: "/usr/bin", UID: 1000, GID: 1000}, "exit 0", "/usr/bin"},
		{run{Name: "session", Paths: sh, Argv: []string{"sh", "-c", `set -- $(cat /proc/self/stat); [ "$6" = $$ ] && echo own`}, UID: 1000, GID: 1000}, "exit 0", "own"},
		{run{Name: "terminal", Paths: sh, Argv: []string{"sh", "-c", "tty </dev/tty && stty -F /dev/tty size"}, UID: 1000, GID: 1000, TTY: true}, "exit 0", ""},
		{run{Name: "second", Paths: []string{"/nowhere/sh", "/etc/passwd/sh", "/bin/sh"}, Argv: echo("found"), UID: 1000, GID: 1000}, "exit 0", "found"},
		{run{Name: "after refusal", Paths: []string{"/tmp/plain", "/bin/sh"}, Argv: echo("found"), UID: 1000, GID: 1000}, "exit 0", "found"},
		{run{Name: "absent", Paths: []string{"/nowhere/a", "/nowhere/b"}, Argv: []string{"a"}, UID: 1000, GID: 1000}, "exec: no such file or directory", ""},
		{run{Name: "refused", Paths: []string{"/tmp/plain", "/nowhere/b"}, Argv: []string{"a"}, UID: 1000, GID: 1000}, "exec: permission denied", ""},
		{run{Name: "no dir", Paths: sh, Argv: echo(""), Dir: "/nowhere", UID: 1000, GID: 1000}, "dir: no such file or directory", ""},
		{run{Name: "private dir", Paths: sh, Argv: echo(""), Dir: "/tmp/private", UID: 1000, GID: 1000}, "dir: permission denied", ""},
		{run{Name: "unmapped", Paths: sh, Argv: echo(""), UID: 70000, GID: 1000}, "user: invalid argument", ""},
		{run{Name: "unset", Paths: sh, Argv: echo(""), UID: unset, GID: 1000}, "check: " + spawn.ErrUnset.Error(), ""},
		{run{Name: "unset group", Paths: sh, Argv: echo(""), UID: 1000, GID: unset}, "check: " + spawn.ErrUnset.Error(), ""},
		{run{Name: "unset groups", Paths: sh, Argv: echo(""), UID: 1000, GID: 1000, Groups: []uint32{unset}}, "check: " + spawn.ErrUnset.Error(), ""},
		{run{Name: "root", Paths: sh, Argv: echo(""), UID: 0, GID: 1000}, "check: " + spawn.ErrRoot.Error(), ""},
		{run{Name: "relative", Paths: []string{"sh"}, Argv: echo(""), UID: 1000, GID: 1000}, "check: the program's path is not absolute", ""},
		{run{Name: "nothing", UID: 1000, GID: 1000}, "check: no program or no argument zero", ""},
	}
	s := script{Walls: profile(t, isolation.Locked, walls.Options{OpenFiles: 64}, false)}
	for _, c := range cases {
		s.Runs = append(s.Runs, c.run)
	}
	r := inGuest(t, s)
	for _, c := range cases {
		if got := r.Status[c.run.Name]; got != c.status {
			t.Errorf("%s: %s (%s), want %s", c.run.Name, got, r.Output[c.run.Name], c.status)
		}
		if got := r.Output[c.run.Name]; c.output != "" && got != c.output {
			t.Errorf("%s: output %q, want %q", c.run.Name, got, c.output)
		}
	}
}

// TestOwnGroupTakesAScope shows that a start without a group of its own is refused where the walls promise one: its view of
// groups would begin at the guest's.
func TestOwnGroupTakesAScope(t *testing.T) {
	w := profile(t, isolation.Locked, walls.Options{}, false)
	w.OwnGroup = true
	x := run{Name: "x", Paths: []string{"/bin/true"}, Argv: []string{"true"}, UID: 1000, GID: 1000}
	want := "check: the walls give each process a group of its own, and this start names none"
	if r := inGuest(t, script{Walls: w, Runs: []run{x}}); r.Status["x"] != want {
		t.Errorf("%q, want %q", r.Status["x"], want)
	}
}

// TestWorker starts the guest's own program inside the walls.
func TestWorker(t *testing.T) {
	for _, uid := range []uint32{0, 1000} {
		r := inGuest(t, script{
			Walls: profile(t, isolation.Standard, walls.Options{}, false),
			Runs:  []run{{Name: "worker", Worker: true, UID: uid, GID: uid}},
		})
		out, _, _ := strings.Cut(r.Output["worker"], " 4:") // from 4 on they are the Go runtime's own
		want := fmt.Sprintf("uid %d fds 0:/dev/null 1:/dev/null 2:/dev/null 3:pipe:", uid)
		if out != want || !strings.Contains(r.Output["worker"], "permission denied") {
			t.Errorf("%q (%s), want %q and no access to its own memory", r.Output["worker"], r.Status["worker"], want)
		}
	}
}

// TestNewFailsClosed shows that a wall that can't be put up stops everything.
func TestNewFailsClosed(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*guestwire.Walls)
		want   string
	}{
		{"rule without a path", func(w *guestwire.Walls) { w.Landlock.Rules[0].Path = "/nowhere" }, "landlock: allow /nowhere: open: no such file or directory"},
		{"access that nobody knows", func(w *guestwire.Walls) { w.Landlock.HandledFS |= 1 << 63 }, "landlock: landlock_create_ruleset: invalid argument"},
		{"half an instruction", func(w *guestwire.Walls) { w.Seccomp = w.Seccomp[:12] }, "12 bytes: no seccomp program"},
		{"program without an end", func(w *guestwire.Walls) { w.Seccomp = w.Seccomp[:8] }, "seccomp: invalid argument"},
		{"processor that is not there", func(w *guestwire.Walls) { w.CPUs = []int{900} }, "set affinity to [900]: invalid argument"},
		{"unknown capability", func(w *guestwire.Walls) { w.Capabilities = []uint8{63} }, "the walls read back differ from those put up: bounding set []"},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := profile(t, isolation.Locked, walls.Options{}, false)
			c.change(&w)
			if r := inGuest(t, script{Walls: w, Runs: []run{{Name: "x"}}}); r.Error != c.want {
				t.Errorf("%q, want %q", r.Error, c.want)
			}
		})
	}
}

// TestHammer starts from many goroutines while the collector stops the world over and over.
func TestHammer(t *testing.T) {
	r := inGuest(t, script{Walls: profile(t, isolation.Locked, walls.Options{}, false), Hammer: 8})
	if r.Status["hammer"] != "" {
		t.Error(r.Status["hammer"])
	}
}

func TestCandidates(t *testing.T) {
	for _, c := range []struct {
		file, path, dir string
		want            []string
	}{
		{"ls", "/usr/bin:/bin", "/home", []string{"/usr/bin/ls", "/bin/ls"}},
		{"ls", ":.:bin:/bin:", "/home", []string{"/bin/ls"}},
		{"ls", "", "/home", nil},
		{"", "/bin", "/home", nil},
		{"./run", "/bin", "/home/user", []string{"/home/user/./run"}},
		{"a/../run", "/bin", "/w", []string{"/w/a/../run"}},
		{"/bin/ls", "/usr/bin", "/home", []string{"/bin/ls"}},
	} {
		if got := spawn.Candidates(c.file, c.path, c.dir); !slices.Equal(got, c.want) {
			t.Errorf("Candidates(%q, %q, %q) = %q, want %q", c.file, c.path, c.dir, got, c.want)
		}
	}
}

func TestClose(t *testing.T) {
	w := guestwire.Walls{RootAllowed: true, Capabilities: ownBounding(t)}
	before := openFiles(t)
	sp, err := spawn.New(w, nil)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := sp.Close(); err != nil {
			t.Fatal(err)
		}
	}
	_, err = sp.Start(spawn.Attr{Paths: []string{"/bin/true"}, Argv: []string{"true"}, Ctty: -1})
	if !errors.Is(err, spawn.ErrClosed) {
		t.Errorf("start after close: %v", err)
	}
	testenv.Eventually(t, 10*time.Second, "all descriptors are closed", func() bool { return openFiles(t) == before })
}

// ownBounding returns the bounding set that the test itself has.
func ownBounding(t *testing.T) []uint8 {
	t.Helper()
	st, err := caps.ReadStatus("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	return st.Bounding.List()
}

func openFiles(t *testing.T) int {
	t.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(d)
}

// TestErrno shows that callers can match a start's error.
func TestErrno(t *testing.T) {
	if !errors.Is(&spawn.Error{Step: spawn.StepExec, Err: unix.ENOENT}, os.ErrNotExist) {
		t.Error("ENOENT is not os.ErrNotExist")
	}
}
