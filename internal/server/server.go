package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"casemate.dev/docs"
	"casemate.dev/internal/api"
	"casemate.dev/internal/cleanup"
	"casemate.dev/internal/clock"
	"casemate.dev/internal/e2b"
	"casemate.dev/internal/egress/control"
	"casemate.dev/internal/egress/proxy"
	"casemate.dev/internal/egress/resolve"
	"casemate.dev/internal/id"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/keeper"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/mcp"
	"casemate.dev/internal/observe"
	"casemate.dev/internal/oci"
	"casemate.dev/internal/policy"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/secret"
	"casemate.dev/internal/state"
	"casemate.dev/internal/store"
	"casemate.dev/internal/template"
	"casemate.dev/internal/tlscert"
	"casemate.dev/internal/trace"
	"casemate.dev/internal/usage"
)

// settingID is the setting of the data directory that holds the server's id.
const settingID = "server_id"

// Server is one running server.
type Server struct {
	cfg       Config
	log       *slog.Logger
	id        string
	began     time.Time
	recovered sandbox.RecoverReport

	db        *store.DB
	events    *journal.Log
	tracer    *trace.Tracer // nil: there is none
	roots     sandbox.Roots
	vault     *secret.Vault
	trust     trust
	backends  map[string]isolation.Backend
	gateway   *control.Gateway // nil where backends were injected
	keeper    *keeper.Keeper   // as gateway
	proxy     *proxy.Proxy     // what leaves goes through it; nil: directly
	images    *oci.Service     // nil as well
	manager   *sandbox.Manager
	builder   *template.Builder
	api       *api.API
	e2b       *e2b.API
	e2bOpen   chan struct{} // closed once e2b is set
	usage     *usage.History
	mcp       *mcp.Server
	listeners []listener
	domain    string // below which sandboxes' ports have names, perhaps with a port; "": none
	ca        *tlscert.Authority
	certFiles *tlscert.Files
	undo      *cleanup.Stack // what Close takes down, in reverse order

	mcpHandler http.Handler

	closing  sync.Once
	closeErr error
}

// New opens and recovers everything, and listens; Run serves. On error nothing is left open. The
// order below matters: each part is opened after those it needs, and nobody can call before what an
// earlier server left behind is adopted, but for what slow guests still have to tell, or removed.
func New(ctx context.Context, cfg Config) (_ *Server, err error) {
	cfg.fill()
	s := &Server{cfg: cfg, log: cfg.Log, began: time.Now(), undo: cleanup.New(), e2bOpen: make(chan struct{})}
	fail := s.undo
	defer func() {
		if err != nil {
			fail.Run()
		}
	}()

	// 0. Before there are other threads and processes, which inherit it.
	relaxTimers()
	s.undo.Add(roomyHeap())
	// 1. Without a guest there is nothing to serve: say so before anything is touched.
	guest, err := guestProgram(cfg)
	if err != nil {
		return nil, err
	}
	// 2. Directories, and the lock that keeps a second server out of the run directory. The data
	// directory's lock is the store's.
	if err := s.openDirs(); err != nil {
		return nil, err
	}
	// 3. The store, and from it who this server is; names on the host carry that id.
	if err := s.openStore(ctx); err != nil {
		return nil, err
	}
	// 4. The journal, before anything that could happen.
	events, err := s.openJournal(ctx)
	if err != nil {
		return nil, err
	}
	// 5. What sandboxes may use and never see.
	if err := s.openVault(ctx, events); err != nil {
		return nil, err
	}
	// 6. Files and walls.
	roots, build, err := s.openBelow(ctx, guest)
	if err != nil {
		return nil, err
	}
	// 7. The domain, and what an earlier server left: adopted or removed before anybody can ask, but for what slow guests still have to tell.
	domain := sandbox.Config{
		DB: s.db, Journal: events, Backends: s.backends, Roots: roots, Clock: clock.New(), Log: s.log,
		Defaults: cfg.Defaults, MaxSandboxes: cfg.MaxSandboxes, MaxPerPrincipal: cfg.MaxPerKey,
		Up:        s.sandboxUp,
		HostPaths: []string{cfg.DataDir, cfg.RunDir, cfg.KeysDir}, NetworkSet: s.networkSet, NetworkSets: s.networkSets, Resolver: resolve.New(cfg.Nameservers),
	}
	if s.gateway != nil {
		domain.Gateway, domain.Grants, domain.Proxy, domain.Beyond = s.gateway, s.grants, s.proxy, s.beyond
	}
	s.manager, err = sandbox.New(domain)
	if err != nil {
		return nil, fmt.Errorf("make manager: %w", err)
	}
	s.undo.Add(s.closeManager)
	var changed <-chan struct{} // taken before sandboxes are told what there is
	if s.gateway != nil {
		changed = s.vault.Changed()
	}
	if s.recovered, err = s.manager.Recover(ctx); err != nil {
		return nil, fmt.Errorf("recover: %w", err)
	}
	if err := s.followCalls(ctx); err != nil {
		return nil, err
	}
	if s.gateway != nil {
		s.background(ctx, func(ctx context.Context) { s.pushSecrets(ctx, changed) })
		s.background(ctx, s.sweepSecrets)
	}
	documents := state.New(state.Config{DB: s.db, Journal: events, Sandboxes: s.manager, MaxBytes: cfg.StatePerKey, Log: s.log})
	s.background(ctx, documents.Run)
	// 8. What builds templates, and cleans up after builds that were cut off.
	if err := s.openBuilder(ctx); err != nil {
		return nil, err
	}
	// 9. Keys: the first one is made before the first request could need it.
	keys := policy.NewKeys(s.db, nil)
	if path, err := keys.First(ctx, cfg.KeysDir); err != nil {
		return nil, err
	} else if path != "" {
		s.log.Info("made the first API key", slog.String("file", path))
	}
	// 10. Ways in, and what the server shows there to be known by. The addresses are taken, but nobody is
	// answered before Run: which ports they have is known only now, and the interfaces tell of them.
	if err := s.listen(ctx); err != nil {
		return nil, err
	}
	if err := s.openTLS(); err != nil {
		return nil, err
	}
	// 11. The interfaces.
	calls := observe.New(s.openTracer())
	s.api, err = api.New(api.Config{
		Manager: s.manager, Keys: keys, Secrets: s.vault, State: documents, Gateway: s.gateway != nil, Log: s.log, Version: cfg.Version, ServerID: s.id, Kernel: kernel(),
		Proofs: events, Hosts: s.hosts(), Authority: s.authority(), BuildTemplate: build, Builder: s.builder, Images: s.imageAPI(), Metrics: s.writeMetrics, Calls: calls,
	})
	if err != nil {
		return nil, fmt.Errorf("make api: %w", err)
	}
	s.undo.Add(s.api.Close)
	if err := s.openE2B(keys, calls); err != nil {
		return nil, err
	}
	s.openMCP(keys)
	return s, nil
}

// ID returns the server's id.
func (s *Server) ID() string { return s.id }

// Recovered tells what New found of an earlier server.
func (s *Server) Recovered() sandbox.RecoverReport { return s.recovered }

// Domain returns the name, perhaps with a port, below which PORT-SANDBOX.DOMAIN leads here; "": none.
func (s *Server) Domain() string { return s.domain }

// Addrs returns the TCP addresses that the server listens on.
func (s *Server) Addrs() []net.Addr {
	var out []net.Addr
	for _, l := range s.listeners {
		if l.Addr().Network() == "tcp" && !l.debug && !l.metrics {
			out = append(out, l.Addr())
		}
	}
	return out
}

// UnixSocket returns the path of the socket that needs no key.
func (s *Server) UnixSocket() string { return s.cfg.UnixSocket }

// KeyPath returns the file that holds the first API key.
func (s *Server) KeyPath() string { return filepath.Join(s.cfg.KeysDir, policy.FirstKeyFile) }

// Run serves until ctx ends, then drains: streams end at once, so that their clients go on with the
// next server, and calls under way get Config.DrainTimeout. It does not close the server.
func (s *Server) Run(ctx context.Context) error {
	g, serving := errgroup.WithContext(ctx)
	g.Go(func() error {
		s.usage.Run(serving)
		return nil
	})
	for _, l := range s.listeners {
		g.Go(func() error { return s.serve(l) })
	}
	g.Go(func() error {
		<-serving.Done()
		s.mcp.Close() // first: its sessions end what they run, and their sandboxes, through the API
		s.api.Drain()
		s.e2b.Drain()
		drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.DrainTimeout)
		defer cancel()
		var all []error
		for _, l := range s.listeners {
			if err := l.http.Shutdown(drain); err != nil {
				all = append(all, l.http.Close()) // the time is over: cut what is left
			}
			if l.direct != nil {
				l.direct.shutdown(drain)
			}
		}
		return errors.Join(all...)
	})
	return g.Wait()
}

// Close takes everything down in reverse order. With Config.StopSandboxes it ends the sandboxes too.
// Idempotent; call it after Run has returned.
func (s *Server) Close() error {
	s.closing.Do(func() { s.undo.Run() })
	return s.closeErr
}

// failed notes an error of a step of Close; the others go on.
func (s *Server) failed(what string, err error) {
	if err != nil {
		s.closeErr = errors.Join(s.closeErr, fmt.Errorf("%s: %w", what, err))
	}
}

func (s *Server) closeManager() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	s.failed("close manager", s.manager.Close(ctx, s.cfg.StopSandboxes))
}

// openBuilder opens what builds templates. It closes before the manager, whose sandboxes it uses.
func (s *Server) openBuilder(ctx context.Context) (err error) {
	s.builder, err = template.New(ctx, template.Config{
		Manager: s.manager, DB: s.db, Dir: filepath.Join(s.cfg.DataDir, "builds"), Log: s.log, Images: s.imageCommits(),
		Scratch: s.scratch(), Aliases: s.cfg.ImageAliases,
	})
	if err != nil {
		return fmt.Errorf("open builder: %w", err)
	}
	s.undo.Add(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		s.failed("close builder", s.builder.Close(ctx))
	})
	return nil
}

func (s *Server) openStore(ctx context.Context) (err error) {
	if s.db, err = store.Open(store.Config{Dir: s.cfg.DataDir, Log: s.log}); err != nil {
		return fmt.Errorf("open store: %w", err)
	}
	s.undo.Add(func() { s.failed("close store", s.db.Close()) })
	// Twelve characters, no separator: the id becomes part of names of control groups and devices.
	fresh := id.Sandbox()[:12]
	if s.id, err = s.db.SettingOr(ctx, settingID, fresh); err != nil {
		return fmt.Errorf("read server id: %w", err)
	}
	return nil
}

// openDirs makes the directories and locks the run directory.
func (s *Server) openDirs() error {
	for _, d := range []struct {
		path string
		mode os.FileMode
	}{
		{s.cfg.DataDir, 0o700},
		{s.cfg.RunDir, 0o711}, // guests' listening sockets lie below, each behind its own directory
		{s.cfg.KeysDir, 0o700},
	} {
		if !filepath.IsAbs(d.path) {
			return errNotAbsolute(d.path)
		}
		if err := os.MkdirAll(d.path, d.mode); err != nil {
			return fmt.Errorf("make directory: %w", err)
		}
	}
	unlock, err := lockRunDir(s.cfg.RunDir)
	if err != nil {
		return err
	}
	s.undo.Add(unlock)
	return nil
}

// ServeHTTP implements http.Handler: E2B's requests are told by what they name, those for the Model
// Context Protocol and for pages by their path, and the rest are the native API's.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch {
	case s.e2b.Claims(r):
		s.e2b.ServeHTTP(w, r)
	case r.URL.Path == mcpPath:
		s.mcpHandler.ServeHTTP(w, r)
	case docs.Serves(r.URL.Path):
		docs.Handle(w, r)
	default:
		s.api.ServeHTTP(w, r)
	}
}
