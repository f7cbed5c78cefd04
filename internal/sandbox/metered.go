package sandbox

import (
	"cmp"
	"context"
	"encoding/json"
	"slices"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/journal/meter"
)

// MeterBy is what figures are summed up by.
type MeterBy string

// The sums.
const (
	BySandbox   MeterBy = "sandbox"
	ByTemplate  MeterBy = "template"
	ByPrincipal MeterBy = "principal"
)

// MeterQuery says of what the use is asked for.
type MeterQuery struct {
	// Sandbox names one; "": all that the principal sees.
	Sandbox string
	By      MeterBy // "": BySandbox
	Period  meter.Period
	// PageSize, at most 1000 (the default), and PageToken are for BySandbox; sums come as a whole.
	PageSize  int
	PageToken string
}

// Metered is the use of one sandbox, or the sum of several. What they have not in common is "".
type Metered struct {
	Sandbox   string
	Name      string
	Template  string
	Principal string
	Ended     bool // of one: nothing more will come
	meter.Usage
}

// lateEvents is how long after a sandbox's end events of it may come: of its connections.
const lateEvents = time.Minute

// Metered returns what sandboxes used in a period, from the events of the journal alone: of each the newest first, or sums in
// order of their names. The token of the next page is "" after the last one. Sandboxes that have ended count like others. One
// that is asked for by its name is read at that, unless it was in the last seconds.
func (m *Manager) Metered(ctx context.Context, p Principal, q MeterQuery) ([]Metered, string, error) {
	q.By = cmp.Or(q.By, BySandbox)
	if err := q.check(); err != nil {
		return nil, "", err
	}
	if q.Sandbox != "" {
		one, err := m.meteredOne(ctx, p, q)
		if err != nil {
			return nil, "", err
		}
		return []Metered{one}, "", nil
	}
	if q.By == BySandbox {
		return m.meteredPage(ctx, p, q)
	}
	sums := make(map[string]*Metered)
	for {
		page, next, err := m.meteredPage(ctx, p, q)
		if err != nil {
			return nil, "", err
		}
		for _, one := range page {
			sum := Metered{Principal: one.Principal}
			if q.By == ByTemplate {
				sum = Metered{Template: one.Template}
			}
			key := sum.Principal + sum.Template
			if sums[key] == nil {
				sums[key] = &sum
			}
			sums[key].Add(one.Usage)
		}
		if q.PageToken = next; next == "" {
			break
		}
	}
	all := make([]Metered, 0, len(sums))
	for _, sum := range sums {
		all = append(all, *sum)
	}
	slices.SortFunc(all, func(a, b Metered) int {
		return cmp.Or(cmp.Compare(a.Principal, b.Principal), cmp.Compare(a.Template, b.Template))
	})
	return all, "", nil
}

func (q MeterQuery) check() error {
	switch {
	case q.By != BySandbox && q.By != ByTemplate && q.By != ByPrincipal:
		return invalid("usage can't be summed up by %s", quote(string(q.By))).WithHint("use sandbox, template or principal")
	case q.Sandbox != "" && q.By != BySandbox:
		return invalid("usage of one sandbox is no sum by %s", q.By).WithHint("leave out either")
	case !q.Period.Until.IsZero() && !q.Period.Since.Before(q.Period.Until):
		return invalid("the period ends before it begins")
	case q.By != BySandbox && (q.PageToken != "" || q.PageSize != 0):
		return invalid("sums come as a whole, without pages")
	case q.PageSize < 0 || q.PageSize > maxPage:
		return invalid("page_size is %d", q.PageSize).WithHint("use 1 to %d", maxPage)
	}
	return nil
}

func (m *Manager) meteredOne(ctx context.Context, p Principal, q MeterQuery) (Metered, error) {
	if q.Sandbox == journal.ServerStream {
		return Metered{}, errs.New(errs.InvalidArgument, "%s is no sandbox", q.Sandbox)
	}
	b, s, err := m.resolve(ctx, p, q.Sandbox)
	if err != nil {
		return Metered{}, err
	}
	if b != nil {
		if b.alive() && (q.Period.Until.IsZero() || q.Period.Until.After(m.clock.Now())) {
			m.meter(ctx, b, meterAsk)
		}
		s = b.snapshot()
	}
	return m.meteredOf(ctx, s.ID, q.Period)
}

// meteredPage returns the use of sandboxes that were there in the period.
func (m *Manager) meteredPage(ctx context.Context, p Principal, q MeterQuery) ([]Metered, string, error) {
	size := cmp.Or(q.PageSize, maxPage)
	sq, err := m.listQuery(p, Query{States: everyState(), PageSize: size, PageToken: q.PageToken})
	if err != nil {
		return nil, "", err
	}
	if !q.Period.Since.IsZero() {
		sq.Since = q.Period.Since.Add(-lateEvents).UnixNano()
	}
	if !q.Period.Until.IsZero() {
		sq.Until = q.Period.Until.UnixNano()
	}
	_ = m.db.Flush() // as in List
	page := []Metered{}
	for {
		rows, err := m.db.ListSandboxes(ctx, sq)
		if err != nil {
			return nil, "", err
		}
		for _, r := range rows {
			if len(page) == size {
				return page, position{Created: sq.Created, ID: sq.ID}.token(), nil
			}
			sq.Created, sq.ID = r.Created, r.ID
			if !m.sees(p, r.Owner, r.Parent) {
				continue
			}
			one, err := m.meteredOf(ctx, r.ID, q.Period)
			if err != nil {
				return nil, "", err
			}
			page = append(page, one)
		}
		if len(rows) < sq.Limit {
			return page, "", nil
		}
	}
}

// everyState returns all states that a sandbox can have.
func everyState() []State { return []State{Starting, Running, Paused, Stopping, Stopped} }

// meteredOf reads the use of one sandbox from its events.
func (m *Manager) meteredOf(ctx context.Context, sandboxID string, period meter.Period) (Metered, error) {
	r := meter.NewRecord(period)
	var after uint64
	for {
		const page = 1000
		events, err := m.journal.EventsOf(ctx, sandboxID, meter.Types(), after, page)
		if err != nil {
			return Metered{}, err
		}
		for _, e := range events {
			facts := make(map[string]json.RawMessage, len(e.Facts))
			for o, f := range e.Facts {
				facts[string(o)] = f
			}
			r.Add(meter.Event{Time: e.Time, Type: string(e.Type), Process: e.Process, Facts: facts})
			after = e.Seq
		}
		if len(events) < page {
			break
		}
	}
	return Metered{
		Sandbox: sandboxID, Name: r.Name, Template: r.Template, Principal: r.Principal, Ended: r.Ended, Usage: r.Usage(),
	}, nil
}
