package sandbox

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	"casemate.dev/internal/journal"
	"casemate.dev/internal/rootfs"
	"casemate.dev/internal/store"
)

// body is what the store keeps of a sandbox beyond the columns that are searched by. Environment
// values are not among it: they may be secrets, and nothing needs them after the claim.
type body struct {
	Spec       Spec                     `json:"spec"`
	StartedAt  time.Time                `json:"started_at"`
	ExpiresAt  time.Time                `json:"expires_at"`
	LastActive time.Time                `json:"last_active"`
	EndReason  EndReason                `json:"end_reason,omitempty"`
	EndDetail  string                   `json:"end_detail,omitempty"`
	Applied    Applied                  `json:"applied"`
	Timings    map[string]time.Duration `json:"timings,omitempty"`
	FilesOnly  bool                     `json:"files_only,omitempty"`
	OnDisk     bool                     `json:"on_disk,omitempty"`
	Head       string                   `json:"head,omitempty"`
	// Checkout is the commit whose files are to take the place of the sandbox's; "": none. It is set only
	// while a checkout is under way.
	Checkout string `json:"checkout,omitempty"`
	// Plan and Record are what adopting it after a restart takes.
	Plan   rootfs.Plan     `json:"plan"`
	Record json.RawMessage `json:"record,omitempty"`
}

// rowLocked returns the box as the store keeps it.
func (b *box) rowLocked() (store.Sandbox, error) {
	s := b.sb
	b.body.Spec = s.Spec
	b.body.Spec.Labels, b.body.Spec.Env = nil, nil // a column; not kept
	b.body.StartedAt, b.body.ExpiresAt, b.body.LastActive = s.StartedAt, s.ExpiresAt, s.LastActive
	b.body.EndReason, b.body.EndDetail = s.EndReason, s.EndDetail
	b.body.Applied, b.body.Timings = s.Applied, s.Timings
	b.body.FilesOnly, b.body.OnDisk, b.body.Head = s.FilesOnly, s.OnDisk, s.Head
	text, err := json.Marshal(b.body)
	if err != nil {
		return store.Sandbox{}, fmt.Errorf("encode sandbox %s: %w", s.ID, err)
	}
	return store.Sandbox{
		ID: s.ID, State: string(s.State), Owner: s.Owner, Parent: s.Parent, Name: s.Spec.Name,
		Created: s.CreatedAt.UnixNano(), Ended: nanos(s.EndedAt), Labels: maps.Clone(s.Spec.Labels), Body: text,
	}, nil
}

func nanos(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

func timeOf(nanos int64) time.Time {
	if nanos == 0 {
		return time.Time{}
	}
	return time.Unix(0, nanos).UTC()
}

// ofRow is the inverse of rowLocked.
func ofRow(r store.Sandbox) (Sandbox, body, error) {
	var b body
	if err := json.Unmarshal(r.Body, &b); err != nil {
		return Sandbox{}, body{}, fmt.Errorf("decode sandbox %s: %w", r.ID, err)
	}
	s := Sandbox{
		ID: r.ID, State: State(r.State), Spec: b.Spec, Owner: r.Owner, Parent: r.Parent,
		CreatedAt: timeOf(r.Created), StartedAt: b.StartedAt, EndedAt: timeOf(r.Ended), ExpiresAt: b.ExpiresAt,
		LastActive: b.LastActive, EndReason: b.EndReason, EndDetail: b.EndDetail,
		Applied: b.Applied, Timings: b.Timings, FilesOnly: b.FilesOnly, OnDisk: b.OnDisk, Head: b.Head,
	}
	s.Spec.Name, s.Spec.Labels = r.Name, r.Labels
	return s, b, nil
}

// saveLocked records e and the box's row together. The caller waits for the answer without the lock.
func (m *Manager) saveLocked(b *box, e journal.Event, with ...store.Write) journal.Pending {
	row, err := b.rowLocked()
	if err != nil {
		return journal.Pending{Event: e, Done: func() error { return err }}
	}
	e.Sandbox = b.id
	return m.journal.Enqueue(e, append([]store.Write{store.PutSandbox(row)}, with...)...)
}

// becomeLocked changes the state: the only place where that happens. Preconditions: the change is
// legal, which the caller has checked, since only it knows what to say otherwise.
func (m *Manager) becomeLocked(b *box, to State, e journal.Event, with ...store.Write) journal.Pending {
	if !b.sb.State.CanBecome(to) {
		// Would be a fault of this package. Refusing it keeps the record true.
		err := &TransitionError{ID: b.id, From: b.sb.State, To: to}
		return journal.Pending{Event: e, Done: func() error { return err }}
	}
	b.sb.State = to
	if to == Stopped {
		m.counted.Ended.Add(b.sb.EndReason, 1)
	}
	if to != Running {
		b.down()
	} else {
		if b.up.Err() != nil {
			b.up, b.down = context.WithCancel(context.Background())
		}
		m.upLocked(b)
	}
	return m.saveLocked(b, e, with...)
}

// upLocked tells that a sandbox runs.
func (m *Manager) upLocked(b *box) {
	if m.cfg.Up == nil {
		return
	}
	up, s := b.up, b.snapshotLocked()
	m.background(func() {
		ctx, cancel := context.WithCancel(up)
		defer cancel()
		defer context.AfterFunc(m.ctx, cancel)()
		m.cfg.Up(ctx, s)
	})
}

// event returns an event of the server's own doing, or of p's asking.
func event(t journal.Type, actor string, facts any) journal.Event {
	return journal.Event{Type: t, Actor: or(actor, "server")}.With(journal.Server, facts)
}

// createdFacts are the server's facts of sandbox.created. Of the environment only the names.
//
//casemate:facts server sandbox.created
type createdFacts struct {
	Template   string            `json:"template"`
	Commit     string            `json:"commit,omitempty"`
	Isolation  string            `json:"isolation"`
	Profile    Profile           `json:"profile"`
	Limits     Limits            `json:"limits"`
	Name       string            `json:"name"`
	Owner      string            `json:"owner"`
	Parent     string            `json:"parent,omitempty"`
	Labels     map[string]string `json:"labels,omitempty"`
	Env        []string          `json:"env,omitempty"`
	User       string            `json:"user,omitempty"`
	Dir        string            `json:"dir,omitempty"`
	Lifetime   string            `json:"lifetime"`
	Idle       string            `json:"idle,omitempty"`
	Workspaces []string          `json:"workspaces,omitempty"` // targets
	Missing    []string          `json:"allow_missing,omitempty"`
	Network    *Network          `json:"network,omitempty"`
	Record     Recording         `json:"record"`
	Calls      *Calls            `json:"calls,omitempty"`
	// FileChanges is how much is recorded of the files that processes change.
	FileChanges FileChanges `json:"file_changes,omitempty"`
}

func factsOfSpec(sb Sandbox) createdFacts {
	s := sb.Spec
	f := createdFacts{
		Template: s.Template, Commit: s.Commit, Isolation: s.Isolation, Profile: s.Profile, Limits: s.Limits, Name: s.Name,
		Owner: sb.Owner, Parent: sb.Parent, Labels: s.Labels, User: s.User, Dir: s.Dir, Lifetime: "none",
		Env: slices.Sorted(maps.Keys(s.Env)), Missing: s.AllowMissing,
		Network: s.Network, Record: s.Record, Calls: s.Calls, FileChanges: s.FileChanges,
	}
	if s.Lifetime > 0 {
		f.Lifetime = s.Lifetime.String()
	}
	if s.Idle > 0 {
		f.Idle = s.Idle.String()
	}
	for _, w := range s.Workspaces {
		f.Workspaces = append(f.Workspaces, w.Target)
	}
	return f
}

// endFacts are the server's facts of sandbox.stopping and sandbox.ended.
//
//casemate:facts server sandbox.stopping sandbox.ended
type endFacts struct {
	Reason  EndReason `json:"reason"`
	Detail  string    `json:"detail,omitempty"`
	AfterMS int64     `json:"after_ms,omitempty"` // since its start
}

// updatedFacts are the server's facts of sandbox.updated: what was changed.
//
//casemate:facts server sandbox.updated
type updatedFacts struct {
	Labels   *map[string]string `json:"labels,omitempty"`
	Lifetime string             `json:"lifetime,omitempty"`
	Idle     string             `json:"idle,omitempty"`
	Limits   *Limits            `json:"limits,omitempty"`
	Network  *Network           `json:"network,omitempty"`
}
