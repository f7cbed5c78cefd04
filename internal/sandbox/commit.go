package sandbox

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/id"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/rootfs"
	"casemate.dev/internal/store"
)

// Commit is an immutable saved state of a sandbox's files. It is a copy: changing it changes nothing.
type Commit struct {
	ID      string
	Owner   string // principal id, the sandbox's owner
	Sandbox string // that it was made of; it may be gone
	// Parent is the commit that the sandbox's files were at before; "": a template. It may be gone.
	Parent string
	// Merged is the other commit that a merge was made of; "": it is no merge. It may be gone.
	Merged    string
	Author    string // principal id, who asked; "server"
	Message   string
	CreatedAt time.Time
	// Event is the counter of the last event of the sandbox that lies before it.
	Event uint64
	// Automatic says that it was made on the way to something else: a fork, a checkout.
	Automatic bool
	Tags      []string // of its owner, by name
	// Memory says that it holds the processes with their memory as well: what starts from it goes on where they were.
	Memory bool
	// Bytes is what it took beyond what was kept already.
	Bytes int64
	// Digest is of its files, as VerifyCommit tells; "": nobody has asked for it yet.
	Digest string
	// Frozen is how long the sandbox stood still for it.
	Frozen time.Duration
	// Spec is what a sandbox that starts from it has where its creator says nothing. Env is not in it: it lies
	// with the files.
	Spec Spec
	// Profiles are those that it allows, the first by default.
	Profiles []string

	layer string
}

// Layer is the committed layer that holds its files; see rootfs.Store.
func (c Commit) Layer() string { return c.layer }

// commitBody is what the store keeps of a commit beyond its columns.
type commitBody struct {
	Author    string        `json:"author"`
	Message   string        `json:"message,omitempty"`
	Event     uint64        `json:"event"`
	Automatic bool          `json:"automatic,omitempty"`
	Memory    bool          `json:"memory,omitempty"`
	Bytes     int64         `json:"bytes"`
	Frozen    time.Duration `json:"frozen"`
	Spec      Spec          `json:"spec"`
	Profiles  []string      `json:"profiles"`
}

func (c Commit) row() (store.Commit, error) {
	spec := c.Spec
	spec.Env = nil
	text, err := json.Marshal(commitBody{
		Author: c.Author, Message: c.Message, Event: c.Event, Automatic: c.Automatic, Memory: c.Memory, Bytes: c.Bytes,
		Frozen: c.Frozen, Spec: spec, Profiles: c.Profiles,
	})
	if err != nil {
		return store.Commit{}, fmt.Errorf("encode commit %s: %w", c.ID, err)
	}
	return store.Commit{
		ID: c.ID, Owner: c.Owner, Sandbox: c.Sandbox, Parent: c.Parent, Merged: c.Merged, Layer: c.layer, Created: c.CreatedAt.UnixNano(), Body: text,
	}, nil
}

func ofCommitRow(r store.Commit) (Commit, error) {
	var b commitBody
	if err := json.Unmarshal(r.Body, &b); err != nil {
		return Commit{}, fmt.Errorf("decode commit %s: %w", r.ID, err)
	}
	return Commit{
		ID: r.ID, Owner: r.Owner, Sandbox: r.Sandbox, Parent: r.Parent, Merged: r.Merged, Digest: r.Digest, Author: b.Author, Message: b.Message,
		CreatedAt: timeOf(r.Created), Event: b.Event, Automatic: b.Automatic, Memory: b.Memory, Bytes: b.Bytes,
		Frozen: b.Frozen, Spec: b.Spec, Profiles: b.Profiles, layer: r.Layer,
	}, nil
}

// CommitOptions go with a commit.
type CommitOptions struct {
	Message string
	// Tag is a name for the commit, or "". One that has it loses it.
	Tag string
	// Automatic says that it is made on the way to something else.
	Automatic bool
	// Memory keeps the processes with their memory as well. The sandbox stands still while they are saved, and its
	// connections to and from outside end in what starts from the commit.
	Memory bool
	// Settle takes out of what was changed since the commit before what tells when that was: no file bears a
	// later time, and logs are empty; see rootfs.Store.Settle. Zero: everything stays as it is.
	Settle time.Time
	// Shape changes what a sandbox that starts from the commit has where its creator says nothing; nil: it has
	// what the sandbox has.
	Shape func(*Spec)
}

// maxMessage bounds a commit's message.
const maxMessage = 16 << 10

func (o CommitOptions) check() error {
	var c checker
	c.that(len(o.Message) <= maxMessage && !strings.Contains(o.Message, "\x00"), "",
		"the message is longer than %d bytes or holds a NUL byte", maxMessage)
	if o.Tag != "" {
		c.tag(o.Tag)
	}
	return c.err
}

// MakeCommit saves the files of a sandbox as they are now, also those of its workspaces. One that runs is
// held for a few milliseconds, in which its files come to rest; one that is paused, in either way, stays so.
// Kinds: InvalidArgument, NotFound, FailedPrecondition (it is not alive), ResourceExhausted (no room), Unsupported (with
// memory: its isolation has no memory images).
func (m *Manager) MakeCommit(ctx context.Context, p Principal, ref string, o CommitOptions) (Commit, error) {
	if err := o.check(); err != nil {
		return Commit{}, err
	}
	b, stopped, err := m.resolve(ctx, p, ref)
	if err != nil {
		return Commit{}, err
	}
	if b == nil {
		return Commit{}, &TransitionError{ID: stopped.ID, From: stopped.State}
	}
	if err := b.acquire(ctx); err != nil {
		return Commit{}, err
	}
	defer b.release()
	return m.commit(ctx, p.ID, b, o, o.Automatic)
}

// committedFacts are the server's facts of commit.made.
//
//casemate:facts server commit.made
type committedFacts struct {
	Commit    string `json:"commit"`
	Parent    string `json:"parent,omitempty"`
	Message   string `json:"message,omitempty"`
	Tag       string `json:"tag,omitempty"`
	Automatic bool   `json:"automatic,omitempty"`
	Memory    bool   `json:"memory,omitempty"`
	Bytes     int64  `json:"bytes"`
	FrozenUS  int64  `json:"frozen_us"`
	Layer     string `json:"layer"`
}

// commit makes a commit of b on behalf of actor. Preconditions: the caller holds the life token.
func (m *Manager) commit(ctx context.Context, actor string, b *box, o CommitOptions, automatic bool) (Commit, error) {
	now := b.snapshot()
	if now.State != Running && now.State != Paused {
		return Commit{}, &TransitionError{ID: b.id, From: now.State}
	}
	if err := m.canKeepMemory(ctx, now, o); err != nil {
		return Commit{}, err
	}
	if !now.asleep() {
		if err := m.keepEnv(ctx, b); err != nil {
			return Commit{}, err
		}
		if err := m.cfg.Roots.Flush(b.id, false); err != nil {
			return Commit{}, err
		}
	}
	// Until the commit is recorded, nothing but this names its layer.
	m.keep.RLock()
	defer m.keep.RUnlock()
	if err := m.db.Flush(); err != nil { // what was posted has happened
		return Commit{}, err
	}
	at, err := m.db.LastEvent(ctx, b.id)
	if err != nil {
		return Commit{}, err
	}
	layer, frozen, err := m.keepLayer(ctx, b, now, o)
	if err == nil && !o.Settle.IsZero() {
		bytes := layer.Bytes
		layer, err = m.cfg.Roots.Settle(ctx, layer.ID, o.Settle)
		layer.Bytes += bytes
	}
	if err != nil {
		return Commit{}, err
	}
	c := Commit{
		ID: id.New(id.Commit), Owner: b.owner, Sandbox: b.id, Parent: now.Head, Author: or(actor, "server"), Message: o.Message,
		CreatedAt: wall(m.clock.Now()), Event: at, Automatic: automatic, Memory: o.Memory || now.OnDisk, Bytes: layer.Bytes, Frozen: frozen, layer: layer.ID,
		Spec: now.Spec, Profiles: m.profilesLike(ctx, now.Spec),
	}
	if o.Tag != "" {
		c.Tags = []string{o.Tag}
	}
	if o.Shape != nil {
		o.Shape(&c.Spec)
	}
	return c, m.recordCommit(b, c, o)
}

// keepLayer keeps b's files, and returns how long it stood still for that. Where they are certainly those of its head,
// the commits share the layer.
func (m *Manager) keepLayer(ctx context.Context, b *box, now Sandbox, o CommitOptions) (rootfs.Layer, time.Duration, error) {
	head, ok, err := m.db.GetCommit(ctx, now.Head)
	if err != nil {
		return rootfs.Layer{}, 0, err
	}
	if ok && o.Settle.IsZero() && !o.Memory && m.cfg.Roots.Unchanged(b.id, head.Layer) {
		return rootfs.Layer{ID: head.Layer}, 0, nil
	}
	b.mu.Lock()
	plan := b.body.Plan
	b.mu.Unlock()
	if now.State != Running && (!o.Memory || now.OnDisk) {
		nothing := func() error { return nil }
		layer, err := m.cfg.Roots.Commit(ctx, b.id, plan, nothing, nothing)
		return layer, 0, err
	}
	if o.Memory {
		return m.keepWithMemory(ctx, b, now, plan)
	}
	var began time.Time
	var frozen time.Duration
	layer, err := m.cfg.Roots.Commit(ctx, b.id, plan, func() error {
		began = m.clock.Now()
		return b.inst.Freeze(ctx)
	}, func() error {
		m.thaw(b)
		frozen = m.clock.Now().Sub(began)
		return nil
	})
	return layer, frozen, err
}

// recordCommit writes a commit and its event, and moves the sandbox's head.
func (m *Manager) recordCommit(b *box, c Commit, o CommitOptions) error {
	b.mu.Lock()
	row, err := c.row()
	if err != nil {
		b.mu.Unlock()
		return err
	}
	writes := []store.Write{store.AddCommit(row)}
	if o.Tag != "" {
		writes = append(writes, store.PutCommitTag(store.CommitTag{Owner: c.Owner, Name: o.Tag, Target: c.ID, Moved: row.Created}))
	}
	before := b.sb.Head
	b.sb.Head = c.ID
	saved := m.saveLocked(b, event(journal.CommitMade, c.Author, committedFacts{
		Commit: c.ID, Parent: c.Parent, Message: cut(c.Message), Tag: o.Tag, Automatic: c.Automatic, Memory: c.Memory, Bytes: c.Bytes,
		FrozenUS: c.Frozen.Microseconds(), Layer: c.layer,
	}), writes...)
	b.mu.Unlock()
	if _, err := saved.Wait(); err != nil {
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.sb.Head == c.ID {
			b.sb.Head = before
		}
		return err
	}
	return nil
}

// profilesLike returns the profiles that a commit of a sandbox allows: those of its template, its own first.
func (m *Manager) profilesLike(ctx context.Context, s Spec) []string {
	own := string(s.Profile)
	all := []string{own}
	if t, err := m.template(ctx, s.Template); err == nil {
		for _, p := range t.Profiles {
			if p != own {
				all = append(all, p)
			}
		}
	}
	return all
}

// startingCommit finds the commit that a spec's template names, if it names one: by its id, or by a tag of
// the principal's. It fills into the spec what the commit has and the caller does not say, and returns the
// commit as a template.
func (m *Manager) startingCommit(ctx context.Context, p Principal, s *Spec) (rootfs.Template, error) {
	ref := s.Template
	var c Commit
	if s.from != nil {
		c, s.from = *s.from, nil
	} else {
		var ok bool
		var err error
		if c, ok, err = m.namedCommit(ctx, p, ref); err != nil || !ok {
			return rootfs.Template{}, err
		}
	}
	from := c.Spec
	s.Template, s.Commit, s.layer = from.Template, c.ID, c.layer
	s.Isolation = or(s.Isolation, from.Isolation)
	s.User, s.Dir, s.Service = or(s.User, from.User), or(s.Dir, from.Dir), or(s.Service, from.Service)
	s.Image = or(s.Image, from.Image)
	s.Record, s.FileChanges = or(s.Record, from.Record), or(s.FileChanges, from.FileChanges)
	s.Limits = fillLimits(s.Limits, from.Limits)
	if len(s.Workspaces) == 0 {
		s.Workspaces = slices.Clone(from.Workspaces)
	}
	kept, err := m.cfg.Roots.LayerEnv(c.layer)
	if err != nil {
		return rootfs.Template{}, err
	}
	env := make(map[string]string, len(kept)+len(s.Env))
	for k, v := range kept {
		env[k] = v
	}
	for k, v := range s.Env {
		env[k] = v
	}
	s.Env = env
	return rootfs.Template{Name: ref, Profiles: c.Profiles, Ready: true}, nil
}

// namedCommit finds the commit that a template's reference names; ok is false where it names none, so that
// it is a template's name. Templates that come with the server can't be hidden by a tag.
func (m *Manager) namedCommit(ctx context.Context, p Principal, ref string) (_ Commit, ok bool, err error) {
	if !strings.HasPrefix(ref, id.Commit) {
		if _, err := m.template(ctx, ref); !errs.Is(err, errs.NotFound) {
			return Commit{}, false, nil // whatever is wrong with it is told when it is used
		}
	}
	c, err := m.GetCommit(ctx, p, ref)
	if errs.Is(err, errs.NotFound) && !strings.HasPrefix(ref, id.Commit) {
		return Commit{}, false, nil
	}
	return c, err == nil, err
}

// startsFrom refuses what names nothing that a sandbox could start from.
func (m *Manager) startsFrom(ctx context.Context, p Principal, name string) error {
	if _, ok, err := m.namedCommit(ctx, p, name); ok || err != nil {
		return err
	}
	if _, err := m.template(ctx, name); errs.Is(err, errs.NotFound) {
		return err
	}
	return nil
}
