package template

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/fake"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/rootfs"
	fakelayers "casemate.dev/internal/rootfs/fake"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/store"
)

var (
	admin = sandbox.Principal{ID: "local", Admin: true}
	alice = sandbox.Principal{ID: "key_alice"}
	bob   = sandbox.Principal{ID: "key_bob"}
)

// roots offers one template, base.
type roots struct {
	*fakelayers.Layers
	mu   sync.Mutex
	held map[string]bool
}

func (r *roots) Plan(_ context.Context, q rootfs.Request) (rootfs.Plan, error) {
	if err := r.Use(q.ID, q.Layer); err != nil {
		return rootfs.Plan{}, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.held[q.ID] = true
	return rootfs.Plan{User: "user", Dir: "/home/user"}, nil
}

func (r *roots) Release(_ context.Context, id string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.held, id)
	r.Forget(id)
	return nil
}

func (r *roots) Sweep(context.Context, map[string]bool) ([]string, error) { return nil, nil }

func (r *roots) Changes(context.Context, string, rootfs.Plan, string) ([]rootfs.Change, error) {
	return nil, nil
}

func (r *roots) Templates(context.Context) ([]rootfs.Template, error) {
	return []rootfs.Template{{
		Name: "base", Profiles: []string{"locked", "standard"}, Ready: true,
		Settings: rootfs.Settings{User: "user", Dir: "/home/user", Env: []string{"PATH=/usr/bin:/bin"}},
	}}, nil
}

// world is what outlives a server.
type world struct {
	t     *testing.T
	dir   string
	host  *fake.Host
	roots *roots
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, dir: t.TempDir(), host: fake.NewHost(), roots: &roots{Layers: fakelayers.NewLayers(), held: map[string]bool{}}}
	t.Cleanup(w.host.Close)
	w.roots.Files = t.TempDir()
	for _, dir := range []string{"home", "home/user"} {
		if err := os.Mkdir(filepath.Join(w.roots.Files, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(w.roots.Files, "home/user/new"), []byte("new"), 0o644); err != nil {
		t.Fatal(err)
	}
	return w
}

// server is a Builder in a world.
type server struct {
	*Builder
	w       *world
	manager *sandbox.Manager
	db      *store.DB
	stopped bool
}

func (w *world) serve(shape ...func(*Config)) *server {
	w.t.Helper()
	ctx := context.Background()
	db, err := store.Open(store.Config{Dir: w.dir})
	if err != nil {
		w.t.Fatal(err)
	}
	m, err := sandbox.New(sandbox.Config{
		DB: db, Journal: journal.Open(db, journal.Options{}), Roots: w.roots,
		Backends: map[string]isolation.Backend{"fake": fake.New(fake.Config{Host: w.host})}, Defaults: sandbox.Defaults{Isolation: "fake"},
	})
	if err != nil {
		w.t.Fatal(err)
	}
	if _, err := m.Recover(ctx); err != nil {
		w.t.Fatal(err)
	}
	cfg := Config{Manager: m, DB: db, Dir: filepath.Join(w.dir, "templates")}
	for _, f := range shape {
		f(&cfg)
	}
	b, err := New(ctx, cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	s := &server{Builder: b, w: w, manager: m, db: db}
	w.t.Cleanup(func() { s.stop() })
	return s
}

func (s *server) stop() {
	if s.stopped {
		return
	}
	s.stopped = true
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := s.Close(ctx); err != nil {
		s.w.t.Error(err)
	}
	if err := s.manager.Close(ctx, true); err != nil {
		s.w.t.Error(err)
	}
	if err := s.db.Close(); err != nil {
		s.w.t.Error(err)
	}
}

// copyDir copies what a killed server would leave.
func (s *server) copyDir() string {
	s.w.t.Helper()
	dir := s.w.t.TempDir()
	for _, name := range []string{"spool", "casemate.db", "casemate.db-wal"} {
		data, err := os.ReadFile(filepath.Join(s.w.dir, name))
		if err != nil {
			s.w.t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			s.w.t.Fatal(err)
		}
	}
	return dir
}

// build runs a build to its end.
func (s *server) build(p sandbox.Principal, r Request) Build {
	s.w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	started, err := s.Start(ctx, p, r)
	if err != nil {
		s.w.t.Fatal(err)
	}
	b, err := s.Wait(ctx, p, started.ID)
	if err != nil {
		s.w.t.Fatal(err)
	}
	return b
}

// logText is a build's log as text.
func (s *server) logText(p sandbox.Principal, id string) string {
	s.w.t.Helper()
	all, err := s.Logs(context.Background(), p, id, 0, 0)
	if err != nil {
		s.w.t.Fatal(err)
	}
	var b strings.Builder
	for i, e := range all {
		if e.Offset != i {
			s.w.t.Errorf("entry %d has offset %d", i, e.Offset)
		}
		b.WriteString(e.Step + "|" + e.Stream + "|" + e.Text + "\n")
	}
	return b.String()
}

// sandboxes counts those that are alive.
func (s *server) sandboxes() int {
	s.w.t.Helper()
	all, _, err := s.manager.List(context.Background(), admin, sandbox.Query{})
	if err != nil {
		s.w.t.Fatal(err)
	}
	return len(all)
}

func run(line string) Step { return Step{Type: "RUN", Args: []string{line}} }
