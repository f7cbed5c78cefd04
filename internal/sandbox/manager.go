package sandbox

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"casemate.dev/internal/clock"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/store"
)

// Manager owns every sandbox of a server. It is the only one that changes a sandbox's state, and
// every change passes through the journal. Its methods are safe for concurrent use.
//
// Lock order: keep, the mu of a parent's box, of its child's, of the Manager.
type Manager struct {
	cfg     Config
	db      *store.DB
	journal journal.Recorder
	clock   clock.Clock
	log     *slog.Logger

	// ctx ends with Close; what follows sandboxes in the background depends on it and is in wg.
	ctx    context.Context //nolint:containedctx // the life of the Manager, not of a call
	cancel context.CancelFunc
	wg     sync.WaitGroup

	counted *instruments

	templates templateCache
	// templateNetworks are the networks that sandboxes get where their create says nothing of one, by what they start
	// from. An administrator gives them, so that they may open what only an administrator opens.
	templateNetworks *settingMap[Network]
	// callDefaults are those that an administrator has set, by CallDefault.key.
	callDefaults *settingMap[Calls]
	// shared are the owners of the templates that were built here and are everybody's, as those that come with the
	// server and those that were made of images are, by name. A name is one key's: what a reference leads to must not
	// depend on who was there first. That is also why only an administrator shares: who names a template that is not
	// their own takes what lies under that name.
	shared *settingMap[string]
	once   onceGroup
	purge  clock.Timer // set by Recover, and by its own callback

	// keep is held for reading by what makes a layer until its commit is recorded, and for writing while
	// layers that no commit names are removed.
	keep sync.RWMutex

	// mu guards the fields below.
	mu     sync.Mutex
	live   map[string]*box // every sandbox that is not stopped
	owned  map[string]int  // how many of them each principal owns
	closed bool            // no new sandboxes
	// resting says that Close waits for wg: nothing may be added to it.
	resting bool
}

// New returns a Manager. Call Recover before anything else, and Close at the end.
func New(cfg Config) (*Manager, error) {
	if cfg.DB == nil || cfg.Journal == nil || cfg.Roots == nil || len(cfg.Backends) == 0 {
		return nil, errs.New(errs.Internal, "a manager needs a store, a journal, roots and a backend")
	}
	if cfg.Clock == nil {
		cfg.Clock = clock.New()
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Resolver == nil {
		cfg.Resolver = net.DefaultResolver
	}
	cfg.Defaults = cfg.Defaults.filled()
	m := &Manager{
		cfg: cfg, db: cfg.DB, journal: cfg.Journal, clock: cfg.Clock, log: cfg.Log,
		live: make(map[string]*box), owned: make(map[string]int), counted: newInstruments(cfg),
		templateNetworks: newSettingMap[Network](cfg, "network.templates", "networks of templates"),
		callDefaults:     newSettingMap[Calls](cfg, "calls.defaults", "defaults of observed system calls"),
		shared:           newSettingMap[string](cfg, "templates.shared", "shared templates"),
	}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	return m, nil
}

// Close stops following sandboxes; with stopSandboxes it ends them first, else they go on and a
// later Recover takes them up. New creates are refused from here on. It returns an error when ctx
// ends before everything has come to rest.
func (m *Manager) Close(ctx context.Context, stopSandboxes bool) error {
	m.mu.Lock()
	m.closed = true
	boxes := slices.Collect(maps.Values(m.live))
	if m.purge != nil {
		m.purge.Stop()
	}
	m.mu.Unlock()
	var err error
	if stopSandboxes {
		for _, b := range boxes {
			m.beginEnd(b, "", EndServerDown, "")
		}
		for _, b := range boxes {
			select {
			case <-b.ended:
			case <-ctx.Done():
				err = fmt.Errorf("stop sandboxes: %w", ctx.Err())
			}
		}
	}
	if !stopSandboxes { // what they use until the next server takes them up, that one tells as far as it can
		m.meterAll(ctx, boxes)
	}
	for _, b := range boxes {
		b.mu.Lock()
		b.stopTimersLocked()
		if b.guest != nil {
			b.guest.Close()
		}
		b.mu.Unlock()
	}
	m.mu.Lock()
	m.resting = true
	m.mu.Unlock()
	m.cancel()
	rest := make(chan struct{})
	go func() {
		m.wg.Wait()
		close(rest)
	}()
	select {
	case <-rest:
	case <-ctx.Done():
		return fmt.Errorf("stop following sandboxes: %w", ctx.Err())
	}
	return err
}

// box is one sandbox that is not stopped.
type box struct {
	id     string
	owner  string
	parent string
	name   string
	// life is held, by a token in it, by what takes several steps on a live sandbox: pause, resume,
	// update of limits. Ending does not wait for it.
	life chan struct{}
	// ready is closed once it is known what runs in it, for which calls wait: its guest must tell of what an earlier server, or a
	// memory image, has left running. ended is closed once it is stopped.
	ready chan struct{}
	ended chan struct{}

	// mu guards the fields below.
	mu      sync.Mutex
	sb      Sandbox
	body    body
	backend isolation.Backend
	inst    *seat // nil while starting; empty while it is paused without memory
	guest   guest // nil while starting
	// restored says that it began with the processes of a memory image. It is the create's alone.
	restored bool
	// placeholders are the variables that it was granted and that hold placeholders of secrets. It is the create's alone.
	placeholders []string
	// untold says that the store holds processes of an earlier server that its guest has not told of.
	untold bool
	// leaving is set while the instance is taken down and the sandbox stays.
	leaving bool
	// bound is the commit whose files it is to get, from before that is recorded; "": none.
	bound string
	// changes records which files change; nil: nothing does. It is set before the sandbox can be used.
	changes  *tracker
	children map[string]*box
	procs    map[string]*proc
	recent   []string // ids of ended ones in procs, oldest first
	codes    map[string]*codeContext
	fresh    map[string]*freshPool // by set of imports
	warm     []CodeContextSpec     // to start with it; does not change
	inUse    int                   // calls that count as activity and have not returned
	lifetime clock.Timer
	idle     clock.Timer
	// up lasts while it is running; down ends it.
	up   context.Context //nolint:containedctx // the life of a state, not of a call
	down context.CancelFunc
	// stop is set when a starting sandbox is to end; cancelStart makes its create notice.
	stop        *ending
	cancelStart context.CancelFunc
	// oomSeen is the kernel's count of out-of-memory kills when it was last read, at oomRead.
	oomSeen int64
	oomRead time.Time
	// gauge is what was used, and not recorded yet.
	gauge gauge
}

// ending says why a sandbox ends.
type ending struct {
	reason EndReason
	detail string
}

func newBox(s Sandbox) *box {
	b := &box{
		id: s.ID, owner: s.Owner, parent: s.Parent, name: s.Spec.Name, sb: s,
		life:  make(chan struct{}, 1),
		ready: make(chan struct{}), ended: make(chan struct{}),
		children: make(map[string]*box), procs: make(map[string]*proc), warm: s.Spec.Contexts,
	}
	b.sb.Spec.Contexts = nil
	b.up, b.down = context.WithCancel(context.Background())
	return b
}

// snapshot returns the sandbox as callers see it.
func (b *box) snapshot() Sandbox {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.snapshotLocked()
}

func (b *box) running() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.sb.State == Running
}

func (b *box) snapshotLocked() Sandbox {
	s := b.sb
	s.Spec.Labels, s.Spec.Extra = maps.Clone(s.Spec.Labels), maps.Clone(s.Spec.Extra)
	s.Timings = maps.Clone(s.Timings)
	return s
}

// acquire takes the life token.
func (b *box) acquire(ctx context.Context) error {
	select {
	case b.life <- struct{}{}:
		return nil
	case <-b.ended:
		return b.notUsable("")
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (b *box) release() { <-b.life }

// settled waits until it is known what runs in the sandbox. What is about one that still starts finds that out by itself.
func (b *box) settled(ctx context.Context) error {
	b.mu.Lock()
	starting := b.sb.State == Starting
	b.mu.Unlock()
	if starting {
		return nil
	}
	select {
	case <-b.ready:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (b *box) notUsable(to State) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return &TransitionError{ID: b.id, From: b.sb.State, To: to}
}

// forget drops a sandbox that has stopped.
func (m *Manager) forget(b *box) {
	m.mu.Lock()
	delete(m.live, b.id)
	if m.owned[b.owner]--; m.owned[b.owner] <= 0 {
		delete(m.owned, b.owner)
	}
	parent := m.live[b.parent]
	m.mu.Unlock()
	if parent != nil {
		parent.mu.Lock()
		delete(parent.children, b.id)
		parent.mu.Unlock()
	}
}

func (m *Manager) find(id string) *box {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.live[id]
}

func (m *Manager) boxes() []*box {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Collect(maps.Values(m.live))
}

// background runs f in a goroutine that Close waits for. It reports false, and runs nothing, once
// Close has stopped following.
func (m *Manager) background(f func()) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.resting {
		return false
	}
	m.wg.Go(f)
	return true
}

func shuttingDown() error {
	return errs.New(errs.Unavailable, "the server is shutting down").WithHint("try again later")
}
