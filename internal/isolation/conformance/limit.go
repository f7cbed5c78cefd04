package conformance

import (
	"strings"
	"testing"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
)

func limitCases() []testCase {
	return []testCase{
		{name: "usage", run: testUsage},
		{name: "cpu time", needs: []Feature{CPUTime}, run: testCPUTime},
		{name: "process limit", run: testProcessLimit},
		{name: "memory limit", run: testMemoryLimit},
		{name: "disk limit", run: testDiskLimit},
		{name: "open file limit", needs: []Feature{OpenFiles}, run: testOpenFileLimit},
		{name: "update limits", run: testUpdate},
	}
}

func (b *box) usage() isolation.Usage {
	b.t.Helper()
	u, err := b.inst.Usage(limited(b.t))
	if err != nil {
		b.t.Fatalf("usage: %v", err)
	}
	return u
}

func testUsage(t *testing.T, h Harness) {
	b := startBox(t, h)
	idle := b.usage()
	if idle.MemoryBytes <= 0 || idle.Pids <= 0 {
		t.Errorf("an idle instance uses %+v", idle)
	}
	for range 5 {
		b.startScript("sleep 1000")
	}
	waitFor(t, "usage counts the processes", func() bool { return b.usage().Pids >= idle.Pids+5 })
	b.write("f", strings.Repeat("x", 300<<10))
	if err := b.client.Sync(limited(t)); err != nil {
		t.Errorf("sync: %v", err)
	}
	waitFor(t, "usage counts the file", func() bool { return b.usage().DiskBytes >= idle.DiskBytes+250<<10 })
}

func testCPUTime(t *testing.T, h Harness) {
	b := startBox(t, h)
	before := b.usage().CPU
	b.prints("i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; echo done", "done\n")
	if after := b.usage().CPU; after <= before {
		t.Errorf("a busy loop cost nothing: %v, then %v", before, after)
	}
}

// testProcessLimit starts more than it may: it fails inside, and the sandbox stays usable.
func testProcessLimit(t *testing.T, h Harness) {
	b := startBox(t, h, func(s *isolation.Spec) { s.Limits.Pids = 32 })
	r := b.startScript("for i in $(seq 100); do sleep 1000 & done; echo tried; sleep 1000")
	waitFor(t, "the limit is reached", func() bool {
		return b.usage().Pids >= 20 && strings.Contains(r.output(guestwire.OutputRequest{}).stderr.String(), "ork")
	})
	if n := b.usage().Pids; n > 40 {
		t.Errorf("%d processes live under a limit of 32", n)
	}
	if err := b.client.Signal(limited(t), guestwire.SignalRequest{ID: r.id, Signal: 9, Tree: true}); err != nil {
		t.Errorf("kill the tree at the limit: %v", err)
	}
	r.wantEmpty()
	b.prints("echo usable", "usable\n")
}

func testMemoryLimit(t *testing.T, h Harness) {
	const limit = 128 << 20
	b := startBox(t, h, func(s *isolation.Spec) { s.Limits.MemoryBytes = limit })
	tr := b.run(guestwire.StartProcess{Argv: h.Allocate(16 << 20)})
	ended(t, "an allocation within the limit", tr.info, guestwire.EndExited, 0, 0)
	tr = b.run(guestwire.StartProcess{Argv: h.Allocate(4 * limit)})
	if !outOfMemory(tr.info) {
		t.Errorf("an allocation over the limit: ended as %s (code %d, signal %d): %s", tr.info.End, tr.info.Code, tr.info.Signal, tr.all.String())
	}
	waitFor(t, "usage counts the kill", func() bool { return b.usage().OOMKills >= 1 })
	b.prints("echo usable", "usable\n")
	if a := b.inst.Applied(); a.Limits.MemoryBytes != limit {
		t.Errorf("applied says %d bytes of memory, want %d", a.Limits.MemoryBytes, limit)
	}
}

// outOfMemory reports whether a process ended as one that was killed for want of memory does. A guest
// that can't see the kernel's count of such kills reports the signal; with Usage's count the server
// makes the end of it.
func outOfMemory(p guestwire.ProcessInfo) bool {
	return p.End == guestwire.EndOOMKilled || p.End == guestwire.EndSignaled && p.Signal == 9
}

// testDiskLimit fills the disk; processes, file calls and removal still work.
func testDiskLimit(t *testing.T, h Harness) {
	b := startBox(t, h, func(s *isolation.Spec) { s.Limits.DiskBytes = 64 << 20 })
	chunk := strings.Repeat("0123456789abcdef", 1<<16) // 1 MiB
	full := false
	for i := range 200 {
		name := "fill" + string(rune('a'+i%26)) + string(rune('a'+i/26))
		_, err := b.client.Write(limited(t), guestwire.WriteRequest{PathRequest: at(name), Offset: -1, Size: int64(len(chunk))}, strings.NewReader(chunk))
		if full = err != nil; full {
			t.Logf("full after %d MiB: %v", i, err)
			break
		}
	}
	if !full {
		t.Fatal("200 MiB went onto a disk of 64 MiB")
	}
	b.prints("echo usable", "usable\n")
	if got := b.runScript("ls | wc -c"); got.info.End != guestwire.EndExited {
		t.Errorf("listing a full disk: %s", got.info.End)
	}
	for _, name := range strings.Fields(b.list(".", 1)) {
		name = strings.TrimPrefix(name, "/home/user/")
		if err := b.client.Remove(limited(t), guestwire.RemoveRequest{PathRequest: at(name)}); err != nil {
			t.Fatalf("remove %s from a full disk: %v", name, err)
		}
	}
	waitFor(t, "there is room again", func() bool {
		_, err := b.client.Write(limited(t), guestwire.WriteRequest{PathRequest: at("again"), Offset: -1, Size: 5}, strings.NewReader("again"))
		return err == nil
	})
}

func testOpenFileLimit(t *testing.T, h Harness) {
	b := startBox(t, h, func(s *isolation.Spec) { s.Limits.OpenFiles = 128 })
	b.prints("ulimit -n; ulimit -Hn", "128\n128\n")
}

func testUpdate(t *testing.T, h Harness) {
	b := startBox(t, h)
	l := b.inst.Applied().Limits
	l.MemoryBytes = 96 << 20
	l.Pids = 48
	if err := b.inst.Update(limited(t), l); err != nil {
		t.Fatal(err)
	}
	if a := b.inst.Applied().Limits; a.MemoryBytes != l.MemoryBytes || a.Pids != l.Pids {
		t.Errorf("applied says %+v", a)
	}
	if tr := b.run(guestwire.StartProcess{Argv: h.Allocate(400 << 20)}); !outOfMemory(tr.info) {
		t.Errorf("over the new limit: ended as %s", tr.info.End)
	}
}
