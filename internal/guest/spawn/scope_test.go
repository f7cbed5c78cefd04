package spawn_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/walls"
	"casemate.dev/internal/testenv"
)

// mounted returns where a control group hierarchy is mounted: "cgroup2", or a controller of version 1.
// Which ones there are is the host's choice, so no kernel version must have them.
func mounted(t testing.TB, kind string) string {
	t.Helper()
	var at string
	testenv.Need(t, testenv.Feature{Name: "cgroup-" + kind, Major: 999, Probe: func() error {
		b, err := os.ReadFile("/proc/self/mounts")
		if err != nil {
			return err
		}
		for line := range strings.Lines(string(b)) {
			f := strings.Fields(line)
			if f[2] == kind || f[2] == "cgroup" && strings.Contains(","+f[3]+",", ","+kind+",") {
				at = f[1]
				return nil
			}
		}
		return errs.New(errs.Unsupported, "no control groups %s are mounted", kind)
	}})
	return at
}

// group makes a control group that goes with the test.
func group(t testing.TB, path string) string {
	t.Helper()
	if err := os.Mkdir(path, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		testenv.Eventually(t, 10*time.Second, "removal of "+path, func() bool {
			err := os.Remove(path)
			return err == nil || os.IsNotExist(err)
		})
	})
	return path
}

func open(t testing.TB, path string, flag int) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, flag, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func unique(t testing.TB) string {
	return fmt.Sprintf("casemate-spawn-%d-%s", os.Getpid(), strings.ToLower(strings.ReplaceAll(t.Name(), "/", "-")))
}

// TestScopeV1 starts a process into a scope, with the forking thread in another group that it joined.
func TestScopeV1(t *testing.T) {
	freezer, pids := mounted(t, "freezer"), mounted(t, "pids")
	name := unique(t)
	scope, joined := group(t, filepath.Join(freezer, name)), group(t, filepath.Join(pids, name))
	x := run{Name: "held", Paths: []string{"/bin/sleep"}, Argv: []string{"sleep", "100"}, UID: 1000, GID: 1000}
	g := newGuest(t, open(t, scope+"/tasks", os.O_WRONLY), open(t, joined+"/tasks", os.O_WRONLY))
	g.start(script{
		Walls: profile(t, isolation.Locked, walls.Options{}, false), Files: []string{"tasks", "join"}, Runs: []run{x}, Hold: true,
	})
	held := fmt.Sprint(g.held())
	if got := strings.Fields(readFile(t, scope+"/cgroup.procs")); len(got) != 1 || got[0] != held {
		t.Errorf("the scope holds %q, want the process %s alone", got, held)
	}
	init := fmt.Sprint(g.cmd.Process.Pid)
	tasks := strings.Fields(readFile(t, joined+"/tasks"))
	if len(tasks) != 2 {
		t.Errorf("the joined group holds %q, want the forking thread and the process", tasks)
	}
	for _, task := range tasks {
		if task == init {
			t.Error("PID 1's main thread sits in the payload's group")
		}
	}
	g.wait()

	// The group that the thread joined is where the processes' namespace begins.
	cat := run{Name: "cat", Paths: []string{"/bin/cat"}, Argv: []string{"cat", "/proc/self/cgroup"}, UID: 1000, GID: 1000}
	r := inGuest(t, script{Walls: profile(t, isolation.Locked, walls.Options{}, false), Files: []string{"join"}, Runs: []run{cat}},
		open(t, joined+"/tasks", os.O_WRONLY))
	if out := r.Output["cat"]; !strings.Contains(out, "pids:/\n") || strings.Contains(out, name) {
		t.Errorf("the process sees the host's names:\n%s", out)
	}
}

// TestScopeV2 starts a process that is born in its scope, from a thread whose own filter lets clone3
// through, and shows that the process itself can't call it.
func TestScopeV2(t *testing.T) {
	for _, p := range []isolation.Profile{isolation.Locked, isolation.Standard} {
		t.Run(string(p), func(t *testing.T) {
			base := group(t, filepath.Join(mounted(t, "cgroup2"), unique(t)))
			home, scope := group(t, base+"/guest"), group(t, base+"/scope")
			dir := open(t, scope, os.O_RDONLY)
			g := newGuest(t, dir)
			// The kernel asks for write access to cgroup.procs of the target and of the common ancestor.
			for _, d := range []string{base, scope} {
				if err := os.Chown(d+"/cgroup.procs", g.base, g.base); err != nil {
					t.Fatal(err)
				}
			}
			g.cmd.SysProcAttr.UseCgroupFD = true
			g.cmd.SysProcAttr.CgroupFD = int(open(t, home, os.O_RDONLY).Fd())
			x := run{Name: "held", Paths: []string{"/bin/sleep"}, Argv: []string{"sleep", "100"}, UID: 1000, GID: 1000}
			g.start(script{Walls: profile(t, p, walls.Options{}, true), Files: []string{"dir"}, Runs: []run{x}, Hold: true})
			held := g.held()
			if got := strings.Fields(readFile(t, scope+"/cgroup.procs")); len(got) != 1 || got[0] != fmt.Sprint(held) {
				t.Errorf("the scope holds %q, want the process %d alone", got, held)
			}
			if status := readFile(t, fmt.Sprintf("/proc/%d/status", held)); !strings.Contains(status, "Seccomp_filters:\t2\n") {
				t.Errorf("the process does not have two filters:\n%s", status)
			}
			g.checkThreads()
			g.wait()
		})
	}
}

// TestScopeV2Clone3 shows that the second filter closes clone3 again. The processes have no scope: what
// counts is the pair of filters.
func TestScopeV2Clone3(t *testing.T) {
	s := script{Walls: profile(t, isolation.Locked, walls.Options{}, true)}
	for _, name := range []string{"clone3-user", "work-fork", "work-thread"} {
		s.add(name, 1000)
	}
	r := inGuest(t, s)
	if r.outcome("clone3-user") != "ENOSYS" || r.outcome("work-fork") != "ok" || r.outcome("work-thread") != "ok" {
		t.Errorf("with the second filter: %v %v", r.Output, r.Status)
	}
	s.Walls.SeccompExec = nil
	if r := inGuest(t, s); r.outcome("clone3-user") != "ok" {
		t.Errorf("without the second filter: %v, so it proves nothing", r.Output)
	}
}

// TestFrozenChild freezes a scope before a process is started into it, as a whole-tree kill or a pause
// may at any moment. The child stops before it executes and shares PID 1's memory meanwhile; PID 1
// must go on, collector and all.
func TestFrozenChild(t *testing.T) {
	scope := group(t, filepath.Join(mounted(t, "freezer"), unique(t)))
	r := inGuest(t, script{
		Walls: profile(t, isolation.Locked, walls.Options{}, false), Files: []string{"tasks", "freezer"}, Freeze: true,
		Runs: []run{{Name: "true", Paths: []string{"/bin/true"}, Argv: []string{"true"}, UID: 1000, GID: 1000}},
	}, open(t, scope+"/tasks", os.O_WRONLY), open(t, scope+"/freezer.state", os.O_WRONLY))
	if r.Status["while frozen"] != "stuck, and the collector ran" || r.Status["true"] != "exit 0" {
		t.Errorf("%v", r.Status)
	}
}

// VULNERABILITY: a child that its user's processes stop before it executes holds up the one thread that
// starts processes, for good.
// ATTACK: SIGSTOP while the child is between fork and exec. A frozen scope holds it there.
// VERIFIES: the start comes through. The twin is TestFrozenChild's: the same child does not come through
// while something that SIGCONT does not end holds it.
func TestStoppedChild(t *testing.T) {
	scope := group(t, filepath.Join(mounted(t, "freezer"), unique(t)))
	r := inGuest(t, script{
		Walls: profile(t, isolation.Locked, walls.Options{}, false), Files: []string{"tasks", "freezer"}, Freeze: true, Stop: true,
		Runs: []run{{Name: "true", Paths: []string{"/bin/true"}, Argv: []string{"true"}, UID: 1000, GID: 1000}},
	}, open(t, scope+"/tasks", os.O_WRONLY), open(t, scope+"/freezer.state", os.O_WRONLY))
	if r.Status["while frozen"] != "stuck, and the collector ran" || r.Status["true"] != "exit 0" {
		t.Errorf("%v", r.Status)
	}
}
