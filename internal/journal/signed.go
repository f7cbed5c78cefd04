package journal

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal/tree"
	"casemate.dev/internal/store"
)

// SignedOptions say where the proofs of a Log lie.
type SignedOptions struct {
	Options
	// Dir is the directory of the Merkle log.
	Dir string
	// Key signs checkpoints.
	Key Key
	// PublishEvery is tree.Config's.
	PublishEvery time.Duration
	// Keep bounds the bodies that are kept.
	Keep Keep
}

// logName is the directory of the tree in Dir.
const logName = "log"

// OpenSigned returns the journal in db, each event of which is a leaf of a Merkle log. What an earlier
// process left is brought in order: events that survived its death and are not in the log yet are put
// there, and what may be missing is recorded as a gap. A data directory without a log gets one, with the
// events that it holds.
//
// FailedPrecondition: the log was cut or changed.
func OpenSigned(ctx context.Context, db *store.DB, o SignedOptions) (_ *Log, err error) {
	l := Open(db, o.Options)
	l.key = o.Key
	l.tree, err = tree.Open(tree.Config{
		Dir: filepath.Join(o.Dir, logName), Signer: o.Key.signer, Verifier: o.Key.verifier,
		PublishEvery: o.PublishEvery, Log: l.log,
	})
	if err != nil {
		return nil, fmt.Errorf("open the journal's log: %w", err)
	}
	l.tell(l.tree.Opened())
	r := recovery{l: l, ctx: ctx, dir: o.Dir}
	if err := r.run(); err != nil {
		_ = l.tree.Close() // which publishes, at worst, what is true
		return nil, fmt.Errorf("recover the journal: %w", err)
	}
	l.scrub() // an earlier server may have been killed before it came to that
	l.loop.Go(func() { l.expireLoop(o.Keep) })
	return l, nil
}

// tell logs what an operator should know of how the log was found.
func (l *Log) tell(found tree.Opened) {
	if found.OtherKey {
		l.log.Warn("the journal's last checkpoint is not signed with its key: unless the key was replaced, the log was changed", "entries", found.Size)
	}
	if found.Rebuilt {
		l.log.Warn("the journal's tiles were missing or damaged, and were made of its leaves again", "entries", found.Size)
	}
	if found.Torn > 0 {
		l.log.Info("the end of the journal's log was no whole entry, and was cut off", "bytes", found.Torn)
	}
}

// Close puts everything into the log and publishes it; later events are refused. Without proofs there is
// nothing to close. Call it before the store is closed.
func (l *Log) Close() error {
	l.tellDropped()
	l.mu.Lock()
	over := l.closed
	l.closed = true
	l.mu.Unlock()
	if over {
		return nil
	}
	close(l.stopped)
	l.loop.Wait()
	if l.tree == nil {
		return nil
	}
	_ = l.db.Flush() // what failed is told to whoever waits for it, and has a gap in its place
	l.mu.Lock()
	rest := len(l.backlog)
	for _, h := range l.heads {
		rest += len(h.line)
	}
	l.mu.Unlock()
	size := l.tree.Size()
	err := errors.Join(l.tree.Close(), l.active.close())
	if err != nil || rest > 0 { // the next start finds out
		return err
	}
	a, err := beginActive(filepath.Dir(l.active.path), size, "closed")
	if err != nil {
		return err
	}
	return a.close()
}

// Checkpoint returns a signed checkpoint of the log that covers every event which was recorded before. It
// survives the death of this process: no later log of this server contradicts it. Unsupported: the
// journal is kept without proofs.
func (l *Log) Checkpoint() ([]byte, error) {
	if l.tree == nil {
		return nil, errs.New(errs.Unsupported, "this journal is kept without proofs")
	}
	return l.tree.Checkpoint()
}

// recovery brings the tree up to what the store holds.
type recovery struct {
	l   *Log
	ctx context.Context //nolint:containedctx // of one call
	dir string
	old *activeState

	logged map[string]uint64 // the last counter in the tree, of streams that matter
	lost   map[string]uint64 // streams whose newest events are in the tree and not in the store, and their last counter
	added  int
}

func (r *recovery) run() (err error) {
	if r.old, err = readActive(r.dir); err != nil {
		return err
	}
	fresh := r.old == nil && r.l.tree.Size() == 0
	crash := r.old != nil && !r.old.closed
	otherBoot := crash && r.old.boot != bootID()
	switch {
	case r.old == nil || otherBoot:
		// Nothing to rely on: look at every stream.
		r.old, err = r.everything()
	case r.old.closed && r.old.base == r.l.tree.Size():
		r.old.streams = nil
	}
	if err != nil {
		return err
	}
	if err := r.catchUp(); err != nil {
		return err
	}
	if err := r.l.tree.Sync(); err != nil {
		return err
	}
	if r.l.active, err = beginActive(r.dir, r.l.tree.Size(), "open"); err != nil {
		return err
	}
	switch {
	case fresh:
		_, err := r.l.Record(r.ctx, Event{Sandbox: ServerStream, Type: JournalBegun, Actor: "server"}.With(Server, begunFacts{Imported: r.l.tree.Size()}))
		return err
	case crash:
		return r.gaps(otherBoot)
	}
	return nil
}

// begunFacts are the server's facts of journal.begun.
//
//casemate:facts server journal.begun
type begunFacts struct {
	// Imported is how many events were there before the log: it proves them from now on only.
	Imported int64 `json:"imported,omitempty"`
}

// everything returns a state as if every stream of the store had been used, and nothing of them logged.
func (r *recovery) everything() (*activeState, error) {
	names, err := r.l.db.EventStreams(r.ctx)
	if err != nil {
		return nil, fmt.Errorf("read streams: %w", err)
	}
	s := &activeState{streams: make(map[string]uint64, len(names))}
	for _, name := range names {
		s.streams[name] = 0
	}
	return s, nil
}

// catchUp puts into the tree what survived and is not there yet.
func (r *recovery) catchUp() error {
	r.logged = maps.Clone(r.old.streams)
	if r.logged == nil {
		r.logged = make(map[string]uint64)
	}
	view, err := r.l.tree.View()
	if err != nil {
		return err
	}
	if r.old.base > view.Head.Size {
		return errs.New(errs.FailedPrecondition, "the journal's log was cut: it had %d entries when the server started last, and has %d", r.old.base, view.Head.Size)
	}
	if err := view.Records(r.old.base, func(_ int64, rec tree.Record) bool {
		r.logged[rec.Stream] = max(r.logged[rec.Stream], rec.Seq)
		return true
	}); err != nil {
		return err
	}
	r.lost = make(map[string]uint64)
	for _, stream := range slices.Sorted(maps.Keys(r.logged)) {
		if err := r.catchUpStream(stream, r.logged[stream]); err != nil {
			return fmt.Errorf("events of %s: %w", stream, err)
		}
	}
	return nil
}

// catchUpStream does that for the events of one stream with counters above after. One that is missing
// between others, as a kill can leave it, gets a gap in its place.
func (r *recovery) catchUpStream(stream string, after uint64) error {
	last, err := r.l.db.LastEvent(r.ctx, stream)
	if err != nil {
		return err
	}
	if last < after {
		r.lost[stream] = after
		return nil
	}
	for next := after + 1; next <= last; {
		rows, err := r.l.db.EventsAfter(r.ctx, stream, next-1, pageSize)
		if err != nil {
			return err
		}
		if len(rows) == 0 {
			return nil
		}
		for _, row := range rows {
			for ; next < row.Seq; next++ {
				if err := r.fill(stream, next, row.Time); err != nil {
					return err
				}
			}
			if err := r.append(row); err != nil {
				return err
			}
			next++
		}
	}
	return nil
}

// append puts an event of the store into the tree. Its facts may be older than the canonical form.
func (r *recovery) append(row store.Event) error {
	e, err := ofRow(row)
	if err != nil {
		return err
	}
	row.Facts = encode(e.Facts)
	r.l.tree.Append(row.Sandbox, row.Seq, line(row))
	r.added++
	return nil
}

// fill records a gap in the place of an event that is missing.
func (r *recovery) fill(stream string, seq uint64, at int64) error {
	e := Event{Sandbox: stream, Seq: seq, Time: time.Unix(0, at).UTC(), Type: Gap, Actor: "server"}.
		With(Server, gapFacts{Reason: "the server was killed before it was recorded"})
	if err := r.l.db.Write(add(e)); err != nil {
		return err
	}
	return r.append(row(e, encode(e.Facts)))
}

// gapFacts are the server's facts of a gap.
//
//casemate:facts server gap
type gapFacts struct {
	Missing Type   `json:"missing,omitempty"` // the type of the one event that is missing, where that is known
	Reason  string `json:"reason"`
	// From and To are the counters of events that are proved to have been and are lost.
	From uint64 `json:"from,omitempty"`
	To   uint64 `json:"to,omitempty"`
	// Dropped is how many events found no place before this one: the disk refused, and too many waited for it already.
	Dropped int `json:"dropped,omitempty"`
	// WindowMS says that events which nobody was told of may be missing in this time before the end of what
	// was recorded.
	WindowMS int64 `json:"window_ms,omitempty"`
}

// The times in which a server that dies can have seen what it had not recorded. Posted events reach the
// kernel with the next event that somebody waits for, or within the store's FlushEvery; the disk within
// SyncEvery more.
const (
	killWindow  = 25 * time.Millisecond
	powerWindow = 50 * time.Millisecond
)

// gaps records, where a stream may lack its newest events, that it does.
func (r *recovery) gaps(power bool) error {
	reason, window := "the server was killed", killWindow
	if power {
		reason, window = "the machine stopped without warning", powerWindow
	}
	for _, stream := range slices.Sorted(maps.Keys(r.logged)) {
		f := gapFacts{Reason: reason, WindowMS: window.Milliseconds()}
		if to, ok := r.lost[stream]; ok {
			last, err := r.l.db.LastEvent(r.ctx, stream)
			if err != nil {
				return err
			}
			f.From, f.To = last+1, to
			r.l.resume(stream, to)
		} else if over, err := r.over(stream); err != nil {
			return err
		} else if over {
			continue
		}
		r.l.Post(Event{Sandbox: stream, Type: Gap, Actor: "server"}.With(Server, f))
	}
	_ = r.l.db.Flush() // as in Close
	return nil
}

// over reports whether nothing more can have happened in a stream.
func (r *recovery) over(stream string) (bool, error) {
	last, err := r.l.db.LastEvent(r.ctx, stream)
	if err != nil || last == 0 {
		return true, err
	}
	rows, err := r.l.db.EventsAfter(r.ctx, stream, last-1, 1)
	return err == nil && len(rows) == 1 && rows[0].Type == string(SandboxEnded), err
}

// resume makes the next event of a stream the one after seq.
func (l *Log) resume(stream string, seq uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if h, err := l.headLocked(stream); err == nil {
		h.seq = max(h.seq, seq)
	}
}
