package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/fake"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/testenv"
)

// newImageWorld is a world whose isolation has memory images.
func newImageWorld(t testing.TB) *world {
	w := newWorld(t)
	w.roots.KeepImages(t.TempDir())
	w.capabilities = []isolation.Capability{
		{Name: "script", OK: true, Required: true},
		{Name: isolation.MemoryImages, OK: true, Detail: "what the fake has of them"},
	}
	return w
}

// counted returns how far a counter has come, and fails where it left a number out or said one twice.
func (s *server) counted(id, process string) int {
	s.w.t.Helper()
	var g gather
	if _, err := s.Output(context.Background(), admin, id, process, OutputOptions{}, &g); err != nil {
		s.w.t.Fatal(err)
	}
	lines := strings.Fields(g.data.String())
	for i, line := range lines {
		if line != fmt.Sprint(i+1) {
			s.w.t.Fatalf("line %d of the counter is %q", i+1, line)
		}
	}
	return len(lines)
}

// counts waits until a counter has gone on from where it was.
func (s *server) counts(id, process string) int {
	s.w.t.Helper()
	was := s.counted(id, process)
	testenv.Eventually(s.w.t, time.Minute, "the counter goes on", func() bool { return s.counted(id, process) > was })
	return was
}

// counting creates a sandbox with a counter that has counted a little.
func (s *server) counting() (id, process string) {
	s.w.t.Helper()
	sb := s.create(admin, Spec{Name: "web", Env: map[string]string{"A": "1"}})
	p := s.start(sb.ID, ProcessSpec{Argv: []string{"count"}})
	s.counts(sb.ID, p.ID)
	return sb.ID, p.ID
}

func (s *server) hibernates(id string) {
	s.w.t.Helper()
	sb, err := s.PauseToDisk(context.Background(), admin, id)
	if err != nil {
		s.w.t.Fatal(err)
	}
	if sb.State != Paused || !sb.OnDisk || sb.FilesOnly {
		s.w.t.Fatalf("paused on disk it is %+v", sb)
	}
}

func TestPauseToDisk(t *testing.T) {
	w := newImageWorld(t)
	s := w.serve()
	id, p := s.counting()
	s.hibernates(id)
	if got := w.host.Instances(); len(got) != 0 {
		t.Errorf("instances are left: %v", got)
	}
	if _, err := s.Execute(t.Context(), admin, id, ProcessSpec{Argv: []string{"true"}}, RunOptions{}); !errs.Is(err, errs.FailedPrecondition) {
		t.Errorf("execute: %v", err)
	}
	s = s.crash()
	if got, err := s.Get(t.Context(), admin, id); err != nil || got.State != Paused || !got.OnDisk {
		t.Fatalf("after the crash it is %+v, %v", got, err)
	}
	s.wakes(id)
	s.counts(id, p)
	if out := string(s.exec(id, "env").Stdout); !strings.Contains(out, "A=1\n") {
		t.Errorf("environment %q", out)
	}
	if n := w.roots.Images(); n != 0 {
		t.Errorf("%d memory images are left", n)
	}
	if _, err := s.Delete(t.Context(), admin, id); err != nil {
		t.Fatal(err)
	}
	s.history(id)
}

// No room for the image is a clear error, and the sandbox goes on as it was.
func TestPauseToDiskWithoutRoom(t *testing.T) {
	w := newImageWorld(t)
	s := w.serve()
	id, p := s.counting()
	full := errs.New(errs.ResourceExhausted, "the memory image does not fit into the sandbox's disk limit")
	s.backend.SetFaults(fake.Faults{Runtime: ownKernel, FailCheckpoint: full})
	_, err := s.PauseToDisk(t.Context(), admin, id)
	wantKind(t, "pause", err, errs.ResourceExhausted)
	if text, _ := errs.PublicText(err); !strings.Contains(text, "disk limit") {
		t.Errorf("the error says %q", text)
	}
	if st := s.state(id); st != Running || w.host.Frozen(id) || w.roots.Images() != 0 {
		t.Errorf("it is %s, frozen %v, with %d images", st, w.host.Frozen(id), w.roots.Images())
	}
	s.counts(id, p)
	s.backend.SetFaults(fake.Faults{Runtime: ownKernel})
	s.hibernates(id)
	s.wakes(id)
	s.counts(id, p)
}

// unkept makes images that can't be kept.
type unkept struct {
	Roots
	err error
}

func (r unkept) KeepMemory(string) error { return r.err }

// What runs on after a pause to disk that failed writes to the disk that the image has filled, so the image goes first.
func TestPauseToDiskFreesTheDiskFirst(t *testing.T) {
	w := newImageWorld(t)
	k := &mortal{w: w}
	s, id, p := k.counting(func(r Roots) Roots { return unkept{r, errs.New(errs.ResourceExhausted, "the disk is full")} })
	_, err := s.PauseToDisk(t.Context(), admin, id)
	wantKind(t, "pause", err, errs.ResourceExhausted)
	k.mu.Lock()
	steps := slices.Clone(k.steps)
	k.mu.Unlock()
	saved, dropped, thawed := slices.Index(steps, "after save"), slices.Index(steps, "after drop image"), slices.Index(steps, "before thaw")
	if saved < 0 || dropped < saved || thawed < dropped {
		t.Errorf("the image does not go between the save and the thaw: %q", steps)
	}
	if w.host.Frozen(id) || w.roots.Images() != 0 {
		t.Errorf("frozen %v, with %d images", w.host.Frozen(id), w.roots.Images())
	}
	s.counts(id, p)
}

// A fork of running processes: the image goes over the host's memory where there is room, and over the disk where not.
func TestLiveFork(t *testing.T) {
	for name, staged := range map[string]bool{"staged": true, "on disk": false} {
		t.Run(name, func(t *testing.T) {
			w := newImageWorld(t)
			w.roots.Stage(staged, nil)
			s := w.serve()
			id, p := s.counting()
			c, forks, err := s.Fork(t.Context(), admin, id, ForkOptions{Count: 3, Name: "kid", Live: true})
			if err != nil || !c.Memory {
				t.Fatalf("%+v, %v", c, err)
			}
			for _, f := range forks {
				if f.Err != nil {
					t.Fatal(f.Err)
				}
				s.counts(f.Sandbox.ID, p)
			}
			s.counts(id, p)
			if w.host.Frozen(id) {
				t.Error("the parent is frozen")
			}
			if n := w.roots.Images(); n != 1 {
				t.Errorf("%d memory images, want the commit's", n)
			}
		})
	}
}

// An image that does not come to the disk fails the commit, not the sandbox.
func TestLiveForkWithoutRoom(t *testing.T) {
	w := newImageWorld(t)
	w.roots.Stage(true, errs.New(errs.ResourceExhausted, "the memory image does not fit into the sandbox's disk limit"))
	s := w.serve()
	id, p := s.counting()
	_, _, err := s.Fork(t.Context(), admin, id, ForkOptions{Live: true})
	wantKind(t, "fork", err, errs.ResourceExhausted)
	if layers := w.roots.Layers.Layers(); len(layers) != 0 || w.host.Frozen(id) || s.state(id) != Running {
		t.Errorf("layers %v, frozen %v, state %s", layers, w.host.Frozen(id), s.state(id))
	}
	s.counts(id, p)
}

// mortal is a server that is killed at one of its steps: from then on nothing that it does has an effect any more.
type mortal struct {
	w  *world
	at string

	// mu guards the fields below.
	mu    sync.Mutex
	steps []string // that it came to
	dir   string   // a copy of its data at that moment, once it is dead
}

var errKilled = errors.New("the server was killed")

// step does what do does, unless the server dies right before it, or right after.
func (k *mortal) step(name string, do func() error) error {
	if err := k.live("before " + name); err != nil {
		return err
	}
	if err := do(); err != nil {
		return err
	}
	return k.live("after " + name)
}

func (k *mortal) live(step string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.dir != "" {
		return errKilled
	}
	k.steps = append(k.steps, step)
	if step != k.at {
		return nil
	}
	dir, err := os.MkdirTemp(k.w.t.TempDir(), "")
	if err != nil {
		return err
	}
	for _, name := range []string{"spool", "casemate.db", "casemate.db-wal"} { // see crash
		if err := copyFile(filepath.Join(dir, name), filepath.Join(k.w.dir, name)); err != nil {
			return err
		}
	}
	k.dir = dir
	return errKilled
}

func (k *mortal) dead() (dir string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.dir
}

// counting is a server whose steps go through k, with roots as over makes them and a counting sandbox, from whose first
// number on steps are told.
func (k *mortal) counting(over func(Roots) Roots) (s *server, id, process string) {
	k.w.shape = func(c *Config) {
		c.Roots = mortalRoots{over(c.Roots), k}
		c.Backends = map[string]isolation.Backend{"fake": mortalBackend{c.Backends["fake"], k}}
	}
	s = k.w.serve()
	id, process = s.counting()
	k.mu.Lock()
	defer k.mu.Unlock()
	k.steps = nil
	return s, id, process
}

type mortalRoots struct {
	Roots
	*mortal
}

func (r mortalRoots) Flush(id string, all bool) error {
	return r.step(fmt.Sprintf("flush %v", all), func() error { return r.Roots.Flush(id, all) })
}

func (r mortalRoots) PutEnv(id string, env map[string]string) error {
	return r.step("environment", func() error { return r.Roots.PutEnv(id, env) })
}

func (r mortalRoots) NewMemory(id string) (dir string, err error) {
	err = r.step("new image", func() error { dir, err = r.Roots.NewMemory(id); return err })
	return dir, err
}

func (r mortalRoots) KeepMemory(id string) error {
	return r.step("keep image", func() error { return r.Roots.KeepMemory(id) })
}

func (r mortalRoots) DropMemory(id string) error {
	return r.step("drop image", func() error { return r.Roots.DropMemory(id) })
}

func (r mortalRoots) Rest(id string) error {
	return r.step("rest", func() error { return r.Roots.Rest(id) })
}

func (r mortalRoots) Rouse(id string) error {
	return r.step("rouse", func() error { return r.Roots.Rouse(id) })
}

type mortalBackend struct {
	isolation.Backend
	*mortal
}

func (b mortalBackend) Start(ctx context.Context, s isolation.Spec) (inst isolation.Instance, err error) {
	err = b.step("start", func() error { inst, err = b.Backend.Start(ctx, s); return err })
	return mortalInstance{inst, b.mortal}, err
}

func (b mortalBackend) Restore(ctx context.Context, s isolation.Spec, dir string) (inst isolation.Instance, err error) {
	err = b.step("restore", func() error { inst, err = b.Backend.Restore(ctx, s, dir); return err })
	return mortalInstance{inst, b.mortal}, err
}

type mortalInstance struct {
	isolation.Instance
	*mortal
}

func (i mortalInstance) Checkpoint(ctx context.Context, dir string) (stood time.Duration, err error) {
	err = i.step("save", func() error { stood, err = i.Instance.Checkpoint(ctx, dir); return err })
	return stood, err
}

func (i mortalInstance) Destroy(ctx context.Context) error {
	return i.step("destroy", func() error { return i.Instance.Destroy(ctx) })
}

func (i mortalInstance) Freeze(ctx context.Context) error {
	return i.step("freeze", func() error { return i.Instance.Freeze(ctx) })
}

func (i mortalInstance) Thaw(ctx context.Context) error {
	return i.step("thaw", func() error { return i.Instance.Thaw(ctx) })
}

// killedAt pauses a counting sandbox to disk and resumes it, on a server that is killed at a step, and sees that another
// server finds it whole. It returns the steps that the first one came to.
func killedAt(t *testing.T, step string) []string {
	w := newImageWorld(t)
	k := &mortal{w: w, at: step}
	s, id, p := k.counting(func(r Roots) Roots { return r })
	done := make(chan error, 1)
	go func() {
		_, err := s.PauseToDisk(context.Background(), admin, id)
		if err == nil {
			_, err = s.Resume(context.Background(), admin, id)
		}
		done <- err
	}()
	over := false
	testenv.Eventually(t, time.Minute, "the server comes to that step, or to the end", func() bool {
		select {
		case err := <-done:
			over = true
			if err != nil && k.dead() == "" {
				t.Fatal(err)
			}
		default:
		}
		return over || k.dead() != ""
	})
	k.mu.Lock()
	steps := k.steps
	k.mu.Unlock()
	if step == "" {
		return steps
	}
	if k.dead() == "" {
		t.Fatalf("it never came to %q", step)
	}
	s.stop(false)
	w.dir, w.shape = k.dead(), nil
	s = w.serve()
	sb, err := s.Get(t.Context(), admin, id)
	if err != nil || sb.State != Running && (sb.State != Paused || !sb.OnDisk) {
		t.Fatalf("the next server finds %+v, %v", sb, err)
	}
	if sb.State == Paused {
		s.wakes(id)
	}
	s.counts(id, p)
	s.hibernates(id) // nothing stands in the way of the next one
	s.wakes(id)
	s.counts(id, p)
	if n := w.roots.Images(); n != 0 {
		t.Errorf("%d memory images are left", n)
	}
	if _, err := s.Delete(t.Context(), admin, id); err != nil {
		t.Fatal(err)
	}
	if left := append(w.host.Instances(), w.roots.writable()...); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
	types := s.history(id)
	for i := 1; i < len(types); i++ {
		if types[i] == journal.SandboxResumed && types[i-1] == journal.SandboxResumed {
			t.Errorf("resumed twice in a row: %v", types)
		}
	}
	return steps
}

// Killed at any step of a pause to disk, or of the resume after it, the server loses nothing: the next one finds a sandbox
// that runs, or one on disk, and its counter goes on.
func TestPauseToDiskKilledAtEachStep(t *testing.T) {
	steps := killedAt(t, "")
	if len(steps) < 20 {
		t.Fatalf("only %q", steps)
	}
	seen := map[string]bool{}
	for _, step := range steps {
		if seen[step] {
			continue
		}
		seen[step] = true
		t.Run(strings.ReplaceAll(step, " ", "-"), func(t *testing.T) { killedAt(t, step) })
	}
}
