package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"casemate.dev/internal/clock"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/fake"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/rootfs"
	fakelayers "casemate.dev/internal/rootfs/fake"
	"casemate.dev/internal/store"
)

var (
	admin = Principal{ID: "local", Admin: true}
	alice = Principal{ID: "key_alice"}
	bob   = Principal{ID: "key_bob"}
)

// fakeRoots keeps the ids whose writable layer is there.
type fakeRoots struct {
	mu     sync.Mutex
	held   map[string]bool
	fail   error // of Plan
	listed int
	*fakelayers.Layers
}

func newFakeRoots() *fakeRoots {
	return &fakeRoots{held: map[string]bool{}, Layers: fakelayers.NewLayers()}
}

func (r *fakeRoots) Plan(_ context.Context, q rootfs.Request) (rootfs.Plan, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fail != nil {
		return rootfs.Plan{}, r.fail
	}
	if err := r.Use(q.ID, q.Layer); err != nil {
		return rootfs.Plan{}, err
	}
	r.held[q.ID] = true
	plan := rootfs.Plan{User: "user", Dir: "/home/user", Disk: rootfs.DiskLimit{Bytes: q.DiskBytes}}
	if q.Layer != "" {
		plan.Committed = []string{q.Layer}
	}
	for _, w := range q.Workspaces {
		plan.Workspaces = append(plan.Workspaces, rootfs.Workspace{Source: w.Source, Target: w.Target})
	}
	return plan, nil
}

func (r *fakeRoots) Release(_ context.Context, id string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.held, id)
	r.Forget(id)
	return nil
}

func (r *fakeRoots) Sweep(_ context.Context, keep map[string]bool) ([]string, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var removed []string
	for id := range r.held {
		if !keep[id] {
			delete(r.held, id)
			removed = append(removed, "layer "+id)
		}
	}
	return removed, nil
}

func (r *fakeRoots) Changes(_ context.Context, id string, _ rootfs.Plan, workspace string) ([]rootfs.Change, error) {
	return []rootfs.Change{{Op: "added", Path: workspace + "/" + id + "\xff"}}, nil
}

func (r *fakeRoots) Templates(context.Context) ([]rootfs.Template, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.listed++
	return []rootfs.Template{
		{Name: "host", Profiles: []string{"locked"}, Ready: true},
		{Name: "base", Profiles: []string{"locked", "standard"}, Ready: true},
		{Name: "unbuilt", Profiles: []string{"locked"}},
	}, nil
}

func (r *fakeRoots) writable() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var all []string
	for id := range r.held {
		all = append(all, id)
	}
	slices.Sort(all)
	return all
}

// world is what outlives a server: the machine, and the data directory.
type world struct {
	t     testing.TB
	dir   string
	host  *fake.Host
	roots *fakeRoots
	clock clock.Clock
	shape func(*Config)
	// capabilities are what the isolation is said to have; nil: what the fake says.
	capabilities []isolation.Capability
}

func newWorld(t testing.TB) *world {
	w := &world{t: t, dir: t.TempDir(), host: fake.NewHost(), roots: newFakeRoots(), clock: clock.New()}
	t.Cleanup(w.host.Close)
	return w
}

const ownKernel = "a kernel of its own"

// server is a Manager in a world.
type server struct {
	*Manager
	w       *world
	backend *fake.Backend
	db      *store.DB
	report  RecoverReport
	stopped bool
}

// serve starts a server; it is stopped, with its sandboxes, at the end of the test.
func (w *world) serve() *server {
	w.t.Helper()
	db, err := store.Open(store.Config{Dir: w.dir})
	if err != nil {
		w.t.Fatal(err)
	}
	s := &server{w: w, db: db, backend: fake.New(fake.Config{Host: w.host, Capabilities: w.capabilities})}
	if w.capabilities != nil { // what has memory images has a kernel of its own
		s.backend.SetFaults(fake.Faults{Runtime: ownKernel})
	}
	cfg := Config{
		DB: db, Journal: journal.Open(db, journal.Options{Clock: w.clock}), Roots: w.roots, Clock: w.clock,
		Backends: map[string]isolation.Backend{"fake": s.backend}, Defaults: Defaults{Isolation: "fake"},
		HostPaths: []string{w.dir},
	}
	if w.shape != nil {
		w.shape(&cfg)
	}
	if s.Manager, err = New(cfg); err != nil {
		w.t.Fatal(err)
	}
	if s.report, err = s.Recover(context.Background()); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { s.stop(true) })
	return s
}

func (s *server) stop(sandboxes bool) {
	if s.stopped {
		return
	}
	s.stopped = true
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := s.Close(ctx, sandboxes); err != nil {
		s.w.t.Errorf("close manager: %v", err)
	}
	if err := s.db.Close(); err != nil {
		s.w.t.Errorf("close store: %v", err)
	}
}

// crash leaves the server's data as kill -9 would at this moment, and starts another server on it.
// What the first one had not written is lost; the machine goes on.
func (s *server) crash() *server {
	s.w.t.Helper()
	dir, err := os.MkdirTemp(s.w.t.TempDir(), "")
	if err != nil {
		s.w.t.Fatal(err)
	}
	// A kill takes all three at one moment. In this order it makes no difference: the spool is emptied
	// once the log has what is in it, and a test makes too few commits for a checkpoint.
	for _, name := range []string{"spool", "casemate.db", "casemate.db-wal"} {
		if err := copyFile(filepath.Join(dir, name), filepath.Join(s.w.dir, name)); err != nil {
			s.w.t.Fatal(err)
		}
	}
	s.stop(false)
	s.w.dir = dir
	return s.w.serve()
}

func copyFile(to, from string) error {
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = src.Close() }()
	dst, err := os.Create(to)
	if err != nil {
		return err
	}
	_, err = io.Copy(dst, src)
	return errors.Join(err, dst.Close())
}

func (s *server) create(p Principal, spec Spec) Sandbox {
	s.w.t.Helper()
	sb, err := s.Create(context.Background(), p, spec, CreateOptions{})
	if err != nil {
		s.w.t.Fatal(err)
	}
	return sb
}

func (s *server) state(id string) State {
	s.w.t.Helper()
	sb, err := s.Get(context.Background(), admin, id)
	if err != nil {
		s.w.t.Fatal(err)
	}
	return sb.State
}

// exec runs a command to its end.
func (s *server) exec(id string, argv ...string) Result {
	s.w.t.Helper()
	r, err := s.Execute(context.Background(), admin, id, ProcessSpec{Argv: argv}, RunOptions{})
	if err != nil {
		s.w.t.Fatal(err)
	}
	return r
}

// ended returns the event of a process's end.
func (s *server) ended(id, process string) journal.Event {
	s.w.t.Helper()
	events, err := s.Events(context.Background(), admin, id, 0, 100_000)
	if err != nil {
		s.w.t.Fatal(err)
	}
	for _, e := range events {
		if e.Type == journal.ProcessEnded && e.Process == process {
			return e
		}
	}
	s.w.t.Fatalf("no end of process %s", process)
	return journal.Event{}
}

func (s *server) start(id string, spec ProcessSpec) Process {
	s.w.t.Helper()
	p, err := s.StartProcess(context.Background(), admin, id, spec, "")
	if err != nil {
		s.w.t.Fatal(err)
	}
	return p
}

func (s *server) wait(id, process string) Process {
	s.w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	p, err := s.WaitProcess(ctx, admin, id, process)
	if err != nil {
		s.w.t.Fatal(err)
	}
	if p.End == EndNone {
		s.w.t.Fatalf("process %s does not end", process)
	}
	return p
}

// history checks that a sandbox's events are dense and make sense, and returns their types.
func (s *server) history(id string) []journal.Type {
	s.w.t.Helper()
	events, err := s.Events(context.Background(), admin, id, 0, 100_000)
	if err != nil {
		s.w.t.Fatal(err)
	}
	if err := checkHistory(events); err != nil {
		s.w.t.Fatalf("sandbox %s: %v", id, err)
	}
	types := make([]journal.Type, len(events))
	for i, e := range events {
		types[i] = e.Type
	}
	return types
}

// checkHistory holds for every sandbox, whatever happened to it and its servers.
func checkHistory(events []journal.Event) error {
	open := map[string]bool{}
	over := false
	for i, e := range events {
		if e.Seq != uint64(i+1) {
			return fmt.Errorf("event %d has counter %d", i+1, e.Seq)
		}
		if i == 0 != (e.Type == journal.SandboxCreated) {
			return fmt.Errorf("event %d is %s", i+1, e.Type)
		}
		switch e.Type {
		case journal.ProcessStarted:
			if _, twice := open[e.Process]; twice {
				return fmt.Errorf("process %s started twice", e.Process)
			}
			open[e.Process] = true
		case journal.ProcessEnded:
			if !open[e.Process] {
				return fmt.Errorf("process %s ended without having run, or twice", e.Process)
			}
			open[e.Process] = false
		case journal.SandboxEnded:
			if over {
				return errors.New("it ended twice")
			}
			over = true
			for p, still := range open {
				if still {
					return fmt.Errorf("process %s outlives it", p)
				}
			}
			continue
		}
		if over {
			return fmt.Errorf("%s after its end", e.Type)
		}
	}
	return nil
}

// soon is what changes in the background take at most (see testenv.Eventually).
const soon = 5 * time.Second

func wantKind(t testing.TB, what string, err error, k errs.Kind) {
	t.Helper()
	if !errs.Is(err, k) {
		t.Errorf("%s: %v, want %s", what, err, k)
	}
}

// fakeClock stands still unless told otherwise. Its timers fire in goroutines, as real ones do.
type fakeClock struct {
	mu     sync.Mutex
	now    time.Time
	timers map[*fakeTimer]bool
}

type fakeTimer struct {
	c  *fakeClock
	at time.Time
	f  func()
}

func newFakeClock() *fakeClock {
	return &fakeClock{now: time.Unix(1_800_000_000, 0), timers: map[*fakeTimer]bool{}}
}

func (c *fakeClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *fakeClock) AfterFunc(d time.Duration, f func()) clock.Timer {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := &fakeTimer{c: c, at: c.now.Add(d), f: f}
	if d <= 0 {
		go f()
		return t
	}
	c.timers[t] = true
	return t
}

func (t *fakeTimer) Stop() bool {
	t.c.mu.Lock()
	defer t.c.mu.Unlock()
	was := t.c.timers[t]
	delete(t.c.timers, t)
	return was
}

// advance moves time on and returns once the callbacks that are due have returned.
func (c *fakeClock) advance(d time.Duration) {
	c.mu.Lock()
	c.now = c.now.Add(d)
	var due []func()
	for t := range c.timers {
		if !t.at.After(c.now) {
			due = append(due, t.f)
			delete(c.timers, t)
		}
	}
	c.mu.Unlock()
	var wg sync.WaitGroup
	for _, f := range due {
		wg.Go(f)
	}
	wg.Wait()
}

func (c *fakeClock) pending() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.timers)
}
