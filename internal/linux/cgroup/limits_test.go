package cgroup

import (
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/testenv"
)

// run runs a shell command in a scope of the payload and returns its output and error.
func run(t *testing.T, g *Group, name, script string) (string, error) {
	t.Helper()
	s, err := g.NewScope(name)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	cmd := exec.Command("/bin/sh", "-c", script)
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	inScope(t, g, s, true, cmd)
	err = cmd.Wait()
	return out.String(), err
}

const (
	eat100M = `/usr/bin/python3 -c 'x=bytearray(100<<20); print("ate", len(x))'`
	fork50  = `for i in $(seq 50); do sleep 1 & done; wait; echo forked`
)

func TestMemoryLimit(t *testing.T) {
	h := open(t, Open)
	small := settled(t, h, Limits{MemoryBytes: 40 << 20})
	out, err := run(t, small, "prc_a", eat100M)
	if err == nil {
		t.Errorf("ate 100 MB of 40: %q", out)
	}
	u, err := small.Usage()
	if err != nil || u.OOMKills < 1 {
		t.Errorf("usage %+v %v, want an OOM kill", u, err)
	}
	if u.MemoryPeak > 40<<20 {
		t.Errorf("peak %d is above the limit", u.MemoryPeak)
	}
	// Twin: the same with room for it.
	large := settled(t, h, Limits{MemoryBytes: 400 << 20})
	if out, err := run(t, large, "prc_a", eat100M); err != nil || !strings.Contains(out, "ate") {
		t.Errorf("twin: %q %v", out, err)
	}
	if u, err := large.Usage(); err != nil || u.OOMKills != 0 || u.MemoryPeak < 100<<20 || u.CPU <= 0 {
		t.Errorf("twin's usage %+v %v", u, err)
	}
	// The limit moves both ways.
	for _, l := range []int64{300 << 20, 500 << 20, 0, 200 << 20} {
		if err := large.Update(Limits{MemoryBytes: l, CPUs: 1, Pids: 10}); err != nil {
			t.Errorf("update to %d: %v", l, err)
		}
	}
}

func TestMemoryLimitBelowUsageIsRefused(t *testing.T) {
	h := open(t, Open)
	g := settled(t, h, Limits{MemoryBytes: 400 << 20})
	s, err := g.NewScope("prc_a")
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	cmd := exec.Command("/bin/sh", "-c", `exec /usr/bin/python3 -c 'import time; x=bytearray(b"x"*(100<<20)); print("up", flush=True); time.sleep(60)'`)
	inScope(t, g, s, true, cmd)
	testenv.Eventually(t, limit, "memory in use", func() bool { u, _ := g.Usage(); return u.MemoryBytes > 100<<20 })
	if err := g.Update(Limits{MemoryBytes: 20 << 20}); !errs.Is(err, errs.FailedPrecondition) {
		t.Errorf("update below the usage: %v, want failed_precondition", err)
	}
	if err := s.Kill(ctx(t)); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
}

func TestPidsLimit(t *testing.T) {
	h := open(t, Open)
	small := settled(t, h, Limits{Pids: 20})
	if out, _ := run(t, small, "prc_a", fork50); strings.Contains(out, "forked") {
		t.Errorf("50 processes fit into 20: %q", out)
	}
	large := settled(t, h, Limits{Pids: 100})
	if out, err := run(t, large, "prc_a", fork50); err != nil || !strings.Contains(out, "forked") {
		t.Errorf("twin: %q %v", out, err)
	}
}

// A fork bomb is killed as a whole while it forks.
func TestForkBombIsKilled(t *testing.T) {
	h := open(t, Open)
	g := settled(t, h, Limits{MemoryBytes: 256 << 20, Pids: 200, CPUs: 1})
	s, err := g.NewScope("prc_bomb")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/bin/bash", "-c", `b() { b | b & }; b`)
	inScope(t, g, s, true, cmd)
	testenv.Eventually(t, limit, "the bomb is at its limit", func() bool { u, _ := g.Usage(); return u.Pids >= 190 })
	start := time.Now()
	if err := s.Kill(ctx(t)); err != nil {
		t.Fatal(err)
	}
	t.Logf("killed in %v", time.Since(start))
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
}

func cpu(t *testing.T, g *Group) time.Duration {
	t.Helper()
	u, err := g.Usage()
	if err != nil {
		t.Fatal(err)
	}
	return u.CPU
}

func TestCPULimit(t *testing.T) {
	h := open(t, Open)
	g := settled(t, h, Limits{CPUs: 0.2})
	s, err := g.NewScope("prc_a")
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	cmd := exec.Command("/bin/sh", "-c", "while :; do :; done")
	inScope(t, g, s, true, cmd)
	before, start := cpu(t, g), time.Now()
	var used, took time.Duration
	testenv.Eventually(t, limit, "a second has passed, and the loop had its share of it", func() bool {
		used, took = cpu(t, g)-before, time.Since(start)
		return took >= time.Second && used >= 20*time.Millisecond
	})
	if share := float64(used) / float64(took); share > 0.35 {
		t.Errorf("a busy loop at 0.2 CPUs has a share of %.2f", share)
	}
	if err := s.Kill(ctx(t)); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
}

// ATTACK: a device node that lies in the sandbox. The twin opens the same node outside of the groups.
func TestDevicesOutsideTheListAreRefused(t *testing.T) {
	h := open(t, Open)
	if h.Version() != 1 {
		return // v2 has no device controller; nodev and no mknod hold there
	}
	g := settled(t, h, Limits{})
	node := t.TempDir() + "/mem"
	if out, err := exec.Command("/bin/mknod", node, "c", "1", "1").CombinedOutput(); err != nil {
		t.Fatalf("%s %v", out, err)
	}
	script := `head -c1 ` + node + ` >/dev/null 2>&1 && echo READ; head -c1 /dev/zero | wc -c; mknod ` + node + `2 c 1 3 2>/dev/null && echo MADE`
	out, _ := run(t, g, "prc_a", script)
	if strings.Contains(out, "READ") || strings.Contains(out, "MADE") || !strings.Contains(out, "1") {
		t.Errorf("inside: %q", out)
	}
	twin, _ := exec.Command("/bin/sh", "-c", script).CombinedOutput()
	if !strings.Contains(string(twin), "MADE") {
		t.Errorf("twin: %q", twin)
	}
}

// ATTACK: one device is let through; another node in the sandbox is opened, and a new one made. Twin: before, that device is
// refused, and outside of the groups both can be opened.
func TestOneMoreDevice(t *testing.T) {
	h := open(t, Open)
	if h.Version() != 1 {
		return // as above
	}
	g := settled(t, h, Limits{})
	dir := t.TempDir()
	for name, number := range map[string][2]string{"tun": {"10", "200"}, "kmsg": {"1", "11"}} {
		if out, err := exec.Command("/bin/mknod", filepath.Join(dir, name), "c", number[0], number[1]).CombinedOutput(); err != nil {
			t.Fatalf("%s %v", out, err)
		}
	}
	script := `cd ` + dir + `; for d in tun kmsg; do (: <>$d) 2>/dev/null && echo opened $d; done; mknod more c 10 200 2>/dev/null && rm more && echo made`
	before, _ := run(t, g, "prc_a", script)
	if err := h.AllowDevice(10, 200); err != nil {
		t.Fatal(err)
	}
	after, _ := run(t, g, "prc_b", script)
	if before != "" || after != "opened tun\n" {
		t.Errorf("before it is let through: %q, after: %q", before, after)
	}
	twin, err := exec.Command("/bin/sh", "-c", script).CombinedOutput()
	if string(twin) != "opened tun\nopened kmsg\nmade\n" {
		t.Errorf("twin: %q, %v", twin, err)
	}
}

// The guest goes on while the payload is at all its limits.
func TestGuestHasAReserve(t *testing.T) {
	h := open(t, Open)
	g := settled(t, h, Limits{MemoryBytes: 40 << 20, Pids: 20, CPUs: 0.5})
	s, err := g.NewScope("prc_a")
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	payload := exec.Command("/bin/sh", "-c", `for i in $(seq 50); do sleep 100 & done; while :; do :; done`)
	inScope(t, g, s, true, payload)
	testenv.Eventually(t, limit, "payload at its pids limit", func() bool { u, _ := g.Usage(); return u.Pids >= 20 })
	guest := exec.Command("/bin/sh", "-c", "for i in $(seq 30); do sleep 0.1 & done; wait; echo alive")
	var out strings.Builder
	guest.Stdout = &out
	err = g.InGuest(func(dir int) error {
		if dir >= 0 {
			// The guest is there already, in a group of its own.
			fd, err := openDir(dir, "guest")
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			guest.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: fd}
		}
		return guest.Start()
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := guest.Wait(); err != nil || out.String() != "alive\n" {
		t.Errorf("guest: %q %v", out.String(), err)
	}
	if err := g.Kill(ctx(t)); err != nil {
		t.Fatal(err)
	}
	_ = payload.Wait()
}
