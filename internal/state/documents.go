package state

import (
	"context"
	"encoding/hex"
	"log/slog"
	"sync"
	"time"

	"casemate.dev/internal/clock"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/store"
)

// MaxDocument bounds one version's content.
const MaxDocument = 8 << 20

// DefaultMaxBytes bounds what the documents of one principal hold, old versions included, unless Config says
// otherwise.
const DefaultMaxBytes = 1 << 30

// Sandboxes are what documents may name; *sandbox.Manager implements it.
type Sandboxes interface {
	Get(ctx context.Context, p sandbox.Principal, ref string) (sandbox.Sandbox, error)
	GetCommit(ctx context.Context, p sandbox.Principal, ref string) (sandbox.Commit, error)
}

// Config is what New needs.
type Config struct {
	DB        *store.DB
	Journal   journal.Recorder
	Sandboxes Sandboxes
	// MaxBytes bounds what the documents of one principal hold, old versions included; 0: DefaultMaxBytes.
	MaxBytes int64
	// Clock defaults to the system's, Log to nowhere.
	Clock clock.Clock
	Log   *slog.Logger
}

// Documents holds the documents of all agents. Its methods are safe for concurrent use.
type Documents struct {
	cfg Config

	// mu guards the fields below.
	mu     sync.Mutex
	locks  map[Ref]*lock
	agents map[agentKey]*agent
}

// Ref names a document.
type Ref struct {
	// Owner is the principal whose agent it is; "" is the caller's own. Others' are for administrators.
	Owner string
	Agent string
	Name  string
}

// Document is one version of a document.
type Document struct {
	Ref
	// Version counts the document's versions from 1, without holes.
	Version uint64
	// Revision counts the writes to any document of the agent.
	Revision    uint64
	ContentType string
	Size        int64
	Digest      string // SHA-256 of the content, in hexadecimal digits
	// Deleted says that this version is the document's deletion.
	Deleted bool
	At      time.Time
	Author  string // principal's id
	Sandbox string // that it was written for; "": none
	Commit  string // that it belongs to; "": none
	// Content is nil in lists and histories.
	Content []byte
}

// agentKey names an agent.
type agentKey struct{ owner, name string }

// agent is what is in memory of an agent while somebody writes to it or watches it.
type agent struct {
	users int // guarded by Documents.mu, as is changed
	// changed is closed and replaced when a version was written.
	changed chan struct{}

	// order is held from taking a revision until its event is queued, so that revisions are written in order.
	order    sync.Mutex
	loaded   bool
	revision uint64
}

// lock keeps writers of one document apart, across the disk.
type lock struct {
	users int
	turn  chan struct{}
}

// New returns the documents in cfg.DB. They hold nothing that needs closing.
func New(cfg Config) *Documents {
	if cfg.Clock == nil {
		cfg.Clock = clock.New()
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.MaxBytes == 0 {
		cfg.MaxBytes = DefaultMaxBytes
	}
	return &Documents{cfg: cfg, locks: make(map[Ref]*lock), agents: make(map[agentKey]*agent)}
}

// owner returns whose documents p means by an owner's id.
func owner(p sandbox.Principal, id string) (string, error) {
	switch {
	case p.ID == "" || p.Sandbox != "":
		return "", errs.New(errs.PermissionDenied, "a sandbox may not see or change agents' documents")
	case id == "" || id == p.ID:
		return p.ID, nil
	case !p.Admin:
		return "", errs.New(errs.PermissionDenied, "the documents of %.80q are for administrators", id).
			WithHint("leave the owner out for your own")
	}
	return id, nil
}

// resolve checks a reference and fills in its owner.
func resolve(p sandbox.Principal, r Ref) (Ref, error) {
	var err error
	if r.Owner, err = owner(p, r.Owner); err != nil {
		return r, err
	}
	if err := checkAgent(r.Agent); err != nil {
		return r, err
	}
	return r, checkName(r.Name)
}

// acquire waits for the turn to write a document.
func (d *Documents) acquire(ctx context.Context, r Ref) (release func(), err error) {
	d.mu.Lock()
	l, ok := d.locks[r]
	if !ok {
		l = &lock{turn: make(chan struct{}, 1)}
		d.locks[r] = l
	}
	l.users++
	d.mu.Unlock()
	leave := func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if l.users--; l.users == 0 {
			delete(d.locks, r)
		}
	}
	select {
	case l.turn <- struct{}{}:
		return func() { <-l.turn; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, ctx.Err()
	}
}

// enter returns an agent's entry, which stays until leave.
func (d *Documents) enter(k agentKey) (a *agent, leave func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	a, ok := d.agents[k]
	if !ok {
		a = &agent{changed: make(chan struct{})}
		d.agents[k] = a
	}
	a.users++
	return a, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if a.users--; a.users == 0 {
			delete(d.agents, k)
		}
	}
}

// next returns a channel that is closed when a version was written.
func (d *Documents) next(a *agent) <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return a.changed
}

func (d *Documents) tell(a *agent) {
	d.mu.Lock()
	defer d.mu.Unlock()
	close(a.changed)
	a.changed = make(chan struct{})
}

func ofRow(v store.StateVersion) Document {
	return Document{
		Ref: Ref{v.Owner, v.Agent, v.Name}, Version: v.Version, Revision: v.Revision, ContentType: v.ContentType, Size: v.Size,
		Digest: hex.EncodeToString(v.Digest), Deleted: v.Deleted, At: time.Unix(0, v.Created).UTC(), Author: v.Author,
		Sandbox: v.Sandbox, Commit: v.Commit, Content: v.Content,
	}
}

func ofRows(rows []store.StateVersion) []Document {
	all := make([]Document, len(rows))
	for i, r := range rows {
		all[i] = ofRow(r)
	}
	return all
}
