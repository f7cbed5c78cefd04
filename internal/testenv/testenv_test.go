package testenv

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
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

func TestTaggedProcessIsSeen(t *testing.T) {
	child := exec.Command("sleep", "60")
	child.Env = append(os.Environ(), tagVariable+"="+tag())
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = child.Process.Kill(); _ = child.Wait() }()
	Eventually(t, time.Second, "the tag shows", func() bool { return len(Leftovers(tag())) == 1 })
}
