package cgroup

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/id"
	"casemate.dev/internal/testenv"
)

// limit bounds every wait in these tests; an emulated machine needs it.
const limit = time.Minute

// open opens a hierarchy of its own for the test and checks that nothing of it stays behind.
func open(t *testing.T, openIt func(string) (*Hierarchy, error)) *Hierarchy {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("this test needs root: run it with sudo")
	}
	server := testenv.ServerID(t)
	h, err := openIt(server)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		if err := h.RemoveAll(ctx); err != nil {
			t.Errorf("remove all: %v", err)
		}
		if err := h.Close(); err != nil {
			t.Error(err)
		}
		if left, _ := filepath.Glob("/sys/fs/cgroup/*/casemate-" + server); left != nil {
			t.Errorf("left behind: %v", left)
		}
	})
	return h
}

func create(t *testing.T, h *Hierarchy, l Limits) *Group {
	t.Helper()
	g, err := h.Create(id.Sandbox(), l)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// settled gives a group a guest, without which v2 does not split the limits between guest and payload.
func settled(t *testing.T, h *Hierarchy, l Limits) *Group {
	t.Helper()
	g := create(t, h, l)
	if h.Version() == 1 {
		return g
	}
	cmd := exec.Command("/bin/sleep", "600")
	err := g.InGuest(func(dir int) error {
		cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: dir}
		return cmd.Start()
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	if err := g.Settle(cmd.Process.Pid); err != nil {
		t.Fatal(err)
	}
	return g
}

// versions runs a test on both versions; on v2 where the host has controllers on v1 limits are not to
// be had, and only the core is tested.
func versions(t *testing.T, f func(t *testing.T, h *Hierarchy)) {
	t.Run("host", func(t *testing.T) { f(t, open(t, Open)) })
	t.Run("unified", func(t *testing.T) { f(t, open(t, OpenUnified)) })
}

// inScope runs start so that its child is born in the scope, as a spawner thread of the guest does.
func inScope(t *testing.T, g *Group, s *Scope, payload bool, cmd *exec.Cmd) {
	t.Helper()
	if s.Layout()[0] == "kill" {
		if cmd.SysProcAttr == nil {
			cmd.SysProcAttr = &syscall.SysProcAttr{}
		}
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(s.Files()[1].Fd())
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return
	}
	var join []*os.File
	if payload {
		files, err := g.PayloadFiles()
		if err != nil {
			t.Fatal(err)
		}
		defer closeFiles(files)
		join = files
	}
	join = append(join, s.Files()[0])
	home, err := g.HomeFile()
	if err != nil {
		t.Fatal(err)
	}
	defer home.Close()
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		for _, f := range join {
			if _, err := f.WriteString("0"); err != nil {
				t.Error(err)
			}
		}
		err := cmd.Start()
		// The spawner leaves the scope; the test's thread also leaves the sandbox.
		if _, herr := home.WriteString("0"); herr != nil {
			t.Error(herr)
		}
		done <- errors.Join(err, g.driver.(*v1Group).leave())
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func ctx(t *testing.T) context.Context {
	c, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	return c
}

func TestCreateOpenListRemove(t *testing.T) {
	versions(t, func(t *testing.T, h *Hierarchy) {
		g := create(t, h, Limits{MemoryBytes: 256 << 20, CPUs: 1.5, Pids: 100})
		if _, err := h.Create(g.ID(), Limits{}); !errs.Is(err, errs.AlreadyExists) {
			t.Errorf("second create: %v, want already_exists", err)
		}
		ids, err := h.List()
		if err != nil || len(ids) != 1 || ids[0] != g.ID() {
			t.Errorf("list %v %v, want [%s]", ids, err, g.ID())
		}
		again, err := h.Open(g.ID())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := again.Usage(); err != nil {
			t.Error(err)
		}
		for range 2 { // idempotent
			if err := again.Remove(ctx(t)); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := h.Open(g.ID()); !errs.Is(err, errs.NotFound) {
			t.Errorf("open after remove: %v, want not_found", err)
		}
		if ids, _ := h.List(); len(ids) != 0 {
			t.Errorf("list after remove: %v", ids)
		}
	})
}

func TestNamesAreChecked(t *testing.T) {
	h := open(t, Open)
	g := create(t, h, Limits{})
	for _, name := range []string{"", ".", "..", "a/b", "../x", "cgroup.procs", "tasks", "payload", strings.Repeat("a", 65)} {
		if _, err := h.Create(name, Limits{}); !errs.Is(err, errs.InvalidArgument) {
			t.Errorf("create %q: %v", name, err)
		}
		if _, err := h.Open(name); !errs.Is(err, errs.InvalidArgument) {
			t.Errorf("open %q: %v", name, err)
		}
		if _, err := g.NewScope(name); !errs.Is(err, errs.InvalidArgument) {
			t.Errorf("scope %q: %v", name, err)
		}
		if _, err := Open(name); !errs.Is(err, errs.InvalidArgument) {
			t.Errorf("open hierarchy %q: %v", name, err)
		}
	}
}

func TestGuestIsBornInItsGroups(t *testing.T) {
	versions(t, func(t *testing.T, h *Hierarchy) {
		g := create(t, h, Limits{MemoryBytes: 64 << 20, Pids: 50, CPUs: 1})
		cmd := exec.Command("/bin/sleep", "60")
		err := g.InGuest(func(dir int) error {
			if dir >= 0 {
				cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: dir}
			}
			return cmd.Start()
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := g.Settle(cmd.Process.Pid); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", cmd.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		own := parseOwn(string(text))
		want := map[string]string{"": "/guest"}
		if h.Version() == 1 {
			want = map[string]string{"memory": "/guest", "pids": "/guest", "cpu": "", "cpuacct": "", "freezer": ""}
		}
		for c, tail := range want {
			if !strings.HasSuffix(own[c], g.ID()+tail) {
				t.Errorf("%q: in %q, want …/%s%s", c, own[c], g.ID(), tail)
			}
		}
		if pids, err := g.Pids(); err != nil || len(pids) != 1 || pids[0] != cmd.Process.Pid {
			t.Errorf("pids %v %v, want [%d]", pids, err, cmd.Process.Pid)
		}
		// Freezing is for the payload: the guest goes on.
		if err := g.Freeze(ctx(t)); err != nil {
			t.Fatal(err)
		}
		if err := g.Kill(ctx(t)); err != nil { // also out of a frozen sandbox
			t.Fatal(err)
		}
		_ = cmd.Wait()
		if err := g.Remove(ctx(t)); err != nil {
			t.Fatal(err)
		}
	})
}

func TestAddGuestMovesARunningProcess(t *testing.T) {
	h := open(t, Open)
	g := create(t, h, Limits{})
	cmd := exec.Command("/bin/sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := g.AddGuest(cmd.Process.Pid); err != nil {
		t.Fatal(err)
	}
	if pids, _ := g.Pids(); len(pids) != 1 {
		t.Errorf("pids %v", pids)
	}
	if err := g.Remove(ctx(t)); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if err := g.AddGuest(cmd.Process.Pid); err == nil {
		t.Error("placed a process that has ended")
	}
}

// A scope's kill takes also what called setsid, ignores SIGTERM and keeps forking.
func TestScopeKillTakesTheWholeTree(t *testing.T) {
	versions(t, func(t *testing.T, h *Hierarchy) {
		g := create(t, h, Limits{MemoryBytes: 512 << 20, Pids: 200})
		s, err := g.NewScope("prc_tree")
		if err != nil {
			t.Fatal(err)
		}
		other, err := g.NewScope("prc_other")
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("/bin/sh", "-c", `trap "" TERM; setsid sleep 300 & (setsid sh -c "trap '' TERM; while :; do sleep 0.01; done" &) ; echo up; sleep 300`)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		inScope(t, g, s, true, cmd)
		bystander := exec.Command("/bin/sleep", "300")
		inScope(t, g, other, true, bystander)
		if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "up\n" {
			t.Fatalf("%q %v", line, err)
		}
		if empty, err := s.Empty(); err != nil || empty {
			t.Errorf("empty %v %v, want false", empty, err)
		}
		for range 2 { // idempotent
			if err := s.Kill(ctx(t)); err != nil {
				t.Fatal(err)
			}
		}
		if empty, err := s.Empty(); err != nil || !empty {
			t.Errorf("empty %v %v, want true", empty, err)
		}
		_ = cmd.Wait()
		if err := bystander.Process.Signal(syscall.Signal(0)); err != nil {
			t.Errorf("the process in the other scope died too: %v", err)
		}
		if names, _ := g.Scopes(); len(names) != 2 {
			t.Errorf("scopes %v", names)
		}
		for range 2 {
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := g.OpenScope("prc_tree"); !errs.Is(err, errs.NotFound) {
			t.Errorf("open a closed scope: %v", err)
		}
		again, err := g.OpenScope("prc_other")
		if err != nil {
			t.Fatal(err)
		}
		if err := again.Close(); err != nil { // kills what is left
			t.Fatal(err)
		}
		if err := bystander.Wait(); err == nil {
			t.Error("close left the process alive")
		}
		_ = other.Close()
	})
}

// The guest kills with nothing but the scope's files.
func TestScopeFilesSufficeToKill(t *testing.T) {
	versions(t, func(t *testing.T, h *Hierarchy) {
		g := create(t, h, Limits{})
		s, err := g.NewScope("prc_a")
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		cmd := exec.Command("/bin/sh", "-c", "sleep 300 & sleep 300")
		inScope(t, g, s, false, cmd)
		if h.Version() == 2 || s.Layout()[0] == "kill" {
			if _, err := s.Files()[0].WriteString("1"); err != nil {
				t.Fatal(err)
			}
		} else {
			procs, freezer := s.Files()[1], s.Files()[2]
			testenv.Eventually(t, limit, "empty", func() bool {
				_, _ = freezer.WriteString("FROZEN")
				list, err := os.ReadFile(fmt.Sprintf("/proc/self/fd/%d", procs.Fd()))
				if err != nil {
					t.Fatal(err)
				}
				for f := range strings.FieldsSeq(string(list)) {
					pid, _ := strconv.Atoi(f)
					_ = unix.Kill(pid, unix.SIGKILL)
				}
				_, _ = freezer.WriteString("THAWED")
				return len(list) == 0
			})
		}
		_ = cmd.Wait()
		testenv.Eventually(t, limit, "scope empty", func() bool { e, _ := s.Empty(); return e })
		// Each file does its one thing and no more. (Writing to "tasks" would move this test.)
		want := map[string]int{"tasks": unix.O_WRONLY, "procs": unix.O_RDONLY, "freezer": unix.O_WRONLY, "kill": unix.O_WRONLY, "dir": unix.O_RDONLY}
		for i, role := range s.Layout() {
			flags, err := unix.FcntlInt(s.Files()[i].Fd(), unix.F_GETFL, 0)
			if err != nil || flags&unix.O_ACCMODE != want[role] {
				t.Errorf("%s is open with %#x (%v), want access mode %d", role, flags, err, want[role])
			}
		}
	})
}

// ATTACK: climb from the descriptor that the guest holds to the host's groups. The twin shows that a
// plain descriptor of the directory leads there.
func TestScopeDirIsDetached(t *testing.T) {
	h := open(t, OpenUnified)
	g := create(t, h, Limits{})
	s, err := g.NewScope("prc_a")
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	dir := int(s.Files()[1].Fd())
	var self, up unix.Stat_t
	if err := unix.Fstatat(dir, ".", &self, 0); err != nil {
		t.Fatal(err)
	}
	if err := unix.Fstatat(dir, "..", &up, 0); err != nil {
		t.Fatal(err)
	}
	if self.Ino != up.Ino {
		t.Error(`".." of the descriptor leads out of the scope`)
	}
	d := h.driver.(*v2)
	plain, err := openDir(d.dir, g.ID()+"/payload/prc_a")
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(plain)
	if err := unix.Fstatat(plain, "..", &up, 0); err != nil || up.Ino == self.Ino {
		t.Errorf("twin: a plain descriptor should lead out: %v", err)
	}
}

// A process without privilege may place its child in a delegated scope, and in no other; it can't
// change limits.
func TestDelegateOnUnified(t *testing.T) {
	h := open(t, OpenUnified)
	g := create(t, h, Limits{})
	const uid = 54321
	if err := g.Delegate(uid, uid); err != nil {
		t.Fatal(err)
	}
	d := h.driver.(*v2)
	for path, want := range map[string]uint32{"": uid, "/payload": uid, "/guest": 0} {
		var st unix.Stat_t
		if err := unix.Fstatat(d.dir, g.ID()+path+"/cgroup.procs", &st, 0); err != nil || st.Uid != want {
			t.Errorf("cgroup.procs of %q is owned by %d (%v), want %d", path, st.Uid, err, want)
		}
		if err := unix.Fstatat(d.dir, g.ID()+path+"/cgroup.subtree_control", &st, 0); err == nil && st.Uid != 0 {
			t.Errorf("cgroup.subtree_control of %q is owned by %d, want root", path, st.Uid)
		}
	}
	mine, err := g.NewScope("prc_mine")
	if err != nil {
		t.Fatal(err)
	}
	defer mine.Close()
	// After a restart the delegation is known again.
	reopened, err := h.Open(g.ID())
	if err != nil {
		t.Fatal(err)
	}
	later, err := reopened.NewScope("prc_later")
	if err != nil {
		t.Fatal(err)
	}
	defer later.Close()
	for _, s := range []*Scope{mine, later} {
		var st unix.Stat_t
		if err := unix.Fstatat(int(s.Files()[1].Fd()), "cgroup.procs", &st, 0); err != nil || st.Uid != uid {
			t.Errorf("%s: cgroup.procs is owned by %d (%v), want %d", s.ID(), st.Uid, err, uid)
		}
		for _, f := range []string{"cgroup.freeze", "cgroup.subtree_control", "cgroup.kill"} {
			if err := unix.Fstatat(int(s.Files()[1].Fd()), f, &st, 0); err == nil && st.Uid != 0 {
				t.Errorf("%s: %s is owned by %d, want root", s.ID(), f, st.Uid)
			}
		}
	}
}
