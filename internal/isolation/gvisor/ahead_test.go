package gvisor_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/id"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/conformance"
	"casemate.dev/internal/isolation/gvisor"
	"casemate.dev/internal/isolation/walls"
	"casemate.dev/internal/rootfs"
	"casemate.dev/internal/testenv"
)

// eager is a backend with cells that wait, in one of which a runsc waits as well.
type eager struct {
	t      *testing.T
	b      *gvisor.Backend
	server string
}

func newEager(t *testing.T) *eager {
	h := newHost(t)
	h.cfg.Spares = 1
	return eagerOn(h)
}

func eagerOn(h *host) *eager {
	h.t.Helper()
	b, ok := h.backend().(*gvisor.Backend)
	if !ok {
		h.t.Fatal("another backend")
	}
	return &eager{h.t, b, h.cfg.ServerID}
}

// full waits until all that is to wait does.
func (e *eager) full() {
	e.t.Helper()
	testenv.Eventually(e.t, time.Minute, "a runsc waits", func() bool {
		ready, wanted := e.b.Spares()
		return wanted == 2 && ready == wanted
	})
}

func (e *eager) start(spec isolation.Spec) *box {
	e.t.Helper()
	inst, err := e.b.Start(e.t.Context(), spec)
	if err != nil {
		e.t.Fatal(err)
	}
	b := newBox(e.t, inst)
	if err := b.guest.Claim(e.t.Context(), guestwire.Claim{Sandbox: spec.ID, Hostname: "box"}); err != nil {
		e.t.Fatal(err)
	}
	return b
}

// waiting returns the gofer of the runsc that waits, as the one of this server that is in no sandbox; 0: none waits.
func (e *eager) waiting(sandboxes ...*box) int {
	e.t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		e.t.Fatal(err)
	}
	for _, f := range all {
		dir := filepath.Dir(f)
		line, _ := os.ReadFile(f)
		groups, _ := os.ReadFile(filepath.Join(dir, "cgroup"))
		if !strings.HasPrefix(string(line), "runsc-gofer\x00") || !strings.Contains(string(groups), e.server) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err == nil && !slices.ContainsFunc(sandboxes, func(b *box) bool { return process(b, "runsc-gofer") == pid }) {
			return pid
		}
	}
	return 0
}

// awaits waits until a runsc waits, and returns its gofer.
func (e *eager) awaits(sandboxes ...*box) (pid int) {
	e.t.Helper()
	e.full()
	testenv.Eventually(e.t, time.Minute, "its gofer is there", func() bool {
		pid = e.waiting(sandboxes...)
		return pid != 0
	})
	return pid
}

// process returns the pid of a process of a sandbox by its name.
func process(b *box, name string) int {
	b.t.Helper()
	for _, p := range processes(b.t, b.inst) {
		if p.Name == name {
			return p.PID
		}
	}
	b.t.Fatalf("there is no %s", name)
	return 0
}

// mounted lists what a process has mounted where, without what tells one sandbox from another.
func mounted(t *testing.T, pid int) (out []string) {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		f := strings.Fields(line)
		sep := slices.Index(f, "-")
		if len(f) < 6 || sep < 0 || sep+1 >= len(f) {
			t.Fatalf("mountinfo says %q", line)
		}
		shared := slices.ContainsFunc(f[6:sep], func(o string) bool { return strings.HasPrefix(o, "shared:") })
		out = append(out, fmt.Sprintf("%s %s %s shared=%v", f[4], f[5], f[sep+1], shared))
	}
	slices.Sort(out)
	return out
}

// A runsc that was started before anybody asked for the sandbox serves it like any other: with its own files, a workspace
// among them, and its processes see the same mounts as those of one that was started when it was asked for.
func TestStartedAhead(t *testing.T) {
	e := newEager(t)
	first := e.start(conformance.Spec(t, isolation.Locked))
	waits := e.awaits(first)
	spec := conformance.Spec(t, isolation.Locked)
	if err := os.WriteFile(filepath.Join(spec.Root.Lowers[0], "etc/mark"), []byte("mine"), 0o644); err != nil {
		t.Fatal(err)
	}
	work := t.TempDir()
	if err := os.WriteFile(filepath.Join(work, "note"), []byte("work"), 0o644); err != nil {
		t.Fatal(err)
	}
	second := e.start(spec)
	if got := second.run("cat", "/etc/mark"); got != "mine" {
		t.Errorf("the second one reads %q", got)
	}
	if got := process(second, "runsc-gofer"); waits == 0 || got != waits {
		t.Errorf("its gofer is %d, and the one that waited %d", got, waits)
	}
	for _, name := range []string{"runsc-sandbox", "runsc-gofer"} {
		if one, other := mounted(t, process(first, name)), mounted(t, process(second, name)); !slices.Equal(one, other) {
			t.Errorf("%s has mounted\n%s\nand started ahead\n%s", name, strings.Join(one, "\n"), strings.Join(other, "\n"))
		}
	}
	e.full()
	third := conformance.Spec(t, isolation.Locked)
	upper, workdir := conformance.Writable(t)
	third.Root.Workspaces = []rootfs.Workspace{{Source: work, Target: "/shared", Upper: upper, Work: workdir}}
	b := e.start(third)
	if got := b.run("cat", "/shared/note"); got != "work" {
		t.Errorf("the workspace holds %q", got)
	}
	if got := b.run("sh", "-c", "echo new >/shared/other && cat /shared/other"); got != "new" {
		t.Errorf("written to the workspace: %q", got)
	}
}

// A sandbox with fewer processors than the host takes what waits, too, and has as many as it may.
func TestStartedAheadOnFewProcessors(t *testing.T) {
	e := newEager(t)
	one := func() isolation.Spec {
		s := conformance.Spec(t, isolation.Locked)
		s.Limits.CPUs = 1
		return s
	}
	spec, next := one(), one()
	first := e.start(spec)
	waits := e.awaits(first)
	two := []int{0, 1}
	for slices.Equal(walls.CPUs(1, two, spec.ID), walls.CPUs(1, two, next.ID)) { // by its id it would be on another
		next.ID = id.Sandbox()
	}
	second := e.start(next)
	if got := process(second, "runsc-gofer"); got != waits {
		t.Errorf("its gofer is %d, and the one that waited %d", got, waits)
	}
	for _, b := range []*box{first, second} {
		var set unix.CPUSet
		if err := unix.SchedGetaffinity(process(b, "runsc-sandbox"), &set); err != nil || set.Count() != 1 {
			t.Errorf("it runs on %d processors, %v", set.Count(), err)
		}
	}
}

// What waits serves no other start, and goes when another is expected; one whose runsc was killed is no obstacle.
func TestStartedAheadInVain(t *testing.T) {
	e := newEager(t)
	first := e.start(conformance.Spec(t, isolation.Locked))
	waits := e.awaits(first)
	other := e.start(conformance.Spec(t, isolation.Standard))
	if got := process(other, "runsc-gofer"); got == waits {
		t.Error("a sandbox of another profile took it")
	}
	next := waits
	testenv.Eventually(t, time.Minute, "another one waits", func() bool {
		next = e.awaits(first, other)
		return next != waits
	})
	if err := unix.Kill(next, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	after := e.start(conformance.Spec(t, isolation.Standard))
	if got := after.run("echo", "on"); got != "on" {
		t.Errorf("after what waited was killed, it says %q", got)
	}
}

// A memory image goes on beside a runsc that waits for something else.
func TestRestoreBesideOneStartedAhead(t *testing.T) {
	e := newEager(t)
	spec := conformance.Spec(t, isolation.Locked)
	dir := imageOf(t, e.b, spec)
	e.full()
	inst, err := e.b.Restore(t.Context(), spec, dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := inst.Destroy(context.Background()); err != nil {
		t.Error(err)
	}
	e.full()
}

// serverVariable makes TestServerProcess a server that is to be killed, of the configuration that it holds.
const serverVariable = "CASEMATE_GVISOR_TEST_SERVER"

// TestServerProcess is nothing by itself.
func TestServerProcess(t *testing.T) {
	config := os.Getenv(serverVariable)
	if config == "" {
		return
	}
	h := &host{t: t}
	if err := json.Unmarshal([]byte(config), &h.cfg); err != nil {
		t.Fatal(err)
	}
	h.cfg.Guest = testenv.Guest(t)
	e := eagerOn(h)
	fmt.Fprintf(os.Stdout, "waits %d\n", e.awaits(e.start(conformance.Spec(t, isolation.Locked))))
	select {} // until killed
}

// A runsc that waits ends with a server that is killed, and the next one finds all that it leaves.
func TestServerKilledWhileOneWaits(t *testing.T) {
	h := newHost(t)
	cfg := h.cfg
	cfg.Guest, cfg.Spares = nil, 1
	config, err := json.Marshal(cfg)
	if err != nil {
		t.Fatal(err)
	}
	server := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^TestServerProcess$", "-test.v")
	// Killed, it leaves its own temporary files behind: they go with ours.
	server.Env = append(os.Environ(), serverVariable+"="+string(config), "TMPDIR="+t.TempDir())
	server.SysProcAttr = &unix.SysProcAttr{Unshareflags: unix.CLONE_NEWNS, Pdeathsig: unix.SIGKILL}
	out, err := server.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	pid := 0
	for lines := bufio.NewScanner(out); pid == 0 && lines.Scan(); {
		_, _ = fmt.Sscanf(lines.Text(), "waits %d", &pid) // other lines are the testing package's
	}
	if pid == 0 {
		t.Fatal("none waits")
	}
	if err := server.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = server.Wait()
	testenv.Eventually(t, patience, "what waited ends", func() bool {
		groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
		return err != nil || !strings.Contains(string(groups), h.cfg.ServerID)
	})
	if _, err := h.backend().Sweep(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if left := h.leftovers(); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}
