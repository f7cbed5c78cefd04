package gvisor_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/id"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/conformance"
	"casemate.dev/internal/testenv"
)

// counter counts in its memory alone, one line a step.
var counter = []string{"python3", "-u", "-c", `
import time
n = 0
while True:
    n += 1
    print(n)
    time.sleep(0.02)
`}

// box is a started and claimed instance.
type box struct {
	t     *testing.T
	inst  isolation.Instance
	guest *guestwire.Client
}

func newBox(t *testing.T, inst isolation.Instance) *box {
	t.Helper()
	t.Cleanup(func() {
		if err := inst.Destroy(context.Background()); err != nil {
			t.Errorf("destroy: %v", err)
		}
	})
	testenv.Overdue(t, func() { _ = inst.Destroy(context.Background()) })
	return &box{t, inst, guestwire.NewClient(inst.Dial)}
}

// started starts a sandbox that is somebody's.
func started(t *testing.T, b isolation.Backend, spec isolation.Spec) *box {
	t.Helper()
	inst, err := b.Start(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	x := newBox(t, inst)
	if err := x.guest.Claim(t.Context(), guestwire.Claim{Sandbox: spec.ID, Hostname: "box"}); err != nil {
		t.Fatal(err)
	}
	return x
}

func (b *box) start(processID string, argv ...string) {
	b.t.Helper()
	if _, err := b.guest.Start(b.t.Context(), guestwire.StartProcess{ID: processID, Argv: argv}, nil); err != nil {
		b.t.Fatal(err)
	}
}

// lines reads n lines of a process's output from an offset on, and returns them and where they end.
func (b *box) lines(processID string, offset int64, n int) ([]string, int64) {
	b.t.Helper()
	out, err := b.guest.Output(b.t.Context(), guestwire.OutputRequest{ID: processID, Offset: offset, Follow: true})
	if err != nil {
		b.t.Fatal(err)
	}
	defer out.Close()
	var text strings.Builder
	for {
		piece, err := out.Next()
		if err != nil {
			b.t.Fatalf("output of %s after %q: %v", processID, text.String(), err)
		}
		text.Write(piece.Data)
		if all := strings.SplitAfter(text.String(), "\n"); len(all) > n {
			got := strings.Join(all[:n], "")
			return strings.Split(strings.TrimSpace(got), "\n"), offset + int64(len(got))
		}
	}
}

// until reads a process's output until it holds text, and returns it.
func (b *box) until(processID, text string) string {
	b.t.Helper()
	out, err := b.guest.Output(b.t.Context(), guestwire.OutputRequest{ID: processID, Follow: true})
	if err != nil {
		b.t.Fatal(err)
	}
	defer out.Close()
	var got strings.Builder
	for !strings.Contains(got.String(), text) {
		piece, err := out.Next()
		if err != nil {
			b.t.Fatalf("output of %s after %q: %v", processID, got.String(), err)
		}
		got.Write(piece.Data)
	}
	return got.String()
}

func (b *box) run(argv ...string) string {
	b.t.Helper()
	_, out, err := b.guest.Run(b.t.Context(), guestwire.RunProcess{
		Start: guestwire.StartProcess{ID: id.New(id.Process), Argv: argv}, Output: guestwire.OutputRequest{Follow: true},
	}, nil)
	if err != nil {
		b.t.Fatal(err)
	}
	defer out.Close()
	var text strings.Builder
	for {
		piece, err := out.Next()
		if errors.Is(err, io.EOF) {
			return strings.TrimSpace(text.String())
		}
		if err != nil {
			b.t.Fatal(err)
		}
		text.Write(piece.Data)
	}
}

// A counter in a process goes on where it was: in the sandbox that the image was made of, and in one that is restored
// from it, several times.
func TestCheckpointAndRestore(t *testing.T) {
	h := newHost(t)
	backend := h.backend()
	spec := conformance.Spec(t, isolation.Standard)
	inst, err := backend.Start(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	first := newBox(t, inst)
	if err := first.guest.Claim(t.Context(), guestwire.Claim{Sandbox: spec.ID, Hostname: "first", Env: map[string]string{"WHO": "first"}}); err != nil {
		t.Fatal(err)
	}
	first.start("counter", counter...)
	_, at := first.lines("counter", 0, 5)
	dir := t.TempDir()
	if _, err := inst.Checkpoint(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	onlyRoots(t, dir)
	if err := inst.Thaw(t.Context()); err != nil {
		t.Fatal(err)
	}
	goesOn(first, at)
	random := map[string]string{}
	for _, name := range []string{"second", "third"} {
		s := spec
		s.ID = id.Sandbox()
		s.Root.Upper, s.Root.Work = conformance.Writable(t)
		inst, err := backend.Restore(t.Context(), s, dir)
		if err != nil {
			t.Fatal(err)
		}
		b := newBox(t, inst)
		claim := &guestwire.Claim{Sandbox: s.ID, Hostname: name, Env: map[string]string{"WHO": name}}
		if err := b.guest.Restored(t.Context(), guestwire.Restored{Claim: claim}); err != nil {
			t.Fatal(err)
		}
		goesOn(b, at)
		if got := b.run("sh", "-c", "echo $WHO $(hostname)"); got != name+" "+name {
			t.Errorf("%s is %q", name, got)
		}
		bytes := b.run("od", "-An", "-tx1", "-N16", "/dev/urandom")
		if of, twice := random[bytes]; twice || bytes == "" {
			t.Errorf("%s gets %q of the kernel, and so did %q", name, bytes, of)
		}
		random[bytes] = name
	}
}

// When told, this forks until it may not, or takes memory until it may not. What it starts with leaves its session.
var greedy = []string{"python3", "-u", "-c", `
import os, signal, subprocess
def fork(*_):
    n = 0
    try:
        while os.fork():
            n += 1
        while True:
            signal.pause()
    except OSError:
        print("forked", n, "done")
def take(*_):
    all = bytearray(1 << 30)
    for i in range(0, len(all), 4096):
        all[i] = 1
    print("took it")
signal.signal(signal.SIGUSR1, fork)
signal.signal(signal.SIGUSR2, take)
subprocess.Popen(["sleep", "4711"], start_new_session=True)
print("up")
while True:
    signal.pause()
`}

// What an image holds stays in its groups: it counts, it can't leave, the limits of where it was restored hold it, and
// a kill takes the whole tree of it and nothing else.
func TestRestoredGroups(t *testing.T) {
	h := newHost(t)
	backend := h.backend()
	spec := conformance.Spec(t, isolation.Standard)
	spec.Limits.MemoryBytes = 512 << 20
	inst, err := backend.Start(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	b := newBox(t, inst)
	if err := b.guest.Claim(t.Context(), guestwire.Claim{Sandbox: spec.ID, Hostname: "first", User: "root"}); err != nil {
		t.Fatal(err)
	}
	b.start("counter", counter...)
	for _, p := range []string{"forks", "takes", "stays"} {
		b.start(p, greedy...)
		b.until(p, "up\n")
	}
	_, at := b.lines("counter", 0, 5)
	alive := b.alive("")
	dir := t.TempDir()
	if _, err := inst.Checkpoint(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	if err := inst.Destroy(t.Context()); err != nil {
		t.Fatal(err)
	}
	s := spec
	s.ID = id.Sandbox()
	s.Root.Upper, s.Root.Work = conformance.Writable(t)
	s.Limits.Pids, s.Limits.MemoryBytes = 40, 256<<20 // less than the first one had
	if inst, err = backend.Restore(t.Context(), s, dir); err != nil {
		t.Fatal(err)
	}
	b = newBox(t, inst)
	claim := &guestwire.Claim{Sandbox: s.ID, Hostname: "second", User: "root"}
	if err := b.guest.Restored(t.Context(), guestwire.Restored{Claim: claim}); err != nil {
		t.Fatal(err)
	}
	if n := b.alive(""); n != alive {
		t.Errorf("%d processes live, and in the image there are %d", n, alive)
	}
	checkLeaving(b, false, "after a restore")
	b.signal("forks", unix.SIGUSR1, false)
	var n int
	if _, err := fmt.Sscanf(b.until("forks", "done\n"), "up\nforked %d done", &n); err != nil || n >= s.Limits.Pids {
		t.Errorf("%d forks under a limit of %d processes, %v", n, s.Limits.Pids, err)
	}
	b.signal("forks", unix.SIGKILL, true)
	if n := b.alive("forks"); n != 0 {
		t.Errorf("%d processes outlive a kill of their tree", n)
	}
	b.signal("takes", unix.SIGUSR2, false)
	if info, err := b.guest.Wait(t.Context(), "takes"); err != nil || info.Signal != int(unix.SIGKILL) {
		t.Errorf("what took too much memory ended as %+v, %v", info, err)
	}
	if n := b.alive("stays"); n != 2 {
		t.Errorf("%d of two processes live that did nothing", n)
	}
	goesOn(b, at)
}

// alive counts what lives of a process; of all with "".
func (b *box) alive(processID string) int {
	b.t.Helper()
	if processID == "" {
		u, err := b.inst.Usage(b.t.Context())
		if err != nil {
			b.t.Fatal(err)
		}
		return u.Pids
	}
	tree, err := b.guest.Tree(b.t.Context(), processID)
	if err != nil && !errs.Is(err, errs.NotFound) {
		b.t.Fatal(err)
	}
	return tree.Alive
}

func (b *box) signal(processID string, s unix.Signal, tree bool) {
	b.t.Helper()
	if err := b.guest.Signal(b.t.Context(), guestwire.SignalRequest{ID: processID, Signal: int(s), Tree: tree}); err != nil {
		b.t.Fatal(err)
	}
}

// onlyRoots fails where anybody but root may open a file of an image.
func onlyRoots(t *testing.T, dir string) {
	t.Helper()
	files, err := os.ReadDir(dir)
	if err != nil || len(files) != 4 {
		t.Fatalf("the image is %v, %v", files, err)
	}
	for _, f := range files {
		info, err := f.Info()
		if err != nil {
			t.Fatal(err)
		}
		if st, ok := info.Sys().(*syscall.Stat_t); !ok || info.Mode() != 0o600 || st.Uid != 0 || st.Gid != 0 {
			t.Errorf("%s is %v of %+v", f.Name(), info.Mode(), info.Sys())
		}
	}
}

// goesOn reads from a counter that printed up to at before its image was made.
func goesOn(b *box, at int64) {
	b.t.Helper()
	_, end := b.lines("counter", at, 5)
	next, _ := b.lines("counter", end, 5)
	var first int
	if _, err := fmt.Sscan(next[0], &first); err != nil {
		b.t.Fatal(err)
	}
	for i, line := range next {
		if want := fmt.Sprint(first + i); line != want {
			b.t.Errorf("%s: the counter says %s where %s is due", b.inst.ID(), line, want)
		}
	}
}

// An image that another runsc made is refused, with both versions in the text, before anything is started.
func TestImageOfAnotherRunsc(t *testing.T) {
	h := newHost(t)
	dir := t.TempDir()
	data, err := json.Marshal(map[string]any{"v": 1, "runsc": "release-20200101.0"})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "about.json"), data, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = h.backend().Restore(t.Context(), conformance.Spec(t, isolation.Locked), dir)
	text, hint := errs.PublicText(err)
	if !errs.Is(err, errs.FailedPrecondition) || !strings.Contains(text, "release-20200101.0") || !strings.Contains(text, "v0.0.0-") || hint == "" {
		t.Errorf("restore gives %v, %q, %q", err, text, hint)
	}
	if left := h.leftovers(); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// imageOf returns the directory of a memory image of a sandbox that is gone.
func imageOf(t *testing.T, backend isolation.Backend, spec isolation.Spec) string {
	t.Helper()
	inst, err := backend.Start(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	_, err = inst.Checkpoint(t.Context(), dir)
	if derr := inst.Destroy(context.Background()); err != nil || derr != nil {
		t.Fatal(err, derr)
	}
	return dir
}

// ATTACK: an image is to go on in a sandbox of another shape: with less of a wall, or with a network.
// VERIFIES: it is refused, and the text says what differs. The twin is TestCheckpointAndRestore.
func TestImageInAnotherSandbox(t *testing.T) {
	h := newHost(t)
	backend := h.backend()
	spec := conformance.Spec(t, isolation.Locked)
	dir := imageOf(t, backend, spec)
	for word, change := range map[string]func(*isolation.Spec){
		"profile":    func(s *isolation.Spec) { s.Profile = isolation.Standard },
		"network":    func(s *isolation.Spec) { s.Network = &isolation.Network{Device: "eth0"} },
		"open files": func(s *isolation.Spec) { s.Limits.OpenFiles++ },
	} {
		s := spec
		s.ID = id.Sandbox()
		change(&s)
		_, err := backend.Restore(t.Context(), s, dir)
		if text, hint := errs.PublicText(err); !errs.Is(err, errs.FailedPrecondition) || !strings.Contains(text, word) || hint == "" {
			t.Errorf("another %s: %v, %q, %q", word, err, text, hint)
		}
	}
	if left := h.leftovers(); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// VULNERABILITY: a restore mounts where links lead that were planted since the image was made (CVE-2026-119101).
// ATTACK: a memory image is restored on files in which a mount target is a symbolic link by then.
// VERIFIES: it is refused, and nothing was written where the link leads. TWIN: without the link it goes on.
func TestLinksPlantedUnderAnImage(t *testing.T) {
	h := newHost(t)
	backend := h.backend()
	spec := conformance.Spec(t, isolation.Standard)
	dir := imageOf(t, backend, spec)
	lower := spec.Root.Lowers[0]
	victim := filepath.Join(lower, "home", "victim")
	if err := os.MkdirAll(victim, 0o777); err != nil {
		t.Fatal(err)
	}
	for _, target := range []string{"dev", "proc", "sys", "tmp"} {
		path := filepath.Join(lower, target)
		if err := errors.Join(os.Rename(path, path+".kept"), os.Symlink("/home/victim", path)); err != nil {
			t.Fatal(err)
		}
		s := spec
		s.ID = id.Sandbox()
		s.Root.Upper, s.Root.Work = conformance.Writable(t)
		if i, err := backend.Restore(t.Context(), s, dir); err == nil {
			t.Errorf("it was restored with a link for /%s: %v", target, i.Destroy(context.Background()))
		} else if !strings.Contains(err.Error(), "symbolic link") {
			t.Errorf("/%s: refused for another reason: %v", target, err)
		}
		if entries, err := os.ReadDir(victim); err != nil || len(entries) > 0 {
			t.Errorf("/%s: something was written behind the link: %v, %v", target, entries, err)
		}
		if err := errors.Join(os.Remove(path), os.Rename(path+".kept", path)); err != nil {
			t.Fatal(err)
		}
	}
	if left := h.leftovers(); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	spec.ID = id.Sandbox()
	spec.Root.Upper, spec.Root.Work = conformance.Writable(t)
	inst, err := backend.Restore(t.Context(), spec, dir)
	if err != nil {
		t.Fatalf("without a link it is not restored either: %v", err)
	}
	if err := inst.Destroy(context.Background()); err != nil {
		t.Error(err)
	}
}

// An image that is made in memory counts as the server's: the sandbox's own limit has no room for its memory twice.
func TestImageInMemoryIsNotTheSandboxs(t *testing.T) {
	h := newHost(t)
	spec := conformance.Spec(t, isolation.Locked)
	b := started(t, h.backend(), spec)
	const held = 48 << 20
	b.start("holder", "python3", "-u", "-c", fmt.Sprintf("import os, time\nb = os.urandom(%d)\nprint('here\\n')\ntime.sleep(1000)", held))
	b.lines("holder", 0, 1)
	before, err := b.inst.Usage(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("/dev/shm", "casemate-image-*") // a file system in memory
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if _, err := b.inst.Checkpoint(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	if err := b.inst.Thaw(t.Context()); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(filepath.Join(dir, "pages.img"))
	if err != nil || info.Size() < held {
		t.Fatalf("the image holds %v, %v", info, err)
	}
	after, err := b.inst.Usage(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if more := after.MemoryBytes - before.MemoryBytes; more > held/2 {
		t.Errorf("the sandbox has %d MB more than before it was saved", more>>20)
	}
}
