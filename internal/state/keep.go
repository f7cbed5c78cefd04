package state

import (
	"context"
	"fmt"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/store"
)

// DefaultVersions is how many versions of a document are kept unless its agent's settings say otherwise.
const DefaultVersions = 1000

// deletedFor is how long a deleted document can still be read at its old versions.
const deletedFor = 30 * 24 * time.Hour

// sweepEvery is how often Run looks for what is too old.
const sweepEvery = 10 * time.Minute

// sweepPage is how many documents a sweep looks at in one query.
const sweepPage = 100

// Retention says how much of an agent's history is kept. The newest version of a document always is.
type Retention struct {
	// Versions is how many of each document are kept; 0: DefaultVersions, -1: all.
	Versions int
	// For is how long a version is kept that another has replaced; 0: for ever.
	For time.Duration
}

// Keep sets how much of an agent's history is kept. Fewer versions take effect with a document's next write,
// a shorter time within minutes. Kinds: InvalidArgument.
func (d *Documents) Keep(ctx context.Context, p sandbox.Principal, ownerID, agent string, r Retention) (Agent, error) {
	own, err := scope(p, ownerID, agent, "")
	if err != nil {
		return Agent{}, err
	}
	if r.Versions < -1 || r.For < 0 {
		return Agent{}, invalid("%d versions for %s can't be kept", r.Versions, r.For).WithHint("use 1 or more versions, 0 for the default or -1 for all, and a time of 0 or more")
	}
	//casemate:fact server document.kept owner text
	//casemate:fact server document.kept agent text
	//casemate:fact server document.kept versions number
	//casemate:fact server document.kept for text how long
	e := journal.Event{Sandbox: journal.ServerStream, Type: journal.DocumentsKept, Actor: p.ID}.With(journal.Server, map[string]any{
		"owner": own, "agent": agent, "versions": r.Versions, "for": r.For.String(),
	})
	if _, err := d.cfg.Journal.Record(ctx, e, store.KeepState(own, agent, int64(r.Versions), int64(r.For))); err != nil {
		return Agent{}, fmt.Errorf("store settings: %w", err)
	}
	row, err := d.cfg.DB.GetStateAgent(ctx, own, agent)
	return ofAgentRow(row), err
}

// keepVersions is how many versions of each document an agent's settings keep; 0: all.
func keepVersions(a store.StateAgent) uint64 {
	switch {
	case a.KeepVersions < 0:
		return 0
	case a.KeepVersions == 0:
		return DefaultVersions
	}
	return uint64(a.KeepVersions)
}

// Run removes what is too old, until ctx ends.
func (d *Documents) Run(ctx context.Context) {
	for {
		if err := d.sweep(ctx); err != nil && ctx.Err() == nil {
			d.cfg.Log.Warn("cannot remove old versions of documents", "error", err)
		}
		again := make(chan struct{})
		t := d.cfg.Clock.AfterFunc(sweepEvery, func() { close(again) })
		select {
		case <-again:
		case <-ctx.Done():
			t.Stop()
			return
		}
	}
}

// sweep removes versions that are older than their agent's settings allow, and documents that were deleted long
// ago.
func (d *Documents) sweep(ctx context.Context) error {
	for {
		rows, err := d.cfg.DB.StateOutdated(ctx, d.cfg.Clock.Now().UnixNano(), sweepPage)
		if err != nil {
			return fmt.Errorf("find old versions: %w", err)
		}
		var writes []store.Write
		last := Ref{}
		for _, r := range rows { // the newest of each document comes first
			if ref := (Ref{r.Owner, r.Agent, r.Name}); ref != last {
				last = ref
				writes = append(writes, store.DropStateVersions(r.Owner, r.Agent, r.Name, r.Version))
			}
		}
		if len(writes) == 0 {
			break
		}
		if err := d.cfg.DB.Write(writes...); err != nil {
			return fmt.Errorf("drop old versions: %w", err)
		}
	}
	for {
		rows, err := d.cfg.DB.StateDeleted(ctx, d.cfg.Clock.Now().Add(-deletedFor).UnixNano(), sweepPage)
		if err != nil {
			return fmt.Errorf("find deleted documents: %w", err)
		}
		for _, r := range rows {
			if err := d.forgetDeleted(ctx, r); err != nil {
				return err
			}
		}
		if len(rows) < sweepPage {
			return nil
		}
	}
}

// forgetDeleted forgets a document unless somebody has written it anew.
func (d *Documents) forgetDeleted(ctx context.Context, r store.StateVersion) error {
	expect := r.Version
	admin := sandbox.Principal{ID: "server", Admin: true}
	_, err := d.Forget(ctx, admin, DeleteRequest{Ref: Ref{r.Owner, r.Agent, r.Name}, Expect: &expect})
	if errs.Is(err, errs.Conflict) || errs.Is(err, errs.NotFound) {
		return nil
	}
	return err
}
