package secret

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"casemate.dev/internal/clock"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/store"
)

// Class is what kind of thing a secret opens; policies name it.
type Class string

// The classes.
const (
	ModelKey Class = "model" // a model provider's API key
	ToolKey  Class = "tool"  // a key of a service that tools use: git, packages, search
	Other    Class = "other"
)

// KeyFile is the file in the keys directory that holds the master key.
const KeyFile = "secrets.key"

// maxSecrets bounds a vault, which holds everything but values in memory.
const maxSecrets = 10_000

// usedEvery bounds how often the time of last use is written.
const usedEvery = 10 * time.Second

// Caller is who asks.
type Caller struct {
	ID    string
	Admin bool
	// Sandbox says that a sandbox asks: it may do nothing here.
	Sandbox bool
}

// owner is whose the secrets that the caller makes are: an admin's are the server's.
func (c Caller) owner() string {
	if c.Admin {
		return ""
	}
	return c.ID
}

// Config is what Open needs.
type Config struct {
	DB      *store.DB
	Journal journal.Recorder
	// Key is the master key, 32 bytes. Open does not keep it.
	Key []byte
	// Clock defaults to the system's, Log to nowhere, Getenv to os.Getenv.
	Clock  clock.Clock
	Log    *slog.Logger
	Getenv func(string) string
}

// Secret is what may be known of a secret: everything but its value.
type Secret struct {
	ID        string
	Owner     string // principal's id; "": the server's
	Name      string
	Class     Class
	Source    Source
	Shape     Shape
	Version   uint64
	CreatedAt time.Time
	ChangedAt time.Time // its newest version
	UsedAt    time.Time // zero: never
	Bindings  []Binding
	// Metadata is what its owner wants to know of it, and nothing to the vault.
	Metadata map[string]string
	// Sandbox is set for what belongs to one sandbox and goes with it: see Transform. Proxy says that it is no transform,
	// but the proxy of SetTransforms.
	Sandbox string
	Proxy   bool
	// Fault says why an external value could not be read the last time; "": it could.
	Fault string
	// Fills are the names of the secrets whose values stand in a Transform's.
	Fills []string
}

// body is what the store keeps of a secret beyond its columns.
type body struct {
	Class    Class     `json:"class"`
	Source   Source    `json:"source"`
	Shape    Shape     `json:"shape"`
	Changed  time.Time `json:"changed"`
	Bindings []Binding `json:"bindings,omitempty"`
	Sandbox  string    `json:"sandbox,omitempty"`
	Proxy    bool      `json:"proxy,omitempty"`
	Fills    []string  `json:"fills,omitempty"`

	Metadata map[string]string `json:"metadata,omitempty"`
	// Print tells whether an external value has changed. It is keyed, so that it can't be guessed at.
	Print []byte `json:"print,omitempty"`
}

// entry is a secret with what is known of its values.
type entry struct {
	Secret
	print []byte
	// value is the current one, previous the one before; both may be empty until they are needed.
	value, previous Value
	loaded          bool
	needed          bool      // external: somebody has asked for it
	readAt          time.Time // external: when it was last tried
	usedWritten     time.Time
}

// Vault holds the secrets of a server. Its methods are safe for concurrent use.
type Vault struct {
	cfg    Config
	sealer *sealer

	// changing is held by whoever changes a secret, across the write to the store; before mu.
	changing sync.Mutex

	// mu guards the fields below.
	mu      sync.Mutex
	entries map[string]*entry
	routes  map[string]Route
	classes map[Class]ClassPolicy
	changed chan struct{} // closed and replaced at every change
}

// Open returns the vault in cfg.DB. A secret that does not open with the master key is kept, and says
// so when it is needed: it can be set again or removed.
func Open(ctx context.Context, cfg Config) (*Vault, error) {
	if cfg.Clock == nil {
		cfg.Clock = clock.New()
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Getenv == nil {
		cfg.Getenv = os.Getenv
	}
	s, err := newSealer(cfg.Key)
	if err != nil {
		return nil, err
	}
	cfg.Key = nil
	v := &Vault{cfg: cfg, sealer: s, entries: make(map[string]*entry), changed: make(chan struct{})}
	rows, err := cfg.DB.Secrets(ctx)
	if err != nil {
		return nil, fmt.Errorf("read secrets: %w", err)
	}
	for _, r := range rows {
		e, err := ofRow(r)
		if err != nil {
			return nil, err
		}
		v.entries[e.ID] = e
	}
	return v, v.openSettings(ctx)
}

// Close overwrites the values in memory. The vault must not be used afterwards.
func (v *Vault) Close() {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, e := range v.entries {
		e.wipe()
	}
}

func (e *entry) wipe() {
	e.value.Wipe()
	e.previous.Wipe()
	e.value, e.previous, e.loaded = Value{}, Value{}, false
}

func ofRow(r store.Secret) (*entry, error) {
	var b body
	if err := json.Unmarshal(r.Body, &b); err != nil {
		return nil, fmt.Errorf("decode secret %s: %w", r.ID, err)
	}
	e := &entry{print: b.Print, Secret: Secret{
		ID: r.ID, Owner: r.Owner, Name: r.Name, Class: b.Class, Source: b.Source, Shape: b.Shape, Version: r.Version,
		CreatedAt: time.Unix(0, r.Created).UTC(), ChangedAt: b.Changed, Bindings: b.Bindings, Sandbox: b.Sandbox, Proxy: b.Proxy,
		Fills: b.Fills, Metadata: b.Metadata,
	}}
	if r.Used != 0 {
		e.UsedAt = time.Unix(0, r.Used).UTC()
	}
	return e, nil
}

// put is the write of a secret's row.
func put(s Secret, print []byte) (store.Write, error) {
	text, err := json.Marshal(body{
		Class: s.Class, Source: s.Source, Shape: s.Shape, Changed: s.ChangedAt, Bindings: s.Bindings, Print: print, Sandbox: s.Sandbox, Proxy: s.Proxy,
		Fills: s.Fills, Metadata: s.Metadata,
	})
	if err != nil {
		return store.Write{}, fmt.Errorf("encode secret %s: %w", s.ID, err)
	}
	row := store.Secret{ID: s.ID, Owner: s.Owner, Name: s.Name, Created: s.CreatedAt.UnixNano(), Version: s.Version, Body: text}
	return store.PutSecret(row), nil
}

// Changed returns a channel that is closed at the next change of anything that Grants depends on.
func (v *Vault) Changed() <-chan struct{} {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.changed
}

func (v *Vault) tellLocked() {
	close(v.changed)
	v.changed = make(chan struct{})
}

// List returns the secrets that the caller may see, by name: an admin all, others their own.
func (v *Vault) List(c Caller) ([]Secret, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	var all []Secret
	for _, e := range v.entries {
		if e.Sandbox == "" && (c.Admin || e.Owner == c.ID) {
			all = append(all, e.clone())
		}
	}
	slices.SortFunc(all, func(a, b Secret) int {
		return cmp.Or(strings.Compare(a.Name, b.Name), strings.Compare(a.Owner, b.Owner))
	})
	return all, nil
}

func (e *entry) clone() Secret {
	s := e.Secret
	s.Bindings, s.Metadata = slices.Clone(s.Bindings), maps.Clone(s.Metadata)
	return s
}

func (c Caller) check() error {
	if c.ID == "" || c.Sandbox {
		return errs.New(errs.PermissionDenied, "a sandbox may not see or change secrets")
	}
	return nil
}

// find returns the secret that ref names: an id, or a name among the caller's own. Others' are not
// found, so that nobody learns which exist.
func (v *Vault) find(c Caller, ref string) (*entry, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if e, ok := v.entries[ref]; ok && e.Sandbox == "" && (c.Admin || e.Owner == c.ID) {
		return e, nil
	}
	if e := v.namedLocked(c.owner(), ref); e != nil {
		return e, nil
	}
	return nil, errs.New(errs.NotFound, "no secret %.80q", ref).WithHint("casemate secrets ls shows them")
}

func (v *Vault) namedLocked(owner, name string) *entry {
	for _, e := range v.entries {
		if e.Sandbox == "" && e.Owner == owner && e.Name == name {
			return e
		}
	}
	return nil
}

// Get returns one secret by its id or name. NotFound: there is none that the caller may see.
func (v *Vault) Get(c Caller, ref string) (Secret, error) {
	e, err := v.find(c, ref)
	if err != nil {
		return Secret{}, err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	return e.clone(), nil
}

// event is an event about secrets that belongs to no sandbox.
func (v *Vault) event(t journal.Type, c Caller, s Secret, more map[string]any) journal.Event {
	//casemate:fact server secret.set,secret.rotated,secret.removed,secret.bound,secret.unbound secret text its id
	//casemate:fact server secret.set,secret.rotated,secret.removed,secret.bound,secret.unbound name text
	//casemate:fact server secret.set,secret.rotated,secret.removed,secret.bound,secret.unbound class text
	//casemate:fact server secret.set,secret.rotated,secret.removed,secret.bound,secret.unbound version number
	facts := map[string]any{"secret": s.ID, "name": s.Name, "class": s.Class, "version": s.Version}
	for k, f := range more {
		facts[k] = f
	}
	return journal.Event{Sandbox: journal.ServerStream, Type: t, Actor: c.ID}.With(journal.Server, facts)
}
