package journal

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"casemate.dev/internal/clock"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal/tree"
	"casemate.dev/internal/store"
)

// The bounds of what the log keeps in memory.
const (
	// maxHeads is how many sandboxes' counters are kept; others are read again when needed.
	maxHeads = 4096
	// maxBacklog is how many events wait for a disk that refuses them.
	maxBacklog = 4096
	// retryEvery is how long a disk that refuses them is left alone, once so many wait.
	retryEvery = time.Second
	// pageSize is how many events are read at once.
	pageSize = 1000
)

// Options shape a Log.
type Options struct {
	// Strict flushes events that somebody waits for to disk before they count as recorded.
	Strict bool
	// Clock defaults to the system's.
	Clock clock.Clock
	// Log hears about faults that no caller can be told; nil: nobody.
	Log *slog.Logger
}

// Log is the Recorder on package store.
//
// Counters are dense: an event whose writes fail leaves a Gap event in its place that says what is
// missing and why. Where not even that can be written, it waits and goes in front of the next event.
//
// Where it has a tree (OpenSigned), each event becomes a leaf of it as soon as it survives the death of
// this process, those of a sandbox in the order of their counters.
type Log struct {
	db     *store.DB
	strict bool
	clock  clock.Clock
	log    *slog.Logger
	tree   *tree.Tree // nil: events are kept without proofs
	active *active    // nil as well
	key    Key

	// unscrubbed says that something erased may still lie in the database's files.
	unscrubbed atomic.Bool
	// stopped ends the loop that erases old bodies, loop waits for it.
	stopped chan struct{}
	loop    sync.WaitGroup

	// mu guards the fields below. It is held while an event is queued, so that counters and the order
	// of the queue agree.
	mu      sync.Mutex
	heads   map[string]*head
	backlog []late // gaps and posted events that the disk refused, by age
	// retrying is how many of them are on their way to the disk again; retried is when a full backlog was last.
	retrying int
	retried  time.Time
	// dropped counts the events that found no place at all, by stream, until a gap there tells of them.
	dropped map[string]int
	// recorded and gaps count events since the log was opened.
	recorded, gaps uint64
	// posted are events that lie in the spool's next frame: they survive with the next spooled one.
	posted []*entry
	closed bool
}

// entry is an event on its way into the tree.
type entry struct {
	row   store.Event
	ready bool // it survives the death of this process
}

// head is the newest end of one sandbox's events.
type head struct {
	seq       uint64        // of the last event that has a place
	line      []*entry      // those that are not in the tree yet, by counter
	queued    int           // events not yet committed
	slow      int           // those among them that a later spooled event would not imply
	followers int           // Follow calls
	grown     chan struct{} // closed and replaced when events were committed
}

var _ Recorder = (*Log)(nil)

// Open returns the journal in db, without proofs. It holds nothing that needs closing; it ends with db.
func Open(db *store.DB, o Options) *Log {
	if o.Clock == nil {
		o.Clock = clock.New()
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return &Log{db: db, strict: o.Strict, clock: o.Clock, log: o.Log, stopped: make(chan struct{}), heads: make(map[string]*head), dropped: make(map[string]int)}
}

// Record implements Recorder.
func (l *Log) Record(_ context.Context, e Event, with ...store.Write) (Event, error) {
	return l.Enqueue(e, with...).Wait()
}

// Enqueue implements Recorder.
func (l *Log) Enqueue(e Event, with ...store.Write) Pending {
	return l.enqueue(e, func(e Event) Event { return gap(e, "could not be written") }, true, with)
}

// Post implements Recorder. If its writes fail, the event is kept without them.
func (l *Log) Post(e Event, with ...store.Write) Event {
	return l.enqueue(e, func(e Event) Event { return e }, false, with).Event
}

// enqueue places e; what instead makes of it takes its counter if it can't be written. An event that somebody waits
// for survives the death of this process from here on, where that is possible: not while an earlier
// event of the sandbox still waits for the database, since a kill would then leave a hole.
func (l *Log) enqueue(e Event, instead func(Event) Event, waited bool, with []store.Write) Pending {
	facts := encode(e.Facts)
	l.mu.Lock()
	defer l.mu.Unlock()
	h, err := l.placeLocked(e.Sandbox)
	if err != nil {
		l.dropLocked(e.Sandbox)
		return failed(e, err)
	}
	if l.dropped[e.Sandbox] > 0 {
		l.tellLocked(h, e.Sandbox)
	}
	return l.queueLocked(h, e, facts, instead, waited, with)
}

// placeLocked returns the head of a stream that the next event of it can be put behind. Where the disk refuses, it can't.
func (l *Log) placeLocked(stream string) (*head, error) {
	h, err := l.headLocked(stream)
	switch {
	case err != nil:
		return nil, err
	case l.closed:
		return nil, errs.New(errs.Unavailable, "cannot record what happens: the journal is closed")
	case len(l.backlog)+l.retrying >= maxBacklog:
		if now := l.clock.Now(); l.retrying == 0 && now.Sub(l.retried) >= retryEvery {
			l.retried = now
			l.flushBacklogLocked() // it may have become able to
		}
		return nil, errs.New(errs.Unavailable, "cannot record what happens: too much waits for the disk already")
	}
	l.flushBacklogLocked()
	return h, nil
}

// dropLocked takes note of an event that found no place.
func (l *Log) dropLocked(stream string) {
	if _, ok := l.dropped[stream]; !ok && len(l.dropped) >= maxHeads {
		stream = ServerStream
	}
	l.dropped[stream]++
}

// tellLocked records how many events of a stream found no place.
func (l *Log) tellLocked(h *head, stream string) {
	n := l.dropped[stream]
	delete(l.dropped, stream)
	e := Event{Sandbox: stream, Type: Gap, Actor: "server"}.With(Server, gapFacts{Reason: "there was no place for it", Dropped: n})
	l.queueLocked(h, e, encode(e.Facts), func(e Event) Event { return e }, false, nil)
}

// tellDropped records, in each stream where events found no place, how many.
func (l *Log) tellDropped() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for stream := range l.dropped {
		h, err := l.placeLocked(stream)
		if err != nil {
			return // the disk refuses still
		}
		l.tellLocked(h, stream)
	}
}

// queueLocked gives an event its counter and its place.
func (l *Log) queueLocked(h *head, e Event, facts []byte, instead func(Event) Event, waited bool, with []store.Write) Pending {
	if e.Time.IsZero() {
		e.Time = l.clock.Now()
	}
	h.seq++
	h.queued++
	l.recorded++
	if e.Type == Gap {
		l.gaps++
	}
	e.Seq = h.seq
	stand := func() Event {
		other := instead(e)
		other.Seq, other.Time = e.Seq, e.Time
		return other
	}
	place := placed{sandbox: e.Sandbox, entry: &entry{row: row(e, facts)}} // guarded by l.mu
	h.line = append(h.line, place.entry)
	writes := append([]store.Write{store.AddEvent(place.entry.row)}, e.bodyWrites()...)
	p := l.db.Queue(store.Change{
		Writes:  append(writes, with...),
		Instead: func() []store.Write { return []store.Write{add(stand())} },
		Synced:  waited && l.strict,
		Spool:   waited && !l.strict && h.slow == 0,
		After:   func(err, insteadErr error) { l.settled(&place, stand, err, insteadErr) },
	})
	if place.slow = !p.InOrder(); place.slow {
		h.slow++
	}
	switch {
	case p.Spooled():
		place.event = &e // it has happened, and no gap may take its place
		before := l.posted
		l.posted = nil
		for _, earlier := range before {
			l.readyLocked(earlier)
		}
		l.readyLocked(place.entry)
	case p.InOrder() && !waited:
		l.posted = append(l.posted, place.entry)
	}
	l.db.Kick() // what is spooled, nobody waits for
	return Pending{Event: e, Done: p.Wait}
}

// placed is how a queued event got its place.
type placed struct {
	sandbox string
	slow    bool   // a later spooled event would not imply it
	event   *Event // where it is spooled
	entry   *entry
}

// late is an event that the disk has refused so far.
type late struct {
	Event
	entry *entry
}

func failed(e Event, err error) Pending {
	return Pending{Event: e, Done: func() error { return err }}
}

// gap is the event that takes e's place.
func gap(e Event, why string) Event {
	g := Event{Sandbox: e.Sandbox, Type: Gap, Actor: "server", Process: e.Process}
	return g.With(Server, map[string]any{"missing": e.Type, "reason": why})
}

func row(e Event, facts []byte) store.Event {
	return store.Event{
		Sandbox: e.Sandbox, Seq: e.Seq, Time: e.Time.UnixNano(), Type: string(e.Type),
		Actor: e.Actor, Process: e.Process, Facts: facts,
	}
}

// add is the write of an event alone.
func add(e Event) store.Write { return store.AddEvent(row(e, encode(e.Facts))) }

// encode returns facts as the store and the leaf hold them.
func encode(facts map[Observer]json.RawMessage) []byte {
	b, err := canonicalFacts(facts)
	if err != nil {
		text := appendString([]byte(`{"server":{"unrecordable":`), err.Error())
		return append(text, "}}"...)
	}
	return b
}

// headLocked returns a sandbox's newest end, and reads its counter where it is not in memory.
func (l *Log) headLocked(sandbox string) (*head, error) {
	if h, ok := l.heads[sandbox]; ok {
		return h, nil
	}
	seq, err := l.db.LastEvent(context.Background(), sandbox)
	if err != nil {
		return nil, fmt.Errorf("read last event: %w", err)
	}
	if l.tree != nil {
		if !tree.ValidStream(sandbox) {
			return nil, errs.New(errs.InvalidArgument, "cannot record events of %q", sandbox)
		}
		if err := l.active.add(sandbox, seq); err != nil {
			return nil, err
		}
	}
	if len(l.heads) >= maxHeads {
		for s, h := range l.heads {
			if h.queued == 0 && h.followers == 0 {
				delete(l.heads, s)
			}
			if len(l.heads) < maxHeads*3/4 {
				break
			}
		}
	}
	h := &head{seq: seq}
	l.heads[sandbox] = h
	return h, nil
}

// settled takes note of what became of an event, whose counter stand may take.
func (l *Log) settled(place *placed, stand func() Event, err, insteadErr error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.heads[place.sandbox] // never dropped while something is queued
	if err != nil && insteadErr != nil {
		// It stays queued, and in the way of spooled events: its counter is not in the store.
		if !place.slow {
			h.slow++
		}
		if place.event != nil {
			stand = func() Event { return *place.event }
		}
		other := stand()
		l.countGapLocked(other, place.entry)
		l.backlog = append(l.backlog, late{other, place.entry})
		l.posted = slices.DeleteFunc(l.posted, func(e *entry) bool { return e == place.entry }) // it is in no frame
		return
	}
	if err != nil && place.event == nil { // else it is spooled, and in the tree
		other := stand()
		l.countGapLocked(other, place.entry)
		place.entry.row = row(other, encode(other.Facts))
	}
	l.readyLocked(place.entry)
	h.queued--
	if place.slow {
		h.slow--
	}
	h.wake()
}

// countGapLocked counts an event that stands for that of the entry; a gap that stands for itself is counted already.
func (l *Log) countGapLocked(other Event, e *entry) {
	if other.Type == Gap && e.row.Type != string(Gap) {
		l.gaps++
	}
}

// readyLocked takes note that an event survives the death of this process, and puts it into the tree once
// all before it of its sandbox are there.
func (l *Log) readyLocked(e *entry) {
	e.ready = true
	h := l.heads[e.row.Sandbox]
	done := 0
	for done < len(h.line) && h.line[done].ready {
		if l.tree != nil {
			r := h.line[done].row
			l.tree.Append(r.Sandbox, r.Seq, line(r))
		}
		done++
	}
	if h.line = h.line[done:]; len(h.line) == 0 {
		h.line = nil
	}
	done = 0
	for done < len(l.posted) && l.posted[done].ready {
		done++
	}
	l.posted = l.posted[done:]
}

func (h *head) wake() {
	if h.followers > 0 {
		close(h.grown)
		h.grown = make(chan struct{})
	}
}

// flushBacklogLocked puts what the disk refused before in line again, in front of new events.
func (l *Log) flushBacklogLocked() {
	if len(l.backlog) == 0 {
		return
	}
	back := l.backlog
	l.backlog = nil
	l.retrying += len(back)
	var writes []store.Write
	for _, e := range back {
		writes = append(append(writes, add(e.Event)), e.bodyWrites()...)
		if !e.entry.ready { // else it was spooled, and is in the tree as it was
			e.entry.row = row(e.Event, encode(e.Facts))
		}
	}
	l.db.Queue(store.Change{Writes: writes, After: func(err, _ error) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.retrying -= len(back)
		if err != nil {
			l.backlog = append(back, l.backlog...)
			return
		}
		for _, e := range back {
			l.readyLocked(e.entry)
			h := l.heads[e.Sandbox]
			h.queued--
			h.slow--
			h.wake()
		}
	}})
	l.db.Kick()
}

// Events implements Recorder.
func (l *Log) Events(ctx context.Context, sandbox string, after uint64, limit int) ([]Event, error) {
	// What was posted counts as having happened, so it must be seen. A failure to write it is told to
	// whoever waits for it; what is there is shown.
	_ = l.db.Flush()
	return l.read(ctx, sandbox, after, limit)
}

func (l *Log) read(ctx context.Context, sandbox string, after uint64, limit int) ([]Event, error) {
	if limit <= 0 {
		limit = pageSize
	}
	all, err := ofRows(l.db.EventsAfter(ctx, sandbox, after, limit))
	if err != nil {
		return nil, err
	}
	return all, l.addBodies(ctx, all)
}

// EventsOf implements Recorder.
func (l *Log) EventsOf(ctx context.Context, sandbox string, types []string, after uint64, limit int) ([]Event, error) {
	_ = l.db.Flush() // as in Events
	return ofRows(l.db.EventsOfTypes(ctx, sandbox, types, after, limit))
}

func ofRows(rows []store.Event, err error) ([]Event, error) {
	if err != nil {
		return nil, fmt.Errorf("read events: %w", err)
	}
	all := make([]Event, len(rows))
	for i, r := range rows {
		if all[i], err = ofRow(r); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// smallBody is the length up to which bodies come with their events, if they are among what tells what was done.
const smallBody = 16 << 10

// addBodies gives events of one sandbox, in order, the arguments and the code that they speak of, where these are small.
func (l *Log) addBodies(ctx context.Context, events []Event) error {
	if len(events) == 0 || !slices.ContainsFunc(events, func(e Event) bool { return e.speaks() }) {
		return nil
	}
	first := events[0]
	bodies, err := l.db.BodiesOf(ctx, first.Sandbox, first.Seq, events[len(events)-1].Seq, smallBody,
		"server.argv", "guest.argv", "kernel.argv", "server.code")
	if err != nil {
		return fmt.Errorf("read bodies: %w", err)
	}
	at := 0
	for _, b := range bodies {
		for at < len(events) && events[at].Seq < b.Seq {
			at++
		}
		if at == len(events) || events[at].Seq != b.Seq {
			continue // of an event that is lost
		}
		by, name, _ := strings.Cut(b.Name, ".")
		events[at].Bodies = append(events[at].Bodies, Body{By: Observer(by), Name: name, Size: b.Size, Data: b.Data, Salt: b.Salt})
	}
	return nil
}

// speaks reports whether an event may speak of a body.
func (e Event) speaks() bool {
	for _, f := range e.Facts {
		if bytes.Contains(f, []byte(`"body":`)) {
			return true
		}
	}
	return false
}

func ofRow(r store.Event) (Event, error) {
	e := Event{
		Sandbox: r.Sandbox, Seq: r.Seq, Time: time.Unix(0, r.Time).UTC(),
		Type: Type(r.Type), Actor: r.Actor, Process: r.Process,
	}
	if err := json.Unmarshal(r.Facts, &e.Facts); err != nil {
		return Event{}, fmt.Errorf("decode event %s/%d: %w", r.Sandbox, r.Seq, err)
	}
	return e, nil
}

// Follow implements Recorder. It is told of new events, and never polls.
func (l *Log) Follow(ctx context.Context, sandbox string, after uint64, send func(Event) error) error {
	h, err := l.follow(sandbox)
	if err != nil {
		return err
	}
	defer func() {
		l.mu.Lock()
		h.followers--
		l.mu.Unlock()
	}()
	_ = l.db.Flush() // as in Events
	for {
		// The channel first: what is committed after the read closes it.
		l.mu.Lock()
		grown := h.grown
		l.mu.Unlock()
		page, err := l.read(ctx, sandbox, after, pageSize)
		if err != nil {
			return errors.Join(ctx.Err(), err)
		}
		for _, e := range page {
			if err := send(e); err != nil {
				return err
			}
			after = e.Seq
		}
		if len(page) > 0 {
			continue
		}
		select {
		case <-grown:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (l *Log) follow(sandbox string) (*head, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	h, err := l.headLocked(sandbox)
	if err != nil {
		return nil, err
	}
	if h.followers == 0 {
		h.grown = make(chan struct{})
	}
	h.followers++
	return h, nil
}
