package testenv

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"casemate.dev/internal/errs"
)

// TestHostInfo prints the host, so that a log of a test run begins with what it ran on.
func TestHostInfo(t *testing.T) {
	info := HostInfo()
	t.Log(info)
	for _, want := range []string{"Linux ", "cgroups: v", "CapEff"} {
		if !strings.Contains(info, want) {
			t.Errorf("HostInfo lacks %q", want)
		}
	}
}

func TestJudge(t *testing.T) {
	feature := Feature{Name: "landlock", Major: 6, Minor: 1}
	lacks := errs.New(errs.Unsupported, "no such system call")
	for _, tt := range []struct {
		name             string
		answer           error
		release, require string
		skip, fail       bool
	}{
		{"works", nil, "5.0.0", "all", false, false},
		{"lacking on an old kernel skips", lacks, "5.10.0-8-amd64", "", true, false},
		{"lacking on an old kernel fails when required", lacks, "5.10.0", "seccomp,landlock", false, true},
		{"lacking on an old kernel fails when all are required", lacks, "5.10.0", "all", false, true},
		{"another requirement changes nothing", lacks, "5.10.0", "seccomp", true, false},
		{"lacking on its first kernel fails", lacks, "6.1.0", "", false, true},
		{"lacking on a newer kernel fails", lacks, "7.0.1", "", false, true},
		{"a probe without an answer fails", errors.New("no memory"), "5.10.0", "", false, true},
		{"an unreadable release fails", lacks, "unknown", "", false, true},
	} {
		skip, err := judge(feature, tt.answer, tt.release, tt.require)
		if (skip != "") != tt.skip || (err != nil) != tt.fail {
			t.Errorf("%s: got skip %q, error %v", tt.name, skip, err)
		}
	}
}

func TestRunDirIsShort(t *testing.T) {
	if dir := RunDir(t); len(dir) > 30 {
		t.Errorf("%q has %d bytes", dir, len(dir))
	}
}

// TestLeaksAreSeen makes one of each kind of leftover and wants it in the list: a check that sees
// nothing would pass every test.
func TestLeaksAreSeen(t *testing.T) {
	dir := t.TempDir()
	before := snapshot([]string{dir})
	file, err := os.Create(filepath.Join(dir, "open"))
	if err != nil {
		t.Fatal(err)
	}
	child := exec.Command("sleep", "60")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	left := strings.Join(snapshot([]string{dir}).since(before), "\n")
	for _, want := range []string{file.Name(), "process "} {
		if !strings.Contains(left, want) {
			t.Errorf("leftovers lack %q:\n%s", want, left)
		}
	}
	_ = file.Close()
	_ = child.Process.Kill()
	_ = child.Wait()
	Eventually(t, time.Second, "nothing is left", func() bool { return len(snapshot([]string{dir}).since(before)) == 0 })
}

// TestWhatLivesIsLeftAlone: a collection of garbage is not the end of the tests.
func TestWhatLivesIsLeftAlone(t *testing.T) {
	dir := RunDir(t)
	child := exec.Command("sleep", "60")
	child.Env = []string{tagVariable + "=" + tag()}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { _ = child.Wait(); close(ended) }()
	for range 3 {
		runtime.GC()
	}
	select {
	case <-ended:
		t.Error("its process was ended")
	case <-time.After(300 * time.Millisecond): // what must not happen would take about as long
	}
	if _, err := os.Stat(dir); err != nil {
		t.Error(err)
	}
	_ = child.Process.Kill()
	<-ended
}

func TestTaggedProcessIsSeen(t *testing.T) {
	child := exec.Command("sleep", "60")
	child.Env = append(os.Environ(), tagVariable+"="+tag())
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = child.Process.Kill(); _ = child.Wait() }()
	Eventually(t, time.Second, "the tag shows", func() bool { return len(Leftovers(tag())) == 1 })
}

// TestKilledTestsLeaveNothing kills a test program that has a directory, a process and a control group, and wants them gone.
func TestKilledTestsLeaveNothing(t *testing.T) {
	Root(t)
	if os.Getenv("TESTENV_CHILD") != "" {
		dir, group := RunDir(t), "/sys/fs/cgroup/memory/casemate-"+ServerID(t)
		if _, err := os.Stat("/sys/fs/cgroup/memory"); err != nil {
			group = filepath.Join("/sys/fs/cgroup", filepath.Base(group))
		}
		if err := os.Mkdir(group, 0o755); err != nil {
			t.Fatal(err)
		}
		// In a session of its own, as a guest is, and in the control group.
		child := exec.Command("/bin/sh", "-c", "echo 0 >"+group+"/cgroup.procs; echo $$ >"+dir+"/pid; exec sleep 1000")
		child.Env = []string{}
		child.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if err := child.Start(); err != nil {
			t.Fatal(err)
		}
		Eventually(t, time.Second, "it sleeps", func() bool {
			name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", child.Process.Pid))
			return err == nil && string(name) == "sleep\n"
		})
		fmt.Println("tag", tag())
		_, _ = io.Copy(io.Discard, os.Stdin)
		panic("as the time limit of a test program does")
	}
	for name, end := range map[string]func(*exec.Cmd, io.Closer) error{
		"killed":      func(cmd *exec.Cmd, _ io.Closer) error { return cmd.Process.Kill() },
		"terminated":  func(cmd *exec.Cmd, _ io.Closer) error { return cmd.Process.Signal(syscall.SIGTERM) },
		"out of time": func(_ *exec.Cmd, in io.Closer) error { return in.Close() },
	} {
		ctx, cancel := context.WithTimeout(t.Context(), busy)
		defer cancel()
		cmd := exec.CommandContext(ctx, os.Args[0], "-test.run", "^"+t.Name()+"$")
		cmd.Env = append(os.Environ(), "TESTENV_CHILD=1")
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var its string
		if _, err := fmt.Fscanf(out, "tag %s\n", &its); err != nil {
			t.Fatal(err)
		}
		if left := Leftovers(its); len(left) != 1 { // the group: what sleeps in it carries no tag
			t.Errorf("%s, before: %q", name, left)
		}
		dirs, err := filepath.Glob("/tmp/cm-" + its + "-*")
		if err != nil || len(dirs) != 1 {
			t.Fatalf("%q, %v", dirs, err)
		}
		sleeper, err := os.ReadFile(dirs[0] + "/pid")
		if err != nil {
			t.Fatal(err)
		}
		if err := end(cmd, in); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if err := cmd.Wait(); err == nil || ctx.Err() != nil {
			t.Errorf("%s: its end is %v", name, err)
		}
		Eventually(t, time.Minute, "all of it is gone", func() bool {
			dirs, err := filepath.Glob("/tmp/cm-" + its + "-*")
			args, _ := os.ReadFile("/proc/" + strings.TrimSpace(string(sleeper)) + "/cmdline") // empty also where nobody waited for it
			return err == nil && len(dirs) == 0 && len(Leftovers(its)) == 0 && len(args) == 0
		})
	}
}
