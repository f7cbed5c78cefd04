package journal

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/store"
)

// redactedFacts are the server's facts of body.redacted.
//
//casemate:facts server body.redacted
type redactedFacts struct {
	Event  uint64   `json:"event"` // its counter
	Names  []string `json:"names"` // observer and fact of each body
	Reason string   `json:"reason,omitempty"`
}

// Redaction says what is to be erased.
type Redaction struct {
	Sandbox string
	Event   uint64 // its counter
	// Names are observer and fact of bodies, as "guest.stdout"; none: all that are there.
	Names  []string
	Actor  string
	Reason string
}

// Redact erases content that an event speaks of, from the database and from the files that it lay in, and records that
// as an event, which it returns. No proof is harmed: the log holds a hash of the content behind a salt, which is erased
// with it. also, unless it is nil, is asked what else is to be written, for an event of that process and the names of
// what is erased. NotFound: there is no such event or content.
func (l *Log) Redact(ctx context.Context, r Redaction, also func(process string, names []string) []store.Write) (Event, error) {
	bodies, process, err := l.toRedact(ctx, r)
	if err != nil {
		return Event{}, err
	}
	f := redactedFacts{Event: r.Event, Reason: r.Reason}
	var with []store.Write
	for _, b := range bodies {
		f.Names = append(f.Names, b.Name)
		with = append(with, store.EraseBody(b.Sandbox, b.Seq, b.Name))
	}
	if also != nil {
		with = append(with, also(process, f.Names)...)
	}
	e, err := l.Record(ctx, Event{Sandbox: r.Sandbox, Type: BodyRedacted, Actor: r.Actor, Process: process}.With(Server, f), with...)
	if err != nil {
		return Event{}, err
	}
	l.scrub()
	return e, nil
}

// scrub sees to it that what was erased is gone from the database's files too; where that can't be now, soon.
func (l *Log) scrub() {
	if err := l.db.Scrub(); err != nil {
		l.unscrubbed.Store(true)
		l.log.Warn("what was erased may still lie in the database's files; this is tried again", "error", err)
	}
}

// toRedact finds the bodies that are to be erased, and the process that the event is about.
func (l *Log) toRedact(ctx context.Context, r Redaction) (found []store.Body, process string, err error) {
	_ = l.db.Flush() // as in Events
	if r.Event == 0 {
		return nil, "", errs.New(errs.InvalidArgument, "no event is named").WithHint("casemate journal shows their numbers")
	}
	rows, err := l.db.EventsAfter(ctx, r.Sandbox, r.Event-1, 1)
	if err != nil {
		return nil, "", fmt.Errorf("read event: %w", err)
	}
	if len(rows) == 0 || rows[0].Seq != r.Event {
		return nil, "", errs.New(errs.NotFound, "there is no event %d", r.Event).WithHint("casemate journal shows their numbers")
	}
	all, err := l.db.BodiesOf(ctx, r.Sandbox, r.Event, r.Event, 0)
	if err != nil {
		return nil, "", fmt.Errorf("read bodies: %w", err)
	}
	if len(all) == 0 {
		return nil, "", errs.New(errs.NotFound, "event %d speaks of no content, or it was erased before", r.Event)
	}
	names := make([]string, len(all))
	for i, b := range all {
		names[i] = b.Name
	}
	for _, n := range r.Names {
		if !slices.Contains(names, n) {
			return nil, "", errs.New(errs.NotFound, "event %d has no %s", r.Event, n).WithHint("it has %s", strings.Join(names, ", "))
		}
	}
	if len(r.Names) > 0 {
		all = slices.DeleteFunc(all, func(b store.Body) bool { return !slices.Contains(r.Names, b.Name) })
	}
	return all, rows[0].Process, nil
}

// ReadBody returns content that an event speaks of, as far as it is kept; with its name as "guest.stdout".
// NotFound: there is none, it was erased, or it was never kept.
func (l *Log) ReadBody(ctx context.Context, sandbox string, event uint64, name string) (Body, error) {
	_ = l.db.Flush() // as in Events
	all, err := l.db.BodiesOf(ctx, sandbox, event, event, MaxBody, name)
	if err != nil {
		return Body{}, fmt.Errorf("read body: %w", err)
	}
	if len(all) == 0 {
		return Body{}, errs.New(errs.NotFound, "event %d has no %s: it speaks of none, or it was erased", event, name)
	}
	by, fact, _ := strings.Cut(name, ".")
	b := Body{By: Observer(by), Name: fact, Size: all[0].Size, Data: all[0].Data, Salt: all[0].Salt}
	if int64(len(b.Data)) < b.Size {
		b.Tail = MaxBody / 2
	}
	if len(b.Data) == 0 {
		return b, errs.New(errs.NotFound, "of the %s of event %d only the hash was kept", name, event).
			WithHint("create sandboxes with --record content, or all")
	}
	return b, nil
}

// Keep bounds the content that is kept beside the log. Zero fields bound nothing.
type Keep struct {
	Age   time.Duration
	Bytes int64
}

// The pace of expiry.
const (
	expireEvery = time.Minute
	expireBatch = 1000
)

// expiredFacts are the server's facts of bodies.expired.
//
//casemate:facts server bodies.expired
type expiredFacts struct {
	Bodies int       `json:"bodies"`
	Bytes  int64     `json:"bytes"`
	Until  time.Time `json:"until"` // of the newest event among them
	Reason string    `json:"reason"`
}

// expireLoop erases what is too old or too much, now and then.
func (l *Log) expireLoop(k Keep) {
	t := time.NewTicker(expireEvery)
	defer t.Stop()
	for {
		l.tellDropped()
		if err := l.Expire(context.Background(), k); err != nil {
			l.log.Warn("cannot erase old content of the journal", "error", err)
		}
		if l.unscrubbed.Swap(false) {
			l.scrub()
		}
		select {
		case <-t.C:
		case <-l.stopped:
			return
		}
	}
}

// Expire erases the content that is older than k says, and then the oldest until the rest has room. Each step is an event
// of the server's own.
func (l *Log) Expire(ctx context.Context, k Keep) error {
	if k.Age > 0 {
		for again := true; again; {
			old, err := l.db.OldBodies(ctx, l.clock.Now().Add(-k.Age).UnixNano(), expireBatch)
			if err != nil {
				return fmt.Errorf("find old bodies: %w", err)
			}
			if err := l.expire(ctx, old, "older than "+k.Age.String()); err != nil {
				return err
			}
			again = len(old) == expireBatch
		}
	}
	for k.Bytes > 0 {
		_ = l.db.Flush() // as in Events
		have, err := l.db.BodyBytes(ctx)
		if err != nil {
			return fmt.Errorf("measure bodies: %w", err)
		}
		if have <= k.Bytes {
			return nil
		}
		old, err := l.db.OldBodies(ctx, 0, expireBatch)
		if err != nil {
			return fmt.Errorf("find old bodies: %w", err)
		}
		n := 0
		for ; n < len(old) && have > k.Bytes; n++ {
			have -= old[n].Kept
		}
		if err := l.expire(ctx, old[:n], fmt.Sprintf("more than %d bytes", k.Bytes)); err != nil {
			return err
		}
	}
	return nil
}

func (l *Log) expire(ctx context.Context, old []store.OldBody, reason string) error {
	if len(old) == 0 {
		return nil
	}
	f := expiredFacts{Bodies: len(old), Until: time.Unix(0, old[len(old)-1].Time).UTC(), Reason: reason}
	var with []store.Write
	for _, b := range old {
		f.Bytes += b.Kept
		with = append(with, store.EraseBody(b.Sandbox, b.Seq, b.Name))
	}
	_, err := l.Record(ctx, Event{Sandbox: ServerStream, Type: BodiesExpired, Actor: "server"}.With(Server, f), with...)
	l.unscrubbed.Store(true)
	return errors.Join(err, ctx.Err())
}
