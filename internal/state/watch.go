package state

import (
	"context"
	"fmt"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/store"
)

// watchPage is how many versions a watch reads at once.
const watchPage = 200

// WatchQuery says which versions a watch sends.
type WatchQuery struct {
	Owner, Agent string
	// Name is the one document, or Prefix what names begin with; both empty: all of the agent's.
	Name, Prefix string
	// After is the revision after which it begins; AfterVersion, with Name, the document's version instead. Both 0:
	// from the beginning.
	After, AfterVersion uint64
	// Content also sends what the versions hold.
	Content bool
}

// Gap says that versions with revisions after From and up to To may be missing: they are no longer kept.
type Gap struct{ From, To uint64 }

// WatchSink takes what a watch sends, one call at a time.
type WatchSink interface {
	// Ready says that the watch stands: versions from now on will be sent.
	Ready() error
	// Version sends one version. To go on from it, watch after its Revision.
	Version(v Document) error
	// Gap comes before the versions that follow it.
	Gap(g Gap) error
}

// Watch sends versions in the order of their revisions, those that are there and those that come, until ctx ends or
// the sink fails, and returns that error. A slow sink holds nobody up and misses nothing. Kinds: InvalidArgument.
func (d *Documents) Watch(ctx context.Context, p sandbox.Principal, q WatchQuery, to WatchSink) error {
	own, err := scope(p, q.Owner, q.Agent, q.Prefix)
	if err == nil && q.Name != "" {
		err = checkName(q.Name)
	}
	if err != nil {
		return err
	}
	if q.Name != "" && q.Prefix != "" || q.AfterVersion != 0 && (q.Name == "" || q.After != 0) {
		return invalid("a watch has a name or a prefix, and goes on after a revision or, with a name, after a version")
	}
	q.Owner = own
	a, leave := d.enter(agentKey{own, q.Agent})
	defer leave()
	w := &watch{d: d, q: q, to: to, after: q.After}
	if err := w.start(ctx); err != nil {
		return err
	}
	if err := to.Ready(); err != nil {
		return err
	}
	for {
		changed := d.next(a) // before the read: what is written after it closes this
		if more, err := w.page(ctx); err != nil || more {
			if err != nil {
				return err
			}
			continue
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// watch is one that runs.
type watch struct {
	d     *Documents
	q     WatchQuery
	to    WatchSink
	after uint64 // the revision of what was sent last
	told  uint64 // up to where a gap was told
}

// start finds the revision to begin after.
func (w *watch) start(ctx context.Context) error {
	q, db := w.q, w.d.cfg.DB
	if q.AfterVersion == 0 {
		a, err := db.GetStateAgent(ctx, q.Owner, q.Agent)
		if err != nil {
			return fmt.Errorf("read agent: %w", err)
		}
		if q.After > a.Revision {
			return errs.New(errs.InvalidArgument, "agent %s is at revision %d, before %d", q.Agent, a.Revision, q.After).
				WithHint("list its documents: the answer has the revision to watch from")
		}
		return nil
	}
	rows, err := db.StateHistory(ctx, q.Owner, q.Agent, q.Name, q.AfterVersion+1, 1)
	if err != nil {
		return fmt.Errorf("read history: %w", err)
	}
	if len(rows) > 0 && rows[0].Version == q.AfterVersion {
		w.after = rows[0].Revision
		return nil
	}
	head, found, err := db.StateHead(ctx, q.Owner, q.Agent, q.Name)
	if err != nil {
		return fmt.Errorf("read document: %w", err)
	}
	if !found || head.Version < q.AfterVersion {
		return errs.New(errs.InvalidArgument, "document %s/%s is at version %d, before %d", q.Agent, q.Name, head.Version, q.AfterVersion)
	}
	return nil // it is no longer kept, and the first page tells so
}

// page sends what has been written, and reports whether there may be more.
func (w *watch) page(ctx context.Context) (more bool, err error) {
	q, db := w.q, w.d.cfg.DB
	rows, err := db.StateSince(ctx, q.Owner, q.Agent, q.Name, q.Prefix, w.after, watchPage)
	if err != nil {
		return false, fmt.Errorf("read versions: %w", err)
	}
	// After the rows: what was removed before they were read must be told before they are.
	a, err := db.GetStateAgent(ctx, q.Owner, q.Agent)
	if err != nil {
		return false, fmt.Errorf("read agent: %w", err)
	}
	if a.Removed > max(w.after, w.told) {
		w.told = a.Removed
		if err := w.to.Gap(Gap{w.after, a.Removed}); err != nil {
			return false, err
		}
	}
	for _, r := range rows {
		if err := w.send(ctx, r); err != nil {
			return false, err
		}
		w.after = r.Revision
	}
	return len(rows) == watchPage, nil
}

func (w *watch) send(ctx context.Context, r store.StateVersion) error {
	if w.q.Content && !r.Deleted {
		full, ok, err := w.d.cfg.DB.GetStateVersion(ctx, r.Owner, r.Agent, r.Name, r.Version)
		if err != nil {
			return fmt.Errorf("read document: %w", err)
		}
		if !ok { // removed since the page was read
			return w.to.Gap(Gap{r.Revision - 1, r.Revision})
		}
		r = full
	}
	return w.to.Version(ofRow(r))
}
