package guest

import (
	"slices"
	"sync"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
)

// recountEvery is how often trees with leftovers are looked at while orphans end.
const recountEvery = 100 * time.Millisecond

// table holds the processes by id.
type table struct {
	// mu guards the fields below.
	mu    sync.Mutex
	byID  map[string]*process
	order []*process // oldest start first
	over  []*process // those of which nothing is left but their output, in the order of that
	// recounting says that a recount of leftovers is due.
	recounting bool
}

func newTable() *table { return &table{byID: make(map[string]*process)} }

// enter returns the process of an id, and makes its entry where there is none. Only one of several
// callers gets it fresh, and must then start it and close ready.
func (t *table) enter(id string) (p *process, fresh bool, err error) {
	if id == "" || len(id) > maxID {
		return nil, false, errs.New(errs.InvalidArgument, "a process's id has 1 to %d characters", maxID)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if p := t.byID[id]; p != nil {
		return p, false, nil
	}
	if len(t.order)-len(t.over) >= guestwire.MaxRunning {
		return nil, false, errs.New(errs.ResourceExhausted, "%d processes run already", guestwire.MaxRunning)
	}
	p = &process{id: id, table: t, ready: make(chan struct{}), done: make(chan struct{})}
	t.byID[id] = p
	t.order = append(t.order, p)
	return p, true, nil
}

// note takes note of a process that may be over, and forgets the oldest such ones beyond guestwire.MaxKept.
func (t *table) note(p *process) {
	if !p.over() {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if p.noted || t.byID[p.id] != p {
		return
	}
	p.noted = true
	t.over = append(t.over, p)
	for len(t.over) > guestwire.MaxKept {
		t.removeLocked(t.over[0])
	}
}

// over reports whether nothing of the process is left but its output.
func (p *process) over() bool {
	select {
	case <-p.done:
	default:
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.leftover == 0
}

func (t *table) removeLocked(p *process) {
	delete(t.byID, p.id)
	t.order = without(t.order, p)
	if p.noted {
		t.over = without(t.over, p)
	}
	if p.err == nil {
		p.forget()
	}
}

// without takes p out of a list, in which it is mostly the first.
func without(list []*process, p *process) []*process {
	if i := slices.Index(list, p); i >= 0 {
		return slices.Delete(list, i, i+1)
	}
	return list
}

// leave removes a process that could not be started.
func (t *table) leave(p *process) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.removeLocked(p)
}

// get returns a started process.
func (t *table) get(id string) (*process, error) {
	t.mu.Lock()
	p := t.byID[id]
	t.mu.Unlock()
	if p != nil {
		<-p.ready
		if p.err == nil {
			return p, nil
		}
	}
	return nil, errs.New(errs.NotFound, "no such process: %s", quote(id))
}

// all returns the started processes, oldest first.
func (t *table) all() []*process {
	t.mu.Lock()
	defer t.mu.Unlock()
	list := make([]*process, 0, len(t.order))
	for _, p := range t.order {
		select {
		case <-p.ready:
			list = append(list, p)
		default:
		}
	}
	return list
}

// forget removes an ended process.
func (t *table) forget(id string) error {
	p, err := t.get(id)
	if err != nil {
		return err
	}
	select {
	case <-p.done:
	default:
		return errs.New(errs.FailedPrecondition, "process %s still runs", quote(id))
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.byID[id] == p {
		t.removeLocked(p)
	}
	return nil
}

// orphaned is called when an orphan was reaped: it may have been the last of some tree. Many orphans
// in a row cost one look.
func (t *table) orphaned() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.recounting {
		t.recounting = true
		time.AfterFunc(recountEvery, t.recount)
	}
}

func (t *table) recount() {
	t.mu.Lock()
	t.recounting = false
	t.mu.Unlock()
	for _, p := range t.all() {
		select {
		case <-p.done:
			if !p.over() {
				p.recount()
				t.note(p)
			}
		default:
		}
	}
}
