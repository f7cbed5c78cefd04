package guest

import (
	"sync"
	"time"

	"casemate.dev/internal/errs"
)

const (
	// maxRunning bounds the processes that run or are not complete.
	maxRunning = 4096
	// maxEnded is how many ended ones are kept, and trimEvery how many more there may be until the oldest are
	// forgotten: to tell who has ended takes a look at each.
	maxEnded  = 1024
	trimEvery = 64
	// recountEvery is how often trees with leftovers are looked at while orphans end.
	recountEvery = 100 * time.Millisecond
)

// table holds the processes by id.
type table struct {
	// mu guards the fields below.
	mu    sync.Mutex
	byID  map[string]*process
	order []*process // oldest start first
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
	if t.trimLocked() >= maxRunning {
		return nil, false, errs.New(errs.ResourceExhausted, "%d processes run already", maxRunning)
	}
	p = &process{id: id, ready: make(chan struct{}), done: make(chan struct{})}
	t.byID[id] = p
	t.order = append(t.order, p)
	return p, true, nil
}

// trimLocked forgets the oldest ended processes beyond maxEnded, and returns how many run.
func (t *table) trimLocked() int {
	if len(t.order) < maxEnded+trimEvery {
		return len(t.order)
	}
	ended := 0
	for _, p := range t.order {
		if p.over() {
			ended++
		}
	}
	running := len(t.order) - ended
	for i := 0; ended >= maxEnded && i < len(t.order); {
		if p := t.order[i]; p.over() {
			t.removeLocked(p)
			ended--
			continue
		}
		i++
	}
	return running
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
	for i, o := range t.order {
		if o == p {
			t.order = append(t.order[:i], t.order[i+1:]...)
			break
		}
	}
	if p.err == nil {
		p.forget()
	}
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
			}
		default:
		}
	}
}
